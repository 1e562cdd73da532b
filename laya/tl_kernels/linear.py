# mypy: disable-error-code="valid-type, name-defined, untyped-decorator"
# TileLang reads a program's buffer shapes from its annotations, which are calls and not types.
"""Matrix product with an optional bias: out[t, n] = sum over k of x[t, k] weight[n, k], plus bias[n]."""

from torch import Tensor

from laya.tl_kernels.arguments import HALVES, architecture, dtype_name, expect, result
from laya.tl_kernels.kernel import Kernel, language, made_once
from laya.tl_kernels.product import launch, product
from laya.tl_kernels.tiles import SAFE_GEMM, GemmTile, tiles_for


@made_once
def gemm_kernel(n: int, k: int, dtype: str = "bfloat16", tile: GemmTile = SAFE_GEMM, bias: bool = False) -> Kernel:
    """A kernel for (T, k) times (n, k) transposed, in `dtype` with float32 sums; T is free at run time.

    Arguments when called: x (T, k), weight (n, k), then bias (n) if `bias`, then the number of workers, then out
    (T, n). k and n are multiples of 8.
    """
    T = language()  # noqa: N806 - the name TileLang's own programs give it
    tokens = T.dynamic("tokens")

    @T.macro
    def finish(total, rounded, _row, column, offset):  # type: ignore[no-untyped-def]  # TileLang buffers
        if bias:
            for i, j in T.Parallel(tile.rows, tile.columns):
                total[i, j] += T.cast(offset[column + j], "float32")
        if tile.bulk or tile.turns:  # sm_90 has an instruction for this copy
            T.copy(total, rounded)
        else:
            for i, j in T.Parallel(tile.rows, tile.columns):
                rounded[i, j] = T.cast(total[i, j], dtype)

    body = product(n, k, dtype, tile, finish)
    if bias:

        @T.prim_func
        def gemm_biased_program(
            x: T.Tensor((tokens, k), dtype),
            weight: T.Tensor((n, k), dtype),
            offset: T.Tensor((n,), dtype),
            workers: T.int32,
            out: T.Tensor((tokens, n), dtype),
        ) -> None:
            body(x, weight, offset, workers, out)

        return Kernel(gemm_biased_program)

    @T.prim_func
    def gemm_program(
        x: T.Tensor((tokens, k), dtype),
        weight: T.Tensor((n, k), dtype),
        workers: T.int32,
        out: T.Tensor((tokens, n), dtype),
    ) -> None:
        body(x, weight, weight, workers, out)

    return Kernel(gemm_program)


def gemm(x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """x (T, K) times weight (N, K) transposed, plus bias (N): (T, N), all in bf16 or all in fp16, sums in float32.

    `out`, when given, receives the result. ValueError for shapes, dtypes or devices that do not fit together;
    BackendError away from CUDA, or for more tokens than one launch takes.
    """
    tiles = tiles_for(architecture("gemm", x.device))
    dtype = dtype_name("x", x, HALVES)
    expect("x", x, (None, None), x.dtype, x.device)
    tokens, k = x.shape
    expect("weight", weight, (None, k), x.dtype, x.device)
    n = weight.shape[0]
    out = result(out, (tokens, n), x.dtype, x.device)
    tile = tiles.gemm_of(tokens)
    operands = [x, weight]
    if bias is not None:
        expect("bias", bias, (n,), x.dtype, x.device)
        operands.append(bias)
    return launch("gemm", gemm_kernel(n, k, dtype, tile, bias is not None), tile, operands, out)
