"""How far the scoring process is, as its parent and it both see; and how a Celery worker may end."""

import os
from enum import IntEnum
from multiprocessing.sharedctypes import RawValue

from worker.flag import Flag


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
