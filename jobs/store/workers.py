"""Who scores: one row for each start of a worker, with what it was asked to run and what it really runs."""

from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from jobs.store.database import Database, seconds_from_now
from jobs.store.replay import replayed
from jobs.urls import hide_secrets
from schemas.tables import workers


@dataclass(frozen=True)
class WorkerStart:
    """A worker that begins to boot."""

    name: str
    host: str
    pid: int
    parent_pid: int
    device: str
    checkpoint: str
    backend_asked: str


@dataclass(frozen=True)
class WorkerReady:
    """A worker whose model is loaded and warm."""

    backend: str
    fallback_reason: str | None
    dtype: str
    warmup_s: float
    versions: dict[str, Any]


@dataclass(frozen=True)
class WorkersSeen:
    """Whether any worker is alive, and when one last was; by the database's clock."""

    alive: bool
    last_at: datetime | None  # None: none has ever started
    now: datetime


@replayed
def last_seen(db: Database, silent_after_s: float, boot_timeout_s: float) -> WorkersSeen:
    """Return whether a worker boots or works; a heart stands still while it boots, for `boot_timeout_s` at most."""
    status, beat_at = workers.c.status, workers.c.heartbeat_at
    awake = sa.or_(
        sa.and_(status == "ready", beat_at > seconds_from_now(-silent_after_s)),
        sa.and_(status == "starting", beat_at > seconds_from_now(-boot_timeout_s)),
    )
    seen = sa.select(
        sa.func.coalesce(sa.func.max(sa.case((awake, 1), else_=0)), 0),
        sa.func.max(workers.c.heartbeat_at),
        seconds_from_now(),
    )
    with db.read() as connection:
        alive, last_at, now = connection.execute(seen).one()
    return WorkersSeen(bool(alive), last_at, now)


@replayed
def last_error(db: Database, name: str) -> str | None:
    """Why the worker of this name ended last time, if it was not told to."""
    with db.read() as connection:
        named = sa.select(workers.c.error).where(workers.c.name == name)
        return connection.scalar(named.order_by(workers.c.id.desc()).limit(1))


@replayed
def start_worker(db: Database, start: WorkerStart) -> int:
    """Record a boot; returns the worker's id."""
    now = seconds_from_now()
    with db.write() as connection:
        inserted = sa.insert(workers).values(**asdict(start), status="starting", started_at=now, heartbeat_at=now)
        return int(connection.execute(inserted.returning(workers.c.id)).scalar_one())


def mark_ready(db: Database, worker_id: int, ready: WorkerReady) -> None:
    """The worker is about to take its first message."""
    _update(db, worker_id, status="ready", **asdict(ready))


def mark_failed(db: Database, worker_id: int, error: str) -> None:
    """The worker could not boot."""
    _update(db, worker_id, status="failed", error=hide_secrets(error))


@replayed
def mark_ended(db: Database, name: str, parent_pid: int, reason: str | None) -> None:
    """The worker's process has ended: whoever started it says so, since a killed one cannot.

    Its successor of the same name, which may have begun by now, has another parent. `reason`: why it ended, if it was
    not told to. A worker that ended before it was ready has failed.
    """
    alive = workers.c.name == name, workers.c.parent_pid == parent_pid, workers.c.status.in_(["starting", "ready"])
    failed = sa.and_(workers.c.status == "starting", sa.literal(reason is not None))
    status = sa.case((failed, "failed"), else_="stopped")
    with db.write() as connection:
        connection.execute(sa.update(workers).where(*alive).values(status=status, error=reason))


def beat(db: Database, worker_id: int, refused_messages: int) -> None:
    """The worker is alive, and has refused so many messages."""
    _update(db, worker_id, refused_messages=refused_messages)


@replayed
def _update(db: Database, /, worker_id: int, **values: Any) -> None:
    with db.write() as connection:
        changed = sa.update(workers).where(workers.c.id == worker_id)
        connection.execute(changed.values(heartbeat_at=seconds_from_now(), **values))
