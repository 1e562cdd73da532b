"""Finding what was lost: shards whose worker vanished, and shards whose message did."""

from collections.abc import Collection, Generator
from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa

from jobs.store.database import Database, seconds_from_now, session_name
from jobs.store.fence import JOB_IS_OPEN, OPEN_JOBS
from jobs.store.lifecycle import lock_job, settle_job
from jobs.store.replay import replayed
from jobs.store.suspects import count_death
from schemas.job import Lease, ShardStatus
from schemas.message import QueuedShard
from schemas.tables import jobs, shards, workers

READ_AT_ONCE = 10_000  # shards
SEND_SHARD_S = 0.002  # that a submit may need to send one message, on a busy machine
LEFT_OPEN_S = 1.0  # longer than a transaction of a worker takes


@replayed
def release_leases(db: Database, owner: str, max_attempts: int, how: str | None = None) -> list[QueuedShard]:
    """Free what a worker of this name still held: it died (`how`, if known), and its successor has started.

    Returns the shards that are queued again, whose messages must be sent.
    """
    reason = "the worker process died" + (f": {how}" if how else "")
    return _release_running(db, shards.c.lease_owner == owner, reason, max_attempts)


def read_clock(db: Database) -> datetime:
    """Return the database's time. Not tried again while the database is away: its caller must learn of that."""
    with db.read() as connection:
        now: datetime = connection.execute(sa.select(seconds_from_now())).scalar_one()
    return now


@dataclass(frozen=True)
class EndedLeases:
    """Leases that had ended at a moment of the database's clock."""

    before: datetime
    only_job: int | None = None
    owners: Collection[str] | None = None  # None: everybody's

    @property
    def condition(self) -> sa.ColumnElement[bool]:
        owned = sa.true() if self.owners is None else shards.c.lease_owner.in_(self.owners)
        return sa.and_(shards.c.lease_expires_at < self.before, owned, _in_job(self.only_job))


def expire_leases(db: Database, ended: EndedLeases, max_attempts: int) -> list[QueuedShard]:
    """Free the shards of these leases; returns what must be sent, as `release_leases` does. Not tried again, either."""
    _end_transactions(db, ended.condition)
    return _release_running(db, ended.condition, "the worker vanished: its lease ended", max_attempts)


def list_owners(db: Database, ended: EndedLeases, host: str) -> set[tuple[str, int]]:
    """Return the names and process ids of workers on this host that hold such a lease."""
    held = workers.c.name == shards.c.lease_owner, shards.c.status == ShardStatus.RUNNING, workers.c.host == host
    with db.read() as connection:
        found = connection.execute(sa.select(workers.c.name, workers.c.pid).where(*held, ended.condition))
        return {(row.name, row.pid) for row in found}


@replayed
def shorten_leases(db: Database, lease_s: float) -> None:
    """Let no lease end later than one taken now: the database's clock was set back since it was taken."""
    too_long = shards.c.status == ShardStatus.RUNNING, shards.c.lease_expires_at > seconds_from_now(lease_s)
    with db.write() as connection:
        connection.execute(sa.update(shards).where(*too_long).values(lease_expires_at=seconds_from_now(lease_s)))


@replayed
def list_queued(db: Database, job_id: int) -> list[QueuedShard]:
    """The job's shards that wait for a worker, in order."""
    waiting = shards.c.job_id == job_id, shards.c.status == ShardStatus.QUEUED
    selected = sa.select(shards.c.job_id, shards.c.id, jobs.c.priority).join(jobs).where(*waiting)
    with db.read() as connection:
        return [QueuedShard(*row) for row in connection.execute(selected.order_by(shards.c.number))]


@dataclass(frozen=True)
class Unclaimed:
    """Waiting shards whose message must have been in the queue at a moment that is `since_s` seconds ago.

    A shard that was attempted before needs no time to be sent: its message follows the end of the attempt, or, when
    that failed, there is none.
    """

    since_s: float
    resend_s: float  # from the creation of a job to its first message
    only_job: int | None = None

    @property
    def condition(self) -> sa.ColumnElement[bool]:
        sending_s = self.resend_s + SEND_SHARD_S * shards.c.number
        age_s = self.since_s + sa.case((shards.c.attempt > 0, 0.0), else_=sending_s)
        return sa.and_(
            shards.c.status == ShardStatus.QUEUED, shards.c.sent_at <= seconds_from_now(-age_s), _in_job(self.only_job)
        )


@replayed
def list_priorities(db: Database, only_job: int | None = None) -> list[int]:
    """Return the priorities of jobs with a shard that waits, the most urgent first."""
    waiting = shards.c.job_id == jobs.c.id, shards.c.status == ShardStatus.QUEUED, _in_job(only_job)
    selected = sa.select(jobs.c.priority).where(OPEN_JOBS, sa.exists().where(*waiting)).distinct()
    with db.read() as connection:
        return list(connection.scalars(selected.order_by(jobs.c.priority.desc())))


def stream_unclaimed(db: Database, unclaimed: Unclaimed, priority: int) -> Generator[QueuedShard, None, None]:
    """Yield such shards of open jobs of this priority, the oldest first."""
    found = (
        sa.select(shards.c.job_id, shards.c.id)
        .join(jobs)
        .where(OPEN_JOBS, jobs.c.priority == priority, unclaimed.condition)
        .order_by(shards.c.id)
        .execution_options(yield_per=READ_AT_ONCE)
    )
    with db.read() as connection:
        for job_id, shard_id in connection.execute(found):
            yield QueuedShard(job_id, shard_id, priority)


@replayed
def take_unclaimed(db: Database, unclaimed: Unclaimed, lost: list[QueuedShard]) -> list[QueuedShard]:
    """Mark those that still are unclaimed as sent now; returns them. Of two sweeps, one takes a shard."""
    ids = [shard.shard_id for shard in lost]
    free = (
        sa.select(shards.c.id)
        .where(shards.c.id.in_(ids), unclaimed.condition, JOB_IS_OPEN)
        .order_by(shards.c.id)
        .with_for_update(skip_locked=True, of=shards)  # two sweeps share the work, and neither waits for a cancel
    )
    with db.write() as connection:
        taken = set(
            connection.scalars(
                sa.update(shards)
                .where(shards.c.id.in_(free.scalar_subquery()), unclaimed.condition)
                .values(sent_at=seconds_from_now())
                .returning(shards.c.id)
            )
        )
    return [shard for shard in lost if shard.shard_id in taken]


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
