"""The columns that a job reads: whether each file has them, what types they may be, and whether files agree on them.

Files are one table where their values mean the same: text, whole numbers, fractions, moments and lists of any layout or
width. A column without any value agrees with all.
"""

import difflib
from collections.abc import Callable, Iterable
from textwrap import shorten

import pyarrow as pa
from pyarrow import types

from jobs.discovery import partition_values
from jobs.errors import InputError
from jobs.values import is_bytes, is_list, is_text
from schemas.job import JobSpec

LISTED_CHARACTERS = 300  # of the columns of a file that lacks one


ColumnTypes = dict[str, pa.DataType]  # of each column that the job reads, in `bare_type`s


def needed_types(file: str, schema: pa.Schema, spec: JobSpec) -> ColumnTypes:
    """Return the types of a file's columns that the job reads: each there once, and of a type that can be read.

    A column that the file does not have may be a `key=value` folder above it, and is text. Raises InputError.
    """
    folders = partition_values(file)
    found: ColumnTypes = {}
    for column in needed_columns(spec):
        if schema.names.count(column) > 1:
            raise InputError(f"{file}: has more than one column {column!r}")
        if column not in schema.names and column not in folders:
            raise InputError(f"{file}: no column {column!r}; {_describe_columns([*schema.names, *folders], column)}")
        found[column] = bare_type(schema.field(column).type) if column in schema.names else pa.string()
        if why := _refusal(spec, column, found[column]):
            raise InputError(f"{file}: {why}")
    return found


def check_same_types(files: Iterable[tuple[str, ColumnTypes]]) -> None:
    """Raise InputError, naming two files, unless the values of each column mean the same in all."""
    merged: dict[str, tuple[str, pa.DataType]] = {}  # column -> the first file that has values in it, type
    for file, found in files:
        for column, kind in found.items():
            first, before = merged.get(column, (file, kind))
            if (both := merge_types(before, kind)) is None:
                raise InputError(f"{file}: columns differ from {first}: {column} is {kind}, not {before}")
            merged[column] = (file if types.is_null(before) else first, both)


def needed_columns(spec: JobSpec) -> list[str]:
    """Return the names of all columns that the job reads, each once."""
    wanted = (*spec.state, spec.row_id, spec.language_column)
    return list(dict.fromkeys(column for column in wanted if column is not None))


def _describe_columns(names: list[str], wanted: str) -> str:
    """What a file has instead of a column: all its columns where these fit in a line, else the nearest."""
    if len(listed := ", ".join(names)) <= LISTED_CHARACTERS:
        return f"it has {listed}"
    near = difflib.get_close_matches(wanted, names, 3)
    shown = ", ".join(repr(shorten(name, LISTED_CHARACTERS // 3, placeholder="…")) for name in near or names[:3])
    return f"it has {len(names):,} columns, {'the nearest are' if near else 'such as'} {shown}"


def _refusal(spec: JobSpec, column: str, kind: pa.DataType) -> str:
    """Return why no value of this type can be what the job takes the column for; empty when some can."""
    if column in spec.state:
        if len(spec.state) == 1 and not _can_be_state(kind):
            return (
                f"column {column!r} is {kind}; a state is text, a list of turns (text, or structs such as role and "
                "content), a struct or a map; or give --state several times to make an object of columns"
            )
        if why := _has_no_json(kind):
            return f"column {column!r} is {kind}; {why}"
    if column == spec.row_id and not _can_be_id(kind):
        return f"row id column {column!r} is {kind}; an id is text, a whole number, a decimal, a time or a uuid"
    if column == spec.language_column and not (is_text(kind) or is_bytes(kind) or types.is_null(kind)):
        return f"language column {column!r} is {kind}; a language is text"
    return ""


def _can_be_state(kind: pa.DataType) -> bool:
    if is_list(kind):
        kind = bare_type(kind.value_type)
    return bool(is_text(kind) or is_bytes(kind) or types.is_struct(kind) or types.is_map(kind) or types.is_null(kind))


def _can_be_id(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        return bool(kind.extension_name == "arrow.uuid")
    refused = types.is_floating(kind) or types.is_nested(kind) or types.is_interval(kind)
    return not (refused or types.is_duration(kind))


def _has_no_json(kind: pa.DataType) -> str:
    """Return why no value of a type has JSON; empty when some have."""
    kind = bare_type(kind)
    if types.is_map(kind) and not _can_be_id(key := bare_type(kind.key_type)):
        return f"the keys of a JSON object are text, not {key}"
    if types.is_struct(kind):
        names = [field.name for field in _children(kind)]
        if repeated := [name for name in names if names.count(name) > 1]:
            return f"it has two fields {repeated[0]!r}"
    return next((why for child in _children(kind) if (why := _has_no_json(child.type))), "")


def _children(kind: pa.DataType) -> list[pa.Field]:
    return [kind.field(i) for i in range(kind.num_fields)] if types.is_nested(kind) else []


def bare_type(kind: pa.DataType) -> pa.DataType:
    """Return a type without dictionary, run-end encoding and extensions that only wrap another type."""
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return bare_type(kind.value_type)
    if isinstance(kind, pa.BaseExtensionType) and kind.extension_name not in ("arrow.uuid", "arrow.bool8"):
        return bare_type(kind.storage_type)
    return kind


def merge_types(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """Return a type that stands for both, or None when their values do not mean the same."""
    one, other = bare_type(one), bare_type(other)
    if types.is_null(one) or types.is_null(other) or one.equals(other):
        return other if types.is_null(one) else one
    if is_list(one) and is_list(other):
        value = merge_types(one.value_type, other.value_type)
        return None if value is None else pa.list_(value)
    if types.is_struct(one) and types.is_struct(other):
        return _merge_structs(one, other)
    if types.is_map(one) and types.is_map(other):
        key, item = merge_types(one.key_type, other.key_type), merge_types(one.item_type, other.item_type)
        return None if key is None or item is None else pa.map_(key, item)
    alike = any(is_kind(one) and is_kind(other) for is_kind in _ALIKE)
    return one if alike and _have_zones(one) == _have_zones(other) else None


def _merge_structs(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """Return the struct of both: the same fields, in any order."""
    ours, theirs = ({field.name: field.type for field in _children(kind)} for kind in (one, other))
    if ours.keys() != theirs.keys():
        return None
    merged = {name: merge_types(ours[name], theirs[name]) for name in ours}
    return None if None in merged.values() else pa.struct(list(merged.items()))


def _have_zones(kind: pa.DataType) -> bool:
    return types.is_timestamp(kind) and kind.tz is not None


def _is_text_or_bytes(kind: pa.DataType) -> bool:
    return is_text(kind) or is_bytes(kind)


def _is_number(kind: pa.DataType) -> bool:
    return bool(types.is_integer(kind) or types.is_floating(kind))


_ALIKE: tuple[Callable[[pa.DataType], bool], ...] = (
    *(_is_text_or_bytes, _is_number, types.is_decimal),
    *(types.is_date, types.is_time, types.is_timestamp, types.is_duration),
)
