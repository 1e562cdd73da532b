import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor

import laya
from laya.backends import eager, selection
from laya.backends.base import Backend, BackendContext, CompileOptions
from laya.backends.eager import EagerBackend
from laya.backends.selection import Flags, choose_backend
from laya.errors import BackendError, BackendUnavailableError
from laya.inputs import ModelInputs, synthetic_inputs
from laya.operations import PackedOperations
from laya.settings import Settings

QUESTIONS = {"holds": {"type": "noul", "instructions": "Is it?"}}


class RecordingBackend(EagerBackend):
    """Eager under another name: it notes its calls, and can be held in the middle of one."""

    name = "tilelang"

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.calls = 0
        self.closed = False
        self.entered, self.released = threading.Event(), threading.Event()
        self.released.set()

    def forward(self, inputs: ModelInputs) -> tuple[Tensor, Tensor]:
        self.entered.set()
        self.released.wait(10)
        assert not self.closed
        self.calls += 1
        return super().forward(inputs)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def own_agent(checkpoint_path: Path) -> Iterator[laya.Agent]:
    yield laya.load(checkpoint_path, device="cpu")


@pytest.mark.parametrize(
    ("backend", "fast", "compile_model", "expected"),
    [
        (None, False, False, "eager"),
        (None, True, False, "tilelang"),
        (None, False, True, "compile"),
        (None, True, True, "tilelang"),
        ("eager", True, True, "eager"),
        ("auto", True, False, "auto"),
        ("compile", True, False, "compile"),
    ],
)
def test_flags_become_one_choice_and_an_explicit_one_wins(
    backend: str | None, fast: bool, compile_model: bool, expected: str
) -> None:
    assert choose_backend(backend, Flags(fast, compile_model), Settings()).name == expected


def test_eager_is_the_default_and_auto_resolves_without_a_warning(own_agent: laya.Agent) -> None:
    assert own_agent.backend == "eager"
    assert isinstance(own_agent.backend_object, EagerBackend)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert own_agent.set_backend("auto") == own_agent.backend
    assert own_agent.fallback_reason is None


def cannot_run(context: BackendContext) -> Backend:
    raise BackendError("its wheels are square")


def test_a_backend_that_cannot_run_warns_once_and_eager_runs(
    own_agent: laya.Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "FACTORIES", {**selection.FACTORIES, "tilelang": cannot_run})
    with pytest.warns(RuntimeWarning, match="'tilelang' cannot run: its wheels are square; running 'eager'") as caught:
        assert own_agent.set_backend("tilelang") == "eager"
    assert len(caught) == 1
    assert own_agent.fallback_reason == "backend 'tilelang' cannot run: its wheels are square"
    assert own_agent.predict("a", QUESTIONS)
    own_agent.deaccelerate()
    assert own_agent.fallback_reason is None


def test_strict_raises_and_leaves_what_ran(own_agent: laya.Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "FACTORIES", {**selection.FACTORIES, "compile": cannot_run})
    before = own_agent.backend_object
    with pytest.raises(BackendError, match="'compile' cannot run: its wheels are square"):
        own_agent.set_backend("compile", strict=True)
    assert own_agent.backend_object is before
    with pytest.raises(BackendError, match="square"):
        laya.load(own_agent.checkpoint.path, device="cpu", backend="compile", strict=True)
    with pytest.warns(RuntimeWarning, match="square"):
        fallen = laya.load(own_agent.checkpoint.path, device="cpu", compile=True)
    assert (fallen.backend, fallen.fallback_reason) == ("eager", "backend 'compile' cannot run: its wheels are square")


def test_an_unknown_backend_is_refused_with_the_names(own_agent: laya.Agent) -> None:
    with pytest.raises(BackendError, match="unknown backend 'quantum'; choose one of eager"):
        own_agent.set_backend("quantum")
    assert own_agent.backend == "eager"


def not_for_this_machine(context: BackendContext) -> Backend:
    raise BackendUnavailableError("wrong machine")


