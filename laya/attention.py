"""Attention inside each sequence of a batch, and the rotary positions it stands on. No parameters.

Owns which keys a query may see, and in what layout the product is taken: `PaddedAttention` anywhere, `PackedAttention`
where a kernel reads sequences by their offsets. RoPE is Su et al. 2021 (arXiv:2104.09864), the two halves of a head
rotated together.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the name every reader of PyTorch knows
from torch import Tensor, nn

from laya.inputs import ModelInputs


@dataclass(frozen=True)
class AttentionSpec:
    """What of a model its attention depends on: the rotary tables (2, max_len, W / 2) float32 of either kind of layer,
    how far a sliding one reaches (tokens), and the dtype of the products."""

    full_table: Tensor
    sliding_table: Tensor
    reach: int
    dtype: torch.dtype


class Attention(ABC):
    """The attention of one batch, made once for all the layers of a forward pass."""

    def __init__(self, inputs: ModelInputs, spec: AttentionSpec) -> None:
        self.spec = spec
        self.inputs = inputs
        self._rotations: dict[bool, Tensor] = {}

    def encode(self, x: Tensor, projection: nn.Linear, full: bool) -> Tensor:
        """A layer of the encoder, (T, d) to (T, H W): `projected`, two of three rotated, then `within` its reach."""
        qkv = self.projected(x, projection)
        if full not in self._rotations:
            self._rotations[full] = self._table(full)[:, self.inputs.positions.long(), None, None]
        query, key = rotate(qkv[:, :2], self._rotations[full]).unbind(1)
        return self.within(query, key, qkv[:, 2], self._reach(full))

    def projected(self, x: Tensor, projection: nn.Linear) -> Tensor:
        """Queries, keys and values (T, 3, H, W)."""
        qkv: Tensor = projection(x)
        return qkv.view(x.shape[0], 3, -1, 2 * self.spec.full_table.shape[-1])

    def mix(self, qkv: Tensor) -> Tensor:
        """A layer of the head, (T, 3, H, W) to (T, H W): every token asks all of its sequence."""
        query, key, value = qkv.unbind(1)
        return self.within(query, key, value, None)

    @abstractmethod
    def within(self, query: Tensor, key: Tensor, value: Tensor, reach: int | None) -> Tensor:
        """Every token asks: (T, H, W) each to (T, H W). `reach` is None for all the sequence, else a distance."""

    @abstractmethod
    def at(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """A few queries of each sequence over all its tokens: query (n, q, H, W), key and value (T, H, W)."""

    def _table(self, full: bool) -> Tensor:
        return self.spec.full_table if full else self.spec.sliding_table

    def _reach(self, full: bool) -> int | None:
        return None if full else self.spec.reach


class PaddedAttention(Attention):
    """Pads sequences to the longest and masks the padding: for any device and dtype.

    Its masks are (n, 1, L, L) at most, broadcast over the heads.
    """

    def __init__(self, inputs: ModelInputs, spec: AttentionSpec) -> None:
        super().__init__(inputs, spec)
        self._shape = (inputs.qtype.shape[0], inputs.longest)
        self._index: Tensor | None = None
        lengths = inputs.offsets.diff()
        if not inputs.equal:
            column = torch.arange(inputs.longest, device=lengths.device)
            # Padding repeats some token of the batch: masked, but finite.
            self._index = (inputs.offsets[:-1, None] + column).clamp(max=inputs.input_ids.shape[0] - 1)
            self._places = inputs.sequence * inputs.longest + inputs.positions
        self._masks = attention_masks(lengths, inputs.longest, MaskSpec(spec.reach, spec.dtype, not inputs.equal))

    def within(self, query: Tensor, key: Tensor, value: Tensor, reach: int | None) -> Tensor:
        mask = self._masks.full if reach is None else self._masks.sliding
        out = attend(self._pad(query), self._pad(key), self._pad(value), mask).flatten(0, 1)
        return out if self._index is None else out[self._places]

    def at(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend(query, self._pad(key), self._pad(value), self._masks.full)

    def _pad(self, x: Tensor) -> Tensor:
        return x.view(*self._shape, *x.shape[1:]) if self._index is None else x[self._index]


class PackedAttention(Attention):
    """Flash attention over sequences as they lie: no padding, no mask, blocks out of reach skipped. CUDA, half."""

    def __init__(self, inputs: ModelInputs, spec: AttentionSpec) -> None:
        super().__init__(inputs, spec)
        self._offsets, self._longest = inputs.offsets, inputs.longest

    def within(self, query: Tensor, key: Tensor, value: Tensor, reach: int | None) -> Tensor:
        window = (-1, -1) if reach is None else (reach, reach)
        spans = (self._offsets, self._offsets, self._longest, self._longest)
        return flash(query, key, value, spans, window).flatten(1)

    def at(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        sequences, asked = query.shape[:2]
        asking = torch.arange(sequences + 1, device=query.device, dtype=torch.int32) * asked
        spans = (asking, self._offsets, asked, self._longest)
        return flash(query.flatten(0, 1), key, value, spans, (-1, -1)).view(sequences, asked, -1)


def flash(
    query: Tensor, key: Tensor, value: Tensor, spans: tuple[Tensor, Tensor, int, int], window: tuple[int, int]
) -> Tensor:
    """PyTorch's variable-length attention; `spans` are the offsets and the longest of the queries and the keys."""
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 - registers its operator when imported

    out: Tensor = varlen_attn(query, key, value, *spans, window_size=window)  # type: ignore[assignment]
    return out


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
    # A compiled graph would hold for one side of this question only.
    if not torch.compiler.is_compiling() and length - 1 <= spec.reach:
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
    """cos and sin of position x inverse frequency: (2, length, width / 2) float32.

    On the CPU even under a meta device context: it is computed, never loaded.
    """
    frequency = 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.float32, device="cpu") / width)
    angle = torch.arange(length, dtype=torch.float32, device="cpu")[:, None] * frequency
    return torch.stack((angle.cos(), angle.sin()))


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """RoPE on the last axis of x (…, W), in float32, returned in x's dtype; rotation (2, …, W / 2): cos and sin."""
    cos, sin = rotation
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Scaled dot-product attention over (n, L, heads, width) tensors; (n, queries, heads * width)."""
    out = F.scaled_dot_product_attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), mask)
    return out.transpose(1, 2).flatten(2)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(…, heads * width) to (…, heads, width)."""
    return x.view(*x.shape[:-1], heads, -1)
