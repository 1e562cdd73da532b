"""Finding what was lost: shards whose worker vanished, and shards whose message did."""

import sqlalchemy as sa

from jobs.store.database import Database, seconds_from_now, session_name
from jobs.store.fence import JOB_IS_OPEN
from jobs.store.lifecycle import lock_job, settle_job
from jobs.store.replay import replayed
from jobs.store.suspects import count_death
from schemas.job import Lease, ShardStatus
from schemas.message import QueuedShard
from schemas.tables import jobs, shards

LEFT_OPEN_S = 1.0  # longer than a transaction of a worker takes


@replayed
def release_leases(db: Database, owner: str, max_attempts: int, how: str | None = None) -> list[QueuedShard]:
    """Free what a worker of this name still held: it died (`how`, if known), and its successor has started.

    Returns the shards that are queued again, whose messages must be sent.
    """
    reason = "the worker process died" + (f": {how}" if how else "")
    return _release_running(db, shards.c.lease_owner == owner, reason, max_attempts)


def expire_leases(db: Database, max_attempts: int, only_job: int | None = None) -> list[QueuedShard]:
    """Free every shard whose lease has ended; returns what must be sent, as `release_leases` does.

    Not tried again while the database is away: its caller must learn of that.
    """
    ended = sa.and_(shards.c.lease_expires_at < seconds_from_now(), _in_job(only_job))
    _end_transactions(db, ended)
    return _release_running(db, ended, "the worker vanished: its lease ended", max_attempts)


@replayed
def list_queued(db: Database, job_id: int) -> list[QueuedShard]:
    """The job's shards that wait for a worker, in order."""
    waiting = shards.c.job_id == job_id, shards.c.status == ShardStatus.QUEUED
    selected = sa.select(shards.c.job_id, shards.c.id, jobs.c.priority).join(jobs).where(*waiting)
    with db.read() as connection:
        return [QueuedShard(*row) for row in connection.execute(selected.order_by(shards.c.number))]


@replayed
def count_queued(db: Database, only_job: int | None = None) -> int:
    """Shards that wait for a worker, and so should have a message in the queue."""
    with db.read() as connection:
        waiting = shards.c.status == ShardStatus.QUEUED, JOB_IS_OPEN, _in_job(only_job)
        return connection.scalar(sa.select(sa.func.count()).select_from(shards).where(*waiting)) or 0


@replayed
def take_unsent(db: Database, sent_before_s: float, limit: int, only_job: int | None = None) -> list[QueuedShard]:
    """Waiting shards whose message went out longer ago than `sent_before_s` seconds, now marked as sent again."""
    unsent = shards.c.status == ShardStatus.QUEUED, shards.c.sent_at <= seconds_from_now(-sent_before_s)
    lost = (
        sa.select(shards.c.id)
        .where(*unsent, JOB_IS_OPEN, _in_job(only_job))
        .order_by(shards.c.id)
        .limit(limit)
        .with_for_update(skip_locked=True, of=shards)  # two sweeps share the work, and neither waits for a cancel
    )
    with db.write() as connection:
        taken = connection.execute(
            sa.update(shards)
            .where(shards.c.id.in_(lost.scalar_subquery()), *unsent)
            .values(sent_at=seconds_from_now())
            .returning(shards.c.id)
        ).scalars()
        sending = (
            sa.select(shards.c.job_id, shards.c.id, jobs.c.priority).join(jobs).where(shards.c.id.in_(list(taken)))
        )
        return [QueuedShard(*row) for row in connection.execute(sending.order_by(shards.c.id))]


def _end_transactions(db: Database, which: sa.ColumnElement[bool]) -> None:
    """End what the owners of these leases have open: one that is frozen or cut off in a transaction keeps its locks."""
    if db.is_sqlite:
        return
    held = sa.select(shards.c.lease_owner).distinct().where(shards.c.status == ShardStatus.RUNNING, which)
    with db.read() as connection:
        owners = [session_name(owner) for owner in connection.scalars(held)]
    if not owners:
        return
    session = sa.table("pg_stat_activity", *(sa.column(name) for name in ("pid", "application_name", "xact_start")))
    left_open = session.c.application_name.in_(owners), session.c.xact_start < seconds_from_now(-LEFT_OPEN_S)
    with db.write() as connection:
        connection.execute(sa.select(sa.func.pg_terminate_backend(session.c.pid)).where(*left_open))


def _in_job(job_id: int | None) -> sa.ColumnElement[bool]:
    return sa.true() if job_id is None else shards.c.job_id == job_id


def _release_running(db: Database, which: sa.ColumnElement[bool], error: str, max_attempts: int) -> list[QueuedShard]:
    lost = (
        sa.select(shards.c.id, shards.c.job_id, shards.c.attempt, shards.c.lease_owner, jobs.c.priority)
        .join(jobs)
        .where(shards.c.status == ShardStatus.RUNNING, which)
    )
    with db.read() as connection:
        found = connection.execute(lost).all()
    queued = []
    for shard_id, job_id, attempt, owner, priority in found:
        with db.write() as connection:
            lock_job(connection, job_id)
            still_lost = connection.scalar(lost.with_only_columns(shards.c.attempt).where(shards.c.id == shard_id))
            if still_lost == attempt:
                if count_death(connection, Lease(shard_id, attempt, owner), error, max_attempts):
                    queued.append(QueuedShard(job_id, shard_id, priority))
                settle_job(connection, job_id)
    return queued
