"""What a Celery worker's parent looks after, in a thread of its own: that its child boots, that it ends each batch in
time and keeps within its memory, and that the worker polls the broker.

It ends a child that hangs, and Celery replaces it. When anything else fails it ends the worker: the supervisor says why
in the database and starts another, waiting longer each time.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Empty
from typing import Any

from celery import bootsteps
from celery.worker import state

from jobs.settings import Settings
from worker.boot import Exit
from worker.vitals import Stage, Vitals

log = logging.getLogger(__name__)

LOOK_S = 0.1
DRAIN_TIMEOUT_S = 110.0  # for the batch in work; below the two minutes that the compose file gives
# By stage: what is done, and the setting that says how long it may take.
DEADLINES: dict[Stage, tuple[str, str]] = {
    "load": ("loading a checkpoint", "boot_timeout_s"),
    "prepare": ("reading rows", "batch_timeout_s"),
    "forward": ("scoring a batch", "batch_timeout_s"),
}
KILL_AT = 1.5  # times the memory limit
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Watch:
    """Watches over one worker. Its parent is Celery's object for it, whose pool has one child."""

    def __init__(self, settings: Settings, vitals: Vitals) -> None:
        self.settings = settings
        self.vitals = vitals
        self.exit_code = Exit.DRAINED
        self._parent: Any = None
        self._child = 0  # process id of the child that was seen last
        self._process: Any = None  # of the child that the pool had last
        self._child_since = time.monotonic()
        self._polled_at = time.monotonic()

    def await_warm_child(self, parent: Any) -> None:
        """Return when the worker may take its first message; then go on watching in a thread."""
        self._parent = parent
        self._child, self._child_since = self._pid_of_child(), time.monotonic()
        while not self.vitals.is_warm(self._child):
            if self.vitals.draining.is_set():
                self.end(Exit.DRAINED)
            if not any(process.is_alive() for process in self._pool()):
                self.end(Exit.BOOT_FAILED)  # Celery replaces no child yet
            self._look_after_boot()
            time.sleep(LOOK_S)
        self.note_poll()
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def has_warm_child(self) -> bool:
        """Whether there is a child that may be given work."""
        return any(process.is_alive() and self.vitals.is_warm(process.pid) for process in self._pool())

    def note_poll(self) -> None:
        """The broker has answered, be it that there is no message."""
        self._polled_at = time.monotonic()

    def note_death(self) -> None:
        """Keep how a child ended, once Celery has removed it from the pool.

        Its successor calls this too, in its copy of this object: it may ask before the parent's thread has looked.
        """
        process = next(iter(self._pool()), None)
        if self._process is not None and process is not self._process and self.vitals.death is None:
            self.vitals.death = _how_ended(self._process.exitcode)
        self._process = process

    def end(self, code: Exit) -> None:
        """End parent and child without taking another message, as Celery's own way out would."""
        if code is not Exit.DRAINED:
            log.error("the worker ends itself: %s", code.name.lower().replace("_", " "))
        with suppress(ProcessLookupError):
            if child := self._pid_of_child():
                os.kill(child, signal.SIGKILL)
        os._exit(code)

    def _watch(self) -> None:
        try:
            while not self.vitals.draining.is_set():
                self._look_after_boot()
                self.note_death()
                self._look_after_batch()
                self._look_after_polls()
                self._look_after_memory()
                time.sleep(LOOK_S)
            self._watch_drain()
        except Exception:  # a worker that nobody watches may hang for ever
            log.exception("the watch failed")
            self.end(Exit.UNWATCHED)

    def _watch_drain(self) -> None:
        """It drains between two batches; a batch may hang, and one alone may take all the memory that there is."""
        give_up_at = time.monotonic() + DRAIN_TIMEOUT_S
        while time.monotonic() < give_up_at and not self._has_too_much_memory(KILL_AT):
            self._look_after_batch()
            time.sleep(LOOK_S)
        log.error("the batch in work does not end: killing its process; its lease brings the shard back")
        self.end(self.exit_code)

    def _look_after_boot(self) -> None:
        """Celery replaces a child that dies. One that died before it was warm is not replaced: the worker ends."""
        now, child = time.monotonic(), self._pid_of_child()
        died_cold = False
        if child != self._child:
            died_cold = self._child != 0 and not self.vitals.is_warm(self._child)
            self._child, self._child_since = child, now
        if died_cold or self.vitals.failed.is_set():
            self.end(Exit.BOOT_FAILED)
        if not self.vitals.is_warm(child) and now - self._child_since > self.settings.boot_timeout_s:
            self.end(Exit.BOOT_TIMED_OUT)

    def _look_after_polls(self) -> None:
        """While it scores or boots again, a worker does not poll."""
        if state.reserved_requests or not self.vitals.is_warm(self._child):
            self.note_poll()
        elif time.monotonic() - self._polled_at > self.settings.poll_timeout_s:
            self.end(Exit.BROKER_SILENT)

    def _look_after_batch(self) -> None:
        """End a child whose batch takes too long: only its parent can, for in C it may hold Python's lock."""
        if stage := self.vitals.overdue():
            doing, setting = DEADLINES[stage]
            how = f"{doing} took longer than LAYA_BATCH_{setting.upper()}={getattr(self.settings, setting):g}"
            log.error("ending the scoring process: %s", how)
            self.vitals.death = how  # before it dies: its successor asks
            self.vitals.forget_deadlines()
            if self._child:
                with suppress(ProcessLookupError):
                    os.kill(self._child, signal.SIGKILL)

    def _look_after_memory(self) -> None:
        if self.vitals.is_warm(self._child) and self._has_too_much_memory():
            log.warning("the scoring process has more than %d bytes in memory: draining", self.settings.max_rss_bytes)
            self.exit_code = Exit.TOO_MUCH_MEMORY
            self.vitals.draining.set()
            os.kill(os.getpid(), signal.SIGTERM)

    def _has_too_much_memory(self, times: float = 1.0) -> bool:
        limit_bytes = self.settings.max_rss_bytes
        return limit_bytes is not None and _rss_bytes(self._child) > times * limit_bytes

    def _pool(self) -> list[Any]:
        """Celery's objects of the pool's one child, or of none: before it began, while it is replaced, at the end."""
        pool = getattr(getattr(self._parent, "pool", None), "_pool", None)
        return [] if pool is None else list(pool._pool)

    def _pid_of_child(self) -> int:
        """0 while there is none, or none has started."""
        return next((int(process.pid or 0) for process in self._pool()), 0)


