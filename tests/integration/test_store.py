"""Every promise of the store that needs no worker: on SQLite, PostgreSQL, and PostgreSQL behind PgBouncer."""

import sqlite3
import threading
import time
import traceback
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from jobs.engine_options import EngineOptions
from jobs.errors import (
    DatabaseConflictError,
    DatabaseError,
    DatabaseRefusedError,
    IdempotencyError,
    JobNotFoundError,
    LeaseLostError,
)
from jobs.store import leases, lifecycle, recovery, reports, suspects, workers
from jobs.store.database import Database, seconds_from_now
from jobs.store.leases import BatchRecord, RowError
from jobs.store.lifecycle import JobOptions
from jobs.store.recovery import EndedLeases, Unclaimed
from jobs.submission import build_spec, check_same
from schemas.job import Claim, JobSpec, JobStatus, TransitionError
from schemas.message import ShardMessage
from schemas.tables import MESSAGE_CHARS, batches, jobs, metadata, results, row_errors, shards
from schemas.tables import workers as table_of_workers
from tests.plans import even_plan

ROWS = 10  # in each shard
LEASE_S = 60.0


@pytest.fixture(params=["sqlite", "postgresql", "pgbouncer"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'test.db'}"
    url = str(request.getfixturevalue("postgres_url"))
    return url if request.param == "postgresql" else str(request.getfixturevalue("pgbouncer").before(url))


def make_job(db: Database, shard_count: int = 2, key: str | None = None, **spec: Any) -> int:
    asked = JobSpec(
        **{"inputs": ["/a"], "questions": {"q": {"type": "noul", "instructions": "x"}}, "state": ["text"], **spec}
    )
    return lifecycle.create_job(db, asked, JobOptions("job", 5, key), even_plan(shard_count, ROWS))


def shard_ids(db: Database, job_id: int) -> list[int]:
    with db.read() as connection:
        return list(
            connection.scalars(sa.select(shards.c.id).where(shards.c.job_id == job_id).order_by(shards.c.number))
        )


def claim(db: Database, job_id: int, number: int = 0, lease_s: float = LEASE_S, owner: str = "w") -> Claim | None:
    message = ShardMessage(job_id=job_id, shard_id=shard_ids(db, job_id)[number])
    return leases.claim_shard(db, message, owner, lease_s)


def must_claim(db: Database, job_id: int, number: int = 0, lease_s: float = LEASE_S) -> Claim:
    claimed = claim(db, job_id, number, lease_s)
    assert claimed is not None
    return claimed


def record(db: Database) -> BatchRecord:
    worker_id = workers.start_worker(db, workers.WorkerStart("w", "h", 1, 1, "cpu", "english", "auto"))
    return BatchRecord(worker_id, "eager", None, "cpu", "float32", 32, 5, 100, 160, 1.0, 2.0, 3.0, 4.0)


def answers(first: int, count: int) -> list[dict[str, Any]]:
    return [
        {
            "row_number": first + i,
            "row_id": f"id{first + i}",
            "question": "q",
            "type": "noul",
            "noul": 0.25,
            "probabilities": {"false": 0.75, "true": 0.25},
            "confidence": 0.75,
            "answer_confidence": 0.75,
            "act_probability": 1.0,
            "state_tokens_dropped": 0,
        }
        for i in range(count)
    ]


def test_the_migrations_make_the_tables_that_the_code_describes(db: Database) -> None:
    with db.read() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    db.migrate()
    db.check_schema()


def test_a_database_without_tables_is_refused_with_what_to_run(database_url: str) -> None:
    empty = Database(database_url)
    with pytest.raises(DatabaseError, match="run `laya-batch migrate`"):
        empty.check_schema()
    empty.close()


def test_two_programs_may_migrate_at_once(database_url: str) -> None:
    def migrate(_: int) -> None:
        database = Database(database_url)
        database.migrate()
        database.check_schema()
        database.close()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(migrate, range(4)))


