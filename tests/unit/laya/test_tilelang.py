"""Which models the tilelang backend is for, as far as a machine without a GPU can say. `tests/kernels` has the rest."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import laya
from laya.backends import tilelang
from laya.errors import BackendUnavailableError
from laya.inputs import synthetic_inputs
from laya.model import ModelConfig
from laya.operations import PackedOperations
from laya.tl_kernels.kernel import Kernel
from laya.tl_kernels.tiles import BIG_TOKENS
from tests.checkpoints import CheckpointSpec

pytest.importorskip("tilelang")
CONFIG = ModelConfig(vocab_size=100, hidden_size=256, intermediate_size=96, heads=4, full_layers=(True, False))


def test_every_kernel_of_the_published_encoders_is_traced() -> None:
    large = replace(CONFIG, hidden_size=1024, intermediate_size=2624, heads=16)
    base = replace(CONFIG, hidden_size=768, intermediate_size=1152, heads=12)
    assert [len(tilelang.trace_kernels(config, "bfloat16")) for config in (large, base)] == [5, 5]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden_size": 192, "heads": 3}, "add_ln_kernel: the width must be a multiple of 128"),
        ({"hidden_size": 8192, "heads": 128}, "add_ln_kernel: the width must be a multiple of 128 up to 4096"),
        ({"heads": 32}, "rope_kernel: the width of a head must be a multiple of 16, got 8"),
        ({"heads": 16}, "attn_kernel: a head must be 32, 64 or 128 wide, got 16"),
        ({"reach": 0}, "attn_kernel: the reach must be None or a positive number of tokens, got 0"),
        ({"intermediate_size": 100}, "a product's widths must be multiples of 8, got 100 and 256"),
    ],
)
def test_a_model_of_other_widths_is_not_for_the_kernels(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        tilelang.trace_kernels(replace(CONFIG, **change), "float16")


def test_a_projection_with_a_bias_may_be_of_any_width() -> None:
    assert len(tilelang.trace_kernels(replace(CONFIG, intermediate_size=100, mlp_bias=True), "float16")) == 4


def test_auto_passes_such_a_model_on_in_silence_and_a_request_warns_once(
    make: Callable[[CheckpointSpec], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAYA_CPU_AMP", "bf16")
    monkeypatch.setattr(tilelang, "choose_operations", lambda *_: PackedOperations())
    path = make(CheckpointSpec(encoder={"hidden_size": 192, "num_attention_heads": 3}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agent = laya.load(path, device="cpu", backend="auto")
    assert (agent.backend, agent.fallback_reason) == ("eager", None)
    with pytest.warns(RuntimeWarning, match="'tilelang' cannot run: add_ln_kernel: .*; running 'eager'") as caught:
        assert agent.set_backend("tilelang") == "eager"
    assert len(caught) == 1
    with pytest.raises(BackendUnavailableError, match="multiple of 128"):
        tilelang.build_tilelang(agent._runner.context)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_nothing_is_left_to_compile_once_the_backend_is_there(
    make: Callable[[CheckpointSpec], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of widths that no other test has kernels of, and of a reach as long as the published encoders'."""
    widths = {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 328, "local_attention": 128}
    agent = laya.load(make(CheckpointSpec(encoder=widths)), device="cuda", backend="tilelang", strict=True)
    monkeypatch.setattr(Kernel, "compile", lambda *_: pytest.fail("a kernel was compiled"))
    for shape in ((1, 1, 1), (3, 100, 5), (BIG_TOKENS // 64, 64, 2)):
        agent.backend_object.forward(synthetic_inputs(shape, agent.device))