def test_auto_takes_the_first_backend_that_runs(own_agent: laya.Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    factories = {**selection.FACTORIES, "tilelang": not_for_this_machine, "compile": RecordingBackend}
    monkeypatch.setattr(selection, "FACTORIES", factories)
    own_agent.set_backend("auto", strict=True)
    assert isinstance(own_agent.backend_object, RecordingBackend)
    assert own_agent.fallback_reason is None


@pytest.mark.parametrize("runs", [1, 2, 3, 4])
def test_auto_tries_the_fastest_first(own_agent: laya.Agent, monkeypatch: pytest.MonkeyPatch, runs: int) -> None:
    """TileLang, then what was compiled ahead of time, then compile, then eager; never onnx, which is another graph."""
    order, tried = ["tilelang", "aot", "compile", "eager"], []

    def factory(name: str) -> Callable[[BackendContext], Backend]:
        def build(context: BackendContext) -> Backend:
            tried.append(name)
            return EagerBackend(context) if name == order[runs - 1] else not_for_this_machine(context)

        return build

    monkeypatch.setattr(selection, "FACTORIES", {name: factory(name) for name in selection.FACTORIES})
    own_agent.set_backend("auto", strict=True)
    assert tried == order[:runs]


def test_what_compiles_and_where_is_kept_is_what_was_said(tmp_path: Path) -> None:
    settings = Settings(inductor_cache_dir=tmp_path / "ours", cache_dir=tmp_path / "laya", compile_warmup=False)
    backend = choose_backend("compile", Flags(compile=True, compile_mode="default", compile_cache=True), settings)
    assert backend.compiling == CompileOptions("reduce-overhead", warm=False, cache_dir=tmp_path / "ours")
    for mode in ("default", "reduce-overhead"):
        flag = choose_backend(None, Flags(compile=True, compile_mode=mode, compile_warmup=True), settings)
        assert flag.compiling == CompileOptions(mode, cpu=True, warm=True, best_effort=True)
    kept = choose_backend(None, Flags(compile=True, compile_cache=True), settings).compiling
    assert (kept.cache_dir, kept.cache_required) == (tmp_path / "laya" / "torchinductor", True)


def test_auto_says_so_when_one_for_this_machine_is_broken(
    own_agent: laya.Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    factories = {**selection.FACTORIES, "tilelang": cannot_run, "compile": not_for_this_machine}
    monkeypatch.setattr(selection, "FACTORIES", factories)
    with pytest.warns(RuntimeWarning, match="'tilelang' cannot run: its wheels are square; running 'eager'"):
        assert own_agent.set_backend("auto") == "eager"
    assert own_agent.fallback_reason == "backend 'tilelang' cannot run: its wheels are square"


def test_strict_auto_raises_when_one_for_this_machine_is_broken(
    own_agent: laya.Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    factories = {**selection.FACTORIES, "tilelang": cannot_run, "compile": not_for_this_machine}
    monkeypatch.setattr(selection, "FACTORIES", factories)
    with pytest.raises(BackendError, match="'tilelang' cannot run: its wheels are square"):
        own_agent.set_backend("auto", strict=True)
    assert (own_agent.backend, own_agent.fallback_reason) == ("eager", None)


def test_a_caller_s_autocast_changes_nothing(own_agent: laya.Agent) -> None:
    expected = own_agent.predict("a state", QUESTIONS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert own_agent.predict("a state", QUESTIONS) == expected


@pytest.mark.parametrize("shape", [(0, 16), (2, 16, 0)])
def test_a_warm_up_shape_of_nothing_is_refused(own_agent: laya.Agent, shape: tuple[int, ...]) -> None:
    with pytest.raises(laya.LayaError, match="expected at least one sequence and one marker"):
        own_agent.warmup([shape])


def test_a_backend_runs_is_removed_and_leaves_the_model_alone(
    own_agent: laya.Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "FACTORIES", {**selection.FACTORIES, "tilelang": RecordingBackend})
    forward = type(own_agent.model).forward
    expected = own_agent.predict("a", QUESTIONS)
    own_agent.set_backend("tilelang", strict=True)
    installed = own_agent.backend_object
    assert isinstance(installed, RecordingBackend)
    assert own_agent.backend == "tilelang"
    assert own_agent.predict("a", QUESTIONS) == expected
    assert installed.calls == 1
    own_agent.deaccelerate()
    assert installed.closed
    assert own_agent.backend == "eager"
    assert own_agent.predict("a", QUESTIONS) == expected
    assert installed.calls == 1
    assert type(own_agent.model).forward is forward
    assert "forward" not in vars(own_agent.model)


def test_switching_waits_for_the_inference_in_flight(own_agent: laya.Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "FACTORIES", {**selection.FACTORIES, "tilelang": RecordingBackend})
    own_agent.set_backend("tilelang")
    held = own_agent.backend_object
    assert isinstance(held, RecordingBackend)
    held.released.clear()
    running = threading.Thread(target=own_agent.predict, args=("a", QUESTIONS))
    switching = threading.Thread(target=own_agent.deaccelerate)
    running.start()
    assert held.entered.wait(10)
    switching.start()
    switching.join(0.2)
    assert switching.is_alive()
    assert not held.closed
    held.released.set()
    running.join(10)
    switching.join(10)
    assert held.closed
    assert held.calls == 1
    assert own_agent.backend == "eager"


def test_a_backend_is_closed_after_what_it_queued(own_agent: laya.Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "FACTORIES", {**selection.FACTORIES, "tilelang": RecordingBackend})
    own_agent.set_backend("tilelang")
    held = own_agent.backend_object
    assert isinstance(held, RecordingBackend)
    held.device = torch.device("cuda", 1)
    closed_when_waiting = []

    def synchronize(device: torch.device) -> None:
        assert device == held.device
        closed_when_waiting.append(held.closed)

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    own_agent.deaccelerate()
    assert closed_when_waiting == [False]
    assert held.closed
    own_agent.deaccelerate()
    assert closed_when_waiting == [False]


def test_the_choice_of_a_masked_kernel_is_made_only_where_there_are_masks(
    own_agent: laya.Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a setting of the whole process, and flash attention over packed sequences does not read it."""
    entered = []
    monkeypatch.setattr(eager, "sdpa_kernel", lambda _: nullcontext(entered.append(True)))
    backend = own_agent.backend_object
    inputs = synthetic_inputs((1, 16, 2), own_agent.device)
    backend.forward(inputs)
    assert entered == [True]
    monkeypatch.setattr(backend, "_operations", PackedOperations())
    monkeypatch.setattr(backend, "_model", lambda *_: (torch.zeros(1, 2), torch.zeros(1, 2)))
    backend.forward(inputs)
    assert entered == [True]