def test_a_shard_is_claimed_once_however_often_its_message_comes(db: Database) -> None:
    job_id = make_job(db)
    with ThreadPoolExecutor(8) as threads:
        claimed = list(threads.map(lambda i: claim(db, job_id, 0, owner=f"w{i}"), range(16)))
    assert sum(one is not None for one in claimed) == 1
    assert reports.get_job(db, job_id).status is JobStatus.RUNNING


def test_a_message_for_another_jobs_shard_or_for_nothing_claims_nothing(db: Database) -> None:
    one, two = make_job(db), make_job(db)
    assert leases.claim_shard(db, ShardMessage(job_id=one, shard_id=shard_ids(db, two)[0]), "w", LEASE_S) is None
    assert leases.claim_shard(db, ShardMessage(job_id=99, shard_id=1), "w", LEASE_S) is None


def test_answers_are_saved_with_their_batch_and_skipped_when_claimed_again(db: Database) -> None:
    job_id = make_job(db, 1)
    first = must_claim(db, job_id)
    assert leases.save_batch(db, first, LEASE_S, record(db), answers(0, 4)) is False
    assert leases.save_row_errors(db, first, LEASE_S, [RowError(4, "*", "id4", "null_state", "is null")]) is False
    leases.give_back(db, first)
    second = must_claim(db, job_id)
    assert second.attempt == first.attempt + 1
    assert leases.saved_pairs(db, second) == {*((i, "q") for i in range(4)), (4, "*")}
    leases.save_batch(db, second, LEASE_S, record(db), answers(5, 5))
    assert leases.finish_shard(db, second) is JobStatus.SUCCEEDED
    job = reports.get_job(db, job_id)
    assert (job.answers, job.unanswered, job.row_errors, job.rows_done) == (9, 1, 1, 10)
    with db.read() as connection:
        joined = sa.select(sa.func.count(), sa.func.min(batches.c.write_ms)).select_from(results.join(batches))
        count, write_ms = connection.execute(joined).one()
        assert count == 9
        assert write_ms > 0


def writes_of(db: Database, claimed: Claim) -> list[Callable[[], object]]:
    """Everything that a worker writes under its claim."""
    return [
        lambda: leases.save_batch(db, claimed, LEASE_S, record(db), answers(0, 3)),
        lambda: leases.save_row_errors(db, claimed, LEASE_S, [RowError(0, "*", None, "c", "m")]),
        lambda: leases.hold_checkpoint(db, claimed, "aaa", None),
        lambda: leases.hold_route(db, claimed, "english", "aaa", None),
        lambda: leases.renew_lease(db, claimed, LEASE_S),
        lambda: suspects.mark_suspects(db, claimed, LEASE_S, 0, 1),
        lambda: suspects.clear_suspects(db, claimed, LEASE_S),
        lambda: suspects.record_death(db, claimed, "late", 3),
        lambda: leases.finish_shard(db, claimed),
        lambda: leases.give_back(db, claimed),
        lambda: leases.stop_shard(db, claimed),
        lambda: leases.fail_shard(db, claimed, "late", 3),
    ]


def test_a_worker_that_lost_its_lease_changes_nothing(db: Database) -> None:
    job_id = make_job(db, 1)
    stale = must_claim(db, job_id, lease_s=-1)
    assert [lost.shard_id for lost in recovery.expire_leases(db, EndedLeases(recovery.read_clock(db)), 3)] == [
        stale.shard_id
    ]
    fresh = must_claim(db, job_id)
    for write in writes_of(db, stale):
        with pytest.raises(LeaseLostError):
            write()
    assert leases.saved_pairs(db, fresh) == set()
    assert leases.finish_shard(db, fresh) is JobStatus.SUCCEEDED
    with pytest.raises(LeaseLostError):
        leases.fail_shard(db, stale, "later still", 3)
    assert reports.get_job(db, job_id).status is JobStatus.SUCCEEDED


