"""A job under way on a service whose workers a test may kill, and what must be true of it afterwards."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

import jobs
from schemas.tables import results, workers
from tests.faults.counting import BATCHES_IN_FLIGHT, RowCount, count_rows
from tests.integration.service import QUESTIONS, Service, make_texts, write_tickets

# What a service must be like for a fault to strike and heal in seconds. DEBUG: a line for each forward pass.
QUICK: dict[str, Any] = {
    "log_level": "DEBUG",
    "max_batch_tokens": 1024,
    "rows_per_shard": 150,
    "lease_s": 4.0,
    "sweep_s": 0.5,
    "resend_s": 1.0,
    "max_attempts": 1000,  # the fault is not the rows'
}
FINISH_S = 180.0


def submit(service: Service, rows: int, name: str = "in", **asked: Any) -> jobs.JobInfo:
    """A job of so many rows, in a file of its own."""
    path = write_tickets(service.folder / f"{name}-{time.monotonic_ns()}.parquet", make_texts(rows))
    return submit_file(service, path, **asked)


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


def count_answers(service: Service, job: jobs.JobInfo) -> int:
    (row,) = service.query(sa.select(sa.func.count()).select_from(results).where(results.c.job_id == job.id))
    return int(row[0])


def await_answers(service: Service, job: jobs.JobInfo, more_than: int = 0) -> float:
    """Wait until more answers than these are saved; returns the seconds it took."""
    started = time.monotonic()
    service.wait_for(lambda: count_answers(service, job) > more_than)
    return time.monotonic() - started


def finish(service: Service, job: jobs.JobInfo) -> RowCount:
    """Wait for the job's end and check every promise: nothing lost, doubled or needlessly rescored, ended once."""
    try:
        jobs.wait(job.id, timeout_s=FINISH_S, settings=service.settings)
    except (TimeoutError, jobs.JobFailedError) as error:
        pytest.fail(f"{error}\n{service.log[-4000:]}")
    count = count_rows(service, job)
    assert (count.lost, count.doubled) == (0, 0), count
    assert count.batches_in_vain <= BATCHES_IN_FLIGHT, count
    assert count.endings <= 1, count
    return count


def child_of(service: Service, supervisor: Any) -> int:
    """The process that scores for this supervisor, once it is warm."""
    mine = workers.c.name.endswith(f"-{supervisor.pid}"), workers.c.status == "ready"
    newest = sa.select(workers.c.pid).where(*mine).order_by(workers.c.id.desc()).limit(1)
    found = service.query(newest)
    return int(found[0].pid) if found and Path(f"/proc/{found[0].pid}").exists() else 0


def parent_of(pid: int) -> int:
    """The process that started this one; 0 when it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except FileNotFoundError:
        return 0
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("PPid:"))


def kill(*pids: int, with_signal: signal.Signals = signal.SIGKILL) -> None:
    for pid in pids:
        if pid > 1:
            os.kill(pid, with_signal)


def costs(count: RowCount) -> dict[str, int]:
    """A count as the report takes it."""
    return {name: getattr(count, name) for name in ("rows", "lost", "doubled", "rescored")}
