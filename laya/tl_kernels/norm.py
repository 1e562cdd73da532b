# mypy: disable-error-code="valid-type, name-defined, untyped-decorator"
# TileLang reads a program's buffer shapes from its annotations, which are calls and not types.
"""The residual sum and the layer norm that follows it, in one pass over the rows.

hidden' = hidden + delta, and (hidden' - mean) / √(variance + eps) · weight + bias (Ba et al. 2016, arXiv:1607.06450).
The mean comes off before the squares are summed: the residual stream reaches 3e4, where E[x²] - E[x]² would cancel.
"""

import torch
from torch import Tensor

from laya.tl_kernels.arguments import FLOATS, architecture, dtype_name, expect, result
from laya.tl_kernels.kernel import Kernel, language, made_once

LANES = 32  # of a warp, which holds one row in registers
VECTOR = 4  # float32 in one 16-byte access
MOST_WIDTH = 4096  # 128 registers a lane


@made_once
def add_ln_kernel(  # noqa: C901 - one program; its loops are over tiles
    width: int, dtype: str = "bfloat16", delta_dtype: str | None = None, bias: bool = False, rows: int = 4
) -> Kernel:
    """A kernel over rows of `width`, one warp each and `rows` a block; the number of rows is free at run time.

    Arguments when called: hidden (T, width) float32, delta (T, width) of `delta_dtype` (`dtype` when None), weight
    (width) float32, then bias (width) float32 if `bias`, then eps, the sum (T, width) float32, and normed (T, width)
    of `dtype`. `width` is a multiple of 128.
    """
    if width % (LANES * VECTOR) or not 0 < width <= MOST_WIDTH:
        raise ValueError(f"add_ln_kernel: the width must be a multiple of 128 up to {MOST_WIDTH}, got {width}")
    T = language()  # noqa: N806 - the name TileLang's own programs give it
    tokens = T.dynamic("tokens")
    incoming = dtype if delta_dtype is None else delta_dtype

    def place(i, j):  # type: ignore[no-untyped-def]  # TileLang expressions
        """Element j of row i: lane j / 4 of warp i, so that a warp's accesses are whole lines."""
        return i * LANES + j // VECTOR % LANES, j // (LANES * VECTOR) * VECTOR + j % VECTOR

    @T.macro
    def body(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917 - TileLang buffers
        hidden, delta, weight, offset, eps, summed, normed
    ):
        with T.Kernel(T.ceildiv(tokens, rows), threads=LANES * rows) as block:
            x = T.alloc_fragment((rows, width), "float32")
            square = T.alloc_fragment((rows, width), "float32")
            mean = T.alloc_fragment((rows,), "float32")
            spread = T.alloc_fragment((rows,), "float32")
            layout = T.Fragment((rows, width), forward_fn=place)
            T.annotate_layout({x: layout, square: layout})
            for i, j in T.Parallel(rows, width):
                x[i, j] = hidden[block * rows + i, j] + T.cast(delta[block * rows + i, j], "float32")
            for i, j in T.Parallel(rows, width):
                summed[block * rows + i, j] = x[i, j]
            T.reduce_sum(x, mean, dim=1)
            for i, j in T.Parallel(rows, width):
                x[i, j] -= mean[i] * (1.0 / width)
            for i, j in T.Parallel(rows, width):
                square[i, j] = x[i, j] * x[i, j]
            T.reduce_sum(square, spread, dim=1)
            for i in T.Parallel(rows):
                spread[i] = T.rsqrt(spread[i] * (1.0 / width) + eps)
            for i, j in T.Parallel(rows, width):
                scaled = x[i, j] * spread[i] * weight[j]
                normed[block * rows + i, j] = T.cast(scaled + offset[j] if bias else scaled, dtype)

    if bias:

        @T.prim_func
        def add_ln_biased_program(  # noqa: PLR0913, PLR0917 - the buffers of the launch
            hidden: T.Tensor((tokens, width), "float32"),
            delta: T.Tensor((tokens, width), incoming),
            weight: T.Tensor((width,), "float32"),
            offset: T.Tensor((width,), "float32"),
            eps: T.float32,
            summed: T.Tensor((tokens, width), "float32"),
            normed: T.Tensor((tokens, width), dtype),
        ) -> None:
            body(hidden, delta, weight, offset, eps, summed, normed)

        return Kernel(add_ln_biased_program)

    @T.prim_func
    def add_ln_program(
        hidden: T.Tensor((tokens, width), "float32"),
        delta: T.Tensor((tokens, width), incoming),
        weight: T.Tensor((width,), "float32"),
        eps: T.float32,
        summed: T.Tensor((tokens, width), "float32"),
        normed: T.Tensor((tokens, width), dtype),
    ) -> None:
        body(hidden, delta, weight, weight, eps, summed, normed)

    return Kernel(add_ln_program)


def add_ln(  # noqa: PLR0913, PLR0917 - the layer norm's own arguments, and the two results
    hidden: Tensor,
    delta: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    dtype: torch.dtype,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """hidden (T, d) float32 plus delta (T, d), and the layer norm of the sum in `dtype`: two tensors (T, d).

    delta and `dtype` are bf16, fp16 or float32, weight and bias (d) float32. `out` is (sum, normed) when given; its sum
    may be `hidden` itself. ValueError for what does not fit together, BackendError away from CUDA.
    """
    architecture("add_ln", hidden.device)
    expect("hidden", hidden, (None, None), torch.float32, hidden.device)
    incoming = dtype_name("delta", delta, FLOATS)
    expect("delta", delta, tuple(hidden.shape), delta.dtype, hidden.device)
    tokens, width = hidden.shape
    expect("weight", weight, (width,), torch.float32, hidden.device)
    summed, normed = (None, None) if out is None else out
    summed = result(summed, (tokens, width), torch.float32, hidden.device)
    normed = result(normed, (tokens, width), dtype, hidden.device)
    operands: list[Tensor | float] = [hidden, delta, weight]
    if bias is not None:
        expect("bias", bias, (width,), torch.float32, hidden.device)
        operands.append(bias)
    if tokens:
        kernel = add_ln_kernel(width, dtype_name("dtype", normed, FLOATS), incoming, bias is not None)
        kernel(*operands, eps, summed, normed, device=hidden.device)
    return summed, normed
