"""Which artifacts are taken, and why others are refused. That one answers rightly is the parity suite's to say."""

import json
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import laya
from laya.agent import Agent
from laya.aot import KEYS, describe, file_name, find_artifact, misfit
from laya.checkpoint import Checkpoint
from laya.errors import BackendUnavailableError


@pytest.fixture
def checkpoint(agent: laya.Agent) -> Checkpoint:
    return agent.checkpoint


def write(path: Path, description: dict[str, str]) -> Path:
    """A file that says what an artifact says of itself, and holds nothing else."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        metadata = {f"laya_{key}": value for key, value in description.items()}
        archive.writestr("x/data/aotinductor/model/a.wrapper_metadata.json", json.dumps(metadata))
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


def test_what_is_no_artifact_is_refused_by_name(checkpoint: Checkpoint, tmp_path: Path) -> None:
    wanted = describe(checkpoint, torch.device("cpu"), torch.float32)
    with pytest.raises(BackendUnavailableError, match=r"no artifact lies in .*; make one with laya\.export_aot"):
        find_artifact([tmp_path], wanted)
    (tmp_path / "a.pt2").write_bytes(b"no archive")
    assert "expected an artifact of laya.export_aot" in str(misfit(tmp_path / "a.pt2", wanted))
    with zipfile.ZipFile(tmp_path / "b.pt2", "w"):
        pass
    assert "it has no description" in str(misfit(tmp_path / "b.pt2", wanted))


def test_a_refusal_names_the_reason_and_eager_runs(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    wanted = describe(checkpoint, torch.device("cpu"), torch.float32)
    write(tmp_path / "laya" / "aot" / "old.pt2", wanted | {"torch": "1.0"})
    with pytest.warns(RuntimeWarning, match=r"'aot' cannot run: .*it was made for 1\.0; running 'eager'"):
        agent = Agent(checkpoint, device="cpu", backend="aot")
    assert agent.backend == "eager"


def test_nothing_beside_a_hub_s_snapshot_is_run(checkpoint: Checkpoint) -> None:
    own = Agent(checkpoint, device="cpu")._runner.context.artifact_folders
    fetched = Agent(replace(checkpoint, revision="abc"), device="cpu")._runner.context.artifact_folders
    assert own[0] == checkpoint.path
    assert fetched == own[1:]


def test_what_fits_by_its_word_but_is_broken_is_an_error(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    wanted = describe(checkpoint, torch.device("cpu"), torch.float32)
    path = write(tmp_path / "laya" / "aot" / file_name(wanted), wanted)
    with pytest.raises(laya.BackendError, match=path.name):
        Agent(checkpoint, device="cpu", backend="aot", strict=True)
