"""Who scores: one row for each start of a worker, with what it was asked to run and what it really runs."""

from dataclasses import asdict, dataclass
from typing import Any

import sqlalchemy as sa

from jobs.store.database import Database, seconds_from_now
from schemas.tables import workers


@dataclass(frozen=True)
class WorkerStart:
    """A worker that begins to boot."""

    name: str
    host: str
    pid: int
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
    _update(db, worker_id, status="failed", error=error)


def mark_stopped(db: Database, name: str) -> None:
    """The worker's process has ended, drained or not: whoever started it says so, since a killed one cannot."""
    alive = workers.c.name == name, workers.c.status.in_(["starting", "ready"])
    with db.write() as connection:
        connection.execute(sa.update(workers).where(*alive).values(status="stopped"))


def beat(db: Database, worker_id: int, refused_messages: int) -> None:
    """The worker is alive, and has refused so many messages."""
    _update(db, worker_id, refused_messages=refused_messages)


def _update(db: Database, worker_id: int, **values: Any) -> None:
    with db.write() as connection:
        changed = sa.update(workers).where(workers.c.id == worker_id)
        connection.execute(changed.values(heartbeat_at=seconds_from_now(), **values))
