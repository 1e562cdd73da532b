"""PostgreSQL restarted, cut off, in conflict and full; SQLite locked and full. A replay neither loses nor doubles."""

import sqlite3
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Literal

import psycopg
import pytest
import sqlalchemy as sa

import jobs
from jobs.errors import DatabaseConflictError
from jobs.queue import count_messages
from jobs.store import leases, lifecycle, recovery
from jobs.store.database import LOCK_TIMEOUT_S, Database
from jobs.store.leases import RowError
from jobs.store.recovery import LEFT_OPEN_S, EndedLeases
from schemas.job import Claim, JobStatus
from schemas.tables import shards
from tests.faults.disks import fill, small_disk
from tests.faults.proxy import CommitProxy
from tests.faults.report import FaultReport
from tests.faults.scenes import QUICK, Scene, costs, start_workers, submit_file
from tests.faults.servers import PrivatePostgres, PrivateRedis, wait_until
from tests.integration.service import make_texts, serve, write_tickets
from tests.integration.test_store import answers, make_job, must_claim, record

FAULT_S = 3.0
Moment = Literal["before", "after"]


@contextmanager
def restarted(postgres: PrivatePostgres) -> Iterator[None]:
    postgres.stop()
    try:
        time.sleep(FAULT_S)
        yield
    finally:
        postgres.start()


@contextmanager
def connections_ended(postgres: PrivatePostgres) -> Iterator[None]:
    for _ in range(10):
        postgres.terminate_connections()
        time.sleep(FAULT_S / 10)
    yield


FAULTS = {"PostgreSQL restarted": restarted, "pg_terminate_backend of every connection": connections_ended}


def failures_of(scene: Scene, job: jobs.JobInfo) -> int:
    counted = sa.select(sa.func.sum(shards.c.failures)).where(shards.c.job_id == job.id)
    return int(scene.service.query(counted)[0][0])


@pytest.mark.parametrize("name", FAULTS)
def test_workers_replay_what_they_were_writing_after(name: str, postgres_scene: Scene, report: FaultReport) -> None:
    assert postgres_scene.postgres is not None
    job = postgres_scene.submit_and_begin(600)
    with FAULTS[name](postgres_scene.postgres):
        pass
    recover_s = postgres_scene.await_progress(job)
    count = postgres_scene.finish(job)
    assert (count.rescored, failures_of(postgres_scene, job)) == (0, 0)
    report.record(name, times=1, **costs(count), recover_s=recover_s)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_connection_that_dies_while_it_commits(moment: Moment, postgres_scene: Scene, report: FaultReport) -> None:
    assert postgres_scene.proxy is not None
    with postgres_scene.proxy.cutting(moment, every=4):
        job = postgres_scene.submit(600)
        count = postgres_scene.finish(job)
    assert postgres_scene.proxy.cuts > 20
    assert (count.rescored, failures_of(postgres_scene, job)) == (0, 0)
    name = f"connection lost {'before COMMIT arrives' if moment == 'before' else 'after COMMIT, before its reply'}"
    report.record(name, times=postgres_scene.proxy.cuts, **costs(count), recover_s=None)


