import datetime
import json
import re
import uuid
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jobs.columns import _has_no_json, merge_types
from jobs.times import date_text, duration_text, timestamp_text
from jobs.values import Unreadable, id_texts, json_values
from tests.arrow_values import arrays, not_utf8
from worker.sizes import is_shared, row_bytes

UUID = uuid.UUID("12345678-1234-5678-1234-567812345678")
EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


@settings(max_examples=300, deadline=None)
@given(arrays())
def test_any_value_of_any_type_is_json_or_unreadable_by_itself(array: pa.Array) -> None:
    values = json_values(array)
    assert len(values) == len(array)
    for row, value in enumerate(values):
        assert json_values(array.slice(row, 1)) == [value]
        if isinstance(value, Unreadable):
            assert value.why
        else:
            json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    if all(isinstance(value, Unreadable) for value in values) and _has_no_json(array.type):
        return
    assert not (pa.types.is_null(array.type) and any(value is not None for value in values))


@settings(max_examples=300, deadline=None)
@given(arrays())
def test_any_value_of_any_type_is_an_id_or_unreadable_by_itself(array: pa.Array) -> None:
    texts = id_texts(array)
    assert len(texts) == len(array)
    for row, text in enumerate(texts):
        assert text is None or isinstance(text, str | Unreadable)
        assert id_texts(array.slice(row, 1)) == [text]


@settings(max_examples=100, deadline=None)
@given(arrays())
def test_the_bytes_of_a_row_do_not_depend_on_its_neighbours(array: pa.Array) -> None:
    if any(kind in str(array.type) for kind in ("union", "run_end", "month_day", "bool")):
        return  # no Parquet file holds the former; the latter are counted in part bytes
    sizes = row_bytes(pa.record_batch({"a": array})).tolist()
    alone = [row_bytes(pa.record_batch({"a": array.slice(row, 1)}))[0] for row in range(len(array))]
    assert sizes == pytest.approx(alone, abs=64)


@settings(max_examples=200, deadline=None)
@given(arrays())
def test_rows_that_share_no_value_hold_no_more_than_the_memory_of_their_column(array: pa.Array) -> None:
    for rows in (pa.record_batch({"a": array}), pa.record_batch({"a": array.slice(1)})):
        assert is_shared(array.type) or row_bytes(rows).sum() <= rows.nbytes


@given(arrays())
@settings(max_examples=200, deadline=None)
def test_a_type_merges_with_itself_and_with_columns_that_have_no_values(array: pa.Array) -> None:
    kind = array.type
    assert merge_types(kind, kind) is not None
    assert merge_types(pa.null(), kind) == merge_types(kind, pa.null()) == merge_types(kind, kind)


def test_a_dictionary_counts_what_a_row_names_and_no_more() -> None:
    words = pa.array(["x" * 10, "y" * 1000, *map(str, range(1000))])
    array = pa.DictionaryArray.from_arrays(pa.array([0, 1, None, 0], pa.int32()), words)
    assert row_bytes(pa.record_batch({"a": array})).tolist() == [10, 1000, 0, 10]
    assert row_bytes(pa.record_batch({"a": pa.array([["ab", "c"], None, []]), "b": array[:3]})).tolist() == [
        13,
        1000,
        0,
    ]


