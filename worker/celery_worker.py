"""One Celery worker for one device: `python -m worker.celery_worker DEVICE NAME`, started by the supervisor.

The parent runs Celery, answers `inspect ping`, and touches no model code. The one forked child loads and warms the
model; only then does the parent take its first message.
"""

import logging
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from celery import Celery, bootsteps, signals
from celery.worker.consumer import Consumer

from jobs.queue import configure_app
from jobs.settings import Settings, load_settings
from worker.tasks import ScoreShard
from worker.vitals import Vitals
from worker.watchdog import watch_children

log = logging.getLogger(__name__)

EXIT_BOOT_FAILED = 3
BOOT_POLL_S = 0.1


class CountingConsumer(Consumer):  # type: ignore[misc]  # Celery has no types
    """Celery's consumer, which counts the messages that it refuses: pickled or garbled ones, and of unknown tasks."""

    vitals: Vitals

    def on_decode_error(self, message: Any, exc: Exception) -> None:
        self.vitals.count_refused()
        super().on_decode_error(message, exc)

    def on_unknown_message(self, body: Any, message: Any) -> None:
        self.vitals.count_refused()
        super().on_unknown_message(body, message)

    def on_unknown_task(self, body: Any, message: Any, exc: Exception) -> None:
        self.vitals.count_refused()
        super().on_unknown_task(body, message, exc)

    def on_invalid_task(self, body: Any, message: Any, exc: Exception) -> None:
        self.vitals.count_refused()
        super().on_invalid_task(body, message, exc)


class AwaitWarmChild(bootsteps.StartStopStep):  # type: ignore[misc]  # Celery has no types
    """Holds the worker's start between its pool and its consumer until the child is warm."""

    requires = ("celery.worker.components:Pool",)
    vitals: Vitals
    settings: Settings

    def start(self, parent: Any) -> None:
        deadline = time.monotonic() + self.settings.boot_timeout_s
        while not self.vitals.warm.is_set():
            if self.vitals.draining.is_set():
                _end_now(parent, 0)
            if self.vitals.failed.is_set() or time.monotonic() > deadline or not _child_lives(parent):
                _end_now(parent, EXIT_BOOT_FAILED)
            time.sleep(BOOT_POLL_S)
        # Celery replaces a child that dies, and would let it work though it failed to boot.
        threading.Thread(target=self.watch, args=(parent,), name="watchdog", daemon=True).start()

    def watch(self, parent: Any) -> None:
        """End the worker when a later child cannot boot: the supervisor starts it again, waiting longer each time."""
        watch_children(parent.pool._pool._pool, self.vitals, self.settings)
        _end_now(parent, EXIT_BOOT_FAILED)


def build_app(settings: Settings, device: str, name: str) -> Celery:
    """The queue's app with the task, and with the steps that boot and drain its child."""
    app, vitals = configure_app(settings), Vitals()
    app.register_task(ScoreShard())
    app.steps["worker"].add(type("AwaitThisChild", (AwaitWarmChild,), {"vitals": vitals, "settings": settings}))
    app.conf.worker_consumer = type("ThisConsumer", (CountingConsumer,), {"vitals": vitals})

    def boot_child(**_: Any) -> None:
        from worker.session import boot_session  # noqa: PLC0415 - the parent never loads the engine

        vitals.forget_deadlines()
        booted = False
        try:
            ScoreShard.session = boot_session(settings, name, device, vitals)
            booted = True
        finally:
            (vitals.warm if booted else vitals.failed).set()

    def drain(**_: Any) -> None:
        vitals.draining.set()

    signals.worker_process_init.connect(boot_child, weak=False)
    signals.worker_shutting_down.connect(drain, weak=False)
    return app


def stop_with_parent() -> None:
    """Drain when the process that started this one is gone: it holds the other end of standard input."""

    def watch() -> None:
        # Not sys.stdin.read: it would hold a lock that a forked child needs to close its copy.
        os.read(sys.stdin.fileno(), 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def configure_logging(level: str) -> None:
    """Log lines to standard error, each with its time and process."""
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(processName)s %(name)s: %(message)s")


def _child_lives(parent: Any) -> bool:
    return any(process.is_alive() for process in parent.pool._pool._pool)


def _end_now(parent: Any, code: int) -> None:
    """End parent and child without taking another message, as Celery's own way out would."""
    if code == EXIT_BOOT_FAILED:
        log.error("the worker could not boot; `laya-batch workers` and the lines above say why")
    for process in list(parent.pool._pool._pool):
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    os._exit(code)


def main() -> None:
    """Run the worker until it is told to stop."""
    device, name = sys.argv[1:]
    settings = load_settings()
    configure_logging(settings.log_level)
    stop_with_parent()
    app = build_app(settings, device, name)
    app.worker_main(
        [
            *("worker", "--pool=prefork", "--concurrency=1", f"--hostname={name}", f"--loglevel={settings.log_level}"),
            *("--without-gossip", "--without-mingle", "--queues", settings.queue),
        ]
    )


if __name__ == "__main__":
    main()
