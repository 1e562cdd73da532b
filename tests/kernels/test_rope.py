"""Rotary positions: the reference, the CUDA they lower to, and the answers on a GPU."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from laya import tl_kernels
from laya.attention import rotary_table, rotate
from laya.errors import BackendError
from laya.tl_kernels import reference
from laya.tl_kernels.tiles import SAFE, TABLE
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

QKV = TABLE[9, 0].qkv
assert QKV is not None


def table(length: int, width: int) -> Tensor:
    """(2, length, width / 2) float32."""
    return rotary_table(length, width, 10_000.0)


def test_reference_turns_pairs_as_complex_numbers() -> None:
    qkv = random(6, 3, 2, 32, dtype=torch.float64, device=torch.device("cpu"))
    positions = torch.tensor([0, 1, 2, 0, 1, 7], dtype=torch.int32)
    cos_sin = table(8, 32).double()
    turn = torch.complex(cos_sin[0], cos_sin[1])[positions.long()][:, None, None, :]
    want = qkv.clone()
    turned = torch.complex(qkv[:, :2, :, :16], qkv[:, :2, :, 16:]) * turn
    want[:, :2] = torch.cat((turned.real, turned.imag), dim=-1)
    torch.testing.assert_close(reference.rope(qkv, positions, cos_sin), want)


def test_reference_is_the_models_rotation() -> None:
    qkv = random(9, 3, 4, 64, dtype=torch.float32, device=torch.device("cpu"))
    want = rotate(qkv[:, :2], table(9, 64)[:, :, None, None])
    got = reference.rope(qkv.clone(), torch.arange(9, dtype=torch.int32), table(9, 64))
    torch.testing.assert_close(got[:, :2], want)
    assert torch.equal(got[:, 2], qkv[:, 2])


def test_reference_refuses_a_position_beyond_the_table() -> None:
    qkv = random(2, 3, 1, 32, dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(BackendError, match="9 tokens exceeds the table of 8"):
        reference.rope(qkv, torch.tensor([0, 8], dtype=torch.int32), table(8, 32))


@needs_tilelang
def test_factory_refuses_a_head_that_is_not_whole_accesses() -> None:
    with pytest.raises(ValueError, match="multiple of 16"):
        tl_kernels.rope_kernel(4, 24)


@needs_tilelang
@pytest.mark.parametrize("arch", ARCHES)
def test_lowers_to_16_byte_accesses(arch: str) -> None:
    assert "(uint4*)(qkv" in tl_kernels.rope_kernel(16, 64).cuda_source(arch)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("heads", "width"), [(16, 64), (12, 64), (4, 32)])
def test_gpu_matches_float64(heads: int, width: int, dtype: torch.dtype) -> None:
    """One rounding of the result to `dtype`."""
    device = gpu()
    turns = table(1024, width).to(device)
    for tokens in TOKENS:
        qkv = random(tokens, 3, heads, width, dtype=dtype, device=device)
        positions = torch.randint(1024, (tokens,), dtype=torch.int32, device=device)
        want = reference.rope(qkv.double(), positions, turns.double())
        values = qkv[:, 2].clone()
        assert tl_kernels.rope(qkv, positions, turns, 1024) is qkv
        assert error(qkv[:, :2], want[:, :2]) < one_rounding(want[:, :2], dtype), tokens
        assert torch.equal(qkv[:, 2], values)


@pytest.mark.gpu
def test_gpu_never_invents_a_position() -> None:
    device = gpu()
    qkv = random(3, 3, 4, 64, dtype=torch.bfloat16, device=device)
    turns = table(8, 64).to(device)
    with pytest.raises(BackendError, match="9 tokens exceeds the table of 8"):
        tl_kernels.rope(qkv, torch.zeros(3, dtype=torch.int32, device=device), turns, 9)
    tl_kernels.rope(qkv, torch.tensor([7, 8, -1], dtype=torch.int32, device=device), turns)
    assert not qkv[0].isnan().any() and qkv[1:, :2].isnan().all() and not qkv[1:, 2].isnan().any()


def test_reference_rotates_what_the_product_makes() -> None:
    x, weight = (random(*shape, dtype=torch.float64, device=torch.device("cpu")) for shape in ((6, 24), (192, 24)))
    positions, turns = torch.tensor([0, 1, 2, 0, 1, 7], dtype=torch.int32), table(8, 32).double()
    want = reference.rope((x @ weight.T).view(6, 3, 2, 32), positions, turns)
    torch.testing.assert_close(reference.gemm_rope(x, weight, positions, turns, 8), want)


@needs_tilelang
@pytest.mark.parametrize(
    ("hidden", "width"),
    [(256, 96), (192, 64), (384, 256)],
    ids=["part of a head", "keys and values", "a head and a half"],
)
def test_factory_refuses_a_tile_that_mixes_what_is_rotated(hidden: int, width: int) -> None:
    tile = replace(SAFE.gemm, columns=256)
    with pytest.raises(ValueError, match="must hold whole heads"):
        tl_kernels.gemm_rope_kernel(hidden, hidden, width, "bfloat16", tile)


@needs_tilelang
def test_product_lowers_to_tensor_core_code() -> None:
    source = tl_kernels.gemm_rope_kernel(1024, 1024, 64, "bfloat16", QKV).cuda_source("sm_90")
    assert "wgmma" in source


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("heads", "width"), [(16, 64), (12, 64), (8, 32), (4, 128)])
def test_gpu_rotates_what_the_product_makes(heads: int, width: int, dtype: torch.dtype) -> None:
    """One rounding of the result to `dtype`, by the tile of Hopper cards and, on any card, by one that is safe."""
    device, hidden = gpu(), heads * width
    turns = table(1024, width).to(device)
    weight = random(3 * hidden, hidden, dtype=dtype, device=device, scale=hidden**-0.5)
    tiles = [replace(SAFE.gemm, columns=128), *([QKV] if torch.cuda.get_device_capability(device) == (9, 0) else [])]
    for tokens in (*TOKENS, 20_000):
        x = random(tokens, hidden, dtype=dtype, device=device)
        positions = torch.randint(1024, (tokens,), dtype=torch.int32, device=device)
        want = reference.gemm_rope(x.double(), weight.double(), positions, turns.double(), 1024)
        for tile in tiles:
            out = poison(tokens, 3, heads, width, dtype=dtype, device=device)
            assert tl_kernels.gemm_rope(x, weight, positions, turns, 1024, tile, out) is out
            assert error(out, want) < one_rounding(want, dtype), (tokens, tile)


@pytest.mark.gpu
def test_gpu_product_refuses_a_position_beyond_the_table() -> None:
    device = gpu()
    x, weight = (random(*shape, dtype=torch.bfloat16, device=device) for shape in ((3, 128), (384, 128)))
    with pytest.raises(BackendError, match="9 tokens exceeds the table of 8"):
        tl_kernels.gemm_rope(
            x, weight, torch.zeros(3, dtype=torch.int32, device=device), table(8, 64).to(device), 9, QKV
        )


@pytest.mark.gpu
def test_gpu_product_takes_no_tokens_and_refuses_what_does_not_fit() -> None:
    device = gpu()
    x, weight = (random(*shape, dtype=torch.bfloat16, device=device) for shape in ((3, 128), (384, 128)))
    positions, turns = torch.zeros(3, dtype=torch.int32, device=device), table(8, 64).to(device)
    assert tl_kernels.gemm_rope(x[:0], weight, positions[:0], turns, 0, QKV).shape == (0, 3, 2, 64)
    with pytest.raises(ValueError, match="three times as many rows as heads of 64 have, got 320"):
        tl_kernels.gemm_rope(x, weight[:320], positions, turns, 8, QKV)
