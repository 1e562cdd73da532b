"""The residual sum with its layer norm: its reference, the CUDA it lowers to, and its answers on a GPU."""

import pytest
import torch

from laya import tl_kernels
from laya.tl_kernels import reference
from tests.kernels.kernel_checks import ARCHES, HALVES, ROUNDING, TOKENS, error, gpu, needs_tilelang, poison, random

EPS = 1e-5


@pytest.mark.parametrize("biased", [False, True])
def test_reference_normalises_the_sum(biased: bool) -> None:
    device = torch.device("cpu")
    hidden, delta, weight, bias = (
        random(*shape, dtype=torch.float64, device=device) for shape in ((4, 128), (4, 128), (128,), (128,))
    )
    summed, normed = reference.add_ln(hidden, delta, weight, bias if biased else None, EPS, torch.float64)
    want = hidden + delta
    centred = want - want.mean(dim=1, keepdim=True)
    want_normed = centred / (centred.pow(2).mean(dim=1, keepdim=True) + EPS).sqrt() * weight + (bias if biased else 0)
    torch.testing.assert_close(summed, want)
    torch.testing.assert_close(normed, want_normed)


@needs_tilelang
def test_factory_refuses_a_width_no_warp_can_hold() -> None:
    with pytest.raises(ValueError, match="multiple of 128"):
        tl_kernels.add_ln_kernel(100)


@needs_tilelang
@pytest.mark.parametrize("arch", ARCHES)
def test_lowers_to_wide_accesses_without_shared_memory(arch: str) -> None:
    source = tl_kernels.add_ln_kernel(1024, "bfloat16", bias=True).cuda_source(arch)
    assert "float4" in source and "__shared__" not in source


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize("width", [128, 768, 1024])
def test_gpu_matches_float64(width: int, dtype: torch.dtype) -> None:
    """The sum is one float32 rounding. The norm adds a rounding to `dtype` to a few of float32 (a factor of 16)."""
    device = gpu()
    weight, bias = (random(width, dtype=torch.float32, device=device) for _ in range(2))
    for tokens in TOKENS:
        hidden = random(tokens, width, dtype=torch.float32, device=device, scale=3)
        delta = random(tokens, width, dtype=dtype, device=device)
        for offset in (None, bias):
            out = tuple(poison(tokens, width, dtype=kind, device=device) for kind in (torch.float32, dtype))
            tl_kernels.add_ln(hidden, delta, weight, offset, EPS, dtype, (out[0], out[1]))
            wide = [None if part is None else part.double() for part in (hidden, delta, weight, offset)]
            want = reference.add_ln(wide[0], wide[1], wide[2], wide[3], EPS, torch.float64)
            assert error(out[0], want[0]) < ROUNDING[torch.float32], tokens
            assert error(out[1], want[1]) < ROUNDING[dtype] + 16 * ROUNDING[torch.float32], tokens


@pytest.mark.gpu
def test_gpu_keeps_its_digits_far_from_zero() -> None:
    """Rows around 3e4 with a spread of 1: float32 holds them to 2e-3, and the norm must not lose more than that."""
    device = gpu()
    hidden = random(64, 1024, dtype=torch.float32, device=device) + 3e4
    delta = torch.zeros(64, 1024, dtype=torch.bfloat16, device=device)
    weight = torch.ones(1024, device=device)
    _, normed = tl_kernels.add_ln(hidden, delta, weight, None, EPS, torch.float32)
    want = reference.add_ln(hidden.double(), delta.double(), weight.double(), None, EPS, torch.float64)[1]
    assert error(normed, want) < 4e-3


@pytest.mark.gpu
def test_gpu_may_sum_in_place() -> None:
    device = gpu()
    hidden = random(300, 768, dtype=torch.float32, device=device)
    delta, weight = random(300, 768, dtype=torch.float16, device=device), torch.ones(768, device=device)
    want = hidden + delta
    normed = poison(300, 768, dtype=torch.float16, device=device)
    tl_kernels.add_ln(hidden, delta, weight, None, EPS, torch.float16, (hidden, normed))
    assert torch.equal(hidden, want) and not normed.isnan().any()
