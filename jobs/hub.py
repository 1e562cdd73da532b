"""Whether this machine can load a checkpoint from the Hub: asked before a job is queued for its own workers.

Not asked for a service's: its workers may have another cache, and another way to the network.
"""

from jobs.errors import InputError
from schemas.checkpoints import NAMES

_ANSWER_S = 10.0


def check_loadable(checkpoint: str, revision: str | None = None) -> None:
    """Raise InputError when the checkpoint is neither in the Hub's cache nor to be had from the Hub.

    `checkpoint`: a public name, a folder or a Hub id, as `resolve_checkpoint` returns it. The network is used only for
    what is not in the cache, and would have to be downloaded anyway.
    """
    if checkpoint.startswith("/"):
        return
    # Slow to import, and no other command wants it.
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache  # noqa: PLC0415
    from huggingface_hub.errors import (  # noqa: PLC0415
        EntryNotFoundError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    owner, _, rest = NAMES.get(checkpoint, checkpoint).partition("/")
    repository, _, subfolder = rest.partition("/")
    weights, config = (f"{subfolder}/{file}".lstrip("/") for file in ("model.safetensors", "rl_agent_config.json"))
    if isinstance(try_to_load_from_cache(f"{owner}/{repository}", weights, revision=revision), str):
        return
    absent = f"checkpoint {checkpoint}: is not in the Hub's cache ({constants.HF_HUB_CACHE})"
    otherwise = "give --checkpoint a folder, or copy that cache from a machine that has it"
    try:
        hf_hub_download(f"{owner}/{repository}", config, revision=revision, etag_timeout=_ANSWER_S)
    except LocalEntryNotFoundError as error:
        why = "HF_HUB_OFFLINE is set; unset it" if constants.HF_HUB_OFFLINE else "the Hub cannot be reached; try again"
        raise InputError(f"{absent}, and {why}, {otherwise}") from error
    except RevisionNotFoundError as error:
        raise InputError(f"checkpoint {checkpoint}: the Hub has no revision {revision!r} of it") from error
    except RepositoryNotFoundError as error:
        raise InputError(
            f"checkpoint {checkpoint}: the Hub has no repository {owner}/{repository}, or shows it only with a token "
            "(HF_TOKEN)"
        ) from error
    except EntryNotFoundError as error:
        raise InputError(f"checkpoint {checkpoint}: the repository {owner}/{repository} has no {config}") from error
    except HfHubHTTPError as error:
        raise InputError(f"{absent}, and the Hub refuses: {str(error).splitlines()[0]}; {otherwise}") from error