def test_the_id_of_a_deleted_job_is_never_given_again_and_its_worker_writes_nothing(db: Database) -> None:
    deleted = must_claim(db, make_job(db, 1))
    worker_id = record(db).worker_id
    with db.write() as connection:
        connection.execute(sa.delete(jobs).where(jobs.c.id == deleted.job_id))
        connection.execute(sa.delete(table_of_workers).where(table_of_workers.c.id == worker_id))
    again = must_claim(db, make_job(db, 1))
    assert (again.job_id > deleted.job_id, again.shard_id > deleted.shard_id) == (True, True)
    assert record(db).worker_id > worker_id
    for write in writes_of(db, deleted):
        with pytest.raises(LeaseLostError):
            write()
    assert leases.saved_pairs(db, again) == set()
    assert leases.finish_shard(db, again) is JobStatus.SUCCEEDED


def test_a_claim_of_another_worker_changes_nothing_though_shard_and_attempt_are_the_same(db: Database) -> None:
    held = must_claim(db, make_job(db, 1))
    for write in writes_of(db, replace(held, owner="other")):
        with pytest.raises(LeaseLostError):
            write()
    assert leases.saved_pairs(db, held) == set()
    assert leases.finish_shard(db, held) is JobStatus.SUCCEEDED


def test_an_answer_is_never_doubled(db: Database) -> None:
    claimed = must_claim(db, make_job(db, 1))
    leases.save_batch(db, claimed, LEASE_S, record(db), answers(0, 3))
    with pytest.raises(DatabaseConflictError):
        leases.save_batch(db, claimed, LEASE_S, record(db), answers(2, 3))
    assert len(leases.saved_pairs(db, claimed)) == 3
    assert reports.get_job(db, claimed.job_id).answers == 3


def test_a_job_finishes_exactly_once_when_its_shards_end_together(db: Database) -> None:
    job_id = make_job(db, 6)
    claims = [must_claim(db, job_id, number) for number in range(6)]
    barrier = threading.Barrier(6)

    def finish(one: Claim) -> JobStatus | None:
        barrier.wait()
        return leases.finish_shard(db, one)

    with ThreadPoolExecutor(6) as threads:
        outcomes = list(threads.map(finish, claims))
    assert sorted(outcomes, key=str) == [*[None] * 5, JobStatus.SUCCEEDED]


def test_a_shard_out_of_attempts_fails_its_job_after_the_others_have_ended(db: Database) -> None:
    job_id = make_job(db, 2)
    for attempt in range(2):
        leases.fail_shard(db, must_claim(db, job_id), f"boom {attempt}", 2)
    assert claim(db, job_id) is None
    assert reports.get_job(db, job_id).status is JobStatus.RUNNING
    assert leases.finish_shard(db, must_claim(db, job_id, 1)) is JobStatus.FAILED
    assert "1 of 2 shards ran out of attempts: boom 1" in (reports.get_job(db, job_id).error or "")


def test_retry_queues_only_what_was_left_and_success_is_final(db: Database) -> None:
    job_id = make_job(db, 2)
    leases.finish_shard(db, must_claim(db, job_id, 1))
    leases.fail_shard(db, must_claim(db, job_id), "boom", 1)
    lifecycle.retry_job(db, job_id, None)
    assert [queued.shard_id for queued in recovery.list_queued(db, job_id)] == shard_ids(db, job_id)[:1]
    assert leases.finish_shard(db, must_claim(db, job_id)) is JobStatus.SUCCEEDED
    for change in (lambda: lifecycle.retry_job(db, job_id, None), lambda: lifecycle.request_cancel(db, job_id)):
        with pytest.raises(TransitionError, match="cannot go from succeeded"):
            change()


def test_cancel_ends_waiting_shards_now_and_running_ones_at_their_next_batch(db: Database) -> None:
    job_id = make_job(db, 3)
    running = must_claim(db, job_id)
    lifecycle.request_cancel(db, job_id)
    assert reports.get_job(db, job_id).status is JobStatus.RUNNING
    assert claim(db, job_id, 1) is None
    assert leases.save_batch(db, running, LEASE_S, record(db), answers(0, 2)) is True
    assert leases.stop_shard(db, running) is JobStatus.CANCELLED
    assert reports.get_job(db, job_id).answers == 2


