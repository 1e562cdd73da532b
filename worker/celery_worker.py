"""One Celery worker for one device: `python -m worker.celery_worker DEVICE NAME`, started by the supervisor.

The parent runs Celery, answers `inspect ping`, and touches no model code. The one forked child loads and warms the
model; only then does the parent take its first message.
"""

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from celery import Celery, signals

from jobs.errors import LayaBatchError
from jobs.queue import configure_app
from jobs.settings import Settings, load_settings
from worker.boot import boot_child
from worker.consumer import consumer_of
from worker.tasks import ScoreShard
from worker.vitals import Vitals
from worker.watch import Watch, steps_of

log = logging.getLogger(__name__)


def build_app(settings: Settings, device: str, name: str, watch: Watch) -> Celery:
    """The queue's app with the task, and with the steps that boot, watch and drain its child."""
    app, vitals = configure_app(settings), watch.vitals
    app.register_task(ScoreShard())
    await_warm_child, watch_polls = steps_of(watch)
    app.steps["worker"].add(await_warm_child)
    app.steps["consumer"].add(watch_polls)
    app.conf.worker_consumer = consumer_of(watch)

    def boot_session(**_: Any) -> None:
        # A service manager signals every process of its group. The parent drains; this one ends when it is told to.
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        watch.note_death()
        try:
            ScoreShard.session = boot_child(settings, name, device, vitals)
        except LayaBatchError as error:  # which says enough; the parent has been told, and ends this process
            log.error("the worker cannot boot: %s", error)  # noqa: TRY400 - words, no traceback

    def drain(**_: Any) -> None:
        vitals.draining.set()

    signals.worker_process_init.connect(boot_session, weak=False)
    signals.worker_shutting_down.connect(drain, weak=False)
    return app


def stop_with_parent(stop: Callable[[], None]) -> None:
    """Call `stop`, in a thread, when the process that started this one is gone: it holds the other end of stdin."""

    def watch() -> None:
        # Not sys.stdin.read: it would hold a lock that a forked child needs to close its copy.
        os.read(sys.stdin.fileno(), 1)
        stop()

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def configure_logging(level: str) -> None:
    """Log lines to standard error, each with its time and process."""
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(processName)s %(name)s: %(message)s")


def main() -> None:
    """Run the worker until it is told to stop."""
    device, name = sys.argv[1:]
    settings = load_settings()
    configure_logging(settings.log_level)
    stop_with_parent(lambda: os.kill(os.getpid(), signal.SIGTERM))
    watch = Watch(settings, Vitals())
    app = build_app(settings, device, name, watch)
    app.worker_main(
        [
            *("worker", "--pool=prefork", "--concurrency=1", f"--hostname={name}", f"--loglevel={settings.log_level}"),
            # Celery's heartbeats would be sent in its loop, which stands still while the broker does not answer.
            *("--without-gossip", "--without-mingle", "--without-heartbeat", "--queues", settings.queue),
        ]
    )
    sys.exit(watch.exit_code)


if __name__ == "__main__":
    main()
