"""Where a checkpoint's files are: an alias, a Hugging Face Hub id with an optional subfolder, or a folder.

Owns names and fetching. Does not open the files (`checkpoint`), and never writes into a snapshot.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from laya.errors import CheckpointError, CheckpointMismatchError, CheckpointNotFoundError, MissingFileError
from schemas.checkpoints import (
    NAMES,
    REQUIRED_FILES,
    REVIEWED,
    REVIEWED_COMMITS,
    TOKENIZER_CONFIGS,
    known_name,
    split_hub_id,
)


@dataclass(frozen=True)
class Location:
    """A checkpoint's folder; `revision` is the Hub commit it came from, None for a plain folder."""

    name: str
    path: Path
    revision: str | None


@dataclass(frozen=True)
class HubOptions:
    """How the Hub is asked: for a branch, tag or commit, or else for `default_revision`, and with which token.

    `reviewed` as either revision means the commit of a public checkpoint that its package lists as reviewed.
    """

    revision: str | None = None
    default_revision: str | None = None
    token: str | None = field(default=None, repr=False)


def find_checkpoint(checkpoint: str | Path, hub: HubOptions = HubOptions(), subfolder: str | None = None) -> Location:
    """The folder of a named checkpoint, fetched from the Hub when it has to be.

    `checkpoint` is a name or alias, a folder, or `owner/repository[/subfolder]`; `subfolder` of a folder or a
    repository may also stand alone. Raises CheckpointError, as MissingFileError when there is no such checkpoint.
    """
    name, inside = str(checkpoint), (subfolder or "").strip("/")
    known = known_name(name)
    if ".." in inside.split("/"):
        raise CheckpointError(f"subfolder {subfolder!r}: expected a folder inside {name}")
    if known is None and name and Path(checkpoint).is_dir():
        return _find_folder(Path(checkpoint), inside, hub)
    if known is not None and inside:
        raise CheckpointError(
            f"subfolder {subfolder!r}: {name!r} is a checkpoint by itself; give the repository's Hub id"
        )
    hub_id = NAMES[known] if known else f"{name}/{inside}".rstrip("/")
    return _fetch(known or hub_id, hub_id, hub)


def _find_folder(folder: Path, subfolder: str, hub: HubOptions) -> Location:
    name = str(folder / subfolder)
    if hub.revision is not None and hub.revision.strip():
        raise CheckpointMismatchError(f"{name}: a folder has no revision, but {hub.revision!r} was asked for")
    if not (folder / subfolder).is_dir():
        raise MissingFileError(f"{name}: no such folder")
    return Location(name, (folder / subfolder).resolve(), None)


def _choose_revision(repository: str, hub: HubOptions) -> str | None:
    """Return what to ask the Hub for, None for its default. A blank `revision` keeps the default one from applying."""
    revision = (hub.revision or hub.default_revision or "").strip()
    if revision != REVIEWED:
        return revision or None
    if (commit := REVIEWED_COMMITS.get(repository.lower())) is None:
        whose = "revision" if (hub.revision or "").strip() else "LAYA_REVISION"
        raise CheckpointMismatchError(
            f"{repository}: {whose} is {REVIEWED!r}, but no commit of it has been; name a commit, or load one of "
            f"{', '.join(REVIEWED_COMMITS)}"
        )
    return commit


def _fetch(name: str, hub_id: str, hub: HubOptions) -> Location:
    repository, subfolder = split_hub_id(hub_id)
    nowhere = f"{name!r}: no such folder, and no name ({', '.join(NAMES)}) or Hub id (owner/repository[/subfolder])"
    if not repository or ".." in subfolder.split("/"):
        raise CheckpointNotFoundError(nowhere)
    revision = _choose_revision(repository, hub)
    files = [f"{subfolder}/{file}".lstrip("/") for file in (*REQUIRED_FILES, *TOKENIZER_CONFIGS)]
    try:
        snapshot = Path(snapshot_download(repository, revision=revision, allow_patterns=files, token=hub.token))
    except LocalEntryNotFoundError as error:
        which = f"{name} at revision {revision!r}" if revision else name
        raise MissingFileError(f"{which}: not in the local Hub cache, and the Hub cannot be reached") from error
    except RevisionNotFoundError as error:
        raise CheckpointMismatchError(f"{name}: the Hub has no revision {revision!r} of it") from error
    except RepositoryNotFoundError as error:
        raise CheckpointNotFoundError(
            f"{name}: the Hub has no repository {repository}, or shows it only to who may read it (HF_TOKEN)"
        ) from error
    except HFValidationError as error:
        raise CheckpointNotFoundError(nowhere) from error
    except HfHubHTTPError as error:
        raise CheckpointError(f"{name}: the Hub gave no snapshot at revision {revision!r}: {error}") from error
    commit = snapshot.name if re.fullmatch(r"[0-9a-f]{40}", snapshot.name) else revision
    return Location(name, snapshot / subfolder, commit)
