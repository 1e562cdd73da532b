"""What the kernel tests share: devices, random inputs, poisoned outputs, and the error that rounding explains."""

import importlib.util

import pytest
import torch
from torch import Tensor

needs_tilelang = pytest.mark.skipif(importlib.util.find_spec("tilelang") is None, reason="TileLang is not installed")
ARCHES = ("sm_80", "sm_89", "sm_90")
HALVES = (torch.bfloat16, torch.float16)
TOKENS = (1, 7, 129, 1000, 4097)

# What one rounding to the dtype is off by in many values together; in a few, chance may make it half as much again.
ROUNDING = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12, torch.float32: 2.0**-24}


def gpu() -> torch.device:
    """The CUDA device, or a skip."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda", torch.cuda.current_device())


def random(*shape: int, dtype: torch.dtype, device: torch.device, scale: float = 1.0) -> Tensor:
    """Fresh normal values: torch's generator is seeded once a process, from the clock."""
    return (torch.randn(shape, device=device) * scale).to(dtype)


def poison(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An output that shows every element nothing wrote."""
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def one_rounding(want: Tensor, dtype: torch.dtype) -> float:
    """Return the error of exact values rounded once to `dtype`, and a tenth of it for what float32 sums add."""
    return 1.1 * error(want.to(dtype), want)


def error(got: Tensor, want: Tensor) -> float:
    """The norm of the difference over the norm of `want` (float64); NaN when anything is not finite."""
    return float((got.double() - want).norm() / want.norm().clamp_min(1e-300))
