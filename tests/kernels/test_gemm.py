"""The matrix product: its reference, the CUDA it lowers to, and its answers on a GPU."""

import pytest
import torch

from laya import tl_kernels
from laya.errors import BackendError
from laya.tl_kernels import reference
from laya.tl_kernels.arguments import result
from laya.tl_kernels.tiles import TABLE
from tests.kernels.kernel_checks import (
    ARCHES,
    HALVES,
    TOKENS,
    error,
    gpu,
    needs_tilelang,
    one_rounding,
    poison,
    random,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("biased", [False, True])
def test_reference_sums_products_in_float64(biased: bool) -> None:
    x, weight = (random(*shape, dtype=torch.float64, device=CPU) for shape in ((5, 24), (16, 24)))
    bias = random(16, dtype=torch.float64, device=CPU) if biased else None
    want = (x[:, None, :] * weight).sum(dim=-1) + (0 if bias is None else bias)
    torch.testing.assert_close(reference.gemm(x, weight, bias), want)


def test_reference_rounds_a_half_product_once() -> None:
    x = torch.full((1, 4096), 1.0, dtype=torch.bfloat16)
    assert reference.gemm(x, x).item() == 4096  # a bf16 running sum would stop at 256


def test_wrapper_refuses_the_cpu_by_name() -> None:
    x = random(4, 64, dtype=torch.bfloat16, device=CPU)
    with pytest.raises(BackendError, match=r"gemm runs on CUDA.*reference"):
        tl_kernels.gemm(x, x)


def test_an_output_beyond_int32_is_refused_before_it_is_allocated() -> None:
    with pytest.raises(BackendError, match="out: 2150400000 elements are more than"):
        result(None, (700_000, 3072), torch.bfloat16, CPU)


@needs_tilelang
def test_factory_refuses_widths_the_copies_cannot_take() -> None:
    with pytest.raises(ValueError, match="multiples of 8"):
        tl_kernels.gemm_kernel(100, 64)


@needs_tilelang
def test_factory_returns_the_same_kernel_for_the_same_arguments() -> None:
    assert tl_kernels.gemm_kernel(64, 64) is tl_kernels.gemm_kernel(64, 64)


@needs_tilelang
@pytest.mark.parametrize("arch", ARCHES)
def test_lowers_to_tensor_core_code(arch: str) -> None:
    tile = TABLE[int(arch[3]), int(arch[4])].gemm
    source = tl_kernels.gemm_kernel(3072, 1024, "bfloat16", tile, True).cuda_source(arch)
    assert ("wgmma" if arch == "sm_90" else "mma_sync") in source


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("n", "k"), [(3072, 1024), (1024, 2624), (128, 192)])
def test_gpu_matches_float64(n: int, k: int, dtype: torch.dtype) -> None:
    """Operands are exact in float64, so the only error is one rounding of the result and float32 sums far below it."""
    device = gpu()
    weight, bias = random(n, k, dtype=dtype, device=device), random(n, dtype=dtype, device=device)
    for tokens in (*TOKENS, 20_000):
        x = random(tokens, k, dtype=dtype, device=device)
        for offset in (None, bias) if tokens == 129 else (bias,):
            out = poison(tokens, n, dtype=dtype, device=device)
            assert tl_kernels.gemm(x, weight, offset, out) is out
            want = reference.gemm(x.double(), weight.double(), None if offset is None else offset.double())
            assert error(out, want) < one_rounding(want, dtype), (tokens, offset is None)


@pytest.mark.gpu
def test_gpu_writes_only_its_own_rows() -> None:
    device = gpu()
    x, weight = (random(*shape, dtype=torch.bfloat16, device=device) for shape in ((129, 128), (128, 128)))
    room = poison(400, 128, dtype=torch.bfloat16, device=device)
    tl_kernels.gemm(x, weight, out=room[:129])
    assert not room[:129].isnan().any() and room[129:].isnan().all()


@pytest.mark.gpu
def test_gpu_takes_no_tokens_and_refuses_what_does_not_fit() -> None:
    device = gpu()
    weight = random(128, 64, dtype=torch.bfloat16, device=device)
    assert tl_kernels.gemm(weight[:0], weight).shape == (0, 128)
    with pytest.raises(ValueError, match=r"weight: expected .*any, 64"):
        tl_kernels.gemm(weight, weight[:, :32].contiguous())
    with pytest.raises(ValueError, match=r"x: expected torch.bfloat16 or torch.float16"):
        tl_kernels.gemm(weight.float(), weight.float())
    with pytest.raises(ValueError, match="strided"):
        tl_kernels.gemm(weight[:, ::2], weight)
