"""The temperatures that turn logits into probabilities: where they come from, their limits, and which one a row takes.

Owns the two maps of a checkpoint and the calibration file that replaces them, with its bins of confidence. Does not
apply them (`decode`).
"""

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from laya.errors import CheckpointError, MissingFileError
from schemas.calibration import IDENTITY_KEYS, IDENTITY_VERSION, TYPE_NAMES, find_problem, read_file, version_of
from schemas.checkpoints import NAMES, known_name

LOWEST, HIGHEST = 0.5, 5.0
OPTION_RANGES = ((2, "2"), (5, "3-5"), (10, "6-10"))  # (most options, the range's name); beyond them "11+"
MAP_KEYS = {"temperature", "temperature_by_options"}  # of a checkpoint's configuration, what a calibration replaces
BUCKETS = {f"{kind}:{name}" for kind in TYPE_NAMES for name in (*(name for _, name in OPTION_RANGES), "11+")}


@dataclass(frozen=True)
class Temperatures:
    """A temperature by question type, and by bucket, `"<type>:<range of option counts>"`, where there is a finer one.

    `bins` has, by bucket, what `answer_confidence` becomes: value i of n for a confidence from i / n to (i + 1) / n.
    `fitted_for` is the checkpoint that a calibration was fitted for, as it recorded it, None where it did not.
    """

    by_type: Mapping[str, float]
    by_options: Mapping[str, float]
    version: str | None = None
    bins: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    fitted_for: Mapping[str, Any] | None = None

    def of(self, type_name: str, options: int) -> float:
        """The temperature of a question of this type with this many options."""
        return self.by_options.get(f"{type_name}:{option_range(options)}", self.by_type[type_name])

    def bins_of(self, type_name: str, options: int) -> tuple[float, ...] | None:
        """Return the bins of a question of this type with this many options, None where it has none."""
        return self.bins.get(f"{type_name}:{option_range(options)}")


def option_range(options: int) -> str:
    return next((name for most, name in OPTION_RANGES if options <= most), "11+")


def read_temperatures(config: Mapping[str, Any], source: str) -> Temperatures:
    """The maps of a checkpoint's configuration or of a calibration file, clamped to [0.5, 5].

    A number may be written as text. A value that is not a finite number becomes 1. One RuntimeWarning names everything
    that was changed, and another the buckets that no question has. Raises CheckpointError, naming `source`, when a map
    has the wrong shape.
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
    _warn_of_unused(source, temperatures.by_options)
    return temperatures


def read_calibration(calibration: str | Path | Mapping[str, Any]) -> Temperatures:
    """Read the maps of a calibration file, or of the content of one. Raises CheckpointError when it is none."""
    if isinstance(calibration, Mapping):
        if (problem := find_problem(calibration)) is not None:
            raise CheckpointError(f"calibration: {problem}")
        return _read_content(calibration, "calibration")
    try:
        content = read_file(calibration)
    except FileNotFoundError as error:
        raise MissingFileError(f"{calibration}: no such calibration file") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{calibration}: not a readable calibration file: {error}") from error
    return _read_content(content, str(calibration))


def _read_content(content: Mapping[str, Any], source: str) -> Temperatures:
    bins = {bucket: tuple(entry["values"]) for bucket, entry in (content.get("binning_map") or {}).items()}
    _warn_of_unused(source, bins)
    records = (version_of(content) or 1) >= IDENTITY_VERSION
    return replace(
        read_temperatures(content, source),
        bins=bins,
        fitted_for={key: content.get(key) for key in IDENTITY_KEYS} if records else None,
    )


def warn_if_fitted_for_another(temperatures: Temperatures, name: str, path: Path, config: Mapping[str, Any]) -> None:
    """Give one RuntimeWarning where a calibration records another checkpoint than `name` at `path`.

    `config` is the checkpoint's own `rl_agent_config.json`. The calibration is used all the same: a checkpoint may have
    moved, or been renamed.
    """
    recorded = temperatures.fitted_for
    if recorded is None:
        return
    parts = [part for part in (recorded["model_id_or_path"], recorded["subfolder"]) if isinstance(part, str) and part]
    place = "/".join(parts)
    known = NAMES.get(known_name(place) or place, place)
    differences = []
    if not parts or (known != NAMES.get(name, name) and Path(place).expanduser().resolve() != path):
        differences.append(f"it names {place or 'no checkpoint'}")
    theirs = recorded["config"] if isinstance(recorded["config"], Mapping) else {}
    if keys := [key for key in sorted({*config, *theirs} - MAP_KEYS) if config.get(key) != theirs.get(key)]:
        differences.append(f"its configuration differs in {', '.join(map(str, keys))}")
    if differences:
        warnings.warn(
            f"the calibration was fitted for another checkpoint than {name}: {' and '.join(differences)}; it is used, "
            "but probabilities may be off: fit one for this checkpoint",
            RuntimeWarning,
            stacklevel=3,
        )


def _warn_of_unused(source: str, buckets: Mapping[str, object]) -> None:
    if unused := sorted(buckets.keys() - BUCKETS):
        warnings.warn(
            f"{source}: no question has the bucket {', '.join(map(repr, unused))}: a bucket is one of "
            f"{', '.join(TYPE_NAMES)}, then a colon, then 2, 3-5, 6-10 or 11+ options",
            RuntimeWarning,
            stacklevel=4,
        )


def _clamp(name: str, value: object, changed: list[str]) -> float:
    number = None if isinstance(value, bool) else _as_float(value)
    clamped = 1.0 if number is None else min(max(number, LOWEST), HIGHEST)
    if clamped != number:
        changed.append(f"{name} {value!r} -> {clamped}")
    return clamped


def _as_float(value: object) -> float | None:
    """Return a finite number, also one written as text; None for anything else."""
    if not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
