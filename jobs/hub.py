"""Which checkpoints of the Hub this machine has in its cache, or can load: known before a job is queued.

Only the embedded workers' checkpoints must be loadable here: those of a service may have another cache, and another way
to the network.
"""

from collections.abc import Sequence
from pathlib import Path

from jobs.errors import InputError
from schemas.checkpoints import NAMES, REVIEWED, REVIEWED_COMMITS, split_hub_id

_ANSWER_S = 10.0


def find_cached(checkpoint: str, files: Sequence[str], revision: str | None = None) -> list[Path]:
    """Return where these files of a checkpoint are in the Hub's cache; an empty list unless all of them are there."""
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - a quarter of a second, for Hub names alone

    repository, subfolder = split_hub_id(NAMES.get(checkpoint, checkpoint))
    commit = _choose_revision(repository, revision)
    if not repository or commit == REVIEWED:
        return []
    names = [f"{subfolder}/{file}".lstrip("/") for file in files]
    found = [try_to_load_from_cache(repository, name, revision=commit) for name in names]
    paths = [Path(path) for path in found if isinstance(path, str)]
    return paths if len(paths) == len(names) and all(path.is_file() for path in paths) else []


def check_loadable(checkpoint: str, revision: str | None = None) -> None:
    """Raise InputError when the checkpoint is neither in the Hub's cache nor to be had from the Hub.

    `checkpoint`: a public name, a folder or a Hub id, as `resolve_checkpoint` returns it. The network is used only for
    what is not in the cache, and would have to be downloaded anyway.
    """
    if checkpoint.startswith("/") or find_cached(checkpoint, ["model.safetensors"], revision):
        return
    # Slow to import, and no other command wants it.
    from huggingface_hub import constants, hf_hub_download  # noqa: PLC0415
    from huggingface_hub.errors import (  # noqa: PLC0415
        EntryNotFoundError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    repository, subfolder = split_hub_id(NAMES.get(checkpoint, checkpoint))
    commit, config = _choose_revision(repository, revision), f"{subfolder}/rl_agent_config.json".lstrip("/")
    if commit == REVIEWED:
        raise InputError(f"checkpoint {checkpoint}: no commit of {repository} has been reviewed; name a commit")
    absent = f"checkpoint {checkpoint}: is not in the Hub's cache ({constants.HF_HUB_CACHE})"
    otherwise = "give --checkpoint a folder, or copy that cache from a machine that has it"
    try:
        hf_hub_download(repository, config, revision=commit, etag_timeout=_ANSWER_S)
    except LocalEntryNotFoundError as error:
        why = "HF_HUB_OFFLINE is set; unset it" if constants.HF_HUB_OFFLINE else "the Hub cannot be reached; try again"
        raise InputError(f"{absent}, and {why}, {otherwise}") from error
    except RevisionNotFoundError as error:
        raise InputError(f"checkpoint {checkpoint}: the Hub has no revision {revision!r} of it") from error
    except RepositoryNotFoundError as error:
        raise InputError(
            f"checkpoint {checkpoint}: the Hub has no repository {repository}, or shows it only with a token (HF_TOKEN)"
        ) from error
    except EntryNotFoundError as error:
        raise InputError(f"checkpoint {checkpoint}: the repository {repository} has no {config}") from error
    except HfHubHTTPError as error:
        raise InputError(f"{absent}, and the Hub refuses: {str(error).splitlines()[0]}; {otherwise}") from error


def _choose_revision(repository: str, revision: str | None) -> str | None:
    """Return what to ask the Hub for, None for its default, REVIEWED where the repository has no such commit."""
    revision = (revision or "").strip() or None
    return REVIEWED_COMMITS.get(repository.lower(), REVIEWED) if revision == REVIEWED else revision