@contextmanager
def behind_proxy(url: str) -> Iterator[tuple[CommitProxy, str]]:
    """A proxy before the server of this URL, and the URL that leads through it."""
    with CommitProxy(sa.make_url(url).port or 5432) as proxy:
        yield proxy, sa.make_url(url).set(port=proxy.port).render_as_string(hide_password=False)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_every_write_of_a_shard_is_replayed_to_the_same_end(moment: Moment, postgres_url: str) -> None:
    with behind_proxy(postgres_url) as (proxy, url), closing(Database(url)) as db:
        db.migrate()
        job_id = make_job(db, 2, key="k")
        batch = record(db)
        errors = [RowError(8, "*", None, "null_state", "m"), RowError(9, "q", None, "no_text", "m")]

        def cut(write: object) -> object:
            assert callable(write)
            with proxy.cutting(moment, every=1000):
                outcome = write()
            assert proxy.cuts == 1
            return outcome

        claimed = cut(lambda: must_claim(db, job_id))
        assert isinstance(claimed, Claim)
        assert cut(lambda: leases.save_batch(db, claimed, 60.0, batch, answers(0, 8))) is False
        assert cut(lambda: leases.save_row_errors(db, claimed, 60.0, errors)) is False
        with pytest.raises(DatabaseConflictError):  # what another batch answered is no replay
            leases.save_batch(db, claimed, 60.0, batch, answers(7, 1))
        with pytest.raises(DatabaseConflictError):
            leases.save_row_errors(db, claimed, 60.0, [*errors, RowError(7, "*", None, "c", "m")])
        cut(lambda: leases.renew_lease(db, claimed, 60.0))
        cut(lambda: leases.finish_shard(db, claimed))
        second = must_claim(db, job_id, 1)
        cut(lambda: leases.give_back(db, second))
        third = must_claim(db, job_id, 1)
        assert third.attempt == second.attempt + 1
        leases.save_batch(db, third, 60.0, batch, answers(10, 10))
        leases.give_back(db, third)
        fourth = must_claim(db, job_id, 1)
        with pytest.raises(DatabaseConflictError):  # nor is what another attempt answered
            leases.save_batch(db, fourth, 60.0, batch, answers(10, 10))
        cut(lambda: leases.finish_shard(db, fourth))
        job = jobs.get(job_id, settings=jobs.load_settings(database_url=url))
        assert (job.status, job.answers, job.unanswered, job.row_errors) == (JobStatus.SUCCEEDED, 18, 2, 2)


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("key", [None, "nightly"])
def test_a_submit_whose_commit_is_lost_makes_one_job(
    moment: Moment, key: str | None, postgres_url: str, redis_url: str, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    with (
        behind_proxy(postgres_url) as (proxy, url),
        serve(url, redis_url, tmp_path, checkpoint=str(tiny_checkpoint)) as service,
    ):
        path = write_tickets(tmp_path / "a.parquet", make_texts(250))
        with proxy.cutting(moment, every=1000):
            job = submit_file(service, path, idempotency_key=key)
        assert proxy.cuts == 1
        assert [listed.id for listed in jobs.list_jobs(settings=service.settings)] == [job.id]
        assert count_messages(service.settings) == 3


def test_a_submit_while_the_database_is_away_leaves_nothing_and_may_be_repeated(
    private_postgres: PrivatePostgres, redis_url: str, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    path = write_tickets(tmp_path / "a.parquet", make_texts(250))
    with serve(private_postgres.url, redis_url, tmp_path, checkpoint=str(tiny_checkpoint)) as service:
        private_postgres.stop()
        with pytest.raises(jobs.DatabaseError, match="cannot be used"):
            submit_file(service, path, idempotency_key="nightly")
        private_postgres.start()
        assert jobs.list_jobs(settings=service.settings) == []
        made = [submit_file(service, path, idempotency_key="nightly").id for _ in range(2)]
        assert [job.id for job in jobs.list_jobs(settings=service.settings)] == made[:1] == made[1:]


@pytest.mark.faults
def test_a_submit_while_the_disk_is_full_leaves_nothing_and_may_be_repeated(
    redis_url: str, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    path = write_tickets(tmp_path / "a.parquet", make_texts(2000))
    with (
        small_disk(4) as disk,
        serve(f"sqlite:///{disk / 'test.db'}", redis_url, tmp_path, checkpoint=str(tiny_checkpoint)) as service,
    ):
        with fill(disk), pytest.raises(jobs.DatabaseError, match="cannot be used"):
            submit_file(service, path, idempotency_key="nightly")
        assert jobs.list_jobs(settings=service.settings) == []
        submit_file(service, path, idempotency_key="nightly")
        assert len(jobs.list_jobs(settings=service.settings)) == 1


def test_a_forgotten_job_is_gone_though_the_reply_was_lost(postgres_url: str) -> None:
    with behind_proxy(postgres_url) as (proxy, url), closing(Database(url)) as db:
        db.migrate()
        job_id = make_job(db)
        with proxy.cutting("after", every=1000):
            assert lifecycle.forget_job(db, job_id) is True


def with_option(url: str, option: str) -> str:
    """The URL of the same database, whose sessions have another setting of the server's."""
    return sa.make_url(url).update_query_dict({"options": f"-c {option}"}).render_as_string(hide_password=False)


def count_waiting(rival: "psycopg.Connection[tuple[int]]") -> int:
    """Sessions of this database that wait for a lock."""
    rival.execute("SELECT pg_stat_clear_snapshot()")
    waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    (found,) = rival.execute(waits).fetchall()
    return found[0]


def test_a_deadlock_is_replayed(postgres_url: str, caplog: pytest.LogCaptureFixture, report: FaultReport) -> None:
    # A session looks for a deadlock once, so long after it began to wait. It must exist by then, and the rival must not
    # be the one that finds it.
    patient = with_option(postgres_url, "deadlock_timeout=5s")
    with closing(Database(patient, retry_s=60.0)) as db, ThreadPoolExecutor(1) as thread:
        db.migrate()
        claimed = must_claim(db, make_job(db, 1))
        with psycopg.connect(postgres_url.replace("+psycopg", "")) as rival:
            rival.execute("SET deadlock_timeout = '60s'")
            rival.execute("SELECT 1 FROM shards WHERE id = %s FOR UPDATE", [claimed.shard_id])
            finished = thread.submit(leases.finish_shard, db, claimed)
            wait_until(lambda: count_waiting(rival) == 1)
            rival.execute("SELECT 1 FROM jobs WHERE id = %s FOR UPDATE", [claimed.job_id])
            rival.commit()
        assert finished.result() is JobStatus.SUCCEEDED
    assert "deadlock detected" in caplog.text
    report.record("deadlock", times=1, rows=10, lost=0, doubled=0, rescored=0, recover_s=None)


def test_the_locks_of_a_frozen_worker_fall_with_its_lease(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any state of its session: the server's own timeout waits for the end of a pipeline that may never come."""
    monkeypatch.setattr("jobs.store.database.IDLE_IN_TRANSACTION_S", 200)  # long after the sweep
    with closing(Database(postgres_url, owner="w")) as frozen, closing(Database(postgres_url)) as sweeper:
        frozen.migrate()
        claimed = must_claim(frozen, make_job(frozen, 1), lease_s=-1)
        started = time.monotonic()
        with pytest.raises(jobs.DatabaseError), frozen.write() as connection:
            connection.execute(sa.update(shards).values(last_error="half done"))
            time.sleep(LEFT_OPEN_S + 0.2)
            queued = recovery.expire_leases(sweeper, EndedLeases(recovery.read_clock(sweeper)), 3)
            waited_s = time.monotonic() - started
        assert [lost.shard_id for lost in queued] == [claimed.shard_id]
        assert waited_s < 100


def test_serialisation_failures_are_replayed(
    postgres_url: str, caplog: pytest.LogCaptureFixture, report: FaultReport
) -> None:
    strict = with_option(postgres_url, "default_transaction_isolation=serializable")
    with closing(Database(strict, retry_s=60.0, connections=6)) as db:
        db.migrate()
        job_id, batch = make_job(db, 6), record(db)
        claims = [must_claim(db, job_id, number) for number in range(6)]

        def save_and_finish(one: Claim) -> JobStatus | None:
            leases.save_batch(db, one, 60.0, batch, answers(one.plan.first_row_number, 10))
            return leases.finish_shard(db, one)

        with ThreadPoolExecutor(6) as threads, psycopg.connect(postgres_url.replace("+psycopg", "")) as rival:
            # All six wait for the job's row, and find it changed since they began.
            rival.execute("UPDATE jobs SET name = name WHERE id = %s", [job_id])
            saving = [threads.submit(save_and_finish, one) for one in claims]
            wait_until(lambda: count_waiting(rival) == 6, 60)
            rival.commit()
            outcomes = [one.result() for one in saving]
        assert sorted(outcomes, key=str) == [*[None] * 5, JobStatus.SUCCEEDED]
        job = jobs.get(job_id, settings=jobs.load_settings(database_url=postgres_url))
        assert job.answers == 60
    failures = caplog.text.count("could not serialize access")
    assert failures >= 6
    report.record("serialisation failure", times=failures, rows=60, lost=0, doubled=0, rescored=0, recover_s=None)


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_a_full_disk_under_postgresql(tmp_path: Path, tiny_checkpoint: Path, report: FaultReport) -> None:
    with (
        small_disk(96) as disk,
        PrivateRedis() as redis,
        PrivatePostgres(disk) as postgres,
        serve(postgres.url, redis.url, tmp_path, checkpoint=str(tiny_checkpoint), **QUICK) as service,
    ):
        scene = Scene(service, redis, start_workers(service, 2), postgres)
        job = scene.submit_and_begin(3000)
        with fill(disk):
            service.wait_for(lambda: "No space left on device" in service.log or not postgres.is_running())
            time.sleep(FAULT_S)
        if not postgres.is_running():  # it stops when it cannot write its log of transactions
            postgres.start()
        recover_s = scene.await_progress(job)
        count = scene.finish(job)
        report.record("disk full under PostgreSQL", times=1, **costs(count), recover_s=recover_s)


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_a_full_disk_under_sqlite(tmp_path: Path, tiny_checkpoint: Path, report: FaultReport) -> None:
    with (
        small_disk(16) as disk,
        PrivateRedis() as redis,
        serve(
            f"sqlite:///{disk / 'test.db'}", redis.url, tmp_path, checkpoint=str(tiny_checkpoint), **QUICK
        ) as service,
    ):
        scene = Scene(service, redis, start_workers(service, 2))
        job = scene.submit_and_begin(3000)
        with fill(disk):
            service.wait_for(lambda: "database or disk is full" in service.log)
            time.sleep(FAULT_S)
        recover_s = scene.await_progress(job)
        count = scene.finish(job)
        report.record("disk full under SQLite", times=1, **costs(count), recover_s=recover_s)


@pytest.mark.faults
@pytest.mark.timeout(600)
@pytest.mark.parametrize("statement", ["BEGIN IMMEDIATE", "BEGIN"])
def test_another_program_holds_sqlite(statement: str, sqlite_scene: Scene, report: FaultReport) -> None:
    job = sqlite_scene.submit_and_begin(3000)
    path = sa.make_url(sqlite_scene.service.settings.resolved_database_url).database
    with closing(sqlite3.connect(str(path), isolation_level=None)) as rival:
        rival.execute(statement)
        rival.execute("SELECT count(*) FROM results").fetchone()
        if statement == "BEGIN":  # readers stop nobody
            count = sqlite_scene.finish(job)
            report.record("SQLite held by a reader", times=1, **costs(count), recover_s=None)
            return
        time.sleep(LOCK_TIMEOUT_S + FAULT_S)
        rival.execute("ROLLBACK")
    recover_s = sqlite_scene.await_progress(job)
    report.record("SQLite locked by a writer", times=1, **costs(sqlite_scene.finish(job)), recover_s=recover_s)
