"""A job under way on a service that a test breaks, and what must be true of it afterwards."""

import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

import jobs
from schemas import tables
from schemas.tables import results, shards, workers
from tests.faults.counting import BATCHES_IN_FLIGHT, RowCount, count_rows
from tests.faults.proxy import CommitProxy
from tests.faults.servers import PrivatePostgres, PrivateRedis
from tests.integration.service import QUESTIONS, Service, make_texts, write_tickets
from tests.processes import is_running

# What a service must be like for a fault to strike and heal in seconds. DEBUG: a line for each forward pass.
# Tests assert that nothing was scored twice: the lease is so long that a busy machine does not miss one by itself.
QUICK: dict[str, Any] = {
    "log_level": "DEBUG",
    "max_batch_tokens": 1024,
    "rows_per_shard": 150,
    "lease_s": 15.0,
    "sweep_s": 0.5,
    "resend_s": 1.0,
    "max_attempts": 1000,  # the fault is not the rows'
}
FINISH_S = 180.0


@dataclass
class Scene:
    """A service, its servers, and the supervisors of its workers."""

    service: Service
    redis: PrivateRedis
    supervisors: list["subprocess.Popen[bytes]"]
    postgres: PrivatePostgres | None = None
    proxy: CommitProxy | None = None

    def submit(self, rows: int, **asked: Any) -> jobs.JobInfo:
        """A job of so many rows, in a file of its own."""
        path = write_tickets(self.service.folder / f"{time.monotonic_ns()}.parquet", make_texts(rows))
        return submit_file(self.service, path, **asked)

    def submit_and_begin(self, rows: int, **asked: Any) -> jobs.JobInfo:
        """The same, once some of its answers are saved and most are not."""
        job = self.submit(rows, **asked)
        self.await_answers(job)
        return job

    def count_answers(self, job: jobs.JobInfo) -> int:
        (row,) = self.service.query(sa.select(sa.func.count()).select_from(results).where(results.c.job_id == job.id))
        return int(row[0])

    def await_answers(self, job: jobs.JobInfo, more_than: int = 0) -> float:
        """Wait until more answers than these are saved; returns the seconds it took."""
        return timed(lambda: self.service.wait_for(lambda: self.count_answers(job) > more_than))

    def await_progress(self, job: jobs.JobInfo) -> float:
        """Wait until one more answer is saved, or the job has ended; returns the seconds it took."""
        before = self.count_answers(job)
        ended = sa.select(tables.jobs.c.id).where(tables.jobs.c.id == job.id, tables.jobs.c.finished_at.is_not(None))
        return timed(
            lambda: self.service.wait_for(lambda: self.count_answers(job) > before or self.service.query(ended))
        )

    def await_claim(self, job: jobs.JobInfo) -> None:
        """Wait until another shard is begun, which needs a message, or until the job has ended."""
        begun = sa.select(sa.func.sum(shards.c.attempt)).where(shards.c.job_id == job.id)
        before = self.service.query(begun)
        ended = sa.select(tables.jobs.c.id).where(tables.jobs.c.id == job.id, tables.jobs.c.finished_at.is_not(None))
        self.service.wait_for(lambda: self.service.query(begun) != before or self.service.query(ended))

    def finish(self, job: jobs.JobInfo) -> RowCount:
        """Wait for the job's end and check every promise: nothing lost, doubled or needlessly rescored, ended once."""
        try:
            jobs.wait(job.id, timeout_s=FINISH_S, settings=self.service.settings)
        except (TimeoutError, jobs.JobFailedError) as error:
            pytest.fail(f"{error}\n{self.service.log[-4000:]}")
        count = count_rows(self.service, job)
        assert (count.lost, count.doubled) == (0, 0), count
        assert count.batches_in_vain <= BATCHES_IN_FLIGHT, count
        assert count.endings <= 1, count
        return count

    def child_of(self, supervisor: "subprocess.Popen[bytes]") -> int:
        """The process that scores for this supervisor, once it is warm; else 0."""
        mine = workers.c.name.endswith(f"-{supervisor.pid}"), workers.c.status == "ready"
        found = self.service.query(sa.select(workers.c.pid).where(*mine).order_by(workers.c.id.desc()).limit(1))
        return int(found[0].pid) if found and is_running(found[0].pid) else 0

    def await_child(self, supervisor: "subprocess.Popen[bytes]", but_not: int = 0) -> int:
        """The same, waiting until it is another than the one before."""
        self.service.wait_for(lambda: self.child_of(supervisor) not in (0, but_not), supervisor)
        return self.child_of(supervisor)


def start_workers(service: Service, count: int, **overrides: Any) -> list["subprocess.Popen[bytes]"]:
    """Supervisors with a worker each; returns once all are warm."""
    started = [service.launch(**overrides) for _ in range(count)]
    for process in started:
        service.wait_for(lambda p=process: any(n.endswith(f"-{p.pid}") for n in service.ready_workers()), process)
    return started


def submit_file(service: Service, path: Path, **asked: Any) -> jobs.JobInfo:
    return jobs.submit(
        path,
        questions=QUESTIONS,
        state="text",
        row_id="ticket",
        checkpoint=service.settings.checkpoint,
        settings=service.settings,
        **asked,
    )


def costs(*counts: RowCount) -> dict[str, int]:
    """Counts as the report takes them."""
    return {name: sum(getattr(count, name) for count in counts) for name in ("rows", "lost", "doubled", "rescored")}


def timed(work: Callable[[], object]) -> float:
    """Seconds that the call takes."""
    started = time.monotonic()
    work()
    return time.monotonic() - started
