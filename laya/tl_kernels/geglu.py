# mypy: disable-error-code="valid-type, name-defined, untyped-decorator"
# TileLang reads a program's buffer shapes from its annotations, which are calls and not types.
"""The first half of ModernBERT's MLP in one pass: gelu(x Vᵀ) · (x Gᵀ), V and G the two halves of one weight.

The GELU is the exact one, u times the normal distribution's share below u (Hendrycks and Gimpel 2016,
arXiv:1606.08415), taken in float32 before anything is rounded. Biases of the products are not handled here.
"""

from typing import Any

from torch import Tensor

from laya.tl_kernels.arguments import HALVES, architecture, dtype_name, expect, result
from laya.tl_kernels.kernel import Kernel, language, made_once
from laya.tl_kernels.product import launch, product
from laya.tl_kernels.tiles import SAFE_GEMM, GemmTile, tiles_for

# The share of a normal distribution beyond z >= 0, as a power of two of this polynomial in z, lowest degree first: a
# minimax fit of z times that share, which is what GELU takes from z. In float32 it is within 7e-7 of the exact GELU; an
# erf in its place costs a seventh of the time of the whole product.
TAIL = (-1.0000376, -1.1507878, -0.45999261, -0.051827195, 0.0070844724, -0.00047329547)


@made_once
def gemm_geglu_kernel(intermediate: int, k: int, dtype: str = "bfloat16", tile: GemmTile = SAFE_GEMM) -> Kernel:
    """A kernel for (T, k) and a weight (2 · intermediate, k), in `dtype` with float32 sums; T is free at run time.

    Arguments when called: x (T, k), weight (2 · intermediate, k), the number of workers, out (T, intermediate). Both
    widths are multiples of 8. At the edge of `intermediate` a tile of V runs on into G, and one of G past the end,
    where the copies read zeros: those columns are computed and never stored.
    """
    T = language()  # noqa: N806 - the name TileLang's own programs give it
    tokens = T.dynamic("tokens")

    @T.macro
    def finish(total, rounded, _row, _column, _extra):  # type: ignore[no-untyped-def]  # TileLang buffers
        gate = T.alloc_fragment((tile.rows, tile.columns), "float32")
        for i, j in T.Parallel(tile.rows, tile.columns):
            gate[i, j] = total[i, j + tile.columns]
        for i, j in T.Parallel(tile.rows, tile.columns):
            gate[i, j] *= gelu(T, total[i, j])
        T.copy(gate, rounded)

    body = product(2 * intermediate, k, dtype, tile, finish, pairs=True)

    @T.prim_func
    def gemm_geglu_program(
        x: T.Tensor((tokens, k), dtype),
        weight: T.Tensor((2 * intermediate, k), dtype),
        workers: T.int32,
        out: T.Tensor((tokens, intermediate), dtype),
    ) -> None:
        body(x, weight, x, workers, out)

    return Kernel(gemm_geglu_program, fast_math=True)


def gelu(T: Any, u: Any) -> Any:  # noqa: N803 - the name TileLang's own programs give it
    """The GELU of a TileLang float32 expression: what of u is above 0, less the share beyond |u| of |u|."""
    z = T.abs(u)
    power = T.float32(TAIL[-1])
    for coefficient in TAIL[-2::-1]:
        power = power * z + T.float32(coefficient)
    return T.max(u, T.float32(0)) - z * T.exp2(power)


def gemm_geglu(x: Tensor, weight: Tensor, out: Tensor | None = None, tile: GemmTile | None = None) -> Tensor:
    """gelu(x (T, K) times weight[:I] transposed) · (x times weight[I:] transposed): (T, I), bf16 or fp16.

    `weight` is (2 I, K). `out`, when given, receives the result; `tile` is the architecture's when None. ValueError
    for shapes, dtypes or devices that do not fit together; BackendError away from CUDA, or for more tokens than one
    launch takes.
    """
    found = architecture("gemm_geglu", x.device)
    dtype = dtype_name("x", x, HALVES)
    expect("x", x, (None, None), x.dtype, x.device)
    tokens, k = x.shape
    expect("weight", weight, (None, k), x.dtype, x.device)
    intermediate, odd = divmod(weight.shape[0], 2)
    if odd:
        raise ValueError(f"weight: expected an even number of rows, values then gates, got {weight.shape[0]}")
    out = result(out, (tokens, intermediate), x.dtype, x.device)
    tile = tile or tiles_for(found).geglu_of(tokens) or SAFE_GEMM
    return launch("gemm_geglu", gemm_geglu_kernel(intermediate, k, dtype, tile), tile, [x, weight], out)
