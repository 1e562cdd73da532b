"""Random Arrow types and arrays for property tests: every kind of value that a column can hold."""

import decimal
import itertools
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

INT64 = st.integers(-(2**63), 2**63 - 1)
INT32 = st.integers(-(2**31), 2**31 - 1)
ZONES = [None, "UTC", "Europe/Berlin", "+05:30", "-0800", "Mars/Olympus", "America/New_York"]


class Tagged(pa.ExtensionType):
    """An extension type that nobody else knows."""

    def __init__(self) -> None:
        super().__init__(pa.string(), "tests.tagged")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: pa.DataType, serialized: bytes) -> "Tagged":
        return cls()


def decimals(precision: int, scale: int) -> st.SearchStrategy[decimal.Decimal]:
    most = 10**precision - 1
    context = decimal.Context(prec=80)
    return st.integers(-most, most).map(lambda units: decimal.Decimal(units).scaleb(-scale, context))


# Of each kind: a type, and values of it as pyarrow takes them.
SCALARS: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    *((kind, st.text(max_size=5)) for kind in (pa.string(), pa.large_string(), pa.string_view())),
    *((kind, st.binary(max_size=5)) for kind in (pa.binary(), pa.large_binary(), pa.binary_view())),
    (pa.binary(3), st.binary(min_size=3, max_size=3)),
    (pa.bool_(), st.booleans()),
    (pa.int8(), st.integers(-128, 127)),
    (pa.int64(), INT64),
    (pa.uint64(), st.integers(0, 2**64 - 1)),
    *((kind, st.floats(width=width)) for kind, width in ((pa.float16(), 16), (pa.float32(), 32), (pa.float64(), 64))),
    (pa.decimal128(12, 2), decimals(12, 2)),
    (pa.decimal128(38, -3), decimals(35, -3)),
    (pa.decimal256(76, 40), decimals(76, 40)),
    (pa.date32(), INT32),
    (pa.date64(), st.integers(-(10**11), 10**11).map(lambda days: days * 86_400_000)),
    *((pa.time32(unit), INT32) for unit in ("s", "ms")),
    *((pa.time64(unit), st.one_of(INT64, st.integers(0, 86_400 * 10**6))) for unit in ("us", "ns")),
    *((pa.timestamp(unit, zone), INT64) for unit in ("s", "ms", "us", "ns") for zone in ZONES),
    *((pa.duration(unit), INT64) for unit in ("s", "ms", "us", "ns")),
    (pa.month_day_nano_interval(), st.tuples(INT32, INT32, INT64)),
]


def plain_arrays(kind: pa.DataType, values: st.SearchStrategy[Any]) -> st.SearchStrategy[pa.Array]:
    return st.lists(st.none() | values, min_size=1, max_size=6).map(lambda items: pa.array(items, kind))


def _lists(draw: st.DrawFn, inner: pa.Array, edges: list[int]) -> pa.Array:
    nulls = pa.array([False, *(draw(st.booleans()) for _ in edges[2:])])
    if draw(st.booleans()):
        return pa.ListArray.from_arrays(pa.array(edges, pa.int32()), inner, mask=nulls)
    return pa.LargeListArray.from_arrays(pa.array(edges, pa.int64()), inner, mask=nulls)


def _list_views(draw: st.DrawFn, inner: pa.Array, edges: list[int]) -> pa.Array:
    sizes = [end - start for start, end in itertools.pairwise(edges)]
    return pa.ListViewArray.from_arrays(pa.array(edges[:-1], pa.int32()), pa.array(sizes, pa.int32()), inner)


def _structs(draw: st.DrawFn, inner: pa.Array, edges: list[int]) -> pa.Array:
    mask = pa.array([draw(st.booleans()) for _ in inner])
    return pa.StructArray.from_arrays([inner, inner], names=["a", "b"], mask=mask)


def _maps(draw: st.DrawFn, inner: pa.Array, edges: list[int]) -> pa.Array:
    keys = pa.array([draw(st.sampled_from(["x", "y", "z", "ü"])) for _ in inner])
    return pa.MapArray.from_arrays(pa.array(edges, pa.int32()), keys, inner)


def _dictionaries(draw: st.DrawFn, inner: pa.Array, edges: list[int]) -> pa.Array:
    rows = draw(st.lists(st.none() | st.integers(0, len(inner) - 1), min_size=1, max_size=6))
    return pa.DictionaryArray.from_arrays(pa.array(rows, pa.int32()), inner)


def _runs(draw: st.DrawFn, inner: pa.Array, edges: list[int]) -> pa.Array:
    ends = pa.array([2 * (row + 1) for row in range(len(inner))], pa.int32())
    try:
        return pa.RunEndEncodedArray.from_arrays(ends, inner)
    except pa.ArrowInvalid:  # values that no writer of its own makes, such as a negative time
        return inner


def _unions(draw: st.DrawFn, inner: pa.Array, edges: list[int]) -> pa.Array:
    codes, others = pa.array([row % 2 for row in range(len(inner))], pa.int8()), pa.array(["t"] * len(inner))
    if draw(st.booleans()):
        return pa.UnionArray.from_sparse(codes, [inner, others])
    return pa.UnionArray.from_dense(codes, pa.array(range(len(inner)), pa.int32()), [inner, others])


WRAPPERS = [_lists, _list_views, _structs, _maps, _dictionaries, _runs, _unions]


@st.composite
def arrays(draw: st.DrawFn) -> pa.Array:
    """An array of any type, sliced or whole."""
    special = st.sampled_from(
        [
            pa.nulls(3),
            pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"0123456789abcdef", None], pa.binary(16))),
            pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1, 0, None], pa.int8())),
            pa.ExtensionArray.from_storage(Tagged(), pa.array(["tag", None])),
            pa.array([[1, 2], None], pa.list_(pa.int8(), 2)),
            not_utf8(),
        ]
    )
    scalars = st.sampled_from(SCALARS).flatmap(lambda scalar: plain_arrays(*scalar))
    array = draw(st.one_of(scalars, scalars, scalars, special))
    for _ in range(draw(st.integers(0, 3))):
        if len(array):
            edges = sorted(draw(st.lists(st.integers(0, len(array)), min_size=2, max_size=5)))
            array = draw(st.sampled_from(WRAPPERS))(draw, array, edges)
    start = draw(st.integers(0, len(array) - 1)) if len(array) else 0
    return array.slice(start, draw(st.integers(1, 6)))


def not_utf8() -> pa.Array:
    """Text as a careless writer leaves it: Parquet does not check."""
    raw = pa.array([b"good", b"\xff\xfe", None, b"\xed\xa0\x80"], pa.binary())
    return pa.Array.from_buffers(pa.string(), len(raw), raw.buffers())