def test_a_cancelled_jobs_shard_is_not_queued_again(db: Database) -> None:
    for end in (
        lambda claimed: leases.give_back(db, claimed),
        lambda claimed: leases.fail_shard(db, claimed, "boom", 3),
        lambda claimed: recovery.release_leases(db, "w", 3),
    ):
        job_id = make_job(db, 1)
        claimed = must_claim(db, job_id)
        lifecycle.request_cancel(db, job_id)
        end(claimed)
        assert reports.get_job(db, job_id).status is JobStatus.CANCELLED


def test_too_many_row_errors_fail_the_job_and_stop_the_rest(db: Database) -> None:
    job_id = make_job(db, 3, max_row_errors=2)
    one, two = must_claim(db, job_id, 0), must_claim(db, job_id, 1)
    errors = [RowError(row, "*", None, "null_state", "the state is null") for row in range(3)]
    assert leases.save_row_errors(db, one, LEASE_S, errors[:2]) is False
    assert leases.save_row_errors(db, one, LEASE_S, errors[2:]) is True
    assert leases.save_batch(db, two, LEASE_S, record(db), answers(ROWS, 1)) is True
    assert leases.stop_shard(db, one) is None
    assert leases.stop_shard(db, two) is JobStatus.FAILED
    job = reports.get_job(db, job_id)
    assert "3 rows failed, more than max_row_errors=2" in (job.error or "")
    with pytest.raises(TransitionError, match="has 3 row errors; raise max_row_errors=2"):
        lifecycle.retry_job(db, job_id, None)
    lifecycle.retry_job(db, job_id, 5)
    assert reports.get_job(db, job_id).spec.max_row_errors == 5
    assert len(recovery.list_queued(db, job_id)) == 3


def test_a_job_that_answered_nothing_has_failed_for_its_commonest_row_error(db: Database) -> None:
    claimed = must_claim(db, make_job(db, 1))
    errors = [RowError(row, "*", None, "null_state" if row else "not_text", f"why {row}") for row in range(ROWS)]
    leases.save_row_errors(db, claimed, LEASE_S, errors)
    assert leases.finish_shard(db, claimed) is JobStatus.FAILED
    job = reports.get_job(db, claimed.job_id)
    assert job.row_errors == ROWS
    assert job.error == "no row was answered: the commonest error, null_state (9 times), is for example: why 1"
    with pytest.raises(TransitionError, match="no row left to score"):
        lifecycle.retry_job(db, claimed.job_id, None)
    assert reports.get_job(db, claimed.job_id).status is JobStatus.FAILED


def test_one_answer_among_errors_is_a_success(db: Database) -> None:
    job_id = make_job(db, 2)
    claimed = must_claim(db, job_id, 0)
    leases.save_row_errors(db, claimed, LEASE_S, [RowError(row, "*", None, "null_state", "m") for row in range(ROWS)])
    assert leases.finish_shard(db, claimed) is None
    other = must_claim(db, job_id, 1)
    leases.save_batch(db, other, LEASE_S, record(db), answers(ROWS, 1))
    assert leases.finish_shard(db, other) is JobStatus.SUCCEEDED


def test_warnings_are_kept_once_each(db: Database) -> None:
    claimed = must_claim(db, make_job(db, 1))
    assert reports.get_job(db, claimed.job_id).warnings == ()
    for found in (["a"], ["a", "b"], ["b"]):
        leases.note_warnings(db, claimed, found)
    assert reports.get_job(db, claimed.job_id).warnings == ("a", "b")


def test_questions_of_one_row_that_fail_count_as_one_row(db: Database) -> None:
    claimed = must_claim(db, make_job(db, 1, max_row_errors=1))
    errors = [RowError(0, question, None, "scoring_failed", "m") for question in ("a", "b")]
    assert leases.save_row_errors(db, claimed, LEASE_S, errors) is False
    later = [RowError(0, "c", None, "scoring_failed", "m")]
    assert leases.save_row_errors(db, claimed, LEASE_S, later) is False
    assert reports.get_job(db, claimed.job_id).row_errors == 1


