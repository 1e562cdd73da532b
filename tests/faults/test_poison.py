"""Rows that break what scores them: singled out and set aside with the reason, and every neighbour answered."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

import jobs
from schemas.tables import batches, row_errors, shards, workers
from tests.faults import poisoned
from tests.faults.poisoned import WORDS, check_rows, finish, make_faulty, submit
from tests.faults.report import FaultReport
from tests.integration.service import QUESTIONS, Service, make_texts, serve, write_tickets
from tests.processes import is_running, parent_of

ATTEMPTS = 2


@pytest.fixture
def service(
    monkeypatch: pytest.MonkeyPatch, postgres_url: str, redis_url: str, tmp_path: Path, tiny_checkpoint: Path
) -> Iterator[Service]:
    """A service whose workers' backend breaks at certain words, and which gives up on a row after two deaths."""
    make_faulty(monkeypatch, tmp_path, tiny_checkpoint)
    quick = {"rows_per_shard": 100, "max_attempts": ATTEMPTS, "batch_timeout_s": 20.0, "resend_s": 2.0}
    quick["log_level"] = "DEBUG"
    with serve(postgres_url, redis_url, tmp_path, checkpoint=str(tiny_checkpoint), **quick) as one:
        yield one


def write(service: Service, count: int, words: dict[int, str]) -> Path:
    """A file of tickets, some with the words of faults in their texts."""
    texts = make_texts(count)
    for row, deed in words.items():
        texts[row] = f"{WORDS[deed]} {texts[row]}"
    return write_tickets(service.folder / "in" / "a.parquet", list(texts))


