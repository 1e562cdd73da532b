"""A real service for a test: a database, a queue of its own on the shared Redis, and worker processes."""

import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import sqlalchemy as sa

from jobs.settings import Settings, environment_of, load_settings
from jobs.store.database import Database
from schemas.tables import workers
from tests.processes import held_still, is_running, parent_of

WAIT_S = 90.0

QUESTIONS: dict[str, dict[str, Any]] = {
    "refund": {"type": "noul", "instructions": "Does the customer want a refund?"},
    "anger": {"type": "score", "instructions": "How angry?", "criteria": ["calm", "annoyed", "furious"]},
    "team": {"type": "choice", "instructions": "Who handles it?", "criteria": {"billing": "invoices", "tech": None}},
}
WORDS = [
    *("refund", "please", "the", "invoice", "was", "wrong", "twice", "and", "nobody", "answers"),
    *("退款", "спасибо", "🎉", "why"),
]


def make_texts(count: int) -> list[str]:
    """Texts of 1 to 40 words, in a fixed order."""
    return [" ".join(WORDS[(i * 7 + j * j) % len(WORDS)] for j in range(1 + (i * i) % 40)) for i in range(count)]


def write_tickets(path: Path, texts: list[str | None], row_group_size: int = 50) -> Path:
    """A Parquet file of tickets, with ids t0, t1, …"""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"ticket": [f"t{i}" for i in range(len(texts))], "text": pa.array(texts, pa.string())})
    pq.write_table(table, path, row_group_size=row_group_size)
    return path


@dataclass
class Service:
    """Where a test's jobs go, and the workers that take them."""

    settings: Settings
    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def log(self) -> str:
        return (self.folder / "worker.log").read_text(encoding="utf-8", errors="replace")

    def start_worker(self, **overrides: Any) -> subprocess.Popen[bytes]:
        """A supervisor with one worker; returns once it is warm."""
        process = self.launch(**overrides)
        self.wait_for(lambda: any(name.endswith(f"-{process.pid}") for name in self.ready_workers()), process)
        return process

    def launch(self, *arguments: str, **overrides: Any) -> subprocess.Popen[bytes]:
        # One thread each: threads that wait for each other on a busy machine are slower than one.
        environment = {"OMP_NUM_THREADS": "1", **environment_of(self.settings.model_copy(update=overrides))}
        with (self.folder / "worker.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "worker", *arguments], env=environment, stdout=log, stderr=log
            )
        self.processes.append(process)
        return process

    def ready_workers(self) -> list[str]:
        return [row.name for row in self.query(sa.select(workers.c.name).where(workers.c.status == "ready"))]

    @contextmanager
    def holding_messages(self) -> Iterator[None]:
        """Within the block no warm worker begins another shard; one that is in work goes on.

        Celery is held still, not what scores. A message that it had asked for may come into its hands all the same.
        """
        scoring = [row.pid for row in self.query(sa.select(workers.c.pid).where(workers.c.status == "ready"))]
        parents = [parent_of(pid) for pid in scoring if is_running(pid)]
        assert parents
        with held_still(*parents):
            yield

    def query(self, statement: Any) -> list[Any]:
        db = Database(self.settings.resolved_database_url)
        try:
            with db.read() as connection:
                return list(connection.execute(statement))
        finally:
            db.close()

    def wait_for(self, condition: Callable[[], object], process: subprocess.Popen[bytes] | None = None) -> None:
        """Until the condition holds; fails with the worker's log when it does not, or when the process ends first."""
        deadline = time.monotonic() + WAIT_S
        while not condition():
            ended = process is not None and process.poll() is not None
            assert not ended and time.monotonic() < deadline, self.log[-4000:]
            time.sleep(0.05)

    def stop(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.processes:
            process.wait(WAIT_S)


@contextmanager
def serve(database_url: str, redis_url: str, folder: Path, **overrides: Any) -> Iterator[Service]:
    """A service without workers yet; they are stopped at the end of the block."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = load_settings(
        **{
            "database_url": database_url,
            "broker_url": redis_url,
            "queue": f"test-{uuid.uuid4().hex[:8]}",
            "input_roots": [str(folder)],
            "rows_per_shard": 100,
            "rows_per_window": 40,
            "max_batch_tokens": 2048,
            "sweep_s": 0.5,
            **overrides,
        }
    )
    db = Database(database_url)
    db.migrate()
    db.close()
    service = Service(settings, folder)
    try:
        yield service
    finally:
        service.stop()
