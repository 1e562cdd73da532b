"""From rows of Parquet to states, ids and languages. Owns what a state may be; knows nothing of tokens.

A row that cannot be a state becomes a row error with its reason, and its neighbours go on.
"""

from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from jobs.discovery import partition_values
from jobs.store.leases import RowError
from jobs.values import Unreadable, id_texts, json_values
from schemas.job import JobSpec
from schemas.question import WHOLE_ROW
from worker.sizes import is_shared, row_bytes

MAX_ROW_BYTES = 40_000_000  # the most that the engine's limit of ten million characters may take in UTF-8
MAX_ID_BYTES = 10_000

State = str | dict[str, Any] | list[Any]


class _BadRowError(ValueError):
    """A row's columns are no state, or its id is no text."""

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


def add_folders(rows: pa.RecordBatch, columns: list[str], file: str) -> pa.RecordBatch:
    """Return the rows with the columns that the file lacks, from the `key=value` folders above it."""
    folders = partition_values(file)
    for column in columns:
        if column not in rows.schema.names:
            rows = rows.append_column(column, pa.repeat(pa.scalar(folders[column], pa.string()), rows.num_rows))
    return rows


def read_id(ids: pa.Array) -> str | None:
    """Return the text of the one id, None where it has none."""
    (row_id,) = id_texts(ids)
    return row_id if isinstance(row_id, str) else None


def add_rows(window: Window, spec: JobSpec, rows: pa.RecordBatch, first_row_number: int) -> int:
    """Add rows to the window, as states or as errors; returns how many bytes they hold."""
    total = int(rows.nbytes)
    if total <= MAX_ROW_BYTES and not any(map(is_shared, rows.schema.types)):  # as nearly always, and quick to see
        _convert_rows(window, spec, rows, first_row_number)
        return total
    sizes = row_bytes(rows)
    total = int(sizes.sum())
    if total <= MAX_ROW_BYTES:
        _convert_rows(window, spec, rows, first_row_number)
        return total
    for position, size in enumerate(sizes.tolist()):
        row, row_number = rows.slice(position, 1), first_row_number + position
        if size > MAX_ROW_BYTES:
            window.errors.append(_too_large(spec, row, row_number, size))
        else:
            _convert_rows(window, spec, row, row_number)
    return total


def _convert_rows(window: Window, spec: JobSpec, rows: pa.RecordBatch, first_row_number: int) -> None:
    nothing = [None] * rows.num_rows
    ids = nothing if spec.row_id is None else id_texts(rows.column(spec.row_id))
    languages = nothing if spec.language_column is None else json_values(rows.column(spec.language_column))
    values = [json_values(rows.column(column)) for column in spec.state]
    for position, parts in enumerate(zip(*values, strict=True)):
        row_number, row_id = first_row_number + position, ids[position]
        id_text = row_id if isinstance(row_id, str) else None
        try:
            state = _as_state(spec, row_id, parts)
        except _BadRowError as error:
            window.errors.append(RowError(row_number, WHOLE_ROW, id_text, error.code, str(error)))
        else:
            window.row_numbers.append(row_number)
            window.row_ids.append(id_text)
            window.states.append(state)
            window.languages.append(language if isinstance(language := languages[position], str) else None)


def _too_large(spec: JobSpec, row: pa.RecordBatch, row_number: int, size: int) -> RowError:
    """Return the error of a row of which no Python object shall be made."""
    known = spec.row_id is not None and row_bytes(row.select([spec.row_id]))[0] <= MAX_ID_BYTES
    row_id = read_id(row.column(spec.row_id)) if known else None
    message = f"the row has {size} bytes, more than the limit of {MAX_ROW_BYTES}"
    return RowError(row_number, WHOLE_ROW, row_id, "too_large", message)


def _as_state(spec: JobSpec, row_id: str | Unreadable | None, parts: tuple[Any, ...]) -> State:
    """Return the state of a row: one column's value, or an object of several."""
    if isinstance(row_id, Unreadable):
        raise _BadRowError("bad_row_id", f"row id column {spec.row_id!r} {row_id.why}")
    for column, value in zip(spec.state, parts, strict=True):
        if isinstance(value, Unreadable):
            raise _BadRowError("not_text", f"column {column!r} {value.why}")
    if all(value is None for value in parts):
        what = "the state is null" if len(parts) == 1 else f"all of {', '.join(spec.state)} are null"
        raise _BadRowError("null_state", what)
    if len(parts) > 1:
        return dict(zip(spec.state, parts, strict=True))
    state: State = parts[0]
    if state == []:
        raise _BadRowError("empty_state", "the conversation has no turns")
    if isinstance(state, list) and None in state:
        raise _BadRowError("null_turn", f"turn {state.index(None)} of the conversation is null")
    return state