def test_progress_counts_a_half_answered_row_by_its_questions(db: Database) -> None:
    questions = {name: {"type": "noul", "instructions": "x"} for name in ("q", "r")}
    claimed = must_claim(db, make_job(db, 1, questions=questions))
    errors = [RowError(row, "r", None, "scoring_failed", "m") for row in range(ROWS)]
    leases.save_row_errors(db, claimed, LEASE_S, errors)
    assert reports.get_job(db, claimed.job_id).rows_done == ROWS // 2
    leases.save_batch(db, claimed, LEASE_S, record(db), answers(0, ROWS))
    assert reports.get_job(db, claimed.job_id).rows_done == ROWS


def test_cancel_ends_a_shard_whose_worker_has_vanished(db: Database) -> None:
    job_id = make_job(db, 2)
    vanished = must_claim(db, job_id, lease_s=-1)
    lifecycle.request_cancel(db, job_id)
    assert reports.get_job(db, job_id).status is JobStatus.CANCELLED
    with pytest.raises(LeaseLostError):
        leases.save_batch(db, vanished, LEASE_S, record(db), answers(0, 2))


def test_text_with_nul_is_kept_as_its_picture_on_both_stores(db: Database) -> None:
    claimed = must_claim(db, make_job(db, 1))
    leases.save_batch(db, claimed, LEASE_S, record(db), [{**answers(0, 1)[0], "row_id": "a\x00b"}])
    leases.save_row_errors(db, claimed, LEASE_S, [RowError(1, "*", "c\x00", "not_text", "bad \x00")])
    (batch,) = reports.read_results(db, claimed.job_id)
    assert batch.to_pylist()[0]["row_id"] == "a\u2400b"


def test_words_for_people_can_always_be_saved(db: Database) -> None:
    claimed = must_claim(db, make_job(db, 1))
    words = "half a pair \ud83d, NUL \x00, " + "and so on " * 10_000
    leases.save_row_errors(db, claimed, LEASE_S, [RowError(1, "*", None, "not_text", words)])
    leases.fail_shard(db, claimed, words, 1)
    error = reports.get_job(db, claimed.job_id).error or ""
    assert "half a pair \ufffd, NUL \u2400, and so on" in error
    assert len(error) <= MESSAGE_CHARS
    with db.read() as connection:
        (message,) = connection.scalars(sa.select(row_errors.c.message))
    assert message.startswith("half a pair \ufffd, NUL \u2400, and so on")
    assert message.endswith("…")
    assert len(message) == MESSAGE_CHARS


def test_a_value_that_the_database_cannot_hold_is_refused_in_one_line_and_nothing_is_saved(db: Database) -> None:
    claimed = must_claim(db, make_job(db, 1))
    row = answers(0, 1)[0]
    nan = {"false": float("nan"), "true": 0.5}
    for batch, answer, words in (
        (replace(record(db), tokens=10**30), row, "out of range|too large"),
        (record(db), {**row, "probabilities": nan}, "not JSON compliant"),
        (record(db), {**row, "row_id": "\ud83d"}, "surrogates not allowed"),
    ):
        with pytest.raises(DatabaseRefusedError, match=f"cannot be used: .*({words})") as raised:
            leases.save_batch(db, claimed, LEASE_S, batch, [answer])
        assert "INSERT" not in "".join(traceback.format_exception(raised.value))
        assert len(str(raised.value)) < 500
    assert leases.saved_pairs(db, claimed) == set()


def test_a_constraint_is_named_without_the_row_that_breaks_it(db: Database) -> None:
    claimed = must_claim(db, make_job(db, 1))
    with pytest.raises(DatabaseConflictError, match="cannot be used") as raised:
        leases.save_batch(db, claimed, LEASE_S, record(db), [{**answers(0, 1)[0], "row_id": "secret", "type": None}])
    assert "secret" not in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1


