"""The shape of a calibration: what replaces a checkpoint's temperatures, known to a submitter and to the engine.

Owns the check alone. `laya.calibration` reads the values and applies them.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TYPE_NAMES = ("choice", "score", "noul")  # the order of the list `temperature`
IDENTITY_VERSION = 2  # from this version on a calibration records the checkpoint that it was fitted for
IDENTITY_KEYS = ("model_id_or_path", "subfolder", "config")
KEYS = ("version", "temperature", "temperature_by_options", "binning_map", *IDENTITY_KEYS)
MAX_FILE_BYTES = 1_000_000  # a calibration has a few numbers; a file this large is another one


def find_problem(content: object, needs_temperatures: bool = True) -> str | None:
    """Return what keeps `content` from being a calibration, None where nothing does.

    A checkpoint's own configuration has the same keys and may leave both out: then not `needs_temperatures`.
    """
    if not isinstance(content, Mapping):
        return "expected a JSON object with temperature or temperature_by_options"
    if needs_temperatures and not {"temperature", "temperature_by_options"} & content.keys():
        return "expected an object with temperature or temperature_by_options"
    by_type = content.get("temperature", [1.0] * len(TYPE_NAMES))
    if not isinstance(by_type, list) or len(by_type) != len(TYPE_NAMES):
        return f"temperature: expected a list of {len(TYPE_NAMES)} numbers, found {by_type!r:.200}"
    by_options = content.get("temperature_by_options")
    if by_options is not None and not isinstance(by_options, Mapping):
        return f"temperature_by_options: expected an object, found {by_options!r:.200}"
    return _find_calibration_problem(content) if needs_temperatures else None


def version_of(content: Mapping[str, Any]) -> int | None:
    """Return a calibration's version, 1 where it has none; None where what it has is no whole number."""
    version = content.get("version")
    if version is None:
        return 1
    try:
        number = int(version)
    except (TypeError, ValueError, OverflowError):
        return None
    return None if isinstance(version, bool) or (isinstance(version, float) and version != number) else number


def _find_calibration_problem(content: Mapping[str, Any]) -> str | None:
    """Return what is wrong beside the temperatures, in the keys that a checkpoint's own configuration has not."""
    if unknown := sorted(str(key) for key in content.keys() - set(KEYS)):
        return f"unknown key {unknown[0]!r}; the keys of a calibration are {', '.join(KEYS)}"
    if version_of(content) is None:
        return f"version: expected a whole number, found {content['version']!r:.200}"
    binning = content.get("binning_map")
    if binning is not None and not isinstance(binning, Mapping):
        return f"binning_map: expected an object, found {binning!r:.200}"
    problems = (_find_bins_problem(bucket, entry) for bucket, entry in (binning or {}).items())
    return next((problem for problem in problems if problem), None)


def _find_bins_problem(bucket: str, entry: object) -> str | None:
    bins, values = (entry.get("bins"), entry.get("values")) if isinstance(entry, Mapping) else (None, None)
    if type(bins) is not int or bins < 1 or not isinstance(values, list) or len(values) != bins:
        return f"binning_map: {bucket}: expected a number of bins and a list of as many values, found {entry!r:.200}"
    if any(type(value) not in (int, float) or not 0 <= value <= 1 for value in values):
        return f"binning_map: {bucket}: expected values from 0 to 1, found {values!r:.200}"
    return None


def read_bytes(path: str | Path) -> bytes:
    """Return what a calibration file holds. Raises OSError, or ValueError for a file too large to be one."""
    file = Path(path).expanduser()
    if (size := file.stat().st_size) > MAX_FILE_BYTES:
        raise ValueError(f"a calibration file has at most {MAX_FILE_BYTES:,} bytes, this one has {size:,}")
    return file.read_bytes()


def parse(raw: bytes) -> dict[str, Any]:
    """Return a calibration's content. Raises ValueError where it is none."""
    try:
        content = json.loads(raw)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"expected a JSON object: {error}") from error
    except RecursionError as error:
        raise ValueError("expected a JSON object, found one nested too deeply") from error
    if (problem := find_problem(content)) is not None:
        raise ValueError(problem)
    return dict(content)


def read_file(path: str | Path) -> dict[str, Any]:
    """Return a calibration file's content. Raises OSError, or ValueError, without the path, where it is none."""
    return parse(read_bytes(path))
