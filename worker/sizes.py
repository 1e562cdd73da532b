"""How many bytes each row holds once it is decoded: a dictionary's value counts in each row that names it."""

from collections.abc import Callable
from functools import reduce

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyarrow import types

from jobs.values import FEW_OF_DICTIONARY, is_bytes, is_list, is_text, list_parts

Sizes = NDArray[np.int64]


def row_bytes(rows: pa.RecordBatch) -> Sizes:
    """Return the decoded bytes of each row, without making any Python object of its values."""
    return reduce(np.add, map(_value_bytes, rows.columns), np.zeros(rows.num_rows, np.int64))


def is_shared(kind: pa.DataType) -> bool:
    """Whether several rows of such a column may share a value in memory: then they hold more than its `nbytes`."""
    if isinstance(kind, pa.BaseExtensionType):
        return is_shared(kind.storage_type)
    if any(is_kind(kind) for is_kind in _SHARED):
        return True
    return any(is_shared(kind.field(i).type) for i in range(kind.num_fields))


def _value_bytes(array: pa.Array) -> Sizes:
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return _value_bytes(array.storage)
    for is_kind, count in _COUNTS:
        if is_kind(kind):
            return count(array)
    # Numbers and times, which are as large as they look; and unions and runs, which no Parquet file holds.
    return np.full(len(array), array.nbytes // max(1, len(array)), np.int64)


def _struct_bytes(array: pa.Array) -> Sizes:
    fields = (_value_bytes(array.field(i)) for i in range(array.type.num_fields))
    return reduce(np.add, fields, np.zeros(len(array), np.int64))


def _list_bytes(array: pa.Array) -> Sizes:
    elements, starts, ends = list_parts(array)
    totals = _running_totals(_value_bytes(elements))
    return np.asarray(totals[ends] - totals[starts], np.int64)


def _map_bytes(array: pa.Array) -> Sizes:
    edges = np.array(array.offsets.to_pylist(), np.int64)
    entries = [part.slice(edges[0], edges[-1] - edges[0]) for part in (array.keys, array.items)]
    totals = _running_totals(_value_bytes(entries[0]) + _value_bytes(entries[1]))
    return np.asarray(np.diff(totals[edges - edges[0]]), np.int64)


def _text_bytes(array: pa.Array) -> Sizes:
    if types.is_string_view(array.type) or types.is_binary_view(array.type):
        array = array.cast(pa.large_binary())
    return np.asarray(pc.fill_null(pc.binary_length(array), 0).to_numpy(zero_copy_only=False), np.int64)


def _dictionary_bytes(array: pa.Array) -> Sizes:
    values = array.dictionary
    indices = np.array([-1 if index is None else index for index in array.indices.to_pylist()], np.int64)
    used, places = np.unique(indices, return_inverse=True)
    if len(used) * FEW_OF_DICTIONARY < len(values):
        few = [0 if index < 0 else _value_bytes(values.slice(index, 1))[0] for index in used.tolist()]
        return np.array(few, np.int64)[places]
    return np.append(_value_bytes(values), 0)[indices]  # the last, at -1, is null's


def _running_totals(sizes: Sizes) -> Sizes:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])


_COUNTS: tuple[tuple[Callable[[pa.DataType], bool], Callable[[pa.Array], Sizes]], ...] = (
    (types.is_dictionary, _dictionary_bytes),
    (types.is_struct, _struct_bytes),
    (is_list, _list_bytes),
    (types.is_map, _map_bytes),
    (lambda kind: is_text(kind) or is_bytes(kind), _text_bytes),
)
_SHARED: tuple[Callable[[pa.DataType], bool], ...] = (
    *(types.is_dictionary, types.is_run_end_encoded),
    *(types.is_string_view, types.is_binary_view, types.is_list_view, types.is_large_list_view),
)
