"""The kernels' public names in plain torch: the truth they are tested against, on any device, up to float64.

Arithmetic runs in the input's dtype or float32, whichever is wider, and is rounded once at the end. Owns no checks but
those that keep a wrong request from giving a plausible answer.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F  # noqa: N812 - the name every reader of PyTorch knows
from torch import Tensor

from laya.errors import BackendError


def wide(dtype: torch.dtype) -> torch.dtype:
    """float32, or `dtype` when that is wider."""
    return torch.promote_types(dtype, torch.float32)


def returned(value: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """`value` in `dtype`, in `out` when there is one."""
    return value.to(dtype) if out is None else out.copy_(value)


def gemm(x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """x (T, K) times weight (N, K) transposed, plus bias (N): (T, N) in x's dtype."""
    to = wide(x.dtype)
    return returned(F.linear(x.to(to), weight.to(to), None if bias is None else bias.to(to)), x.dtype, out)


def gemm_geglu(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """gelu(x (T, K) times weight[:I] transposed) · (x times weight[I:] transposed): (T, I) in x's dtype."""
    to = wide(x.dtype)
    value, gate = F.linear(x.to(to), weight.to(to)).chunk(2, dim=-1)
    return returned(F.gelu(value) * gate, x.dtype, out)


def add_ln(  # noqa: PLR0913, PLR0917 - the layer norm's own arguments, and the two results
    hidden: Tensor,
    delta: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    dtype: torch.dtype,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """hidden (T, d) plus delta (T, d), and the layer norm of the sum in `dtype`: two tensors (T, d)."""
    summed = hidden + delta.to(hidden.dtype)
    normed = F.layer_norm(summed, summed.shape[-1:], weight, bias, eps)
    into_sum, into_normed = (None, None) if out is None else out
    return returned(summed, hidden.dtype, into_sum), returned(normed, dtype, into_normed)


def rope(qkv: Tensor, positions: Tensor, table: Tensor, longest: int | None = None) -> Tensor:
    """Rotate the queries and keys of qkv (T, 3, H, W) in place by positions (T); table (2, length, W / 2); returns qkv.

    BackendError when a position, or `longest` minus one, exceeds the table.
    """
    need = longest if longest is not None else int(positions.max()) + 1 if len(positions) else 0
    if need > table.shape[1]:
        raise BackendError(f"rope: a sequence of {need} tokens exceeds the table of {table.shape[1]} positions")
    cos, sin = table[:, positions.long()][:, :, None, None].to(wide(qkv.dtype))
    first, second = qkv[:, :2].to(cos.dtype).chunk(2, dim=-1)
    qkv[:, :2] = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(qkv.dtype)
    return qkv


def gemm_rope(
    x: Tensor, weight: Tensor, positions: Tensor, table: Tensor, longest: int, out: Tensor | None = None
) -> Tensor:
    """x (T, K) times weight (3 · H · W, K) transposed, then `rope`, rounded once: (T, 3, H, W) in x's dtype."""
    to = wide(x.dtype)
    width = 2 * table.shape[2]
    qkv = F.linear(x.to(to), weight.to(to)).view(len(x), 3, len(weight) // (3 * width), width)
    return returned(rope(qkv, positions, table, longest), x.dtype, out)


def attn(qkv: Tensor, offsets: Tensor, longest: int, reach: int | None, out: Tensor | None = None) -> Tensor:
    """Attention of qkv (T, 3, H, W) inside each sequence that `offsets` (n + 1) bound: (T, H · W) in qkv's dtype.

    With a `reach`, token i sees j only where |i - j| <= reach. Rows of `out` past the last sequence are left as they
    were; without `out` they are 0. ValueError when a sequence is longer than `longest`.
    """
    tokens, _, heads, width = qkv.shape
    out = qkv.new_zeros(tokens, heads * width) if out is None else out
    for start, end in pairwise(offsets.tolist()):
        if end - start > longest:
            raise ValueError(f"longest: expected the length of the longest sequence, {end - start}, got {longest}")
        if start == end:
            continue
        position = torch.arange(end - start, device=qkv.device)
        query, key, value = qkv[start:end].to(wide(qkv.dtype)).permute(1, 2, 0, 3)
        score = query @ key.transpose(-1, -2) * width**-0.5
        if reach is not None:
            score = score.masked_fill((position[:, None] - position).abs() > reach, float("-inf"))
        out[start:end] = (score.softmax(dim=-1) @ value).transpose(0, 1).flatten(1).to(qkv.dtype)
    return out
