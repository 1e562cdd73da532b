"""Which artifacts are taken, why others are refused, and how one runs. Its parity is the parity suite's to say."""

import importlib
import json
import subprocess
import sys
import threading
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor
from torch._inductor.exc import CppCompileError, InductorError
from torch.multiprocessing.reductions import StorageWeakRef

import laya
from laya.agent import Agent
from laya.aot import ATTEMPTS, KEYS, SOURCES, describe, file_name, find_artifact, misfit, read_description
from laya.artifacts import artifact_folders
from laya.backends import aot
from laya.backends.aot import AotBackend
from laya.checkpoint import Checkpoint
from laya.errors import BackendUnavailableError
from laya.inputs import synthetic_inputs
from tests.checkpoints import CheckpointSpec, make_checkpoint

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
QUESTIONS: dict[str, Any] = {"holds": {"type": "noul", "instructions": "Is it?"}}
STATES = ["one", "another state", "word " * 40]
SMALL = CheckpointSpec(
    encoder={"hidden_size": 64, "num_hidden_layers": 2, "local_attention": 8}, agent={"head_layers": 1}
)


@pytest.fixture
def checkpoint(agent: laya.Agent) -> Checkpoint:
    return agent.checkpoint


def write(path: Path, description: dict[str, str]) -> Path:
    """A file that says what an artifact says of itself, and whose program is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        metadata = {f"laya_{key}": value for key, value in description.items()}
        archive.writestr("x/data/aotinductor/model/a.wrapper_metadata.json", json.dumps(metadata))
        archive.writestr("x/data/aotinductor/model/a.wrapper.so", "no program")
    return path


def test_an_artifact_of_this_checkpoint_device_and_torch_fits(checkpoint: Checkpoint, tmp_path: Path) -> None:
    wanted = describe(checkpoint, torch.device("cpu"), torch.float32)
    assert set(wanted) == set(KEYS)
    path = write(tmp_path / "b" / file_name(wanted), wanted)
    assert misfit(path, wanted) is None
    assert find_artifact([tmp_path / "a", tmp_path / "b"], wanted) == path


@pytest.mark.parametrize("key", KEYS)
def test_one_made_for_something_else_is_refused_with_what_differs(
    checkpoint: Checkpoint, tmp_path: Path, key: str
) -> None:
    wanted = describe(checkpoint, torch.device("cpu"), torch.float32)
    path = write(tmp_path / "other.pt2", wanted | {key: "another"})
    assert misfit(path, wanted) == f"{path}: {key} {wanted[key]} is wanted, it was made for another"
    with pytest.raises(BackendUnavailableError, match="it was made for another"):
        find_artifact([tmp_path], wanted)


def test_the_code_of_an_artifact_is_all_that_a_forward_pass_stands_on() -> None:
    for name in ("attention", "inputs", "model", "operations", "parameters"):
        used = {getattr(value, "__module__", "") for value in vars(importlib.import_module(f"laya.{name}")).values()}
        assert {module.removeprefix("laya.") for module in used if str(module).startswith("laya.")} <= set(SOURCES)


def test_artifacts_written_at_once_do_not_mix_and_leave_nothing_else(
    agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, written = threading.Barrier(2), []

    def package(_: Any, package_path: str, inductor_configs: Any) -> None:
        written.append(package_path)
        Path(package_path).write_text("half")
        both.wait(10)
        assert not (tmp_path / "a.pt2").exists()
        Path(package_path).write_text("whole")
        both.wait(10)

    monkeypatch.setattr(torch.export, "export", lambda *_, **__: None)
    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", package)
    monkeypatch.setattr("laya.aot.check_loads", lambda *_: None)
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(agent.export_aot, [tmp_path / "a.pt2"] * 2))
    assert len(set(written)) == 2
    assert paths[0].read_text() == "whole"
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt2"]


@pytest.mark.parametrize(
    ("abort", "said"),
    [(True, "Fatal Python error: Aborted"), (False, "RuntimeError: (No device information|File not) found")],
)
def test_what_ends_the_process_that_loads_it_is_never_written(
    agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, abort: bool, said: str
) -> None:
    """Loading native code cannot be undone: it is tried in a process of its own."""
    if abort:
        site = "import os, sys\nif 'laya.aot' in ' '.join(sys.orig_argv): os.abort()\n"
        (tmp_path / "sitecustomize.py").write_text(site)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(torch.export, "export", lambda *_, **__: None)
    monkeypatch.setattr(
        torch._inductor, "aoti_compile_and_package", lambda *_, package_path, **__: write(Path(package_path), {})
    )
    with pytest.raises(laya.BackendError, match=f"compiled, but a process that loaded it ended .*{said}"):
        agent.export_aot(tmp_path / "made" / "a.pt2")
    assert list((tmp_path / "made").iterdir()) == []


def test_an_artifact_goes_where_it_can_be_found(agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laya.aot.write_artifact", lambda *arguments: arguments[-1].touch())
    assert agent.export_aot(tmp_path).parent == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    assert agent.export_aot("~/a.pt2") == tmp_path / "a.pt2"
    with pytest.raises(laya.BackendError, match=r"a\.so: expected a folder, or a file that ends in \.pt2"):
        agent.export_aot(tmp_path / "a.so")


def test_what_does_not_compile_is_told_in_the_compiler_s_words(
    agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def refuse(*_: Any, package_path: str, **__: Any) -> None:
        tried.append(package_path)
        raise InductorError(CppCompileError(["g++"], "In member function:\nx.cpp:1:2: error: no such name"), None)

    monkeypatch.setattr(torch.export, "export", lambda *_, **__: None)
    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", refuse)
    with pytest.raises(laya.BackendError, match=r"did not compile: CppCompileError: x\.cpp:1:2: error: no such name"):
        agent.export_aot(tmp_path / "made" / "a.pt2")
    assert len(tried) == ATTEMPTS
    assert list((tmp_path / "made").iterdir()) == []


def test_a_file_that_hides_is_no_artifact(checkpoint: Checkpoint, tmp_path: Path) -> None:
    wanted = describe(checkpoint, torch.device("cpu"), torch.float32)
    write(tmp_path / ".a.pt2", wanted)
    with pytest.raises(BackendUnavailableError, match="no artifact lies in"):
        find_artifact([tmp_path], wanted)


def test_what_is_no_artifact_is_refused_by_name(checkpoint: Checkpoint, tmp_path: Path) -> None:
    wanted = describe(checkpoint, torch.device("cpu"), torch.float32)
    with pytest.raises(BackendUnavailableError, match=r"no artifact lies in .*; make one with laya\.export_aot"):
        find_artifact([tmp_path], wanted)
    (tmp_path / "a.pt2").write_bytes(b"no archive")
    assert "expected an artifact of laya.export_aot" in str(misfit(tmp_path / "a.pt2", wanted))
    with zipfile.ZipFile(tmp_path / "b.pt2", "w") as archive:
        archive.writestr("a_metadata.json", "{}")
    assert "it holds no program" in str(misfit(tmp_path / "b.pt2", wanted))
    with zipfile.ZipFile(tmp_path / "d.pt2", "w") as archive:
        archive.writestr("a.so", "")
        archive.writestr("a_metadata.json", "[]")
    assert "it has no description" in str(misfit(tmp_path / "d.pt2", wanted))
    with zipfile.ZipFile(tmp_path / "e.pt2", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a_metadata.json", json.dumps({f"laya_{key}": value for key, value in wanted.items()}))
        archive.writestr("a.so", "")
    whole = (tmp_path / "e.pt2").read_bytes()
    packed = whole.index(b"a_metadata.json") + len("a_metadata.json")
    raised = set()
    for place in range(packed, packed + 100):  # of the compressed description
        damaged = bytearray(whole)
        damaged[place] ^= 0xFF
        (tmp_path / "e.pt2").write_bytes(damaged)
        try:
            read_description(tmp_path / "e.pt2")
        except Exception as error:  # noqa: BLE001 - which is what is asked here
            raised.add(type(error))
        assert "expected an artifact of laya.export_aot" in str(misfit(tmp_path / "e.pt2", wanted))
    assert zlib.error in raised
    with zipfile.ZipFile(tmp_path / "c.pt2", "w") as archive:
        archive.writestr("a.so", "no program")
    assert "it has no description" in str(misfit(tmp_path / "c.pt2", wanted))


def test_a_refusal_names_the_reason_and_eager_runs(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    wanted = describe(checkpoint, torch.device("cpu"), torch.float32)
    write(tmp_path / "laya" / "aot" / "old.pt2", wanted | {"torch": "1.0"})
    with pytest.warns(RuntimeWarning, match=r"'aot' cannot run: .*it was made for 1\.0; running 'eager'"):
        agent = Agent(checkpoint, device="cpu", backend="aot")
    assert agent.backend == "eager"


def test_auto_says_once_that_an_artifact_of_this_checkpoint_does_not_fit(
    make: Callable[[CheckpointSpec], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = make(SMALL)
    wanted = describe(laya.load(path, device="cpu").checkpoint, torch.device("cpu"), torch.float32)
    ours, others = tmp_path / "laya" / "aot", {**wanted, "checkpoint": "0" * 64}
    write(ours / file_name(others), others)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert laya.load(path, device="cpu", backend="auto").fallback_reason is None  # it is of another checkpoint
    older = {**wanted, "torch": "1.0"}
    for artifact in (ours / file_name(older), path / "own.pt2"):
        write(artifact, older)
        with pytest.warns(RuntimeWarning, match="'aot' cannot run: .*made for 1.0; .*; running 'eager'") as caught:
            agent = laya.load(path, device="cpu", backend="auto", strict=True)
        assert len(caught) == 1
        assert agent.backend == "eager"
        assert agent.fallback_reason is not None
        assert artifact.name in agent.fallback_reason
        artifact.unlink()


def test_nothing_beside_a_hub_s_snapshot_is_run(checkpoint: Checkpoint) -> None:
    own = artifact_folders(checkpoint, Path("/cache"), "aot")
    fetched = artifact_folders(replace(checkpoint, revision="abc"), Path("/cache"), "aot")
    assert own == (checkpoint.path, Path("/cache/aot"))
    assert fetched == own[1:]


def test_what_fits_by_its_word_but_is_broken_is_an_error(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    wanted = describe(checkpoint, torch.device("cpu"), torch.float32)
    path = write(tmp_path / "laya" / "aot" / file_name(wanted), wanted)
    with pytest.raises(laya.BackendError, match=path.name):
        Agent(checkpoint, device="cpu", backend="aot", strict=True)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint's folder with an artifact in it.

    Its compiler links the C++ runtime into it, as some do, and refuses the program when it first sees it.
    """
    folder = make_checkpoint(tmp_path_factory.mktemp("aot") / "tiny", SMALL)
    compiler = tmp_path_factory.mktemp("compiler") / "g++"
    static = 'case " $* " in *" -shared "*) set -- -static-libstdc++ "$@";; esac'
    once = 'case "$*" in *.wrapper.cpp*) [ -e "$0.seen" ] || { touch "$0.seen"; exit 1; };; esac'
    compiler.write_text(f'#!/bin/sh\n{static}\n{once}\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    with inductor.patch({"cpp.cxx": (str(compiler),)}):
        assert laya.export_aot(folder, folder / "laya.pt2", device=DEVICE) == folder / "laya.pt2"
    assert compiler.with_suffix(".seen").exists()
    return folder


@pytest.fixture
def running(exported: Path) -> Iterator[Agent]:
    yield laya.load(exported, device=DEVICE, backend="aot", strict=True)


def answers(agent: Agent) -> list[float]:
    return [reply["answers"]["holds"]["noul"] for reply in agent.predict_batch(STATES, QUESTIONS, batch_size=1)]


def test_an_artifact_answers_in_another_process(exported: Path) -> None:
    """Where nothing has run yet that would have registered what the program calls."""
    program = (
        "import json, sys, laya; agent = laya.load(sys.argv[1], device=sys.argv[2], backend='aot', strict=True);"
        "replies = agent.predict_batch(json.loads(sys.argv[3]), json.loads(sys.argv[4]), batch_size=1);"
        "print(json.dumps([reply['answers']['holds']['noul'] for reply in replies]))"
    )
    command = [sys.executable, "-c", program, str(exported), DEVICE, json.dumps(STATES), json.dumps(QUESTIONS)]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert found == pytest.approx(answers(laya.load(exported, device=DEVICE)), abs=2e-4 if DEVICE == "cpu" else 0.06)


def test_every_runner_of_an_artifact_reads_the_parameters(running: Agent) -> None:
    assert [answers(running)] * 3 == [answers(running) for _ in range(3)]


def test_a_full_device_is_told_from_other_errors(running: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def run(self, _: object) -> None:
            raise RuntimeError("API call failed")

    backend, inputs = running.backend_object, synthetic_inputs((1, 16, 2), running.device)
    monkeypatch.setattr(backend, "_compiled", Failing())
    monkeypatch.setattr(aot, "allocation_failures", lambda _: 7)
    with pytest.raises(RuntimeError, match="API call failed") as raised:
        backend.forward(inputs)
    assert not isinstance(raised.value, torch.OutOfMemoryError)
    failures = iter((7, 8))
    monkeypatch.setattr(aot, "allocation_failures", lambda _: next(failures))
    with pytest.raises(torch.OutOfMemoryError, match=r"laya\.pt2: CUDA out of memory"):
        backend.forward(inputs)


def test_a_closed_artifact_holds_no_parameter(running: Agent) -> None:
    closed, model = running.backend_object, running.model
    held = [StorageWeakRef(parameter.untyped_storage()) for parameter in model.parameters()]
    before = answers(running)
    running.deaccelerate()
    assert answers(running) == pytest.approx(before, abs=2e-4 if DEVICE == "cpu" else 0.06)
    for parameter in model.parameters():  # as if the model moved to another device
        parameter.data = parameter.data.clone()
    assert isinstance(closed, AotBackend)
    assert all(storage.expired() for storage in held)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")
def test_a_second_pass_is_queued_while_the_first_runs(running: Agent) -> None:
    inputs = synthetic_inputs((2, 16, 2), running.device)
    for _ in range(2):  # each runner loads its kernels when it first runs
        running.backend_object.forward(inputs)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    slept = torch.cuda.Event()
    slept.record()
    for _ in range(2):
        running.backend_object.forward(inputs)
    assert not slept.query()
