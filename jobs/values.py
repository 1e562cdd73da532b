"""Values of Arrow columns as JSON and as row ids, in the forms that docs/inputs.md lists.

Converting never raises: a value that has no such form is an `Unreadable`, and its neighbours are converted.
"""

import math
import uuid
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import types

from jobs.times import date_text, duration_text, interval_text, time_text, timestamp_text

_NS_PER_UNIT = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
_NS_PER_DAY = 86_400 * 10**9
FEW_OF_DICTIONARY = 8  # one value by itself costs about as much as so many of a whole column


@dataclass(frozen=True)
class Unreadable:
    """A value that is no text and no JSON, and why."""

    why: str


_NOT_UTF8 = Unreadable("is not valid UTF-8 text")


def json_values(array: pa.Array) -> list[Any]:
    """Return what JSON can hold of each value: None, bool, int, float, str, list or dict; or an `Unreadable`."""
    kind = array.type
    if types.is_null(kind):
        return [None] * len(array)
    if (values := _encoded(array, json_values)) is not None:
        return values
    for is_kind, convert in _CONVERTERS:
        if is_kind(kind):
            return convert(array)
    return _each(array.is_valid().to_pylist(), lambda _: Unreadable(f"is of type {kind}, which has no JSON"), bool)


def id_texts(array: pa.Array) -> list[str | Unreadable | None]:
    """Return each value as the text of a row id; or an `Unreadable`."""
    if (texts := _encoded(array, id_texts)) is not None:
        return texts
    values = json_values(array)
    if types.is_decimal(array.type):
        return [_shortest_decimal(value) if isinstance(value, str) else value for value in values]
    return [_id_text(value) for value in values]


def _id_text(value: Any) -> str | Unreadable | None:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    if value is None or isinstance(value, str | Unreadable):
        return value
    return Unreadable("is no text, number, time or uuid")


def _shortest_decimal(digits: str) -> str:
    return digits.rstrip("0").rstrip(".") if "." in digits else digits


def _encoded(array: pa.Array, convert: Callable[[pa.Array], list[Any]]) -> list[Any] | None:
    """Return the values of an array that wraps another (an extension, a dictionary, runs); None when it does not."""
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType) and kind.extension_name not in _EXTENSIONS:
        return convert(array.storage)
    if types.is_dictionary(kind):
        return _of_dictionary(array, convert)
    if types.is_run_end_encoded(kind):
        ends, values = array.run_ends.to_pylist(), convert(array.values)
        return [values[bisect_right(ends, row + array.offset)] for row in range(len(array))]
    return None


def _of_dictionary(array: pa.Array, convert: Callable[[pa.Array], list[Any]]) -> list[Any]:
    """Return the values that the rows name; a dictionary may hold far more than these."""
    indices = array.indices.to_pylist()
    used = sorted({index for index in indices if index is not None})
    if len(used) * FEW_OF_DICTIONARY < len(array.dictionary):
        values = {index: convert(array.dictionary.slice(index, 1))[0] for index in used}
    else:
        values = dict(enumerate(convert(array.dictionary)))
    return [None if index is None else values[index] for index in indices]


def _each(values: list[Any], convert: Callable[[Any], Any], has: Callable[[Any], bool] | None = None) -> list[Any]:
    """Return the values converted, and None for each that is null."""
    has = has or (lambda value: value is not None)
    return [convert(value) if has(value) else None for value in values]


def _texts(array: pa.Array) -> list[Any]:
    try:
        return list(array.to_pylist())
    except UnicodeDecodeError:
        return [_decode_text(value) for value in array]


def _decode_text(value: pa.Scalar) -> Any:
    try:
        return value.as_py()
    except UnicodeDecodeError:
        return _NOT_UTF8


def _bytes(array: pa.Array) -> list[Any]:
    return _each(array.to_pylist(), _decode_bytes)


def _decode_bytes(value: bytes) -> Any:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return _NOT_UTF8


def _numbers(array: pa.Array) -> list[Any]:
    return list(array.to_pylist())


def _floats(array: pa.Array) -> list[Any]:
    """Return NaN and infinity as None: JSON has neither."""
    return [value if value is not None and math.isfinite(value) else None for value in array.to_pylist()]


def _decimals(array: pa.Array) -> list[Any]:
    return _each(array.to_pylist(), lambda value: format(value, "f"))