def test_failing_a_job_ends_it_at_once_but_for_what_is_running(db: Database) -> None:
    job_id = make_job(db, 3)
    one, two = must_claim(db, job_id, 0), must_claim(db, job_id, 1)
    leases.fail_job(db, one, "the weights are broken")
    assert claim(db, job_id, 2) is None
    assert leases.save_batch(db, two, LEASE_S, record(db), answers(ROWS, 1)) is True
    assert leases.stop_shard(db, two) is JobStatus.FAILED
    assert reports.get_job(db, job_id).error == "the weights are broken"
    with pytest.raises(LeaseLostError):
        leases.fail_job(db, one, "again")
    lifecycle.retry_job(db, job_id, None)
    assert len(recovery.list_queued(db, job_id)) == 3


def test_sweeps_cancels_and_failures_at_once_neither_deadlock_nor_send_twice(db: Database) -> None:
    job_ids = [make_job(db, 300) for _ in range(2)]
    with db.write() as connection:
        connection.execute(sa.update(shards).values(sent_at=seconds_from_now(-3600)))
    with ThreadPoolExecutor(6) as threads:
        waiting = [queued for job_id in job_ids for queued in recovery.list_queued(db, job_id)]
        sweeps = [threads.submit(recovery.take_unclaimed, db, Unclaimed(0, 60), waiting) for _ in range(4)]
        cancels = [threads.submit(lifecycle.request_cancel, db, job_id) for job_id in job_ids]
        sent = [one.shard_id for sweep in sweeps for one in sweep.result()]
        for cancelled in cancels:
            cancelled.result()
    assert len(sent) == len(set(sent))
    assert all(reports.get_job(db, job_id).status is JobStatus.CANCELLED for job_id in job_ids)


def test_a_dead_workers_shards_are_found_at_once_by_its_successor(db: Database) -> None:
    job_id = make_job(db, 2)
    claim(db, job_id, 0, owner="gpu0")
    claim(db, job_id, 1, owner="gpu1")
    assert [queued.shard_id for queued in recovery.release_leases(db, "gpu0", 3)] == shard_ids(db, job_id)[:1]
    assert recovery.release_leases(db, "gpu0", 3) == []
    assert claim(db, job_id, 1) is None


def unclaimed(db: Database, resend_s: float, priority: int = 5) -> list[int]:
    return [queued.shard_id for queued in recovery.stream_unclaimed(db, Unclaimed(0, resend_s), priority)]


def test_a_new_shard_may_take_a_while_to_be_sent_and_an_attempted_one_may_not(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "SEND_SHARD_S", 1000.0)
    job_id = make_job(db, 3)
    first, second, third = shard_ids(db, job_id)
    leases.fail_shard(db, must_claim(db, job_id, 1), "out of luck", 3)
    assert recovery.list_priorities(db) == [5]
    assert unclaimed(db, resend_s=60) == [second]
    assert unclaimed(db, resend_s=0) == [first, second]  # the third has its time, in which the others are sent
    monkeypatch.setattr(recovery, "SEND_SHARD_S", 0.0)
    assert unclaimed(db, resend_s=0) == [first, second, third]
    assert unclaimed(db, resend_s=0, priority=4) == []


def test_of_two_sweeps_one_sends_a_shard(db: Database) -> None:
    job_id = make_job(db, 3)
    must_claim(db, job_id, 1)
    time.sleep(2 * recovery.SEND_SHARD_S)
    lost = recovery.list_queued(db, job_id)
    assert len(lost) == 2
    began = time.monotonic()
    assert recovery.take_unclaimed(db, Unclaimed(0, 0), lost) == lost
    assert recovery.take_unclaimed(db, Unclaimed(time.monotonic() - began + 0.1, 0), lost) == []


def test_a_lease_taken_before_the_clock_was_set_back_ends_as_one_taken_now(db: Database) -> None:
    claimed = must_claim(db, make_job(db, 1), lease_s=3600)
    recovery.shorten_leases(db, 60)
    now = recovery.read_clock(db)
    with db.read() as connection:
        expires_at = connection.scalar(sa.select(shards.c.lease_expires_at).where(shards.c.id == claimed.shard_id))
    assert 50 < (expires_at - now).total_seconds() <= 60


