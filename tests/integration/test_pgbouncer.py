"""Behind PgBouncer in transaction mode, where each transaction gets another session: a job, and what sessions keep."""

import time
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import sqlalchemy as sa

import jobs
from jobs.store import leases, recovery
from jobs.store.database import IDLE_IN_TRANSACTION_S, LOCK_TIMEOUT_S, Database
from jobs.store.recovery import LEFT_OPEN_S, EndedLeases
from schemas.tables import batches, results, shards
from tests.integration.service import QUESTIONS, make_texts, serve, write_tickets
from tests.integration.test_store import make_job, must_claim
from tests.pgbouncer import SESSIONS, PgBouncer

ROWS = 200


def test_a_job_is_scored_whole(
    pgbouncer: PgBouncer, postgres_url: str, redis_url: str, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    path = write_tickets(tmp_path / "a.parquet", make_texts(ROWS))
    behind = pgbouncer.before(postgres_url)
    with serve(behind, redis_url, tmp_path, checkpoint=str(tiny_checkpoint), max_batch_tokens=512) as service:
        service.start_worker()
        job = jobs.submit(
            path, questions=QUESTIONS, state="text", checkpoint=str(tiny_checkpoint), settings=service.settings
        )
        job = jobs.wait(job.id, timeout_s=120, settings=service.settings)
        assert (job.answers, job.row_errors) == (ROWS * len(QUESTIONS), 0)
        (saved,) = service.query(sa.select(sa.func.count(sa.distinct(results.c.batch_id))))
        (recorded,) = service.query(sa.select(sa.func.count()).select_from(batches))
        assert saved == recorded
        assert recorded[0] > 20
        assert {tuple(row) for row in service.query(sa.select(shards.c.attempt, shards.c.status))} == {(1, "done")}
        assert jobs.export(job.id, tmp_path / "out.parquet", settings=service.settings) == job.answers
        assert "WARNING" not in service.log


SETTINGS = ("application_name", "idle_in_transaction_session_timeout", "lock_timeout")


def read_settings(connection: sa.Connection) -> tuple[str, ...]:
    current = (sa.func.current_setting(name) for name in SETTINGS)
    return tuple(connection.execute(sa.select(*current)).one())


def open_sessions(url: str | sa.URL) -> None:
    """Have the pooler open all its sessions, which it then gives to transactions in turns."""
    engine = sa.create_engine(url, pool_size=SESSIONS)
    with ExitStack() as stack:
        for _ in range(SESSIONS):
            stack.enter_context(engine.connect()).execute(sa.text("SELECT 1"))
    engine.dispose()


@pytest.mark.parametrize("how", ["directly", "behind a pooler"])
def test_a_transaction_has_its_settings_and_leaves_none_behind(
    how: str, pgbouncer: PgBouncer, postgres_url: str
) -> None:
    url = postgres_url if how == "directly" else pgbouncer.before(postgres_url)
    plain = sa.create_engine(url, connect_args={"prepare_threshold": None})
    open_sessions(url)
    with closing(Database(url, owner="w")) as db, plain.connect() as another:
        before = read_settings(another)
        another.rollback()
        for _ in range(2 * SESSIONS):  # so that each session has served both
            with db.write() as connection:
                assert read_settings(connection) == ("w", f"{IDLE_IN_TRANSACTION_S}s", f"{LOCK_TIMEOUT_S}s")
            with db.read() as connection:
                assert read_settings(connection) == ("w", "0", f"{LOCK_TIMEOUT_S}s")
            assert read_settings(another) == before
            another.rollback()
    plain.dispose()


def test_no_statement_is_prepared_in_a_session_that_the_next_transaction_does_not_get(
    pgbouncer: PgBouncer, postgres_url: str
) -> None:
    with closing(Database(pgbouncer.before(postgres_url), retry_s=1.0)) as db:
        db.migrate()
        claimed = must_claim(db, make_job(db, 1))
        open_sessions(db.url)
        for _ in range(5 * SESSIONS):
            leases.renew_lease(db, claimed, 60.0)


def test_the_locks_of_a_frozen_worker_fall_with_its_lease(pgbouncer: PgBouncer, postgres_url: str) -> None:
    url = pgbouncer.before(postgres_url)
    with closing(Database(url, owner="w")) as frozen, closing(Database(url)) as sweeper:
        frozen.migrate()
        claimed = must_claim(frozen, make_job(frozen, 1), lease_s=-1)
        with pytest.raises(jobs.DatabaseError), frozen.write() as connection:
            connection.execute(sa.update(shards).values(last_error="half done"))
            time.sleep(LEFT_OPEN_S + 0.2)
            ended = EndedLeases(recovery.read_clock(sweeper))
            assert [lost.shard_id for lost in recovery.expire_leases(sweeper, ended, 3)] == [claimed.shard_id]
        with sweeper.read() as connection:
            assert connection.scalar(sa.select(shards.c.last_error)) == "the worker vanished: its lease ended"
