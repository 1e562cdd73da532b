import datetime
import decimal
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.errors import InputError
from schemas.job import Claim, JobFile, JobSpec, ShardPlan
from tests.arrow_values import not_utf8
from tests.plans import planned_claims
from worker.parquet import ForwardReader
from worker.reader import read_windows
from worker.states import MAX_ROW_BYTES, Window, add_rows

QUESTIONS = {"q": {"type": "noul", "instructions": "x"}}


def claims(path: Path, state: list[str], row_id: str | None = None, rows_per_shard: int = 1000) -> list[Claim]:
    spec = JobSpec(inputs=[str(path)], questions=QUESTIONS, state=state, row_id=row_id)
    return planned_claims(spec, rows_per_shard)


def read(path: Path, state: list[str], row_id: str | None = None) -> Window:
    (claim,) = claims(path, state, row_id)
    (window,) = read_windows(claim, [], 1000)
    return window


def write(path: Path, columns: dict[str, Any], row_group_size: int | None = None) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=row_group_size)
    return path


@pytest.mark.parametrize(("row_group_size", "rows_per_shard", "rows_per_window"), [(3, 4, 2), (100, 7, 100), (1, 5, 3)])
def test_shards_together_read_every_row_once(
    tmp_path: Path, row_group_size: int, rows_per_shard: int, rows_per_window: int
) -> None:
    texts = [f"text {i}" for i in range(23)]
    path = write(tmp_path / "a.parquet", {"text": texts, "id": list(range(23))}, row_group_size)
    windows = [
        window
        for claim in claims(path, ["text"], "id", rows_per_shard)
        for window in read_windows(claim, [], rows_per_window)
    ]
    assert [state for window in windows for state in window.states] == texts
    assert [number for window in windows for number in window.row_numbers] == list(range(23))
    assert [row_id for window in windows for row_id in window.row_ids] == [str(i) for i in range(23)]


@given(
    groups=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    parts=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12)), min_size=1, max_size=6),
    rows_at_once=st.integers(1, 5),
)
def test_a_reader_that_stays_open_yields_the_rows_that_are_asked_for_in_any_order(
    tmp_path_factory: pytest.TempPathFactory, groups: list[int], parts: list[tuple[int, int]], rows_at_once: int
) -> None:
    files, first = [], 0
    for number, rows in enumerate(groups):
        path = tmp_path_factory.mktemp("files") / f"{number}.parquet"
        write(path, {"n": pa.array(range(first, first + rows), pa.int64())}, row_group_size=3)
        files.append(JobFile(str(path), path.stat().st_size, str(path.stat().st_mtime_ns), rows, first))
        first += rows
    reader = ForwardReader(rows_at_once)
    for start, count in parts:
        expected = list(range(start, min(start + count, first)))
        read = list(reader.read(ShardPlan(start, count, tuple(files)), ["n"], []))
        assert [value for *_, rows in read for value in rows.column(0).to_pylist()] == expected
        assert [number for _, number, rows in read for number in range(number, number + rows.num_rows)] == expected
        next(iter(reader.read(ShardPlan(start, count, tuple(files)), ["n"], [])), None)  # left before its end
    reader.close()


def test_shards_of_a_large_row_group_read_it_once_and_hold_little_of_it(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    texts = [random.bytes(1500).hex() for _ in range(8000)]
    path = write(tmp_path / "a.parquet", {"text": texts, "unused": texts}, row_group_size=8000)
    all_claims = claims(path, ["text"], rows_per_shard=500)
    assert len(all_claims) == 16
    reader = ForwardReader(16)
    list(read_windows(all_claims[0], [], 100, reader))
    before, held, peak = bytes_read(), pa.total_allocated_bytes(), 0
    for claim in all_claims[1:]:
        for _ in read_windows(claim, [], 100, reader):
            peak = max(peak, pa.total_allocated_bytes() - held)
    assert bytes_read() - before < 0.6 * path.stat().st_size  # half of the file is the other column
    assert peak < 4 * 2**20


def bytes_read() -> int:
    """Bytes that this process has read from files."""
    return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])  # type: ignore[index]


