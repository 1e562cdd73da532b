# mypy: disable-error-code="valid-type, name-defined, untyped-decorator"
# TileLang reads a program's buffer shapes from its annotations, which are calls and not types.
"""Matrix product with an optional bias: out[t, n] = sum over k of x[t, k] weight[n, k], plus bias[n]."""

from torch import Tensor

from laya.errors import BackendError
from laya.tl_kernels.arguments import HALVES, MOST_BLOCKS, architecture, dtype_name, expect, result
from laya.tl_kernels.kernel import Kernel, language, made_once
from laya.tl_kernels.tiles import BIG_TOKENS, SAFE, GemmTile, tiles_for


@made_once
def gemm_kernel(  # noqa: C901 - one program; its loops are over tiles
    n: int, k: int, dtype: str = "bfloat16", tile: GemmTile = SAFE.gemm, bias: bool = False
) -> Kernel:
    """A kernel for (T, k) times (n, k) transposed, in `dtype` with float32 sums; T is free at run time.

    Arguments when called: x (T, k), weight (n, k), then bias (n) if `bias`, then out (T, n). k and n are multiples of
    8, which the bulk copies' 16 bytes a row need; neither has to be a multiple of the tile.
    """
    if n % 8 or k % 8:
        raise ValueError(f"gemm_kernel: n and k must be multiples of 8, got n = {n} and k = {k}")
    T = language()  # noqa: N806 - the name TileLang's own programs give it
    tokens = T.dynamic("tokens")
    rows, columns, depth = tile.rows, tile.columns, tile.depth
    policy = T.GemmWarpPolicy.FullRow if tile.by_rows else T.GemmWarpPolicy.Square

    @T.macro
    def body(x, weight, offset, out):  # type: ignore[no-untyped-def]  # TileLang buffers
        with T.Kernel(T.ceildiv(n, columns), T.ceildiv(tokens, rows), threads=tile.threads) as (column, row):
            left = T.alloc_shared((rows, depth), dtype)
            right = T.alloc_shared((columns, depth), dtype)
            rounded = T.alloc_shared((rows, columns), dtype)
            total = T.alloc_fragment((rows, columns), "float32")
            T.use_swizzle(tile.panel)
            T.clear(total)
            for step in T.Pipelined(T.ceildiv(k, depth), num_stages=tile.stages):
                T.copy(x[row * rows, step * depth], left)
                T.copy(weight[column * columns, step * depth], right)
                T.gemm(left, right, total, transpose_B=True, policy=policy)
            if bias:
                for i, j in T.Parallel(rows, columns):
                    total[i, j] += T.cast(offset[column * columns + j], "float32")
            if tile.bulk:
                T.copy(total, rounded)
                T.fence_proxy_async()  # each thread's own stores, before one of them starts the bulk copy
                T.copy(rounded, out[row * rows, column * columns])
            else:
                for i, j in T.Parallel(rows, columns):
                    out[row * rows + i, column * columns + j] = T.cast(total[i, j], dtype)

    if bias:

        @T.prim_func
        def biased(
            x: T.Tensor((tokens, k), dtype),
            weight: T.Tensor((n, k), dtype),
            offset: T.Tensor((n,), dtype),
            out: T.Tensor((tokens, n), dtype),
        ) -> None:
            body(x, weight, offset, out)

        return Kernel(biased)

    @T.prim_func
    def plain(
        x: T.Tensor((tokens, k), dtype),
        weight: T.Tensor((n, k), dtype),
        out: T.Tensor((tokens, n), dtype),
    ) -> None:
        body(x, weight, weight, out)

    return Kernel(plain)


def gemm(x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """x (T, K) times weight (N, K) transposed, plus bias (N): (T, N), all in bf16 or all in fp16, sums in float32.

    `out`, when given, receives the result. ValueError for shapes, dtypes or devices that do not fit together;
    BackendError away from CUDA, or for more tokens than one launch takes.
    """
    capability = architecture("gemm", x.device)
    dtype = dtype_name("x", x, HALVES)
    expect("x", x, (None, None), x.dtype, x.device)
    tokens, k = x.shape
    expect("weight", weight, (None, k), x.dtype, x.device)
    n = weight.shape[0]
    out = result(out, (tokens, n), x.dtype, x.device)
    tiles = tiles_for(capability)
    tile = tiles.gemm if tokens >= BIG_TOKENS else tiles.gemm_small
    check_tokens("gemm", tokens, tile)
    operands = [x, weight, out]
    if bias is not None:
        expect("bias", bias, (n,), x.dtype, x.device)
        operands.insert(2, bias)
    if tokens:
        gemm_kernel(n, k, dtype, tile, bias is not None)(*operands, device=x.device)
    return out


def check_tokens(name: str, tokens: int, tile: GemmTile) -> None:
    """BackendError when `tokens` take more blocks than a grid has along that axis."""
    most = MOST_BLOCKS * tile.rows
    if tokens > most:
        raise BackendError(f"{name}: {tokens} tokens are more than the {most} of one launch")
