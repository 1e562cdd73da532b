import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sqlalchemy as sa

from jobs.engine_options import EngineOptions
from jobs.errors import InputError
from jobs.planning import plan_job
from jobs.store import lifecycle, reports
from jobs.store.database import Database
from jobs.store.leases import RowError, claim_shard, fail_shard, finish_shard, save_row_errors
from jobs.store.lifecycle import JobOptions
from jobs.store.recovery import list_queued
from jobs.store.row_ids import with_id_counts
from jobs.submission import build_spec
from schemas.job import JobInfo, JobSpec
from schemas.message import ShardMessage
from schemas.tables import row_errors
from tests.arrow_values import not_utf8

QUESTIONS = {"q": {"type": "noul", "instructions": "x"}}


def spec(folder: Path) -> JobSpec:
    return JobSpec(inputs=[str(folder)], questions=QUESTIONS, state=["text"], row_id="id", unique_ids=True)


def write(path: Path, ids: Any) -> None:
    path.parent.mkdir(exist_ok=True, parents=True)
    pq.write_table(pa.table({"text": ["a"] * len(ids), "id": ids}), path)


def test_ids_of_all_files_are_compared_as_text(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", pa.array([1, 2, 3], pa.int32()))
    write(tmp_path / "b.parquet", pa.array([4, 5], pa.int64()))
    assert plan_job(spec(tmp_path), 10, []).rows == 5
    write(tmp_path / "c.parquet", pa.array([7, 2], pa.uint8()))
    with pytest.raises(InputError, match=r"1 ids come more than once, as '2' in row 1 of .*a\.parquet and row 1 "):
        plan_job(spec(tmp_path), 10, [])


def test_rows_without_an_id_that_can_be_read_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", not_utf8())
    with pytest.raises(InputError, match=r"3 rows have no id, the first is row 1 of .*a\.parquet"):
        plan_job(spec(tmp_path), 10, [])


def test_a_folder_is_no_id_of_two_rows(tmp_path: Path) -> None:
    folder = tmp_path / "id=7"
    folder.mkdir()
    pq.write_table(pa.table({"text": ["a", "b"]}), folder / "a.parquet")
    with pytest.raises(InputError, match="1 ids come more than once, as '7' in row 0 of"):
        plan_job(spec(tmp_path), 10, [])


def test_unique_ids_need_a_column() -> None:
    asked: dict[str, Any] = {
        "engine_options": EngineOptions(),
        "inputs": "a.parquet",
        "questions": QUESTIONS,
        "state": "text",
        "checkpoint": "english",
    }
    with pytest.raises(InputError, match="no row id column"):
        build_spec(**asked, unique_ids=True)


def test_ids_are_counted_once_when_the_job_has_ended(db: Database, tmp_path: Path) -> None:
    ids = ["x", None, "x", "y", "x"]
    write(tmp_path / "a.parquet", ids)
    asked = spec(tmp_path).model_copy(update={"unique_ids": False})
    job_id = lifecycle.create_job(db, asked, JobOptions(), plan_job(asked, 10, []))
    (queued,) = list_queued(db, job_id)
    claim = claim_shard(db, ShardMessage(job_id=job_id, shard_id=queued.shard_id), "w", 60)
    assert claim is not None
    assert with_id_counts(db, reports.get_job(db, job_id)).null_ids is None  # it runs
    save_row_errors(db, claim, 60, [RowError(row, "*", row_id, "no_text", "m") for row, row_id in enumerate(ids)])
    save_row_errors(db, claim, 60, [RowError(0, "q", "x", "not_finite", "m")])  # counted once all the same
    finish_shard(db, claim)
    for _ in range(2):
        job = with_id_counts(db, reports.get_job(db, job_id))
        assert (job.null_ids, job.repeated_ids) == (1, 3)
        with db.write() as connection:  # counted before: this is not looked at again
            connection.execute(sa.delete(row_errors))


def test_a_count_from_before_a_retry_is_not_kept(db: Database, tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", ["x"])
    asked = spec(tmp_path)
    job_id = lifecycle.create_job(db, asked, JobOptions(), plan_job(asked, 10, []))

    def fail() -> JobInfo:
        (queued,) = list_queued(db, job_id)
        claim = claim_shard(db, ShardMessage(job_id=job_id, shard_id=queued.shard_id), "w", 60)
        assert claim is not None
        fail_shard(db, claim, "boom", 1)
        return reports.get_job(db, job_id)

    before = fail()
    time.sleep(0.01)  # SQLite's clock has milliseconds
    lifecycle.retry_job(db, job_id, None)
    assert fail().status == before.status
    assert with_id_counts(db, before).null_ids == 0
    assert reports.get_job(db, job_id).null_ids is None


def test_ids_are_counted_in_a_database_that_may_only_be_read(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", ["x"])
    asked = spec(tmp_path)
    with closing(Database(f"sqlite:///{tmp_path / 'test.db'}")) as db:
        db.migrate()
        job_id = lifecycle.create_job(db, asked, JobOptions(), plan_job(asked, 10, []))
        lifecycle.request_cancel(db, job_id)
    with closing(Database(f"sqlite:///file:{tmp_path / 'test.db'}?mode=ro&uri=true")) as db:
        job = reports.get_job(db, job_id)
        assert job.is_finished
        assert (job.null_ids, with_id_counts(db, job).null_ids) == (None, 0)
