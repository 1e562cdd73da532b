"""Out of memory: on the CPU by an injected error, on CUDA by a limit."""

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import laya
from laya import runner
from laya.backends import selection
from laya.backends.eager import EagerBackend
from laya.inputs import ModelInputs

CUDA = torch.cuda.is_available()
QUESTIONS: dict[str, Any] = {
    "topic": {"type": "choice", "instructions": "Which?", "criteria": ["a", "b", "c"]},
    "holds": {"type": "noul", "instructions": "Is it?"},
}
STATES = [f"state {'word ' * (i % 17)}" for i in range(24)]


class SmallBackend(EagerBackend):
    """Has room for `most` sequences at a time."""

    name = "tilelang"
    most = 3

    def forward(self, inputs: ModelInputs) -> tuple[Tensor, Tensor]:
        if len(inputs.qtype) > self.most:
            raise torch.OutOfMemoryError("no room")
        return super().forward(inputs)


@pytest.fixture
def small(checkpoint_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[laya.Agent]:
    monkeypatch.setattr(selection, "FACTORIES", {**selection.FACTORIES, "tilelang": SmallBackend})
    yield laya.load(checkpoint_path, device="cpu", backend="tilelang")


def test_a_batch_that_does_not_fit_is_split_until_it_does(small: laya.Agent, agent: laya.Agent) -> None:
    assert small.predict_batch(STATES, QUESTIONS) == agent.predict_batch(STATES, QUESTIONS)
    assert small.degradations.splits > 0
    assert small.degradations.on_cpu == 0
    prepared = small.prepare(QUESTIONS)
    encoded = small.encode(STATES[:4], prepared)
    (batch,) = small.pack(encoded)
    found = small.forward(encoded, batch)
    assert len(batch) == 8
    assert (found.splits, found.on_cpu) == (3, 0)  # 8 = 4 + 4, and each 4 = 2 + 2
    assert found.logits.shape == (8, 3)


def test_on_a_cpu_a_single_sequence_without_room_is_an_error(
    small: laya.Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SmallBackend, "most", 0)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        small.predict_batch(STATES, QUESTIONS)
    monkeypatch.setattr(SmallBackend, "most", 1)
    assert len(small.predict_batch(STATES, QUESTIONS)) == len(STATES)


@pytest.mark.parametrize("words", ["CUDA error: out of memory", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"])
def test_cuda_says_it_in_words_too(
    small: laya.Agent, agent: laya.Agent, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    def forward(self: SmallBackend, inputs: ModelInputs) -> tuple[Tensor, Tensor]:
        if len(inputs.qtype) > 5:
            raise RuntimeError(words)
        return EagerBackend.forward(self, inputs)

    monkeypatch.setattr(SmallBackend, "forward", forward)
    assert small.predict_batch(STATES, QUESTIONS) == agent.predict_batch(STATES, QUESTIONS)
    assert small.degradations.splits > 0


def test_halves_of_different_width_join_with_absent_options(small: laya.Agent) -> None:
    narrow = laya.Logits(np.ones((1, 2), np.float32), np.zeros((1, 2), np.float32), splits=1)
    wide = laya.Logits(np.ones((2, 4), np.float32), np.zeros((2, 2), np.float32), on_cpu=1)
    both = runner.join(narrow, wide)
    assert both.logits.tolist() == [[1, 1, -1e4, -1e4], [1] * 4, [1] * 4]
    assert (both.act.shape, both.splits, both.on_cpu) == ((3, 2), 2, 1)


def test_the_cpu_retry_detaches_the_backend_and_restores_it(
    small: laya.Agent, agent: laya.Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is on a device that only calls itself no CPU, so that going away and coming back can be watched."""
    monkeypatch.setattr(SmallBackend, "most", 0)
    closed: list[str] = []
    monkeypatch.setattr(SmallBackend, "close", lambda self: closed.append(self.name))
    installed = weakref.ref(small.backend_object)
    home = small._runner.context
    elsewhere = replace(home, device=torch.device("meta"))
    monkeypatch.setattr(small._runner, "context", elsewhere)
    monkeypatch.setattr(runner, "place", moves := Moves(installed))
    monkeypatch.setattr(runner, "collate", lambda encoded, batch, _: collate(encoded, batch, torch.device("cpu")))
    found = small.predict_batch(STATES[:2], QUESTIONS)
    assert found == agent.predict_batch(STATES[:2], QUESTIONS)
    assert small.degradations.on_cpu == 4
    assert closed == ["tilelang"] * 4
    assert moves.devices == ["cpu", "meta"] * 4
    assert moves.held == [False] * 8
    assert small.backend == "tilelang"
    assert isinstance(small.backend_object, SmallBackend)


collate = runner.collate


class Moves:
    """Notes where the model was to go, and whether the backend it had was still held then; leaves the model."""

    def __init__(self, backend: Callable[[], Any]) -> None:
        self.devices: list[str] = []
        self.held: list[bool] = []
        self.backend = backend

    def __call__(self, _: Any, device: torch.device, __: torch.dtype) -> None:
        self.devices.append(device.type)
        self.held.append(self.backend() is not None)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="no CUDA device")
@pytest.mark.parametrize("backend", ["eager", "compile", "tilelang", "aot"])
def test_a_full_device_splits_batches_and_sends_what_fits_nowhere_to_the_cpu(
    checkpoint_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if backend == "tilelang":
        pytest.importorskip("tilelang")
    if backend == "aot":
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        laya.export_aot(checkpoint_path, device="cuda")
    roomy = laya.load(checkpoint_path, device="cuda", backend=backend, strict=True)
    states = [f"state {'word ' * 60}{i}" for i in range(3000)]
    expected = roomy.predict_batch(states, QUESTIONS)
    _, total = torch.cuda.mem_get_info()
    limited = []
    try:
        for room_mib in (24, 2):
            gc.collect()
            torch.cuda.empty_cache()
            reserved = torch.cuda.memory_reserved()
            torch.cuda.set_per_process_memory_fraction((reserved + room_mib * 2**20) / total)
            found = roomy.predict_batch(states if room_mib > 8 else states[:3], QUESTIONS)
            limited.append((roomy.degradations.splits, roomy.degradations.on_cpu))
            for ours, theirs in zip(found, expected, strict=False):
                assert abs(ours["answers"]["holds"]["noul"] - theirs["answers"]["holds"]["noul"]) < 0.06
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    print(f"\n{backend}: (splits, sequences on the CPU) with 24 and 2 MiB of room: {limited}")
    assert limited[0][0] > 0
    assert roomy.backend == backend
    assert roomy.device.type == "cuda"
