"""From a checkpoint's name and the options of a load to the verified checkpoint and the backend's choice.

Owns the options, and where the environment stands in for one that was left out. `agent` builds on what is opened here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laya.backends.selection import Choice, Flags, choose_backend
from laya.calibration import read_calibration
from laya.checkpoint import Checkpoint, Limits, open_checkpoint
from laya.errors import CheckpointError
from laya.location import HubOptions, find_checkpoint
from laya.settings import Settings


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """What may be said of a load beside the checkpoint and the device; `laya.load` says what each is."""

    backend: str | None = None
    token: str | None = None
    subfolder: str | None = None
    revision: str | None = None
    expected_sha256: Mapping[str, str] | None = None
    calibration: str | Path | Mapping[str, Any] | None = None
    max_len: int | None = None
    head_max_len: int | None = None
    fast: bool = False
    compile: bool = False
    compile_mode: str = "default"
    compile_warmup: bool = True
    compile_cache: bool = False


def open_named(checkpoint: str | Path, options: LoadOptions, settings: Settings) -> tuple[Checkpoint, Choice]:
    """Find, verify and read a checkpoint, and choose its backend. Raises CheckpointError or BackendError."""
    flags = Flags(options.fast, options.compile, options.compile_mode, options.compile_warmup, options.compile_cache)
    choice = choose_backend(options.backend, flags, settings)
    temperatures = None if options.calibration is None else read_calibration(options.calibration)
    expected = settings.sha256_digests if options.expected_sha256 is None else options.expected_sha256
    if not isinstance(expected, Mapping | None):
        raise CheckpointError(f"expected_sha256: expected digests by path, found {type(expected).__name__}")
    hub = HubOptions(options.revision, settings.revision, options.token)
    location = find_checkpoint(checkpoint, hub, options.subfolder)
    return open_checkpoint(location, expected, Limits(options.max_len, options.head_max_len), temperatures), choice
