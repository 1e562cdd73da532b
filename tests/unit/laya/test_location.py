import os
from dataclasses import replace
from pathlib import Path

import huggingface_hub.constants
import pytest

import laya
import laya.location
from laya.errors import CheckpointError, CheckpointMismatchError, MissingFileError
from laya.location import HubOptions, find_checkpoint
from schemas.checkpoints import REPOSITORY, REQUIRED_FILES, REVIEWED_COMMITS, TOKENIZER_CONFIGS
from tests.checkpoints import make_checkpoint

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hub cache laid out as the Hub's client does, offline and read-only: snapshots of links to blobs."""
    repository = tmp_path / "hub" / "models--convaiinnovations--laya"
    snapshot, blobs = repository / "snapshots" / COMMIT, repository / "blobs"
    blobs.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    for number, subfolder in enumerate(("", "multilingual", "typed-decisions")):
        source = make_checkpoint(tmp_path / f"source{number}")
        for file in (*REQUIRED_FILES, TOKENIZER_CONFIGS[0]):
            blob = blobs / f"{number}-{file.replace('/', '-')}"
            (source / file).rename(blob)
            blob.chmod(0o444)
            link = snapshot / subfolder / file
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(os.path.relpath(blob, link.parent))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return snapshot


def listing(folder: Path) -> dict[Path, int]:
    return {path: path.lstat().st_mtime_ns for path in sorted(folder.rglob("*"))}


@pytest.mark.parametrize(
    ("name", "known", "subfolder"),
    [
        ("english", "english", ""),
        ("EN", "english", ""),
        ("laya", "english", ""),
        ("default", "english", ""),
        ("convaiinnovations/laya", "convaiinnovations/laya", ""),
        ("multilingual", "multilingual", "multilingual"),
        ("multi", "multilingual", "multilingual"),
        ("ml", "multilingual", "multilingual"),
        ("convaiinnovations/laya/multilingual", "convaiinnovations/laya/multilingual", "multilingual"),
        (" Laya-Multilingual ", "multilingual", "multilingual"),
        ("typed", "typed-decisions", "typed-decisions"),
        ("typed_decisions", "typed-decisions", "typed-decisions"),
        ("laya-typed-decisions", "typed-decisions", "typed-decisions"),
        ("decisions", "typed-decisions", "typed-decisions"),
    ],
)
def test_a_name_leads_to_its_snapshot(hub: Path, name: str, known: str, subfolder: str) -> None:
    location = find_checkpoint(name)
    assert (location.name, location.path, location.revision) == (known, hub / subfolder, COMMIT)


def test_an_agent_loads_from_a_snapshot_and_writes_nothing_into_it(hub: Path) -> None:
    before = listing(hub.parents[1])
    agent = laya.load("multilingual", device="cpu", revision="main")
    assert agent.predict("a state", {"q": {"type": "noul", "instructions": "Is it?"}})["answers"]["q"]["type"] == "noul"
    assert agent.checkpoint.revision == COMMIT
    assert listing(hub.parents[1]) == before


def test_a_graph_of_a_hub_s_checkpoint_lies_in_a_folder_of_ours(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    ours, before = tmp_path / "cache" / "laya" / "onnx", listing(hub.parents[1])
    with pytest.raises(laya.BackendError) as absent:
        laya.load("multilingual", backend="onnx", device="cpu")
    assert "write it with laya.export_onnx('multilingual'), or say where it is with onnx_path=" in str(absent.value)
    assert str(hub) not in str(absent.value)
    path = laya.export_onnx("multilingual")
    assert path.parent == ours
    question = {"q": {"type": "noul", "instructions": "Is it?"}}
    agent = laya.load("multilingual", backend="onnx", device="cpu")
    found, expected = (one.predict("a state", question)["answers"]["q"] for one in (agent, laya.load("multilingual")))
    assert found["noul"] == pytest.approx(expected["noul"], abs=1e-3)
    assert listing(hub.parents[1]) == before


def test_a_folder_needs_no_hub(tmp_path: Path) -> None:
    location = find_checkpoint(tmp_path)
    assert (location.path, location.revision) == (tmp_path.resolve(), None)


def test_a_folder_has_no_revision(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="a folder has no revision"):
        find_checkpoint(tmp_path, HubOptions("main"))


@pytest.mark.parametrize("name", ["no-such-name", "owner/../x", "./missing/folder", ""])
def test_what_is_neither_name_folder_nor_hub_id_is_refused(hub: Path, name: str) -> None:
    with pytest.raises(CheckpointError):
        find_checkpoint(name)


def test_a_subfolder_may_stand_alone(hub: Path, tmp_path: Path) -> None:
    location = find_checkpoint(REPOSITORY, subfolder="multilingual/")
    assert (location.name, location.path) == (f"{REPOSITORY}/multilingual", hub / "multilingual")
    (tmp_path / "inside").mkdir()
    assert find_checkpoint(tmp_path, subfolder="inside").path == (tmp_path / "inside").resolve()
    assert find_checkpoint(tmp_path, subfolder="").path == tmp_path.resolve()
    for checkpoint, subfolder, kind in (
        (tmp_path, "absent", MissingFileError),
        (tmp_path, "../elsewhere", CheckpointError),
        (REPOSITORY, "a/../b", CheckpointError),
        ("english", "multilingual", CheckpointError),
    ):
        with pytest.raises(kind, match=subfolder):
            find_checkpoint(checkpoint, subfolder=subfolder)


@pytest.mark.parametrize(
    ("hub_options", "asked"),
    [
        (HubOptions(), None),
        (HubOptions(default_revision="v1"), "v1"),
        (HubOptions(" v2 ", "v1"), "v2"),
        (HubOptions("", "v1"), "v1"),
        (HubOptions("  ", "v1"), None),
        (HubOptions(default_revision="reviewed"), REVIEWED_COMMITS[REPOSITORY]),
        (HubOptions("reviewed", "v1"), REVIEWED_COMMITS[REPOSITORY]),
    ],
)
def test_the_revision_asked_for_wins_over_the_default_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub_options: HubOptions, asked: str | None
) -> None:
    found: list[object] = []

    def download(repository: str, **options: object) -> str:
        found.append((repository, options["revision"], options["token"]))
        return str(tmp_path)

    monkeypatch.setattr(laya.location, "snapshot_download", download)
    find_checkpoint("ml", replace(hub_options, token="secret"))
    find_checkpoint("ConvaiInnovations/Laya", hub_options)
    assert found == [(REPOSITORY, asked, "secret"), ("ConvaiInnovations/Laya", asked, None)]
    assert "secret" not in repr(HubOptions(token="secret"))


def test_only_reviewed_revisions_keep_all_other_repositories_out(tmp_path: Path) -> None:
    hub_options = HubOptions(default_revision="reviewed")
    with pytest.raises(CheckpointMismatchError, match="LAYA_REVISION is 'reviewed', but no commit of it has been"):
        find_checkpoint("someone/other", hub_options)
    assert find_checkpoint(tmp_path, hub_options).path == tmp_path.resolve()  # a folder has no revision


def test_a_repository_that_is_not_cached_offline_is_named(hub: Path) -> None:
    with pytest.raises(CheckpointError, match="someone/other: not in the local Hub cache"):
        find_checkpoint("someone/other")