TABLE: list[tuple[pa.Array, Any]] = [
    (pa.array(["süß"], pa.large_string()), "süß"),
    (pa.array([b"s\xc3\xbc\xc3\x9f"], pa.binary()), "süß"),
    (pa.array([b"\xff"], pa.binary()), Unreadable("is not valid UTF-8 text")),
    (not_utf8().slice(1, 1), Unreadable("is not valid UTF-8 text")),
    (not_utf8().slice(3, 1), Unreadable("is not valid UTF-8 text")),
    (pa.array([True]), True),
    (pa.array([2**64 - 1], pa.uint64()), 18446744073709551615),
    (pa.array([1.5], pa.float16()), 1.5),
    (pa.array([float("nan")]), None),
    (pa.array([float("-inf")], pa.float32()), None),
    (pa.array([[1.0, float("nan")]]), [1.0, None]),
    (pa.array([Decimal("1.50")], pa.decimal128(5, 2)), "1.50"),
    (pa.array([Decimal("5000")], pa.decimal128(5, -3)), "5000"),
    (pa.array([1], pa.date32()), "1970-01-02"),
    (pa.array([2_932_897], pa.date32()), "+10000-01-01"),
    (pa.array([-719_529], pa.date32()), "-0001-12-31"),
    (pa.array([45_000], pa.time32("s")), "12:30:00"),
    (pa.array([45_000 * 10**9 + 1], pa.time64("ns")), "12:30:00.000000001"),
    (pa.array([86_400], pa.time32("s")), Unreadable("is no time of a day")),
    (pa.array([0], pa.timestamp("s")), "1970-01-01T00:00:00"),
    (pa.array([1_500], pa.timestamp("ms", "UTC")), "1970-01-01T00:00:01.500000+00:00"),
    (pa.array([1], pa.timestamp("ns", "Europe/Berlin")), "1970-01-01T01:00:00.000000001+01:00"),
    (pa.array([0], pa.timestamp("s", "-03:30")), "1969-12-31T20:30:00-03:30"),
    (pa.array([0], pa.timestamp("s", "Mars/Olympus")), "1970-01-01T00:00:00+00:00"),
    (pa.array([253_402_300_799], pa.timestamp("s", "Europe/Berlin")), "9999-12-31T23:59:59+00:00"),
    (pa.array([-(2**63)], pa.timestamp("s")), "-292277022657-01-27T08:29:52"),
    (pa.array([93_784_500], pa.duration("ms")), "P1DT2H3M4.5S"),
    (pa.array([-5], pa.duration("s")), "-PT5S"),
    (pa.array([0], pa.duration("ns")), "PT0S"),
    (pa.array([(1, -2, 3_000_000_000)], pa.month_day_nano_interval()), "P1M-2DT3S"),
    (pa.array([[("a", 1), ("b", None)]], pa.map_(pa.string(), pa.int8())), {"a": 1, "b": None}),
    (pa.array([[(7, "x")]], pa.map_(pa.int8(), pa.string())), {"7": "x"}),
    (
        pa.array([[("a", 1), ("a", 2)]], pa.map_(pa.string(), pa.int8())),
        Unreadable("is a map with two values for the key 'a'"),
    ),
    (pa.array([{"a": [{"b": None}]}]), {"a": [{"b": None}]}),
    (pa.array(["a", "a"]).dictionary_encode(), "a"),
    (
        pa.ExtensionArray.from_storage(pa.uuid(), pa.array([uuid.UUID(int=1).bytes], pa.binary(16))),
        str(uuid.UUID(int=1)),
    ),
    (pa.array(['{"a": 1}'], pa.json_()), '{"a": 1}'),
    (pa.nulls(1), None),
]


@pytest.mark.parametrize(("array", "value"), TABLE, ids=[f"{array.type}-{n}" for n, (array, _) in enumerate(TABLE)])
def test_the_form_of_each_type(array: pa.Array, value: Any) -> None:
    assert json_values(array)[0] == value


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (pa.array(["007"]), "007"),
        (pa.array([7], pa.uint8()), "7"),
        (pa.array([True]), "true"),
        (pa.array([Decimal("1200.00")], pa.decimal128(10, 2)), "1200"),
        (pa.array([Decimal("1.50")], pa.decimal128(10, 2)), "1.5"),
        (pa.array([Decimal("0.00")], pa.decimal128(10, 2)), "0"),
        (pa.array([0], pa.date32()), "1970-01-01"),
        (pa.array([0], pa.timestamp("s", "UTC")), "1970-01-01T00:00:00+00:00"),
        (pa.array([b"t1"], pa.binary()), "t1"),
        (pa.array([None], pa.string()), None),
        (not_utf8().slice(1, 1), Unreadable("is not valid UTF-8 text")),
        (pa.array([1.0]), Unreadable("is no text, number, time or uuid")),
    ],
)
def test_the_form_of_an_id(array: pa.Array, text: Any) -> None:
    assert id_texts(array) == [text]


@given(st.datetimes(timezones=st.just(datetime.UTC)))
@example(datetime.datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=datetime.UTC))
def test_where_python_has_a_moment_its_text_is_the_same(moment: datetime.datetime) -> None:
    ns = (moment - EPOCH) // datetime.timedelta(microseconds=1) * 1000
    assert timestamp_text(ns, "UTC") == moment.isoformat()
    assert timestamp_text(ns, None) == moment.replace(tzinfo=None).isoformat()


@given(st.integers(-(2**31), 2**31 - 1))
def test_the_days_of_all_years_follow_one_another(days: int) -> None:
    today, tomorrow = (
        re.fullmatch(r"([+-]?\d{4,})-(\d\d)-(\d\d)", date_text(day)).groups() for day in (days, days + 1)
    )
    year, month, day = map(int, today)
    assert tuple(map(int, tomorrow)) in {(year, month, day + 1), (year, month + 1, 1), (year + 1, 1, 1)}


@given(st.integers(0, 2**62), st.booleans())
def test_a_duration_can_be_read_back(ns: int, negative: bool) -> None:
    text = duration_text(-ns if negative else ns)
    days, hours, minutes, seconds = re.fullmatch(
        r"-?P(?:(\d+)D)?(?:T(?:(\d+)H)?(?:(\d+)M)?(?:([\d.]+)S)?)?", text
    ).groups(default="0")
    read = (int(days) * 1440 + int(hours) * 60 + int(minutes)) * 60 * 10**9 + int(Decimal(seconds) * 10**9)
    assert (read, text.startswith("-")) == (ns, negative and ns > 0)
