"""Errors and limits: what fails a job, what does not, and what a retry scores again."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

import jobs
from schemas.job import TransitionError
from schemas.tables import batches, results, row_errors, shards
from tests.conftest import empty_database
from tests.faults.poisoned import check_rows, finish, submit
from tests.faults.report import FaultReport
from tests.integration.service import QUESTIONS, Service, make_texts, serve, write_tickets


@pytest.fixture(scope="module")
def service(
    postgres_admin: sa.Engine, redis_url: str, tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path
) -> Iterator[Service]:
    """One warm worker for the tests of this file."""
    folder = tmp_path_factory.mktemp("limits")
    options = {"checkpoint": str(tiny_checkpoint), "resend_s": 1.0, "max_attempts": 2, "rows_per_shard": 50}
    with empty_database(postgres_admin) as url, serve(url, redis_url, folder, **options) as one:
        one.start_worker()
        yield one


def test_a_job_over_its_limit_of_row_errors_fails_and_a_retry_scores_the_rest_alone(
    service: Service, report: FaultReport
) -> None:
    texts: list[str | None] = [*make_texts(200)]
    for row in (0, 60, 61, 130):
        texts[row] = None
    path = write_tickets(service.folder / "over" / "a.parquet", texts)
    job = finish(service, submit(service, path, max_row_errors=2))
    assert job.status is jobs.JobStatus.FAILED
    assert "rows failed, more than max_row_errors=2; for example row" in (job.error or "")
    assert 2 < job.row_errors <= 4
    before = {row.id for row in service.query(sa.select(batches.c.id).where(batches.c.job_id == job.id))}
    saved = answers_of(service, job)
    assert len(saved) < 196 * 3
    with pytest.raises(TransitionError, match="raise max_row_errors=2 to go on"):
        jobs.retry(job.id, settings=service.settings)
    jobs.retry(job.id, max_row_errors=4, settings=service.settings)
    job = finish(service, job)
    assert job.status is jobs.JobStatus.SUCCEEDED
    check_rows(service, job, dict.fromkeys((0, 60, 61, 130), "null_state"))
    after = answers_of(service, job)
    assert saved.items() <= after.items()  # not one saved answer was scored again, or changed
    new = service.query(sa.select(sa.func.sum(batches.c.sequences)).where(batches.c.id.not_in(before or {0})))
    assert new[0][0] == 196 * 3 - len(saved)
    report.record("too many row errors, then a retry", times=4, rows=200, lost=0, doubled=0, rescored=0, recover_s=None)


def test_a_shard_that_cannot_be_read_runs_out_of_attempts_and_the_others_are_answered(service: Service) -> None:
    good = write_tickets(service.folder / "torn" / "a.parquet", make_texts(50))
    torn = write_tickets(service.folder / "torn" / "b.parquet", make_texts(2000), row_group_size=2000)
    whole, times = torn.read_bytes(), torn.stat()
    middle = len(whole) // 4
    with service.holding_messages():  # so that nothing is read before it is torn
        job = submit(service, good.parent)
        torn.write_bytes(whole[:middle] + b"\0" * 2000 + whole[middle + 2000 :])  # the same size, and the same time
        set_times(torn, times.st_mtime_ns)
    job = finish(service, job)
    assert job.status is jobs.JobStatus.FAILED
    assert "shards ran out of attempts" in (job.error or "")
    assert job.answers >= 150
    ended = service.query(sa.select(shards).where(shards.c.job_id == job.id, shards.c.status == "failed"))
    assert ended
    assert {row.failures for row in ended} == {2}
    # Mended, a retry scores what failed, and nothing else.
    saved = answers_of(service, job)
    torn.write_bytes(whole)
    set_times(torn, times.st_mtime_ns)
    jobs.retry(job.id, settings=service.settings)
    job = finish(service, job)
    assert (job.status, job.answers) == (jobs.JobStatus.SUCCEEDED, 2050 * 3)
    assert saved.items() <= answers_of(service, job).items()


def test_what_failed_is_null_and_what_a_type_has_not_is_null_never_nought(service: Service) -> None:
    path = write_tickets(service.folder / "null" / "a.parquet", ["", None, *make_texts(20)])
    job = finish(service, submit(service, path))
    check_rows(service, job, {1: "null_state"})
    columns = {"noul": "noul", "score": "score", "choice": "choice"}
    for row in service.query(sa.select(results).where(results.c.job_id == job.id)):
        filled = [name for name in columns if getattr(row, name) is not None]
        assert filled == [row.type]
    (error,) = service.query(sa.select(row_errors).where(row_errors.c.job_id == job.id))
    assert (error.question, error.row_id) == ("*", "t1")


def answers_of(service: Service, job: jobs.JobInfo) -> dict[tuple[int, str], tuple[object, ...]]:
    found = service.query(sa.select(results).where(results.c.job_id == job.id))
    assert len({(row.row_number, row.question) for row in found}) == len(found)
    assert {row.question for row in found} <= set(QUESTIONS)
    return {
        (row.row_number, row.question): (row.choice, row.score, row.noul, row.confidence, row.batch_id) for row in found
    }


def set_times(path: Path, modified_ns: int) -> None:
    os.utime(path, ns=(modified_ns, modified_ns))