NOUL = {"type": "noul", "instructions": "x"}
AS_PYTHON_HAS_THEM: list[Any] = [
    {"q": {**NOUL, "instructions": ("a", 1, 2.50, -0.0, 1e300, 10**30, True, None, "🎉", "\ud83d\ude00")}},
    {"q": {**NOUL, "instructions": {1: "one", 2.5: "two", False: "three", np.int64(7): np.float32(0.1)}}},
    {"q": {"type": "choice", "instructions": "x", "criteria": {1: None, 2.0: "two", 3: ""}}},
    {"q": {"type": "score", "instructions": "x", "criteria": (1, {"a": ()}), "option_order": (1, 0)}},
    "q: {type: noul, instructions: {since: 2024-01-01, at: 12:30, 7: .nan, version: 1.10, n: 1e3}}",
    '{"q": {"type": "choice", "instructions": 1.10, "criteria": {"\\ud83d\\ude00": 1E3, "b": -0}}}',
]


@pytest.mark.parametrize("questions", AS_PYTHON_HAS_THEM)
def test_the_same_questions_under_the_same_key_are_the_same_job(db: Database, tmp_path: Path, questions: Any) -> None:
    if isinstance(questions, str):
        (tmp_path / "questions").write_text(questions)
        questions = tmp_path / "questions"

    def ask() -> JobSpec:
        return build_spec(
            inputs=["/a"],
            state="text",
            questions=questions,
            checkpoint="english",
            engine_options=EngineOptions(),
        )

    job_id = lifecycle.create_job(db, ask(), JobOptions("job", 5, "k"), even_plan(1, ROWS))
    found = lifecycle.find_by_key(db, "k")
    assert found is not None
    assert (found.id, found.spec) == (job_id, ask())
    assert reports.get_job(db, job_id).spec == ask()


def test_options_in_another_order_are_another_question(db: Database) -> None:
    def ask(*labels: str) -> JobSpec:
        choice = {"type": "choice", "instructions": "x", "criteria": dict.fromkeys(labels, "what it is")}
        asked = {"inputs": ["/a"], "state": "text", "questions": {"q": choice}, "checkpoint": "english"}
        return build_spec(**asked, engine_options=EngineOptions())

    lifecycle.create_job(db, ask("a", "b"), JobOptions("job", 5, "k"), even_plan(1, ROWS))
    made = lifecycle.find_by_key(db, "k")
    assert made is not None
    check_same("k", made, ask("a", "b"))
    with pytest.raises(IdempotencyError, match="which differs in questions"):
        check_same("k", made, ask("b", "a"))


def test_an_idempotency_key_is_one_job(db: Database) -> None:
    job_id = make_job(db, key="k")
    spec = reports.get_job(db, job_id).spec
    found = lifecycle.find_by_key(db, "k")
    assert found is not None
    assert (found.id, found.spec, found.status) == (job_id, spec, JobStatus.QUEUED)
    assert found.files
    assert lifecycle.find_by_key(db, "other") is None
    with pytest.raises(DatabaseConflictError):
        make_job(db, key="k")
    assert len(reports.list_jobs(db, 10)) == 1
    assert lifecycle.forget_job(db, job_id) is False  # another call was given it


def test_a_job_that_could_not_be_queued_leaves_nothing_unless_it_has_begun(db: Database) -> None:
    waiting, begun = make_job(db), make_job(db)
    must_claim(db, begun)
    assert lifecycle.forget_job(db, waiting) is True
    assert lifecycle.forget_job(db, begun) is False
    with db.read() as connection:
        assert list(connection.scalars(sa.select(jobs.c.id))) == [begun]
        assert set(connection.scalars(sa.select(shards.c.job_id))) == {begun}


