"""Packed attention: its reference, the CUDA it lowers to, and its answers on a GPU."""

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name every reader of PyTorch knows
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from laya import tl_kernels
from laya.tl_kernels import reference
from laya.tl_kernels.tiles import TABLE, AttnTile
from tests.kernels.kernel_checks import ARCHES, HALVES, ROUNDING, error, gpu, needs_tilelang, poison, random

LENGTHS = {
    "one token": [1],
    "one row": [129],
    "tiny": [1, 2, 3, 1, 5, 8, 1, 63, 64, 65],
    "many tiny": [1 + index % 9 for index in range(700)],
    "edges": [127, 128, 129, 191, 192, 193, 1],
    "long": [1024, 1, 1000, 517],
    "padded offsets": [40, 200, 0, 0, 0],
    "empty first": [0, 0, 77],
}


def edges(lengths: Sequence[int]) -> Tensor:
    """Cumulative offsets (n + 1) int32."""
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(0, 12), min_size=1, max_size=6), reach=st.none() | st.integers(1, 14))
def test_reference_is_attention_under_a_dense_mask(lengths: list[int], reach: int | None) -> None:
    tokens = sum(lengths)
    qkv = random(tokens, 3, 2, 8, dtype=torch.float64, device=torch.device("cpu"))
    owner = torch.repeat_interleave(torch.tensor(lengths))
    position = torch.arange(tokens)
    mask = owner[:, None] == owner
    if reach is not None:
        mask &= (position[:, None] - position).abs() <= reach
    want = F.scaled_dot_product_attention(*qkv.permute(1, 2, 0, 3).unbind(0), attn_mask=mask)
    got = reference.attn(qkv, edges(lengths), max(lengths), reach)
    torch.testing.assert_close(got, want.transpose(0, 1).flatten(1))


def test_reference_refuses_a_wrong_longest() -> None:
    qkv = random(9, 3, 1, 8, dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(ValueError, match="longest: expected the length of the longest sequence, 9, got 8"):
        reference.attn(qkv, edges([9]), 8, None)


@needs_tilelang
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("reach", [None, 64])
def test_lowers_to_tensor_core_code(arch: str, reach: int | None) -> None:
    tiles = TABLE[int(arch[3]), int(arch[4])]
    tile = tiles.attn if reach is None else tiles.attn_window
    source = tl_kernels.attn_kernel(16, 64, "bfloat16", reach, tile).cuda_source(arch)
    assert ("wgmma" if arch == "sm_90" else "mma_sync") in source


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("heads", "width"), [(16, 64), (4, 32)])
@pytest.mark.parametrize("reach", [None, 64])
@pytest.mark.parametrize("shape", LENGTHS)
def test_gpu_matches_float64(shape: str, reach: int | None, heads: int, width: int, dtype: torch.dtype) -> None:
    """The weights are rounded to `dtype` before the second product, relative to the largest of a row, and the result
    once more: twice the rounding of the dtype, and half as much again for sums of few terms."""
    device = gpu()
    lengths = LENGTHS[shape]
    qkv = random(sum(lengths), 3, heads, width, dtype=dtype, device=device)
    offsets = edges(lengths).to(device)
    out = poison(sum(lengths), heads * width, dtype=dtype, device=device)
    tl_kernels.attn(qkv, offsets, max(lengths), reach, out)
    want = reference.attn(qkv.double(), offsets, max(lengths), reach)
    assert error(out, want) < 2.5 * ROUNDING[dtype]


@pytest.mark.gpu
def test_gpu_window_opens_at_its_very_edge() -> None:
    """Token 100 alone has a value; exactly the tokens within the reach of it see one."""
    device = gpu()
    qkv = torch.zeros(400, 3, 4, 64, dtype=torch.bfloat16, device=device)
    qkv[100, 2] = 1
    seen = tl_kernels.attn(qkv, edges([400]).to(device), 400, 64).ne(0).any(dim=1).nonzero().flatten()
    assert seen.tolist() == list(range(36, 165))


@pytest.mark.gpu
def test_gpu_survives_scores_far_apart() -> None:
    device = gpu()
    qkv = random(300, 3, 4, 64, dtype=torch.float16, device=device, scale=30)
    offsets = edges([300]).to(device)
    for reach in (None, 64):
        want = reference.attn(qkv.double(), offsets, 300, reach)
        assert error(tl_kernels.attn(qkv, offsets, 300, reach), want) < 2.5 * ROUNDING[torch.float16]


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [AttnTile(128, 64, 1, 256), AttnTile(64, 64, 1, 128, resident=4)], ids=str)
@pytest.mark.parametrize("reach", [1, 40])
def test_gpu_tiles_may_hold_rows_that_see_nothing_yet(reach: int, tile: AttnTile) -> None:
    """A tile of more queries than keys starts its last rows on keys that are all out of their reach."""
    device = gpu()
    qkv = random(700, 3, 4, 64, dtype=torch.float16, device=device)
    offsets, out = edges([500, 200]).to(device), poison(700, 256, dtype=torch.float16, device=device)
    tl_kernels.attn_kernel(4, 64, "float16", reach, tile)(qkv.view(700, -1), offsets, 500, out, device=device)
    assert error(out, reference.attn(qkv.double(), offsets, 500, reach)) < 2.5 * ROUNDING[torch.float16]


@pytest.mark.gpu
@pytest.mark.parametrize("reach", [None, 64])
def test_gpu_keeps_one_sequences_nan_from_its_neighbours(reach: int | None) -> None:
    device = gpu()
    qkv = random(300, 3, 4, 64, dtype=torch.bfloat16, device=device)
    qkv[100:180] = float("nan")
    got = tl_kernels.attn(qkv, edges([100, 80, 120]).to(device), 120, reach).isnan().any(dim=1)
    assert got.nonzero().flatten().tolist() == list(range(100, 180))


@pytest.mark.gpu
def test_gpu_leaves_rows_past_the_last_sequence_alone() -> None:
    device = gpu()
    qkv = random(500, 3, 4, 64, dtype=torch.bfloat16, device=device)
    out = poison(500, 256, dtype=torch.bfloat16, device=device)
    tl_kernels.attn(qkv, torch.tensor([0, 70, 130, 130, 130], dtype=torch.int32, device=device), 70, None, out)
    assert not out[:130].isnan().any() and out[130:].isnan().all()


@pytest.mark.gpu
def test_gpu_refuses_a_longest_beyond_its_tokens() -> None:
    device = gpu()
    qkv = random(5, 3, 4, 64, dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match="longest: expected 0 to 5"):
        tl_kernels.attn(qkv, edges([5]).to(device), 6, None)
