# mypy: disable-error-code="valid-type, name-defined, untyped-decorator"
# TileLang reads a program's buffer shapes from its annotations, which are calls and not types.
"""The first half of ModernBERT's MLP in one pass: gelu(x Vᵀ) · (x Gᵀ), V and G the two halves of one weight.

The GELU is the exact one, u / 2 · (1 + erf(u / √2)) (Hendrycks and Gimpel 2016, arXiv:1606.08415), taken in float32
before anything is rounded. Biases of the products are not handled here: a configuration that has them uses `gemm`.
"""

import math

from torch import Tensor

from laya.tl_kernels.arguments import HALVES, architecture, dtype_name, expect, result
from laya.tl_kernels.kernel import Kernel, language, made_once
from laya.tl_kernels.linear import check_tokens
from laya.tl_kernels.tiles import BIG_TOKENS, SAFE, GemmTile, tiles_for


@made_once
def gemm_geglu_kernel(intermediate: int, k: int, dtype: str = "bfloat16", tile: GemmTile = SAFE.geglu) -> Kernel:
    """A kernel for (T, k) and a weight (2 · intermediate, k), in `dtype` with float32 sums; T is free at run time.

    Arguments when called: x (T, k), weight (2 · intermediate, k), out (T, intermediate). Both widths are multiples of
    8. At the edge of `intermediate` a tile of V runs on into G, and one of G past the end, where the copies read
    zeros: those columns are computed and never stored.
    """
    if intermediate % 8 or k % 8:
        raise ValueError(f"gemm_geglu_kernel: widths must be multiples of 8, got {intermediate} and {k}")
    T = language()  # noqa: N806 - the name TileLang's own programs give it
    tokens = T.dynamic("tokens")
    rows, columns, depth = tile.rows, tile.columns, tile.depth
    policy = T.GemmWarpPolicy.FullRow if tile.by_rows else T.GemmWarpPolicy.Square
    root_half = math.sqrt(0.5)

    @T.prim_func
    def gemm_geglu_program(
        x: T.Tensor((tokens, k), dtype),
        weight: T.Tensor((2 * intermediate, k), dtype),
        out: T.Tensor((tokens, intermediate), dtype),
    ) -> None:
        with T.Kernel(T.ceildiv(intermediate, columns), T.ceildiv(tokens, rows), threads=tile.threads) as (column, row):
            left = T.alloc_shared((rows, depth), dtype)
            values = T.alloc_shared((columns, depth), dtype)
            gates = T.alloc_shared((columns, depth), dtype)
            rounded = T.alloc_shared((rows, columns), dtype)
            value = T.alloc_fragment((rows, columns), "float32")
            gate = T.alloc_fragment((rows, columns), "float32")
            T.use_swizzle(tile.panel)
            T.clear(value)
            T.clear(gate)
            for step in T.Pipelined(T.ceildiv(k, depth), num_stages=tile.stages):
                T.copy(x[row * rows, step * depth], left)
                T.copy(weight[column * columns, step * depth], values)
                T.copy(weight[intermediate + column * columns, step * depth], gates)
                T.gemm(left, values, value, transpose_B=True, policy=policy)
                T.gemm(left, gates, gate, transpose_B=True, policy=policy)
            for i, j in T.Parallel(rows, columns):
                value[i, j] = 0.5 * value[i, j] * (1.0 + T.erf(value[i, j] * root_half)) * gate[i, j]
            T.copy(value, rounded)
            if tile.bulk:
                T.fence_proxy_async()  # each thread's own stores, before one of them starts the bulk copy
            T.copy(rounded, out[row * rows, column * columns])

    return Kernel(gemm_geglu_program)


def gemm_geglu(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """gelu(x (T, K) times weight[:I] transposed) · (x times weight[I:] transposed): (T, I), bf16 or fp16.

    `weight` is (2 I, K). `out`, when given, receives the result. ValueError for shapes, dtypes or devices that do not
    fit together; BackendError away from CUDA, or for more tokens than one launch takes.
    """
    capability = architecture("gemm_geglu", x.device)
    dtype = dtype_name("x", x, HALVES)
    expect("x", x, (None, None), x.dtype, x.device)
    tokens, k = x.shape
    expect("weight", weight, (None, k), x.dtype, x.device)
    intermediate, odd = divmod(weight.shape[0], 2)
    if odd:
        raise ValueError(f"weight: expected an even number of rows, values then gates, got {weight.shape[0]}")
    out = result(out, (tokens, intermediate), x.dtype, x.device)
    tiles = tiles_for(capability)
    tile = tiles.geglu if tokens >= BIG_TOKENS else tiles.geglu_small
    check_tokens("gemm_geglu", tokens, tile)
    if tokens:
        gemm_geglu_kernel(intermediate, k, dtype, tile)(x, weight, out, device=x.device)
    return out