def steps_of(watch: Watch) -> tuple[type[bootsteps.StartStopStep], type[bootsteps.StartStopStep]]:
    """Celery's steps, of the worker and of its consumer, that call the watch."""

    class AwaitWarmChild(bootsteps.StartStopStep):  # type: ignore[misc]  # Celery has no types
        """Holds the worker's start between its pool and its consumer until the child is warm."""

        requires = ("celery.worker.components:Pool",)

        def start(self, parent: Any) -> None:
            for number in (signal.SIGINT, signal.SIGHUP):  # to Celery, a second SIGINT means kill, SIGHUP start anew
                signal.signal(number, signal.getsignal(signal.SIGTERM))
            watch.await_warm_child(parent)

    class WatchPolls(bootsteps.StartStopStep):  # type: ignore[misc]
        """Tells the watch of each answer to a poll, and polls for a warm child alone; started with each connection."""

        requires = ("celery.worker.consumer.tasks:Tasks",)

        def start(self, consumer: Any) -> None:
            channel = consumer.task_consumer.channel
            channel.handlers["BRPOP"] = _noting(channel.handlers["BRPOP"], watch.note_poll)
            can_consume = channel.qos.can_consume
            # A poll that was sent before the child died must be read: its reply may be a message, to be given back.
            channel.qos.can_consume = lambda: (watch.has_warm_child() or bool(channel._in_poll)) and can_consume()

    return AwaitWarmChild, WatchPolls


def _noting(read: Callable[..., Any], note: Callable[[], None]) -> Callable[..., Any]:
    def read_and_note(**options: Any) -> Any:
        try:
            delivered = read(**options)
        except Empty:
            note()
            raise
        note()
        return delivered

    return read_and_note


def _rss_bytes(pid: int) -> int:
    """Its resident memory; 0 where the system has no /proc."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1]) * PAGE_BYTES
    except OSError:
        return 0


def _how_ended(exit_code: int | None) -> str | None:
    """How a child ended, by the exit code that its parent got; None where it got none."""
    if exit_code is None:
        return None
    if exit_code >= 0:
        return f"it ended with exit code {exit_code}"
    by_kernel = ", as the system does when memory runs out" if -exit_code == signal.SIGKILL else ""
    return f"killed by {signal.Signals(-exit_code).name}{by_kernel}"
