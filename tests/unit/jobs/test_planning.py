import datetime
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.discovery import find_files
from jobs.errors import InputError
from jobs.locations import check_root
from jobs.planning import MAX_FILES_PER_SHARD, divide_rows, plan_job
from schemas.job import JobSpec

QUESTIONS = {"q": {"type": "noul", "instructions": "x"}}


def spec(*inputs: object, state: tuple[str, ...] = ("text",), row_id: str | None = None) -> JobSpec:
    return JobSpec(inputs=[str(name) for name in inputs], questions=QUESTIONS, state=list(state), row_id=row_id)


def write(path: Path, columns: dict[str, Any] | None = None, row_group_size: int | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table(columns if columns is not None else {"text": ["a", "b", "c"], "id": [1, 2, 3]})
    pq.write_table(table, path, row_group_size=row_group_size)
    return path


GROUPS = st.lists(st.integers(0, 50), max_size=6)  # rows of each row group of a file


@given(st.lists(GROUPS, max_size=8), st.integers(1, 60))
def test_shards_hold_every_row_exactly_once_in_order(row_counts: list[list[int]], rows_per_shard: int) -> None:
    plans = divide_rows(row_counts, rows_per_shard)
    assert [row for plan in plans for row in range(plan.first_row_number, plan.first_row_number + plan.rows)] == list(
        range(sum(map(sum, row_counts)))
    )
    assert all(0 < plan.rows <= rows_per_shard for plan in plans)


@given(st.lists(GROUPS, max_size=8), st.integers(1, 60))
def test_a_row_group_that_fits_into_a_shard_is_read_for_one_shard_alone(
    row_counts: list[list[int]], rows_per_shard: int
) -> None:
    ends = {plan.first_row_number + plan.rows for plan in divide_rows(row_counts, rows_per_shard)}
    first = 0
    for group in (group for groups in row_counts for group in groups):
        if group <= rows_per_shard:
            assert not ends & set(range(first + 1, first + group))
        first += group


def test_small_files_share_a_shard_up_to_a_number_of_files() -> None:
    plans = divide_rows([[2]] * (MAX_FILES_PER_SHARD + 10), 10_000)
    assert [plan.rows for plan in plans] == [2 * MAX_FILES_PER_SHARD, 20]


def test_files_folders_globs_lists_and_urls_are_found(tmp_path: Path) -> None:
    b, a = write(tmp_path / "in" / "b.parquet"), write(tmp_path / "in" / "deep" / "a.parquet")
    write(tmp_path / "in" / "_temporary" / "x.parquet")
    write(tmp_path / "in" / ".hidden.parquet")
    (tmp_path / "in" / "notes.txt").write_text("no")
    both = [str(b), str(a)]
    assert [file.name for file in find_files([str(b), str(a)])] == both
    assert [file.name for file in find_files([str(tmp_path / "in")])] == both
    assert [file.name for file in find_files([str(tmp_path / "in" / "**" / "[ab].parquet")])] == both
    assert [file.name for file in find_files([f"file://{b}"])] == [f"file://{b}"]
    assert sorted(file.name for file in find_files([f"file://{tmp_path}/in/*.parquet"]))[-1] == f"file://{b}"


def test_row_numbers_run_on_from_file_to_file(tmp_path: Path) -> None:
    write(tmp_path / "1.parquet", {"text": list("abcde")}, row_group_size=2)
    write(tmp_path / "2.parquet", {"text": list("fg")})
    plan = plan_job(spec(tmp_path), 3, [])
    assert [(file.rows, file.first_row_number) for file in plan.files] == [(5, 0), (2, 5)]
    assert [(shard.first_row_number, shard.rows) for shard in plan.shards] == [(0, 2), (2, 3), (5, 2)]
    assert plan.rows == 7


@pytest.mark.parametrize(
    ("columns", "state", "row_id", "problem"),
    [
        ({"body": ["a"]}, ("text",), None, "no column 'text'; it has body"),
        ({"text": ["a"]}, ("text",), "id", "no column 'id'"),
        ({"text": [1]}, ("text",), None, "column 'text' is int64; a state is text"),
        ({"text": [[1]]}, ("text",), None, "column 'text' is list<element: int64>; a state is text, a list of turns"),
        ({"text": ["a"], "id": [[1]]}, ("text",), "id", "row id column 'id' is list<element: int64>; an id is text"),
        ({"text": ["a"], "id": [0.5]}, ("text",), "id", "row id column 'id' is double"),
        (
            {**{f"c{i}": [1] for i in range(500)}, "txt": [1]},
            ("text",),
            None,
            "has 501 columns, the nearest are 'txt'",
        ),
    ],
)
def test_a_file_that_cannot_be_scored_is_refused_by_name(
    tmp_path: Path, columns: dict[str, Any], state: tuple[str, ...], row_id: str | None, problem: str
) -> None:
    file = write(tmp_path / "bad.parquet", columns)
    with pytest.raises(InputError, match=r"bad\.parquet") as raised:
        plan_job(spec(file, state=state, row_id=row_id), 10, [])
    assert problem in str(raised.value)


@pytest.mark.parametrize(
    "columns",
    [
        {"text": ["a", None]},
        {"text": pa.array(["a"], pa.large_string())},
        {"text": pa.array(["a", "a"]).dictionary_encode()},
        {"text": [["hello", "world"]]},
        {"text": [[{"role": "user", "content": "hi"}]]},
    ],
)
def test_text_and_conversations_are_states(tmp_path: Path, columns: dict[str, Any]) -> None:
    assert plan_job(spec(write(tmp_path / "f.parquet", columns)), 10, []).rows == len(columns["text"])


def test_several_columns_make_an_object_of_any_types(tmp_path: Path) -> None:
    columns = {"subject": ["a"], "day": [datetime.date(2026, 1, 2)], "tags": [["x"]]}
    assert plan_job(spec(write(tmp_path / "f.parquet", columns), state=tuple(columns)), 10, [])


def test_files_whose_columns_differ_are_refused_with_both_names(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", {"text": ["a"], "id": ["x"]})
    write(tmp_path / "b.parquet", {"text": ["a"], "id": [7]})
    with pytest.raises(InputError, match=r"b\.parquet: columns differ from .*a\.parquet: id is int64, not string"):
        plan_job(spec(tmp_path, row_id="id"), 10, [])


def test_other_columns_may_differ(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", {"text": ["a"], "x": [1]})
    write(tmp_path / "b.parquet", {"text": ["a"], "x": ["1"]})
    assert len(plan_job(spec(tmp_path), 10, []).files) == 2


def test_missing_empty_and_broken_inputs_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 but no more")
    (tmp_path / "zero.parquet").touch()
    cases = {
        tmp_path / "none.parquet": "no such file or folder",
        tmp_path / "empty": "no Parquet file there",
        tmp_path / "*.csv": "no file matches",
        tmp_path / "broken.parquet": "is Parquet that is cut off or damaged",
        tmp_path / "zero.parquet": "is an empty file",
        f"file://{tmp_path}/none.parquet": "cannot be read",
        "nosuch://host/file": "unknown kind of URL",
    }
    for name, problem in cases.items():
        with pytest.raises(InputError, match=problem) as raised:
            plan_job(spec(name), 10, [])
        assert str(name) in str(raised.value)


def test_a_file_named_twice_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet")
    with pytest.raises(InputError, match="named twice"):
        find_files([str(file), str(tmp_path)])


def test_a_url_with_a_secret_is_refused_without_showing_it() -> None:
    with pytest.raises(InputError, match=r"names a user|cannot set") as raised:
        find_files(["s3://key:hunter2@bucket/a.parquet"])
    assert "hunter2" not in str(raised.value)


def test_roots_hold_against_parent_folders_and_symlinks(tmp_path: Path) -> None:
    inside, outside = write(tmp_path / "in" / "a.parquet"), write(tmp_path / "out" / "b.parquet")
    link = tmp_path / "in" / "link.parquet"
    link.symlink_to(outside)
    root = str(tmp_path / "in")
    check_root(str(inside), [root])
    check_root("s3://bucket/data/x.parquet", ["s3://bucket/data/"])
    for name in (
        str(outside),
        str(link),
        os.path.join(root, "..", "out", "b.parquet"),  # noqa: PTH118
        f"{root}-2/a.parquet",
        "s3://bucket/data-2/x.parquet",
        "s3://bucket/data/../x.parquet",
    ):
        with pytest.raises(InputError, match="not under an input root"):
            check_root(name, [root, "s3://bucket/data"])


def test_a_wrong_column_of_a_wide_file_is_a_short_message(tmp_path: Path) -> None:
    names = [*(f"feature_{i}_of_the_customer" for i in range(2000)), "ticket_text", "x" * 10_000]
    pq.write_table(pa.table({name: ["a"] for name in names}), tmp_path / "wide.parquet")
    for column, shown in (("ticket_txt", "the nearest are 'ticket_text'"), ("zzz", "such as 'feature_0_of")):
        with pytest.raises(InputError, match=f"no column '{column}'; it has 2,002 columns, {shown}") as raised:
            plan_job(spec(tmp_path / "wide.parquet", state=(column,)), 10, [])
        assert len(str(raised.value)) < 600


def test_a_file_without_rows_is_a_part_like_any_other_and_alone_no_shard(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", {"text": ["a"], "id": ["x"]})
    write(tmp_path / "b.parquet", {"text": pa.array([], pa.string()), "id": pa.array([], pa.string())})
    write(tmp_path / "c.parquet", {"text": ["c"], "id": ["z"]})
    write(tmp_path / "quiet" / "d.parquet", {"text": pa.nulls(0), "id": pa.nulls(0)})
    plan = plan_job(spec(tmp_path, row_id="id"), 10, [])
    assert (plan.rows, len(plan.shards), len(plan.files)) == (2, 1, 4)
    assert plan_job(spec(tmp_path / "quiet"), 10, []).shards == []


ALIKE = [
    (pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string()), pa.null(), pa.binary()),
    (pa.int8(), pa.int32(), pa.int64(), pa.uint16(), pa.float32(), pa.float64(), pa.null()),
    (pa.timestamp("s"), pa.timestamp("us"), pa.timestamp("ns")),
    (pa.timestamp("ms", "UTC"), pa.timestamp("us", "Europe/Berlin")),
    (pa.decimal128(5, 2), pa.decimal128(20, 4)),
    (pa.list_(pa.string()), pa.large_list(pa.large_string()), pa.list_(pa.null())),
    (
        pa.struct([("a", pa.int8()), ("b", pa.string())]),
        pa.struct([("b", pa.large_string()), ("a", pa.int64())]),
        pa.struct([("a", pa.null()), ("b", pa.null())]),
    ),
    (pa.map_(pa.string(), pa.int8()), pa.map_(pa.large_string(), pa.int64())),
]


@pytest.mark.parametrize("kinds", ALIKE, ids=lambda kinds: str(kinds[0]))
def test_parts_whose_values_mean_the_same_are_one_table(tmp_path: Path, kinds: tuple[pa.DataType, ...]) -> None:
    for number, kind in enumerate((*kinds, *reversed(kinds))):
        write(tmp_path / f"{number:02d}.parquet", {"text": ["a"], "x": pa.nulls(1, kind)})
    assert plan_job(spec(tmp_path, state=("text", "x")), 10, []).rows == 2 * len(kinds)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (pa.string(), pa.int64()),
        (pa.bool_(), pa.int8()),
        (pa.timestamp("s"), pa.timestamp("s", "UTC")),
        (pa.date32(), pa.timestamp("s")),
        (pa.list_(pa.string()), pa.string()),
        (pa.list_(pa.string()), pa.list_(pa.int8())),
        (pa.struct([("a", pa.int8())]), pa.struct([("b", pa.int8())])),
        (pa.struct([("a", pa.int8())]), pa.struct([("a", pa.int8()), ("b", pa.int8())])),
    ],
)
def test_parts_whose_values_differ_in_meaning_are_refused_whatever_lies_between(
    tmp_path: Path, one: pa.DataType, other: pa.DataType
) -> None:
    for name, kind in (("a", pa.null()), ("b", one), ("c", pa.null()), ("d", other)):
        write(tmp_path / f"{name}.parquet", {"text": ["a"], "x": pa.nulls(1, kind)})
    with pytest.raises(InputError, match=r"d\.parquet: columns differ from .*b\.parquet: x is "):
        plan_job(spec(tmp_path, state=("text", "x")), 10, [])


def test_a_column_that_one_part_lacks_is_refused_with_the_file(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", {"text": ["a"], "x": [1]})
    write(tmp_path / "b.parquet", {"text": ["a"]})
    with pytest.raises(InputError, match=r"b\.parquet: no column 'x'; it has text"):
        plan_job(spec(tmp_path, state=("text", "x")), 10, [])


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (pa.map_(pa.list_(pa.int8()), pa.int8()), "the keys of a JSON object are text"),
        (pa.map_(pa.float64(), pa.int8()), "the keys of a JSON object are text"),
    ],
)
def test_a_type_of_which_no_value_has_json_is_refused_before_any_row_is_read(
    tmp_path: Path, kind: pa.DataType, problem: str
) -> None:
    file = write(tmp_path / "a.parquet", {"text": ["a"], "x": pa.nulls(1, kind)})
    with pytest.raises(InputError, match=problem):
        plan_job(spec(file, state=("text", "x")), 10, [])