def test_a_null_state_is_an_error_of_its_row_alone(tmp_path: Path) -> None:
    window = read(
        write(tmp_path / "a.parquet", {"text": ["a", None, "", "d"], "id": ["w", "x", None, "z"]}), ["text"], "id"
    )
    assert window.states == ["a", "", "d"]
    assert window.row_numbers == [0, 2, 3]
    assert window.row_ids == ["w", None, "z"]
    (error,) = window.errors
    assert (error.row_number, error.question, error.row_id, error.code) == (1, "*", "x", "null_state")


def test_text_that_is_not_utf8_is_an_error_of_its_row_alone(tmp_path: Path) -> None:
    raw = pa.array([b"good", b"\xff\xfe", "süß".encode()], pa.binary())
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": pa.Array.from_buffers(pa.string(), len(raw), raw.buffers())}), path)
    window = read(path, ["text"])
    assert window.states == ["good", "süß"]
    assert [(error.row_number, error.code) for error in window.errors] == [(1, "not_text")]


def test_conversations_keep_their_turns(tmp_path: Path) -> None:
    turns = [[{"role": "user", "content": "hi"}, {"role": "bot", "content": "hello"}], None, [], [None]]
    window = read(write(tmp_path / "a.parquet", {"chat": turns}), ["chat"])
    assert window.states == [turns[0]]
    assert [(error.row_number, error.code) for error in window.errors] == [
        (1, "null_state"),
        (2, "empty_state"),
        (3, "null_turn"),
    ]


def test_several_columns_make_one_json_object_in_the_order_asked(tmp_path: Path) -> None:
    columns = {
        "day": pa.array([datetime.date(2026, 1, 2), None]),
        "price": pa.array([decimal.Decimal("1.50"), None]),
        "load": pa.array([float("nan"), None]),
        "tags": pa.array([["a", "b"], None]),
    }
    window = read(write(tmp_path / "a.parquet", columns), ["tags", "day", "price", "load"])
    assert window.states == [{"tags": ["a", "b"], "day": "2026-01-02", "price": "1.50", "load": None}]
    assert list(window.states[0]) == ["tags", "day", "price", "load"]
    assert window.errors[0].message == "all of tags, day, price, load are null"


def test_a_file_that_changed_or_went_since_the_job_was_made_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"text": ["a"]})
    (claim,) = claims(path, ["text"])
    write(path, {"text": ["b", "c"]})
    with pytest.raises(InputError, match=r"a\.parquet: has changed since the job was submitted"):
        list(read_windows(claim, [], 10))
    path.unlink()
    with pytest.raises(InputError, match=r"a\.parquet: no such file"):
        list(read_windows(claim, [], 10))


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"text": ["a", "b"]})
    (claim,) = claims(path, ["text"])
    windows = read_windows(claim, [], 1)
    next(windows)
    path.touch()
    with pytest.raises(InputError, match="has changed"):
        list(windows)


def test_a_file_outside_the_roots_is_not_opened(tmp_path: Path) -> None:
    (claim,) = claims(write(tmp_path / "a.parquet", {"text": ["a"]}), ["text"])
    with pytest.raises(InputError, match="not under an input root"):
        list(read_windows(claim, [str(tmp_path / "elsewhere")], 10))


def read_all(path: Path, state: list[str], row_id: str | None = None, language_column: str | None = None) -> Window:
    spec = JobSpec(inputs=[str(path)], questions=QUESTIONS, state=state, row_id=row_id, language_column=language_column)
    everything = Window([], [], [], [], [])
    for claim in planned_claims(spec, 1000):
        for window in read_windows(claim, [], 1000):
            for field in ("row_numbers", "row_ids", "states", "errors", "languages"):
                getattr(everything, field).extend(getattr(window, field))
    return everything


def test_one_odd_time_costs_nothing_and_one_unreadable_value_its_row(tmp_path: Path) -> None:
    times = pa.array([0, 5, 2**63 - 1], pa.int64()).cast(pa.timestamp("ns", "Europe/Berlin"))
    odd = pa.array([[("a", 1)], [("a", 1), ("a", 2)], None], pa.map_(pa.string(), pa.int64()))
    path = write(tmp_path / "a.parquet", {"id": ["x", "y", "z"], "at": times, "odd": odd})
    window = read_all(path, ["at", "odd"], "id")
    assert [state["at"] for state in window.states] == [
        "1970-01-01T01:00:00+01:00",
        "2262-04-12T01:47:16.854775807+02:00",
    ]
    assert window.states[0]["odd"] == {"a": 1}
    (error,) = window.errors
    assert (error.row_id, error.code, error.message) == (
        "y",
        "not_text",
        "column 'odd' is a map with two values for the key 'a'",
    )


