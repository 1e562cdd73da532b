# mypy: disable-error-code="valid-type, name-defined, untyped-decorator"
# TileLang reads a program's buffer shapes from its annotations, which are calls and not types.
"""Rotary positions on packed queries and keys: in place, or on their way out of the product that makes them.

RoPE is Su et al. 2021 (arXiv:2104.09864). The two halves of a head rotate together, as `laya.attention.rotate` does;
the products are taken in float32.
"""

import math

import torch
from torch import Tensor

from laya.errors import BackendError
from laya.tl_kernels.arguments import HALVES, architecture, dtype_name, expect, result
from laya.tl_kernels.kernel import Kernel, language, made_once
from laya.tl_kernels.product import launch, product
from laya.tl_kernels.tiles import GemmTile

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
    if longest is not None:
        check_longest("rope", longest, table)
    if tokens:
        flat = qkv.view(tokens, 3 * heads, width)
        rope_kernel(heads, width, dtype)(flat, positions, table, device=qkv.device)
    return qkv


def check_longest(name: str, longest: int, table: Tensor) -> None:
    """BackendError when a sequence of `longest` tokens has positions that the table lacks."""
    if longest > table.shape[1]:
        raise BackendError(f"{name}: a sequence of {longest} tokens exceeds the table of {table.shape[1]} positions")


@made_once
def gemm_rope_kernel(  # noqa: C901 - one program; its loops are over tiles
    hidden: int, k: int, width: int, dtype: str, tile: GemmTile
) -> Kernel:
    """A kernel for (T, k) and a weight (3 · hidden, k) of heads `width` wide; T and the table's length are free.

    Arguments when called: x (T, k), weight (3 · hidden, k), positions (T) int32, table (2, length, width / 2) float32,
    the number of workers, out (T, 3 · hidden). No position may be beyond the table: reads of it are not guarded, which
    would take more registers than there are. The widths are multiples of 8, and a tile has whole heads, of queries and
    keys or of values.
    """
    if hidden % width or tile.columns % width or 2 * hidden % tile.columns:
        raise ValueError(
            f"gemm_rope_kernel: a tile of {tile.columns} columns must hold whole heads, of {width}, "
            f"and divide {2 * hidden}, which whole heads must fill"
        )
    T = language()  # noqa: N806 - the name TileLang's own programs give it
    tokens, length = T.dynamic("tokens"), T.dynamic("length")
    rows, half = tile.rows, width // 2

    @T.macro
    def finish(total, rounded, row, column, extra):  # type: ignore[no-untyped-def]  # TileLang buffers
        positions, table = extra
        cos = T.alloc_fragment((rows, half), "float32")
        sin = T.alloc_fragment((rows, half), "float32")
        second = T.alloc_fragment((rows, half), "float32")
        turned = T.alloc_fragment((rows, half), "float32")
        if column < 2 * hidden:
            for i, j in T.Parallel(rows, half):
                cos[i, j] = table[0, positions[T.min(row + i, tokens - 1)], j]
            for i, j in T.Parallel(rows, half):
                sin[i, j] = table[1, positions[T.min(row + i, tokens - 1)], j]
            for head in T.unroll(tile.columns // width):
                # One loop for each place in a head, since a loop may read registers at one place only.
                for i, j in T.Parallel(rows, half):
                    second[i, j] = total[i, head * width + half + j]
                for i, j in T.Parallel(rows, half):
                    turned[i, j] = second[i, j] * cos[i, j] + total[i, head * width + j] * sin[i, j]
                for i, j in T.Parallel(rows, half):
                    total[i, head * width + j] = total[i, head * width + j] * cos[i, j] - second[i, j] * sin[i, j]
                for i, j in T.Parallel(rows, half):
                    total[i, head * width + half + j] = turned[i, j]
        T.copy(total, rounded)

    body = product(3 * hidden, k, dtype, tile, finish)

    @T.prim_func
    def gemm_rope_program(
        x: T.Tensor((tokens, k), dtype),
        weight: T.Tensor((3 * hidden, k), dtype),
        positions: T.Tensor((tokens,), "int32"),
        table: T.Tensor((2, length, half), "float32"),
        workers: T.int32,
        out: T.Tensor((tokens, 3 * hidden), dtype),
    ) -> None:
        body(x, weight, (positions, table), workers, out)

    return Kernel(gemm_rope_program, checked=False)


def gemm_rope(  # noqa: PLR0913, PLR0917 - the operands of the product, and of the rotation
    x: Tensor, weight: Tensor, positions: Tensor, table: Tensor, longest: int, tile: GemmTile, out: Tensor | None = None
) -> Tensor:
    """x (T, K) times weight (3 · H · W, K) transposed, queries and keys rotated: (T, 3, H, W), bf16 or fp16.

    positions (T) int32 are all less than `longest`; `table` is (2, length, W / 2) float32, cosines and sines. `out`,
    when given, receives the result. ValueError for what does not fit together; BackendError away from CUDA, when
    `longest` exceeds the table, or for more tokens than one launch takes.
    """
    architecture("gemm_rope", x.device)
    dtype = dtype_name("x", x, HALVES)
    expect("x", x, (None, None), x.dtype, x.device)
    tokens, k = x.shape
    expect("weight", weight, (None, k), x.dtype, x.device)
    expect("positions", positions, (tokens,), torch.int32, x.device)
    expect("table", table, (2, None, None), torch.float32, x.device)
    check_longest("gemm_rope", longest, table)
    hidden, width = weight.shape[0] // 3, 2 * table.shape[2]
    if not width or weight.shape[0] % (3 * width):
        raise ValueError(f"weight: expected three times as many rows as heads of {width} have, got {weight.shape[0]}")
    out = result(out, (tokens, 3, hidden // width, width), x.dtype, x.device)
    kernel = gemm_rope_kernel(hidden, k, width, dtype, tile)
    launch("gemm_rope", kernel, tile, [x, weight, positions, table], out.view(tokens, 3 * hidden))
    return out
