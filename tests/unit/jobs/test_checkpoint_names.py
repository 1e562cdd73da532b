"""Names of checkpoints that nobody could load are refused where a job is asked for."""

from pathlib import Path

import pytest

from jobs.errors import InputError
from jobs.hub import check_loadable
from jobs.submission import resolve_checkpoint
from schemas.checkpoints import REPOSITORY, REVIEWED_COMMITS


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("englisch", "; did you mean english?"),
        ("Laya-Multilingul", "; did you mean laya-multilingual?"),
        ("qwertz", "(owner/repository[/subfolder])"),
        ("owner/../x", "no such folder"),
        ("a b/c", "no such folder"),
        ("owner/two--dashes", "no such folder"),
        ("owner/ends-with.", "no such folder"),
        ("owner/clone.git", "no such folder"),
        ("owner/" + "x" * 97, "no such folder"),
    ],
)
def test_a_name_that_is_none_is_refused_with_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(InputError, match="no such folder, and no name") as raised:
        resolve_checkpoint(name)
    assert hint in str(raised.value)


def test_a_hub_id_is_taken_as_it_is() -> None:
    assert resolve_checkpoint("owner/repository/sub-folder") == "owner/repository/sub-folder"


def test_offline_without_the_checkpoint_the_error_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="HF_HUB_OFFLINE is set; unset it, give --checkpoint a folder"):
        check_loadable("nobody/nothing")


def test_the_reviewed_revision_is_the_commit_that_is_listed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    snapshot = tmp_path / "models--convaiinnovations--laya" / "snapshots" / REVIEWED_COMMITS[REPOSITORY]
    (snapshot / "multilingual").mkdir(parents=True)
    (snapshot / "multilingual" / "model.safetensors").touch()
    check_loadable("multilingual", "reviewed")
    with pytest.raises(InputError, match="is not in the Hub's cache"):
        check_loadable("multilingual", "main")
    with pytest.raises(InputError, match="no commit of nobody/nothing has been reviewed"):
        check_loadable("nobody/nothing", "reviewed")
