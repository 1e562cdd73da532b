"""What a job asks of its checkpoint beyond its name: lengths, a calibration, a revision, digests, a default route.

Owns the checks that a submitter can make without the engine, and reading a calibration file: its content is kept with
the job, so that no worker needs the file. What only the loaded checkpoint can say is checked when it is loaded.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from jobs.errors import InputError
from schemas import calibration as calibration_rules
from schemas.job import ROUTED_TO, Calibration


@dataclass(frozen=True)
class EngineOptions:
    """As a caller gives them. `calibration` is a file, or the content of one; with a router, one by route."""

    revision: str | None = None
    expected_sha256: Mapping[str, str] | None = None
    max_len: int | None = None
    head_max_len: int | None = None
    calibration: str | Path | Mapping[str, Any] | None = None
    default_route: str | None = None


def check_engine_options(options: EngineOptions, checkpoint: str, routes: Mapping[str, str] | None) -> dict[str, Any]:
    """Return the fields of JobSpec that the options are kept in. Raises InputError for those that cannot hold.

    `checkpoint` and `routes` are as the job keeps them.
    """
    for name in ("max_len", "head_max_len"):
        length = getattr(options, name)
        if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 1):
            raise InputError(f"{name}: expected a positive whole number of tokens, found {length!r:.80}")
    locations = [checkpoint] if routes is None else list(routes.values())
    if routes is None and options.default_route is not None:
        raise InputError(f"a default route is taken only with checkpoint 'router', not {checkpoint!r}")
    folders = [Path(location) for location in locations if Path(location).is_dir()]
    if folders and options.revision is not None:
        raise InputError(f"revision {options.revision!r}: {folders[0]} is a folder, which has none; leave it out")
    for location in locations:
        _check_lengths(options, Path(location))
    return {
        "revision": options.revision,
        "expected_sha256": _check_digests(options.expected_sha256, routes is not None),
        "max_len": options.max_len,
        "head_max_len": options.head_max_len,
        "calibration": _read_calibrations(options.calibration, checkpoint, routes is not None),
        "default_route": options.default_route,
    }


def _check_lengths(options: EngineOptions, folder: Path) -> None:
    """Compare the lengths with each other, and with what the files of a local checkpoint say."""
    positions = _read_number(folder / "encoder" / "config.json", "max_position_embeddings")
    if options.max_len is not None and positions is not None and options.max_len > positions:
        raise InputError(f"max_len {options.max_len}: the encoder of {folder} reads {positions} tokens at most")
    longest = options.max_len or _read_number(folder / "rl_agent_config.json", "max_len")
    if options.head_max_len is not None and longest is not None and options.head_max_len >= longest:
        raise InputError(
            f"head_max_len {options.head_max_len} leaves no room for a text in max_len {longest}; "
            "lower it, or raise max_len"
        )


def _read_number(file: Path, key: str) -> int | None:
    """Return a number of a JSON file; None where there is none, which the engine will report."""
    try:
        value = json.loads(file.read_bytes()).get(key)
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
    return value if isinstance(value, int) else None


def _check_digests(expected: Mapping[str, str] | None, routed: bool) -> dict[str, str] | None:
    if not isinstance(expected or {}, Mapping):
        raise InputError(f"expected_sha256: expected digests by file, found {expected!r:.80}")
    checked = {}
    for path, given in (expected or {}).items():
        digest = str(given).strip().lower()
        if not path or path.startswith("/") or "\\" in path or ".." in PurePosixPath(path).parts:
            raise InputError(f"expected_sha256: {path!r}: expected a file's path relative to the checkpoint's folder")
        if routed and path.partition("/")[0] not in ROUTED_TO:
            raise InputError(f"expected_sha256: {path!r}: with a router, begin it with {' or '.join(_prefixes())}")
        if not re.fullmatch(r"[0-9a-f]{64}", digest):
            raise InputError(f"expected_sha256: {path!r}: expected 64 hexadecimal digits, found {digest!r:.80}")
        checked[path] = digest
    return checked or None


def _prefixes() -> list[str]:
    return [f"{name}/" for name in ROUTED_TO]


def _read_calibrations(given: object, checkpoint: str, routed: bool) -> dict[str, Calibration] | None:
    if given is None:
        return None
    if not routed:
        return {checkpoint: _read_calibration(given)}
    if not isinstance(given, Mapping) or not given or given.keys() - set(ROUTED_TO):
        raise InputError(f"calibration: with a router, give one for {' or '.join(ROUTED_TO)}, by that name")
    return {name: _read_calibration(of_route) for name, of_route in given.items()}


def _read_calibration(given: object) -> Calibration:
    if not isinstance(given, str | Path | Mapping):
        raise InputError(f"calibration: expected a file, or the content of one, found {given!r:.80}")
    name = "calibration" if isinstance(given, Mapping) else f"calibration {given}"
    try:
        raw = (
            json.dumps(given, sort_keys=True).encode()
            if isinstance(given, Mapping)
            else calibration_rules.read_bytes(given)
        )
        content = calibration_rules.parse(raw)
        json.dumps(content, allow_nan=False)  # a database refuses what JSON has no word for
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{name}: {error}") from error
    return Calibration(content=content, sha256=hashlib.sha256(raw).hexdigest())
