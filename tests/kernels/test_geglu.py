"""The gated product: its reference, the CUDA it lowers to, and its answers on a GPU."""

import math
from types import SimpleNamespace

import pytest
import torch

from laya import tl_kernels
from laya.tl_kernels import reference
from laya.tl_kernels.geglu import gelu
from laya.tl_kernels.tiles import TABLE
from tests.kernels.kernel_checks import ARCHES, HALVES, TOKENS, error, gpu, needs_tilelang, one_rounding, poison, random


def test_reference_is_the_exact_gelu_times_the_gate() -> None:
    device = torch.device("cpu")
    x, weight = (random(*shape, dtype=torch.float64, device=device) for shape in ((3, 8), (10, 8)))
    got = reference.gemm_geglu(x, weight)
    for t in range(3):
        for i in range(5):
            value, gate = float(x[t] @ weight[i]), float(x[t] @ weight[5 + i])
            want = value / 2 * math.erfc(-value / math.sqrt(2)) * gate
            assert math.isclose(float(got[t, i]), want, rel_tol=1e-12, abs_tol=1e-14)


def test_the_polynomial_s_gelu_is_the_exact_one() -> None:
    """In float32, as the kernel takes it: to 7e-7, where half a unit in the last place of a bf16 1 is 2e-3."""
    language = SimpleNamespace(abs=torch.abs, float32=float, max=torch.clamp_min, exp2=torch.exp2)
    u = torch.cat((torch.linspace(-12, 12, 200_001), torch.tensor([-1e4, -100.0, 100.0, 1e4])))
    assert (gelu(language, u) - torch.nn.functional.gelu(u.double())).abs().max() < 7e-7


@needs_tilelang
@pytest.mark.parametrize("arch", ARCHES)
def test_lowers_to_tensor_core_code_without_an_erf(arch: str) -> None:
    tile = TABLE[int(arch[3]), int(arch[4])].geglu
    source = tl_kernels.gemm_geglu_kernel(2624, 1024, "float16", tile).cuda_source(arch)
    assert ("wgmma" if arch == "sm_90" else "mma_sync") in source
    assert "exp2f(" in source
    assert "erff(" not in source


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("intermediate", "k"), [(2624, 1024), (1152, 768), (192, 128)])
def test_gpu_matches_float64(intermediate: int, k: int, dtype: torch.dtype) -> None:
    """One rounding of the result; the float32 GELU near its zero at -∞ loses digits, of values that are tiny."""
    device = gpu()
    weight = random(2 * intermediate, k, dtype=dtype, device=device, scale=k**-0.5)
    for tokens in (*TOKENS, 20_000):
        x = random(tokens, k, dtype=dtype, device=device, scale=2)
        out = poison(tokens, intermediate, dtype=dtype, device=device)
        tl_kernels.gemm_geglu(x, weight, out)
        want = reference.gemm_geglu(x.double(), weight.double())
        assert error(out, want) < one_rounding(want, dtype), tokens


@pytest.mark.gpu
def test_gpu_refuses_an_odd_weight() -> None:
    device = gpu()
    x = random(8, 64, dtype=torch.float16, device=device)
    with pytest.raises(ValueError, match="even number of rows"):
        tl_kernels.gemm_geglu(x, random(15, 64, dtype=torch.float16, device=device))
