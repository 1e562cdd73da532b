"""Every kernel, at the tiles of each architecture's table, through NVIDIA's compiler: for cards that are not here."""

import re
import shutil
from typing import Any

import pytest

from laya.tl_kernels import add_ln_kernel, attn_kernel, gemm_geglu_kernel, gemm_kernel, gemm_rope_kernel, rope_kernel
from laya.tl_kernels.kernel import Kernel, tilelang
from laya.tl_kernels.tiles import SAFE, TABLE, Tiles
from tests.kernels.kernel_checks import needs_tilelang

pytestmark = [
    needs_tilelang,
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed"),
]

# KiB of shared memory that a block may take (CUDA C++ Programming Guide, compute capabilities).
CARDS = {"sm_80": ((8, 0), 163), "sm_89": ((8, 9), 99), "sm_90a": ((9, 0), 227)}
HALF_KIB = 2 / 1024  # of a half-precision value
D, INNER, HEADS, HEAD_WIDTH, REACH = 1024, 2624, 16, 64, 64  # ModernBERT-large


def every_kernel(tiles: Tiles) -> dict[str, Kernel]:
    qkv = tiles.qkv or tiles.gemm
    return {
        "gemm": gemm_kernel(3 * D, D, tile=tiles.gemm),
        "gemm of few tokens": gemm_kernel(3 * D, D, tile=tiles.gemm_small, bias=True),
        "gemm_geglu": gemm_geglu_kernel(INNER, D, tile=tiles.geglu),
        "gemm_geglu of few tokens": gemm_geglu_kernel(INNER, D, tile=tiles.geglu_small),
        "gemm_rope": gemm_rope_kernel(D, D, HEAD_WIDTH, "bfloat16", qkv),
        "add_ln": add_ln_kernel(D),
        "rope": rope_kernel(HEADS, HEAD_WIDTH),
        "attn": attn_kernel(HEADS, HEAD_WIDTH, tile=tiles.attn),
        "attn in reach": attn_kernel(HEADS, HEAD_WIDTH, reach=REACH, tile=tiles.attn_window),
    }


def shared_kib(compiled: Any) -> float:
    """Of a block, as the host's code asks for it at launch: after the grid and the block, before the stream."""
    *_, asked, _ = re.findall(r"\(int64_t\)(\d+)", compiled.get_host_source())
    return int(asked) / 1024


@pytest.mark.parametrize("card", CARDS)
def test_kernels_compile_for_the_card_and_fit_its_shared_memory(card: str) -> None:
    capability, limit_kib = CARDS[card]
    target = tilelang().tvm.target.Target({"kind": "cuda", "arch": card})
    asked = {}
    for name, kernel in every_kernel(TABLE[capability]).items():
        compiled = tilelang().compile(kernel.prim_func, target=target, pass_configs=kernel.pass_configs)
        asked[name] = shared_kib(compiled)
    assert all(kib <= limit_kib for kib in asked.values()), asked
    tile = TABLE[capability].geglu
    ring = tile.stages * (tile.rows + 2 * tile.columns) * tile.depth * HALF_KIB
    # The two groups that take turns must not share what each stores from.
    assert asked["gemm_geglu"] >= ring + (2 * tile.rows * tile.columns * HALF_KIB if tile.turns else 0), asked


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
def test_safe_shapes_store_without_the_bulk_copy_that_needs_a_fence(arch: str) -> None:
    for kernel in every_kernel(SAFE).values():
        assert "tma_store" not in kernel.cuda_source(arch)