def test_a_job_keeps_to_the_weights_it_began_with(db: Database) -> None:
    claimed = must_claim(db, make_job(db))
    assert leases.hold_checkpoint(db, claimed, "aaa", "r1") == "aaa"
    assert leases.hold_checkpoint(db, claimed, "bbb", "r2") == "aaa"


def test_results_are_read_in_order_and_in_chunks(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "RESULT_CHUNK_ROWS", 4)
    job_id = make_job(db, 1)
    claimed = must_claim(db, job_id)
    for first in (5, 0):
        leases.save_batch(db, claimed, LEASE_S, record(db), answers(first, 5))
    read = list(reports.read_results(db, job_id))
    assert [batch.num_rows for batch in read] == [4, 4, 2]
    rows = [row for batch in read for row in batch.to_pylist()]
    assert [row["row_number"] for row in rows] == list(range(10))
    assert rows[0]["probabilities"] == '{"false": 0.75, "true": 0.25}'
    assert rows[0]["choice"] is None


def test_an_unknown_job_is_an_error_that_says_where_to_look(db: Database) -> None:
    with pytest.raises(JobNotFoundError, match="there is no job 7; `laya-batch list`"):
        reports.get_job(db, 7)
    with pytest.raises(JobNotFoundError):
        lifecycle.request_cancel(db, 7)


def test_an_unreachable_database_is_one_line_without_its_password() -> None:
    database = Database("postgresql://me:hunter2@127.0.0.1:1/none")
    with pytest.raises(DatabaseError, match=r"://\*\*\*@127.0.0.1:1/none cannot be used") as raised:
        database.check_schema()
    assert "hunter2" not in str(raised.value)
    database.close()


def test_a_wrong_database_url_says_how_to_write_one() -> None:
    for url in ("my database", "oracle+nothing://h/d", "mysql://h/db", "postgresql://h:abc/db"):
        with pytest.raises(DatabaseError, match="LAYA_BATCH_DATABASE_URL is not a database URL; write postgresql://"):
            Database(url)


def test_a_file_that_is_no_database_and_a_folder_that_cannot_be_made_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no database, but long enough to look like one " * 50)
    no_database = Database(f"sqlite:///{tmp_path / 'file'}")
    with pytest.raises(DatabaseError, match="file cannot be used: file is not a database"):
        no_database.check_schema()
    no_database.close()
    no_folder = Database(f"sqlite:///{tmp_path / 'file' / 'x.db'}")
    with pytest.raises(DatabaseError, match="file cannot be made"):
        no_folder.migrate()
    no_folder.close()


def test_a_database_of_another_encoding_is_refused_with_what_to_do(postgres_admin: sa.Engine) -> None:
    name = f"laya_batch_{uuid.uuid4().hex[:12]}"
    latin = f"CREATE DATABASE {name} ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0"
    with postgres_admin.connect() as connection:
        connection.execute(sa.text(latin))
    database = Database(postgres_admin.url.set(database=name).render_as_string(hide_password=False))
    with pytest.raises(DatabaseError, match="has the encoding LATIN1, which cannot hold every text; make"):
        database.migrate()
    database.close()
    with postgres_admin.connect() as connection:
        connection.execute(sa.text(f"DROP DATABASE {name}"))


def test_an_sqlite_file_that_is_read_only_damaged_or_without_a_table_is_refused_for_good(tmp_path: Path) -> None:
    path = tmp_path / "test.db"
    for words in ("attempt to write a readonly database", "no such table: .*shards", "disk image is malformed"):
        with closing(Database(f"sqlite:///{path}")) as whole:
            whole.migrate()
        if "table" in words:
            with closing(sqlite3.connect(path)) as connection:
                connection.execute("DROP TABLE shards")
        if "malformed" in words:
            path.write_bytes(path.read_bytes()[:4096] + b"x" * 200_000)
        url = f"sqlite:///file:{path}?uri=true" + ("&mode=ro" if "readonly" in words else "")
        with closing(Database(url, retry_s=60.0)) as changed, pytest.raises(DatabaseRefusedError, match=words):
            make_job(changed)
