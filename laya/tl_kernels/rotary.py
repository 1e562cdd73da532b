# mypy: disable-error-code="valid-type, name-defined, untyped-decorator"
# TileLang reads a program's buffer shapes from its annotations, which are calls and not types.
"""Rotary positions on packed queries and keys, in place (Su et al. 2021, arXiv:2104.09864).

The two halves of a head rotate together, as `laya.attention.rotate` does; the products are taken in float32.
"""

import math

import torch
from torch import Tensor

from laya.errors import BackendError
from laya.tl_kernels.arguments import HALVES, architecture, dtype_name, expect
from laya.tl_kernels.kernel import Kernel, language, made_once

VECTOR = 8  # half-precision values in one 16-byte access
LANES = 32  # of a warp
THREADS = 256  # a block, about
PASSES = 2  # tokens that one thread takes part in


@made_once
def rope_kernel(heads: int, width: int, dtype: str = "bfloat16") -> Kernel:
    """A kernel for `heads` heads of `width`; the numbers of tokens and of table positions are free at run time.

    Arguments when called: qkv (T, 3 · heads, width), positions (T) int32, table (2, length, width / 2) float32. A
    position that the table lacks turns that token's queries and keys into NaN: never into something plausible.
    `width` is a multiple of 16.
    """
    if width % (2 * VECTOR):
        raise ValueError(f"rope_kernel: the width of a head must be a multiple of 16, got {width}")
    T = language()  # noqa: N806 - the name TileLang's own programs give it
    tokens, length = T.dynamic("tokens"), T.dynamic("length")
    parts, half = 2 * heads, width // 2
    lanes = parts * half // VECTOR  # threads that one token takes
    unit = math.lcm(lanes, LANES)
    threads = unit * max(1, THREADS // unit)
    together = threads // lanes  # tokens in one pass of the block
    rows = PASSES * together

    def place(token, part, column):  # type: ignore[no-untyped-def]  # TileLang expressions
        """Eight neighbours to a thread: whole 16-byte accesses."""
        thread = (token % together * parts + part) * (half // VECTOR) + column // VECTOR
        return thread, token // together * VECTOR + column % VECTOR

    @T.prim_func
    def rope_program(
        qkv: T.Tensor((tokens, 3 * heads, width), dtype),
        positions: T.Tensor((tokens,), "int32"),
        table: T.Tensor((2, length, half), "float32"),
    ) -> None:
        with T.Kernel(T.ceildiv(tokens, rows), threads=threads) as block:
            first = T.alloc_fragment((rows, parts, half), dtype)
            second = T.alloc_fragment((rows, parts, half), dtype)
            new_first = T.alloc_fragment((rows, parts, half), dtype)
            new_second = T.alloc_fragment((rows, parts, half), dtype)
            layout = T.Fragment((rows, parts, half), forward_fn=place)
            T.annotate_layout({first: layout, second: layout, new_first: layout, new_second: layout})
            start = block * rows
            T.copy(qkv[start : start + rows, 0:parts, 0:half], first)
            T.copy(qkv[start : start + rows, 0:parts, half:width], second)
            for i, part, c in T.Parallel(rows, parts, half):
                at = positions[start + i]
                known = (at >= 0) & (at < length)
                cos = T.if_then_else(known, table[0, at, c], T.float32(float("nan")))
                sin = T.if_then_else(known, table[1, at, c], T.float32(float("nan")))
                a = T.cast(first[i, part, c], "float32")
                b = T.cast(second[i, part, c], "float32")
                new_first[i, part, c] = T.cast(a * cos - b * sin, dtype)
                new_second[i, part, c] = T.cast(b * cos + a * sin, dtype)
            T.copy(new_first, qkv[start : start + rows, 0:parts, 0:half])
            T.copy(new_second, qkv[start : start + rows, 0:parts, half:width])

    return Kernel(rope_program)


def rope(qkv: Tensor, positions: Tensor, table: Tensor, longest: int | None = None) -> Tensor:
    """Rotate the queries and keys of qkv (T, 3, H, W), bf16 or fp16, in place by positions (T) int32; returns qkv.

    `table` is (2, length, W / 2) float32, cosines and sines; `longest` is the largest position plus one, when known on
    the host. ValueError for what does not fit together; BackendError away from CUDA, or when `longest` exceeds the
    table. Without `longest`, a position beyond the table gives NaN.
    """
    architecture("rope", qkv.device)
    dtype = dtype_name("qkv", qkv, HALVES)
    expect("qkv", qkv, (None, 3, None, None), qkv.dtype, qkv.device)
    tokens, _, heads, width = qkv.shape
    expect("positions", positions, (tokens,), torch.int32, qkv.device)
    expect("table", table, (2, None, width // 2), torch.float32, qkv.device)
    if longest is not None and longest > table.shape[1]:
        raise BackendError(f"rope: a sequence of {longest} tokens exceeds the table of {table.shape[1]} positions")
    if tokens:
        flat = qkv.view(tokens, 3 * heads, width)
        rope_kernel(heads, width, dtype)(flat, positions, table, device=qkv.device)
    return qkv
