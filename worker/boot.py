"""The start of the scoring process: recorded, seen by its parent, and how a Celery worker may end."""

import os
import socket
from enum import IntEnum
from typing import TYPE_CHECKING

from jobs.settings import Settings
from jobs.store import workers
from jobs.store.database import Database
from worker.vitals import Vitals

if TYPE_CHECKING:
    from worker.session import Session


class Exit(IntEnum):
    """Exit codes of a Celery worker that ended itself: the supervisor records what they mean."""

    DRAINED = 0
    BOOT_FAILED = 3
    BOOT_TIMED_OUT = 4
    BROKER_SILENT = 5
    TOO_MUCH_MEMORY = 6
    UNWATCHED = 7


def boot_child(settings: Settings, owner: str, device: str, vitals: Vitals) -> "Session":
    """In the child: record the start, then load the engine. Raises what kept it from that, once recorded."""
    vitals.forget_deadlines()
    booted = False
    try:
        db = Database(settings.resolved_database_url, settings.database_retry_s, owner)
        start = workers.WorkerStart(
            owner, socket.gethostname(), os.getpid(), os.getppid(), device, settings.checkpoint, settings.backend
        )
        how_the_last_died = vitals.death or workers.last_error(db, owner)
        worker_id = workers.start_worker(db, start)
        try:
            # Not in the parent, and not before the start is recorded: a broken driver may fail, or hang, here.
            from worker.session import Birth, boot_session  # noqa: PLC0415

            session = boot_session(settings, db, Birth(owner, worker_id, how_the_last_died), vitals)
        except Exception as error:
            workers.mark_failed(db, worker_id, f"{type(error).__name__}: {error}")
            raise
        booted = True
        return session
    finally:
        if booted:
            vitals.mark_warm()
        else:
            vitals.failed.set()