def _dates(array: pa.Array) -> list[Any]:
    if types.is_date32(array.type):
        return _each(array.cast(pa.int32()).to_pylist(), date_text)
    return _each(array.cast(pa.int64()).to_pylist(), lambda ms: date_text(ms // 86_400_000))


def _times(array: pa.Array) -> list[Any]:
    unit = _NS_PER_UNIT[array.type.unit]
    whole = pa.int32() if types.is_time32(array.type) else pa.int64()

    def convert(value: int) -> Any:
        return time_text(value * unit) if 0 <= value * unit < _NS_PER_DAY else Unreadable("is no time of a day")

    return _each(array.cast(whole).to_pylist(), convert)


def _timestamps(array: pa.Array) -> list[Any]:
    unit, zone = _NS_PER_UNIT[array.type.unit], array.type.tz
    return _each(array.cast(pa.int64()).to_pylist(), lambda value: timestamp_text(value * unit, zone))


def _durations(array: pa.Array) -> list[Any]:
    unit = _NS_PER_UNIT[array.type.unit]
    return _each(array.cast(pa.int64()).to_pylist(), lambda value: duration_text(value * unit))


def _intervals(array: pa.Array) -> list[Any]:
    return _each(array.to_pylist(), lambda value: interval_text(value.months, value.days, value.nanoseconds))


def _uuids(array: pa.Array) -> list[Any]:
    return _each(array.storage.to_pylist(), lambda value: str(uuid.UUID(bytes=value)))


def _bool8s(array: pa.Array) -> list[Any]:
    return _each(array.storage.to_pylist(), bool)


def _lists(array: pa.Array) -> list[Any]:
    elements, starts, ends = list_parts(array)
    values = json_values(elements)
    lists = (_whole(values[start:end]) for start, end in zip(starts, ends, strict=True))
    return [part if valid else None for part, valid in zip(lists, array.is_valid().to_pylist(), strict=True)]


def list_parts(array: pa.Array) -> tuple[pa.Array, list[int], list[int]]:
    """Return the elements of an array of lists, and where among them each list starts and ends.

    Not `flatten`, which some types of elements do not have.
    """
    kind = array.type
    if types.is_fixed_size_list(kind):
        starts = [(array.offset + row) * kind.list_size for row in range(len(array))]
        ends = [start + kind.list_size for start in starts]
    elif types.is_list(kind) or types.is_large_list(kind):
        edges = array.offsets.to_pylist()
        starts, ends = edges[:-1], edges[1:]
    else:
        starts = array.offsets.to_pylist()
        ends = [start + size for start, size in zip(starts, array.sizes.to_pylist(), strict=True)]
    first, last = min(starts, default=0), max(ends, default=0)
    elements = array.values.slice(first, last - first)
    return elements, [start - first for start in starts], [end - first for end in ends]


def _whole(values: list[Any]) -> Any:
    """Return the values; or the first that is unreadable, of which the whole then is one, too."""
    return next((value for value in values if isinstance(value, Unreadable)), values)


def _structs(array: pa.Array) -> list[Any]:
    names = [array.type.field(i).name for i in range(array.type.num_fields)]
    if repeated := _repeated(names):
        return _each(array.is_valid().to_pylist(), lambda _: Unreadable(f"has two fields {repeated!r}"), bool)
    # Not `flatten`, which ends the process when a field is a union; values below a null are passed over.
    fields = [json_values(array.field(i)) for i in range(len(names))]
    structs = []
    for row, valid in enumerate(array.is_valid().to_pylist()):
        whole = _whole([field[row] for field in fields]) if valid else None
        structs.append(dict(zip(names, whole, strict=True)) if isinstance(whole, list) else whole)
    return structs


def _maps(array: pa.Array) -> list[Any]:
    edges = array.offsets.to_pylist()
    keys = id_texts(array.keys.slice(edges[0], edges[-1] - edges[0]))
    items = json_values(array.items.slice(edges[0], edges[-1] - edges[0]))
    maps: list[Any] = []
    for row, valid in enumerate(array.is_valid().to_pylist()):
        here = slice(edges[row] - edges[0], edges[row + 1] - edges[0])
        maps.append(_map(keys[here], items[here]) if valid else None)
    return maps


def _map(keys: list[Any], items: list[Any]) -> Any:
    if isinstance(broken := _whole([*keys, *items]), Unreadable):
        return broken
    if (repeated := _repeated(keys)) is not None:
        return Unreadable(f"is a map with two values for the key {repeated!r}")
    return dict(zip(keys, items, strict=True))


def _repeated(names: list[str]) -> str | None:
    return None if len(set(names)) == len(names) else next(name for name in names if names.count(name) > 1)


def _unions(array: pa.Array) -> list[Any]:
    # The buffers, for `type_codes` and `offsets` begin with the array that this one may be a slice of.
    _, codes, *offsets = array.buffers()[: 3 if array.type.mode == "dense" else 2]
    here = slice(array.offset, array.offset + len(array))
    places = np.frombuffer(offsets[0], np.int32)[here].tolist() if offsets else range(len(array))
    children = {code: array.field(i) for i, code in enumerate(array.type.type_codes)}
    chosen = zip(np.frombuffer(codes, np.int8)[here].tolist(), places, strict=True)
    return [json_values(children[code].slice(place, 1))[0] for code, place in chosen]


def _is_extension(name: str) -> Callable[[pa.DataType], bool]:
    return lambda kind: isinstance(kind, pa.BaseExtensionType) and kind.extension_name == name


def is_text(kind: pa.DataType) -> bool:
    """Return whether an Arrow type is text of any layout."""
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def is_bytes(kind: pa.DataType) -> bool:
    """Return whether an Arrow type is bytes of any layout."""
    return bool(
        types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_fixed_size_binary(kind)
        or types.is_binary_view(kind)
    )


def is_list(kind: pa.DataType) -> bool:
    """Return whether an Arrow type is a list of any layout."""
    return bool(
        types.is_list(kind)
        or types.is_large_list(kind)
        or types.is_fixed_size_list(kind)
        or types.is_list_view(kind)
        or types.is_large_list_view(kind)
    )


_EXTENSIONS: dict[str, Callable[[pa.Array], list[Any]]] = {"arrow.uuid": _uuids, "arrow.bool8": _bool8s}

_CONVERTERS: tuple[tuple[Callable[[pa.DataType], bool], Callable[[pa.Array], list[Any]]], ...] = (
    *((_is_extension(name), convert) for name, convert in _EXTENSIONS.items()),
    (is_text, _texts),
    (is_bytes, _bytes),
    (lambda kind: types.is_boolean(kind) or types.is_integer(kind), _numbers),
    (types.is_floating, _floats),
    (types.is_decimal, _decimals),
    (types.is_date, _dates),
    (types.is_time, _times),
    (types.is_timestamp, _timestamps),
    (types.is_duration, _durations),
    (types.is_interval, _intervals),
    (is_list, _lists),
    (types.is_map, _maps),
    (types.is_struct, _structs),
    (types.is_union, _unions),
)
