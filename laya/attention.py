"""The pieces that attention layers share: masks, rotary positions, and the product itself. No parameters.

Owns which keys a query may see. RoPE is Su et al. 2021 (arXiv:2104.09864), the two halves of a head rotated together.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the name every reader of PyTorch knows
from torch import Tensor


class Masks(NamedTuple):
    """Additive masks that broadcast to (n, heads, L, L), or None where nothing is masked."""

    full: Tensor | None
    sliding: Tensor | None


@dataclass(frozen=True)
class MaskSpec:
    """What masks are made of: how far a sliding layer reaches (tokens), their dtype, whether a sequence is padded."""

    reach: int
    dtype: torch.dtype
    padded: bool


def attention_masks(lengths: Tensor, length: int, spec: MaskSpec) -> Masks:
    """The masks of sequences of `lengths` (n) tokens padded to `length`.

    There is no dense one when every key is within reach of every query, and none at all when nothing is padded either.
    """
    position = torch.arange(length, device=lengths.device)
    real = (position < lengths[:, None])[:, None, None, :] if spec.padded else None
    full = None if real is None else additive(real, spec.dtype)
    if length - 1 <= spec.reach:
        return Masks(full, full)
    distance = (position[:, None] - position).abs()
    near = (distance <= spec.reach)[None, None]
    # Far into the padding a query would see no key at all, and softmax over nothing is NaN: it always sees itself.
    allowed = near if real is None else (near & real) | (distance == 0)
    return Masks(full, additive(allowed, spec.dtype))


def additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where `allowed` (bool, any shape), -inf elsewhere."""
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, float("-inf"))


def rotary_table(length: int, width: int, theta: float) -> Tensor:
    """cos and sin of position x inverse frequency: (2, length, 1, 1, width / 2) float32.

    On the CPU even under a meta device context: it is computed, never loaded.
    """
    frequency = 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.float32, device="cpu") / width)
    angle = torch.arange(length, dtype=torch.float32, device="cpu")[:, None] * frequency
    return torch.stack((angle.cos(), angle.sin()))[:, :, None, None, :]


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """RoPE on the last axis of x (n, L, parts, heads, width), in float32, returned in x's dtype."""
    cos, sin = table[:, : x.shape[1]]
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Scaled dot-product attention over (n, L, heads, width) tensors; (n, queries, heads * width)."""
    out = F.scaled_dot_product_attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), mask)
    return out.transpose(1, 2).flatten(2)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(…, heads * width) to (…, heads, width)."""
    return x.view(*x.shape[:-1], heads, -1)


def gather(hidden: Tensor, at: Tensor) -> Tensor:
    """hidden (n, L, d) at the positions `at` (n, q): (n, q, d)."""
    return hidden.gather(1, at[..., None].expand(-1, -1, hidden.shape[-1]))
