"""The start of the scoring process: recorded, seen by its parent, and how a Celery worker may end."""

import os
import socket
from enum import IntEnum
from multiprocessing.sharedctypes import RawValue
from typing import TYPE_CHECKING

from jobs.settings import Settings
from jobs.store import workers
from jobs.store.database import Database
from worker.flag import Flag

if TYPE_CHECKING:
    from worker.session import Session


class Exit(IntEnum):
    """Exit codes of a Celery worker that ended itself: the supervisor records what they mean."""

    DRAINED = 0
    BOOT_FAILED = 3
    BOOT_TIMED_OUT = 4
    BROKER_SILENT = 5
    TOO_MUCH_MEMORY = 6


class Boot:
    """Which child is warm, whether one failed to become so, and whether it is to stop. Made before the fork."""

    def __init__(self) -> None:
        self.failed = Flag()
        self.draining = Flag()
        self._warm_pid = RawValue("i", 0)

    def mark_warm(self) -> None:
        """Called in the child: it may be given work."""
        self._warm_pid.value = os.getpid()

    def is_warm(self, pid: int) -> bool:
        """Whether the process of this id is the one that became warm last."""
        return bool(self._warm_pid.value == pid)


def boot_child(settings: Settings, owner: str, device: str, boot: Boot) -> "Session":
    """In the child: record the start, then load the engine. Raises what kept it from that, once recorded."""
    booted = False
    try:
        db = Database(settings.resolved_database_url, settings.database_retry_s, owner)
        start = workers.WorkerStart(
            owner, socket.gethostname(), os.getpid(), device, settings.checkpoint, settings.backend
        )
        worker_id = workers.start_worker(db, start)
        try:
            # Not in the parent, and not before the start is recorded: a broken driver may fail, or hang, here.
            from worker.session import boot_session  # noqa: PLC0415

            session = boot_session(settings, db, owner, worker_id, boot.draining)
        except Exception as error:
            workers.mark_failed(db, worker_id, f"{type(error).__name__}: {error}")
            raise
        booted = True
        return session
    finally:
        if booted:
            boot.mark_warm()
        else:
            boot.failed.set()
