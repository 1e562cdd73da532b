"""The shape of a calibration: the temperatures that replace a checkpoint's, known to a submitter and to the engine.

Owns the check alone. `laya.calibration` reads the values and applies them.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TYPE_NAMES = ("choice", "score", "noul")  # the order of the list `temperature`
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
    by_options = content.get("temperature_by_options") or {}
    if not isinstance(by_options, Mapping):
        return f"temperature_by_options: expected an object, found {by_options!r:.200}"
    return None


def read_file(path: str | Path) -> dict[str, Any]:
    """Return a calibration file's content. Raises ValueError, without the path, when it is none; OSError, too."""
    file = Path(path).expanduser()
    if file.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"a calibration file has at most {MAX_FILE_BYTES} bytes, this one {file.stat().st_size}")
    try:
        content = json.loads(file.read_bytes())
    except RecursionError as error:
        raise ValueError("expected a JSON object, found one nested too deeply") from error
    if (problem := find_problem(content)) is not None:
        raise ValueError(problem)
    return dict(content)
