"""What a worker's parent and its child tell each other, in memory that both see. Owns no policy: `watch` does."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.sharedctypes import RawArray, RawValue
from typing import Any, Literal, get_args

from worker.flag import Flag

Stage = Literal["load", "prepare", "forward"]  # some run at once, each with a deadline of its own
DEATH_BYTES = 200


class Vitals:
    """How far the child is, when what it does must have ended, how the last child died, and what was refused.

    It has no locks: a process that dies must keep none.
    """

    def __init__(self) -> None:
        self.failed = Flag()  # a child could not boot
        self.draining = Flag()
        self._warm_pid = RawValue("i", 0)
        # In monotonic seconds; 0: none.
        self._deadlines: dict[Stage, Any] = {stage: RawValue("d", 0.0) for stage in get_args(Stage)}
        self._death = RawArray("c", DEATH_BYTES)
        self._refused = RawValue("q", 0)

    def mark_warm(self) -> None:
        """Called in the child: it may be given work."""
        self._warm_pid.value = os.getpid()

    def is_warm(self, pid: int) -> bool:
        """Whether the process of this id is the one that became warm last."""
        return bool(self._warm_pid.value == pid)

    @contextmanager
    def within(self, stage: Stage, seconds: float) -> Iterator[None]:
        """The block must end in so many seconds, or the parent ends this process: a hang in C heeds no signal."""
        deadline = self._deadlines[stage]
        deadline.value = time.monotonic() + seconds
        try:
            yield
        finally:
            deadline.value = 0.0

    def overdue(self) -> Stage | None:
        """The stage that should have ended by now, if any."""
        now = time.monotonic()
        return next((stage for stage, deadline in self._deadlines.items() if 0 < deadline.value < now), None)

    def forget_deadlines(self) -> None:
        """A process that died has none."""
        for deadline in self._deadlines.values():
            deadline.value = 0.0

    @property
    def death(self) -> str | None:
        """How the child before this one died, as far as it is known."""
        return self._death.value.decode(errors="ignore") or None

    @death.setter
    def death(self, how: str | None) -> None:
        self._death.value = (how or "").encode()[: DEATH_BYTES - 1]

    @property
    def refused(self) -> int:
        """Messages that were no shard's, since the parent began."""
        return int(self._refused.value)

    def count_refused(self) -> None:
        self._refused.value += 1
