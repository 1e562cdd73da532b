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
from typing import Any

from billiard import Event
from celery import Celery, bootsteps, signals

from jobs.queue import configure_app
from jobs.settings import Settings, load_settings
from jobs.store import workers
from worker.tasks import ScoreShard

log = logging.getLogger(__name__)

EXIT_BOOT_FAILED = 3
_BOOT_POLL_S = 0.1


class Boot:
    """How far the child is: flags that the fork shares between parent and child."""

    def __init__(self) -> None:
        self.warm = Event()
        self.failed = Event()
        self.draining = Event()


class AwaitWarmChild(bootsteps.StartStopStep):  # type: ignore[misc]  # Celery has no types
    """Holds the worker's start between its pool and its consumer until the child is warm."""

    requires = ("celery.worker.components:Pool",)
    boot: Boot
    timeout_s: float

    def start(self, parent: Any) -> None:
        deadline = time.monotonic() + self.timeout_s
        while not self.boot.warm.is_set():
            if self.boot.failed.is_set() or time.monotonic() > deadline or not _child_lives(parent):
                log.error("the worker could not boot; `laya-batch workers` and the lines above say why")
                _end_now(parent, EXIT_BOOT_FAILED)
            if self.boot.draining.is_set():
                _end_now(parent, 0)
            time.sleep(_BOOT_POLL_S)


def build_app(settings: Settings, device: str, name: str) -> Celery:
    """The queue's app with the task, and with the steps that boot and drain its child."""
    app, boot = configure_app(settings), Boot()
    app.register_task(ScoreShard())
    step = type("AwaitThisChild", (AwaitWarmChild,), {"boot": boot, "timeout_s": settings.boot_timeout_s})
    app.steps["worker"].add(step)

    def boot_child(**_: Any) -> None:
        from worker.session import boot_session  # noqa: PLC0415 - the parent never loads the engine

        try:
            ScoreShard.session = boot_session(settings, name, device, boot.draining)
            boot.warm.set()
        finally:
            if not boot.warm.is_set():
                boot.failed.set()

    def stop_child(**_: Any) -> None:
        session = getattr(ScoreShard, "session", None)
        if session is not None:
            workers.mark_stopped(session.db, session.worker_id)

    def drain(**_: Any) -> None:
        boot.draining.set()

    signals.worker_process_init.connect(boot_child, weak=False)
    signals.worker_process_shutdown.connect(stop_child, weak=False)
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
    """End parent and child before any message was taken; Celery's own way out would first begin to consume."""
    for process in parent.pool._pool._pool:
        if process.is_alive():
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
