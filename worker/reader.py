"""From a shard's rows in Parquet to states. Owns what a state may be; knows nothing of tokens.

A row that cannot be a state becomes a row error with its reason, and its neighbours go on.
"""

import datetime
import decimal
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from jobs.store.leases import RowError
from schemas.job import Claim, JobSpec
from schemas.question import WHOLE_ROW
from worker.parquet import ForwardReader

READ_ROWS = 16  # decoded at once: a file of a kilobyte may hold rows of a hundred megabytes, and few are enough
WINDOW_BYTES = 32 * 2**20  # a window that holds more takes no further rows; three windows are in memory at once
MAX_ROW_BYTES = 40_000_000  # the most that the engine's limit of ten million characters may take in UTF-8
MAX_ID_BYTES = 10_000

State = str | dict[str, Any] | list[Any]


class _BadStateError(ValueError):
    """A row's columns are no state."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Window:
    """Some consecutive rows of a shard: those that are states, and the errors of those that are not."""

    row_numbers: list[int]
    row_ids: list[str | None]
    states: list[State]
    errors: list[RowError]
    languages: list[str | None]  # as the job's language column has them

    def __len__(self) -> int:
        return len(self.row_numbers) + len(self.errors)


def read_windows(
    claim: Claim, roots: list[str], rows_per_window: int, reader: ForwardReader | None = None
) -> Iterator[Window]:
    """Read a shard's rows, some at a time: at most `rows_per_window`, and fewer of large ones.

    `reader`: the one that read the worker's shard before, which may stand where this one begins.

    Raises:
        InputError: the file is gone, has changed since the job was submitted, or lies outside the roots.
    """
    spec, window, held_bytes = claim.spec, Window([], [], [], [], []), 0
    columns = list(dict.fromkeys(c for c in (*spec.state, spec.row_id, spec.language_column) if c is not None))
    reader = reader or ForwardReader(min(READ_ROWS, rows_per_window))
    for _, first_row_number, rows in reader.read(claim.plan, columns, roots):
        if held_bytes > WINDOW_BYTES or len(window) + rows.num_rows > rows_per_window:
            yield window
            window, held_bytes = Window([], [], [], [], []), 0
        _add_rows(window, spec, rows, first_row_number)
        held_bytes += rows.nbytes
    if len(window):
        yield window


def read_row_id(claim: Claim, roots: list[str]) -> str | None:
    """The caller's id of the claim's first row; its state, which may be what kills, is not read."""
    if claim.spec.row_id is None:
        return None
    for *_, rows in ForwardReader(1).read(claim.plan, [claim.spec.row_id], roots):
        return _id_text(_values(rows.column(0))[0])
    return None


def _add_rows(window: Window, spec: JobSpec, rows: pa.RecordBatch, first_row_number: int) -> None:
    if rows.nbytes > MAX_ROW_BYTES:
        if rows.num_rows > 1:
            for position in range(rows.num_rows):
                _add_rows(window, spec, rows.slice(position, 1), first_row_number + position)
        else:
            window.errors.append(_too_large(spec, rows, first_row_number))
        return
    ids = [None] * rows.num_rows if spec.row_id is None else _values(rows.column(spec.row_id))
    given = [None] * rows.num_rows
    languages = given if spec.language_column is None else _values(rows.column(spec.language_column))
    values = [_values(rows.column(column)) for column in spec.state]
    for position, parts in enumerate(zip(*values, strict=True)):
        row_number, row_id = first_row_number + position, _id_text(ids[position])
        try:
            state = _as_state(parts[0]) if len(parts) == 1 else _as_object(dict(zip(spec.state, parts, strict=True)))
        except _BadStateError as error:
            window.errors.append(RowError(row_number, WHOLE_ROW, row_id, error.code, str(error)))
        else:
            window.row_numbers.append(row_number)
            window.row_ids.append(row_id)
            window.states.append(state)
            window.languages.append(language if isinstance(language := languages[position], str) else None)


def _too_large(spec: JobSpec, row: pa.RecordBatch, row_number: int) -> RowError:
    """The error of a row of which no Python object shall be made."""
    known = spec.row_id is not None and row.select([spec.row_id]).nbytes <= MAX_ID_BYTES
    row_id = _id_text(_values(row.column(spec.row_id))[0]) if known else None
    message = f"the row has {row.nbytes} bytes, more than the limit of {MAX_ROW_BYTES}"
    return RowError(row_number, WHOLE_ROW, row_id, "too_large", message)


def _values(column: pa.Array) -> list[Any]:
    """The column as Python values; text that is not UTF-8, which Parquet does not forbid, stays bytes."""
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        return [_decoded(column[i]) for i in range(len(column))]


def _decoded(value: pa.Scalar) -> Any:
    try:
        return value.as_py()
    except UnicodeDecodeError:
        return b"not UTF-8"


def _id_text(value: object) -> str | None:
    return value if value is None or isinstance(value, str) else str(value)


def _as_state(value: object) -> State:
    if isinstance(value, str):
        return value
    if value is None:
        raise _BadStateError("null_state", "the state is null")
    if not isinstance(value, list):
        raise _BadStateError("not_text", "the state is not valid UTF-8 text")
    if not value:
        raise _BadStateError("empty_state", "the conversation has no turns")
    if None in value:
        raise _BadStateError("null_turn", f"turn {value.index(None)} of the conversation is null")
    return [_as_json(turn) for turn in value]


def _as_object(columns: dict[str, Any]) -> State:
    if all(value is None for value in columns.values()):
        raise _BadStateError("null_state", f"all of {', '.join(columns)} are null")
    return {name: _as_json(value) for name, value in columns.items()}


def _as_json(value: Any) -> Any:
    """A Parquet value as what JSON can hold: times in ISO 8601, decimals as text, NaN as null."""
    match value:
        case dict():
            return {key: _as_json(part) for key, part in value.items()}
        case list():
            return [_as_json(part) for part in value]
        case datetime.date() | datetime.time():  # a datetime is a date
            return value.isoformat()
        case datetime.timedelta() | decimal.Decimal():
            return str(value)
        case bytes():
            raise _BadStateError("not_text", "the state is not valid UTF-8 text")
        case float() if not math.isfinite(value):
            return None
        case _:
            return value
