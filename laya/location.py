"""Where a checkpoint's files are: an alias, a Hugging Face Hub id with an optional subfolder, or a folder.

Owns names and fetching. Does not open the files (`checkpoint`), and never writes into a snapshot.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, RevisionNotFoundError

from laya.errors import CheckpointError, CheckpointMismatchError
from schemas.checkpoints import NAMES, REQUIRED_FILES, TOKENIZER_CONFIGS, known_name


@dataclass(frozen=True)
class Location:
    """A checkpoint's folder; `revision` is the Hub commit it came from, None for a plain folder."""

    name: str
    path: Path
    revision: str | None


def find_checkpoint(checkpoint: str | Path, revision: str | None = None) -> Location:
    """The folder of a named checkpoint, fetched from the Hub when it has to be.

    `checkpoint` is a name or alias, a folder, or `owner/repository[/subfolder]`; `revision` a Hub branch, tag or
    commit. Raises CheckpointError when there is no such checkpoint.
    """
    name = str(checkpoint)
    known = known_name(name)
    if known is None and name and Path(checkpoint).is_dir():
        if revision is not None:
            raise CheckpointMismatchError(f"{name}: a folder has no revision, but {revision!r} was asked for")
        return Location(name, Path(checkpoint).resolve(), None)
    return _fetch(known or name, NAMES[known] if known else name, revision)


def _fetch(name: str, hub_id: str, revision: str | None) -> Location:
    owner, _, rest = hub_id.partition("/")
    repository, _, subfolder = rest.partition("/")
    nowhere = f"{name!r}: no such folder, and no name ({', '.join(NAMES)}) or Hub id (owner/repository[/subfolder])"
    if not repository or ".." in subfolder.split("/"):
        raise CheckpointError(nowhere)
    files = [f"{subfolder}/{file}".lstrip("/") for file in (*REQUIRED_FILES, *TOKENIZER_CONFIGS)]
    try:
        snapshot = Path(snapshot_download(f"{owner}/{repository}", revision=revision, allow_patterns=files))
    except LocalEntryNotFoundError as error:
        which = f"{name} at revision {revision!r}" if revision else name
        raise CheckpointError(f"{which}: not in the local Hub cache, and the Hub cannot be reached") from error
    except RevisionNotFoundError as error:
        raise CheckpointMismatchError(f"{name}: the Hub has no revision {revision!r} of it") from error
    except HFValidationError as error:
        raise CheckpointError(nowhere) from error
    except HfHubHTTPError as error:
        raise CheckpointError(f"{name}: the Hub gave no snapshot at revision {revision!r}: {error}") from error
    commit = snapshot.name if re.fullmatch(r"[0-9a-f]{40}", snapshot.name) else revision
    return Location(name, snapshot / subfolder, commit)