def test_batches_without_room_are_split_and_their_records_say_so(
    service: Service, monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Path
) -> None:
    make_faulty(monkeypatch, service.folder, tiny_checkpoint, most=3)
    service.start_worker()
    job = finish(service, submit(service, write(service, 60, {})))
    assert job.status is jobs.JobStatus.SUCCEEDED
    check_rows(service, job, {})
    recorded = service.query(sa.select(batches.c.sequences, batches.c.memory_splits, batches.c.cpu_sequences))
    assert max(row.sequences for row in recorded) > 3
    for row in recorded:
        assert row.memory_splits >= -(-row.sequences // 3) - 1, row
        assert (row.memory_splits == 0) == (row.sequences <= 3)
        assert row.cpu_sequences == 0


def count_deaths(service: Service) -> int:
    """Claims that ended in the death of their process, of all shards."""
    (row,) = service.query(sa.select(sa.func.sum(shards.c.attempt), sa.func.count()))
    return int(row[0]) - int(row[1])


def test_a_row_that_kills_the_process_is_set_aside_and_its_neighbours_are_answered(
    service: Service, report: FaultReport
) -> None:
    service.start_worker()
    job = finish(service, submit(service, write(service, 150, {30: "kill"})))
    assert job.status is jobs.JobStatus.SUCCEEDED
    check_rows(service, job, {30: "killed_worker"})
    (error,) = service.query(sa.select(row_errors))
    assert re.fullmatch(
        "2 processes died of scoring this row alone, the last: the worker process died: killed by SIGKILL.*",
        error.message,
    )
    deaths = count_deaths(service)
    assert 3 <= deaths <= 3 + ATTEMPTS  # one of all rows, one or two of some, and two alone
    # The count is the shard's, and its search is over; no shard failed, and the other shard never paid for it.
    first, second = service.query(sa.select(shards).order_by(shards.c.number))
    assert (first.status, first.failures, first.suspect_first_row) == ("done", 0, None)
    assert (second.status, second.attempt, second.deaths) == ("done", 1, 0)
    poisoned.record(report, "a text that kills the process", deaths, service, job)


def test_texts_that_raise_are_set_aside_within_the_process_and_nothing_dies(
    service: Service, report: FaultReport
) -> None:
    process = service.start_worker()
    job = finish(service, submit(service, write(service, 150, {3: "fail", 77: "exhaust", 78: "exhaust", 149: "fail"})))
    assert job.status is jobs.JobStatus.SUCCEEDED
    check_rows(service, job, {3: "scoring_failed", 77: "out_of_memory", 78: "out_of_memory", 149: "scoring_failed"})
    messages = {row.message for row in service.query(sa.select(row_errors))}
    assert messages == {"RuntimeError: this text cannot be scored", "MemoryError: cannot allocate 1 TiB"}
    assert count_deaths(service) == 0
    assert process.poll() is None
    poisoned.record(report, "a text that raises, or runs out of memory", 4, service, job)


@pytest.mark.faults
def test_a_row_that_hangs_in_c_is_ended_at_the_deadline_and_set_aside(service: Service, report: FaultReport) -> None:
    service.settings = service.settings.model_copy(update={"batch_timeout_s": 8.0})
    service.start_worker()
    job = finish(service, submit(service, write(service, 60, {59: "hang"})))
    check_rows(service, job, {59: "killed_worker"})
    (error,) = service.query(sa.select(row_errors))
    assert "scoring a batch took longer than LAYA_BATCH_BATCH_TIMEOUT_S=8" in error.message
    poisoned.record(report, "a text that hangs in C", count_deaths(service), service, job)


@pytest.mark.faults
def test_a_batch_that_hangs_while_its_orphaned_worker_drains_is_ended(service: Service) -> None:
    service.settings = service.settings.model_copy(update={"batch_timeout_s": 5.0})
    supervisor = service.start_worker()
    (scoring,) = service.query(sa.select(workers.c.pid))
    parent = parent_of(scoring.pid)
    submit(service, write(service, 1, {0: "hang"}))
    service.wait_for(lambda: f"scoring {len(QUESTIONS)} sequences" in service.log)
    supervisor.kill()
    service.wait_for(lambda: not is_running(parent))
    assert "ending the scoring process: scoring a batch took longer than LAYA_BATCH_BATCH_TIMEOUT_S=5" in service.log


@pytest.mark.faults
def test_a_row_that_takes_all_memory_is_ended_at_the_limit_and_set_aside(service: Service, report: FaultReport) -> None:
    service.settings = service.settings.model_copy(update={"max_rss_bytes": 900_000_000})
    service.start_worker()
    job = finish(service, submit(service, write(service, 60, {5: "swell"})))
    check_rows(service, job, {5: "killed_worker"})
    (error,) = service.query(sa.select(row_errors))
    assert "it had more than 900000000 bytes in memory (max_rss_bytes)" in error.message
    poisoned.record(report, "a text that takes all memory", count_deaths(service), service, job)


@pytest.mark.faults
def test_a_row_that_loses_the_device_ends_the_process_which_could_score_no_more(
    service: Service, report: FaultReport
) -> None:
    service.start_worker()
    job = finish(service, submit(service, write(service, 60, {20: "lose_device"})))
    check_rows(service, job, {20: "killed_worker"})
    (error,) = service.query(sa.select(row_errors))
    assert "CUDA error: an illegal memory access was encountered; and then a small batch failed, too" in error.message
    poisoned.record(report, "a text that loses the device", count_deaths(service), service, job)


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_several_kinds_of_poison_in_one_shard_are_each_set_aside(service: Service, report: FaultReport) -> None:
    service.start_worker()
    words = {0: "kill", 1: "crash", 40: "fail", 41: "kill", 99: "crash"}
    job = finish(service, submit(service, write(service, 100, words)), timeout_s=700.0)  # more than a dozen boots
    assert job.status is jobs.JobStatus.SUCCEEDED
    killed = dict.fromkeys(words, "killed_worker")
    check_rows(service, job, {**killed, 40: "scoring_failed"})
    poisoned.record(report, "five texts of three kinds in one shard", count_deaths(service), service, job)


@pytest.mark.faults
def test_a_shard_in_which_every_row_kills_ends_and_the_others_are_answered(
    service: Service, report: FaultReport
) -> None:
    service.settings = service.settings.model_copy(update={"max_attempts": 1})
    service.start_worker()
    path = write(service, 200, dict.fromkeys(range(100), "kill"))
    job = finish(service, submit(service, path))
    assert job.status is jobs.JobStatus.FAILED
    assert "1 of 2 shards ran out of attempts: the worker process died" in (job.error or "")
    assert job.answers == 300
    dead, _ = service.query(sa.select(shards).order_by(shards.c.number))
    assert (dead.status, dead.deaths) == ("failed", 10)
    assert job.row_errors < 10
    report.record("a shard whose every text kills", times=10, rows=100, lost=0, doubled=0, rescored=0, recover_s=None)