def test_parts_of_different_widths_read_alike(tmp_path: Path) -> None:
    for name, text, number in (("a", pa.string(), pa.int8()), ("b", pa.large_string(), pa.int64())):
        write(tmp_path / f"{name}.parquet", {"text": pa.array([name], text), "id": pa.array([7], number)})
    write(tmp_path / "c.parquet", {"text": pa.array(["c"]).dictionary_encode(), "id": pa.nulls(1)})
    window = read_all(tmp_path, ["text"], "id")
    assert window.states == ["a", "b", "c"]
    assert window.row_ids == ["7", "7", None]


def test_a_dictionary_is_not_counted_for_each_of_its_rows(tmp_path: Path) -> None:
    words = {
        "large": pa.array([f"{'w' * 500_000}{n}" for n in range(100)]),  # 50 MB: more than a row may have
        "many": pa.array(map(str, range(10**6))),
    }
    for name, dictionary in words.items():
        indices = pa.array([n % 100 for n in range(64)], pa.int32())
        path = write(tmp_path / f"{name}.parquet", {"text": pa.DictionaryArray.from_arrays(indices, dictionary)})
        spec = JobSpec(inputs=[str(path)], questions=QUESTIONS, state=["text"])
        (claim,) = planned_claims(spec, 1000)
        (window,) = read_windows(claim, [], 1000)  # one: of 32 MB of texts, or of 200 bytes
        assert (len(window.states), window.errors) == (64, [])


LARGE = pa.array(["x" * (MAX_ROW_BYTES // 2 + 1)])


@pytest.mark.parametrize(
    "twice",
    [
        pa.DictionaryArray.from_arrays(pa.array([0, 0]), LARGE),
        pa.ListViewArray.from_arrays(pa.array([0, 0], pa.int32()), pa.array([1, 1], pa.int32()), LARGE),
    ],
    ids=["dictionary", "list view"],
)
def test_a_value_that_a_row_holds_twice_counts_twice_though_it_is_in_memory_once(twice: pa.Array) -> None:
    rows = pa.record_batch({"text": pa.ListArray.from_arrays(pa.array([0, 2], pa.int32()), twice)})
    assert rows.nbytes <= MAX_ROW_BYTES
    window = Window([], [], [], [], [])
    spec = JobSpec(inputs=["a.parquet"], questions=QUESTIONS, state=["text"])
    assert add_rows(window, spec, rows, 5) > MAX_ROW_BYTES
    (error,) = window.errors
    assert (error.row_number, error.code, window.states) == (5, "too_large", [])


def test_an_id_that_is_not_utf8_is_an_error_of_its_row_and_invents_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a", "b", "c", "d"], "id": not_utf8()}), path)
    window = read_all(path, ["text"], "id")
    assert window.row_ids == ["good", None]
    assert [(error.row_number, error.row_id, error.code) for error in window.errors] == [
        (1, None, "bad_row_id"),
        (3, None, "bad_row_id"),
    ]


def test_folders_of_partitions_are_columns_unless_the_file_has_them(tmp_path: Path) -> None:
    folder = tmp_path / "day=2026-01-02" / "city=S%C3%A3o Paulo" / "lang=__HIVE_DEFAULT_PARTITION__"
    folder.mkdir(parents=True)
    write(folder / "a.parquet", {"text": ["a", "b"], "day": ["file", None]})
    for inputs in (tmp_path, f"file://{tmp_path}"):
        window = read_all(inputs, ["text", "day", "city"], "city", "lang")
        assert window.states == [
            {"text": "a", "day": "file", "city": "São Paulo"},
            {"text": "b", "day": None, "city": "São Paulo"},
        ]
        assert (window.row_ids, window.languages) == (["São Paulo"] * 2, [None] * 2)
    assert read_all(tmp_path, ["city"]).states == ["São Paulo"] * 2
