"""The temperatures that turn logits into probabilities: where they come from, their limits, and which one a row takes.

Owns the two maps of a checkpoint and the calibration file that replaces them. Does not apply them (`decode`).
"""

import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laya.errors import CheckpointError
from schemas.calibration import TYPE_NAMES, find_problem, read_file

LOWEST, HIGHEST = 0.5, 5.0
OPTION_RANGES = ((2, "2"), (5, "3-5"), (10, "6-10"))  # (most options, the range's name); beyond them "11+"


@dataclass(frozen=True)
class Temperatures:
    """A temperature by question type, and by `"<type>:<range of option counts>"` where there is a finer one."""

    by_type: Mapping[str, float]
    by_options: Mapping[str, float]
    version: str | None = None

    def of(self, type_name: str, options: int) -> float:
        """The temperature of a question of this type with this many options."""
        return self.by_options.get(f"{type_name}:{option_range(options)}", self.by_type[type_name])


def option_range(options: int) -> str:
    return next((name for most, name in OPTION_RANGES if options <= most), "11+")


def read_temperatures(config: Mapping[str, Any], source: str) -> Temperatures:
    """The maps of a checkpoint's configuration or of a calibration file, clamped to [0.5, 5].

    A value that is not a finite number becomes 1. One RuntimeWarning names everything that was changed. Raises
    CheckpointError, naming `source`, when a map has the wrong shape.
    """
    if (problem := find_problem(config, needs_temperatures=False)) is not None:
        raise CheckpointError(f"{source}: {problem}")
    by_type = config.get("temperature", [1.0] * len(TYPE_NAMES))
    by_options = config.get("temperature_by_options") or {}
    changed: list[str] = []
    temperatures = Temperatures(
        by_type={name: _clamp(name, value, changed) for name, value in zip(TYPE_NAMES, by_type, strict=True)},
        by_options={str(name): _clamp(str(name), value, changed) for name, value in by_options.items()},
        version=None if config.get("version") is None else str(config["version"]),
    )
    if changed:
        warnings.warn(
            f"{source}: temperatures outside [{LOWEST}, {HIGHEST}] or not finite: {', '.join(changed)}; "
            "probabilities that use them are not calibrated",
            RuntimeWarning,
            stacklevel=2,
        )
    return temperatures


def read_calibration(calibration: str | Path | Mapping[str, Any]) -> Temperatures:
    """Read the maps of a calibration file, or of the content of one. Raises CheckpointError when it is none."""
    if isinstance(calibration, Mapping):
        if (problem := find_problem(calibration)) is not None:
            raise CheckpointError(f"calibration: {problem}")
        return read_temperatures(calibration, "calibration")
    try:
        content = read_file(calibration)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{calibration}: not a readable calibration file: {error}") from error
    return read_temperatures(content, str(calibration))


def _clamp(name: str, value: object, changed: list[str]) -> float:
    # An integer too large for a float is not finite either; to compare it needs no conversion.
    finite = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    clamped = min(max(float(value), LOWEST), HIGHEST) if finite else 1.0  # type: ignore[arg-type]
    if clamped != value:
        changed.append(f"{name} {value!r} -> {clamped}")
    return clamped
