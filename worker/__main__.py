"""The supervisor: one Celery worker for each device, kept alive, and the sweep that finds lost shards.

`python -m worker [--exit-with-parent] [--no-restart] [--job ID]`; all else is settings. It touches no device.
"""

import argparse
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType

from jobs.client import open_database
from jobs.errors import LayaBatchError, SettingsError
from jobs.queue import check_broker, configure_app
from jobs.settings import Settings, environment_of, load_settings
from jobs.store import workers
from jobs.store.database import Database
from worker.boot import Exit
from worker.celery_worker import configure_logging, stop_with_parent
from worker.devices import list_devices, pin_environment, short_name
from worker.flag import Flag
from worker.sweep import Sweeper
from worker.watch import DRAIN_TIMEOUT_S

log = logging.getLogger("worker")

TICK_S = 0.2
FIRST_BACKOFF_S, LAST_BACKOFF_S = 1.0, 60.0
ONE_STOP_S = 3.0  # signals that come so soon after the first are the same stop: sent to the group, and passed on
RECORD_S = 5.0  # in which the database is told of the last ends; when it does not answer, nobody is
HEALTHY_AFTER_S = 120.0  # a worker that lived so long starts again with the first back-off


@dataclass
class DeviceWorker:
    """One device's Celery worker: the process, when it started, and how long to wait before the next start."""

    device: str
    name: str
    pinned: dict[str, str]  # variables of its device, and of its share of the CPUs
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    backoff_s: float = FIRST_BACKOFF_S
    start_not_before: float = 0.0

    def start(self, settings: Settings) -> None:
        environment = {**environment_of(settings), **self.pinned}
        command = [sys.executable, "-m", "worker.celery_worker", self.device, self.name]
        # Its own session: Ctrl-C reaches the supervisor alone. Standard input is its lifeline.
        self.process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, start_new_session=True)
        self.started_at = time.monotonic()

    def plan_restart(self) -> float:
        """Wait longer after each start that soon failed; returns the seconds to wait now."""
        now = time.monotonic()
        if now - self.started_at > HEALTHY_AFTER_S:
            self.backoff_s = FIRST_BACKOFF_S
        wait_s = self.backoff_s
        self.start_not_before = now + wait_s
        self.backoff_s = min(wait_s * 2, LAST_BACKOFF_S)
        self.process = None
        return wait_s


class Supervisor:
    """Starts, watches and stops the device workers. Never waits for the database: threads do."""

    def __init__(self, settings: Settings, db: Database, restart: bool, only_job: int | None) -> None:
        self.settings = settings
        self.db = db
        self.restart = restart
        self.sweeper = Sweeper(db, settings, only_job)
        self.stopping = Flag()  # no Event: a handler that sets one waits for ever when it interrupts a wait for it
        self._stopped_at = 0.0
        self._records: list[threading.Thread] = []
        host = socket.gethostname()
        # A name that no other worker ever has: at boot, a worker frees what its predecessor of the same name held.
        devices = list_devices()
        self.workers = [
            DeviceWorker(
                device,
                f"{short_name(device)}-{secrets.token_hex(3)}@{host}-{os.getpid()}",
                pin_environment(device, len(devices)),
            )
            for device in devices
        ]

    def run(self) -> int:
        """Until told to stop, or, with restarts off, until a worker ends: its exit code is returned."""
        threading.Thread(target=self.sweeper.run, name="sweep", daemon=True).start()
        exit_code = 0
        while not self.stopping.is_set():
            codes = [self._watch(worker) for worker in self.workers]
            if not self.restart and any(codes):
                exit_code = max(codes)
                break
            time.sleep(TICK_S)
        self._stop_workers()
        return exit_code

    def drain(self) -> None:
        """Have every worker end at its next batch, then end."""
        self.stopping.set()

    def stop(self, _signal: int, _frame: FrameType | None) -> None:
        """Signal handler: drain. Called again a while later, kill the workers."""
        now = time.monotonic()
        if not self._stopped_at:
            self._stopped_at = now
            self.drain()
        elif now - self._stopped_at > ONE_STOP_S:
            self._kill_workers()

    def _watch(self, worker: DeviceWorker) -> int:
        """Start the worker when it is due; when it has ended, plan its restart and return a code that is not 0."""
        if worker.process is None:
            if time.monotonic() >= worker.start_not_before:
                log.info("starting a worker on %s", worker.device)
                try:
                    worker.start(self.settings)
                except OSError as error:  # no memory, or no process, to be had at the moment
                    log.error("the worker on %s: %s; next try in %.0f s", worker.device, error, worker.plan_restart())  # noqa: TRY400
            return 0
        if (code := worker.process.poll()) is None:
            return 0
        _kill_group(worker.process)  # a child that outlived its parent would keep the device's memory
        reason = self._describe(code)
        self._record_end(worker.name, worker.process.pid, reason)
        wait_s = worker.plan_restart()
        log.error("the worker on %s ended with code %d: %s; next start in %.0f s", worker.device, code, reason, wait_s)
        return abs(code) or 1

    def _describe(self, code: int) -> str:
        """Why a worker ended that was not told to."""
        settings = self.settings
        reasons: dict[int, str] = {
            Exit.DRAINED: "Celery ended by itself; the log says why",
            Exit.BOOT_FAILED: "its process ended while it booted",
            Exit.BOOT_TIMED_OUT: f"it was not warm after {settings.boot_timeout_s:g} s (boot_timeout_s)",
            Exit.BROKER_SILENT: f"the broker did not answer for {settings.poll_timeout_s:g} s (poll_timeout_s)",
            Exit.UNWATCHED: "what watches over it failed; the log says why",
            Exit.TOO_MUCH_MEMORY: f"it had more than {settings.max_rss_bytes} bytes in memory (max_rss_bytes)",
        }
        return reasons.get(code, f"it was killed by signal {-code}" if code < 0 else f"it ended with code {code}")

    def _stop_workers(self) -> None:
        running = {worker.name: worker.process for worker in self.workers if worker.process is not None}
        for process in running.values():
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + DRAIN_TIMEOUT_S
        try:
            for process in running.values():
                process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            log.warning("killing what did not drain in %.0f s; its lease brings the shard back", DRAIN_TIMEOUT_S)
            self._kill_workers()
        for name, process in running.items():
            _kill_group(process)  # a child that outlived its parent
            self._record_end(name, process.pid, None)
        deadline = time.monotonic() + RECORD_S
        for record in self._records:
            record.join(max(0.0, deadline - time.monotonic()))

    def _record_end(self, name: str, pid: int, reason: str | None) -> None:
        def record() -> None:
            try:
                workers.mark_ended(self.db, name, pid, reason)
            except LayaBatchError as error:  # the record is for people; it may be missing
                log.warning("the end of worker %s is not recorded: %s", name, error)

        self._records = [thread for thread in self._records if thread.is_alive()]
        self._records.append(threading.Thread(target=record, name="record", daemon=True))
        self._records[-1].start()

    def _kill_workers(self) -> None:
        for worker in self.workers:
            if worker.process is not None and worker.process.poll() is None:
                _kill_group(worker.process)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def supervise(settings: Settings, arguments: argparse.Namespace) -> int:
    """Check the settings and the servers, then run the supervisor; returns the exit code."""
    if not settings.input_roots:
        raise SettingsError(
            "no input roots: set LAYA_BATCH_INPUT_ROOTS to the folders or URLs that workers may read under"
        )
    configure_app(settings)
    check_broker(settings)
    with open_database(settings) as db:
        supervisor = Supervisor(settings, db, restart=not arguments.no_restart, only_job=arguments.job)
        heed_signals(supervisor.stop)
        if arguments.exit_with_parent:
            stop_with_parent(supervisor.drain)
        return supervisor.run()


def heed_signals(stop: Callable[[int, FrameType | None], None]) -> None:
    """Have SIGTERM, Ctrl-C and SIGHUP call `stop`, but leave the last two ignored where whoever started this says so.

    A script's shell does so with Ctrl-C for what it runs in the background: it is then meant for another program.
    `nohup` does so with SIGHUP.
    """
    signal.signal(signal.SIGTERM, stop)
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, stop)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m worker", description=__doc__)
    parser.add_argument("--exit-with-parent", action="store_true", help="drain when standard input is closed")
    parser.add_argument("--no-restart", action="store_true", help="end when a worker ends")
    parser.add_argument("--job", type=int, help="sweep for the lost shards of this job alone")
    arguments = parser.parse_args()
    try:
        settings = load_settings()
        configure_logging(settings.log_level)
        sys.exit(supervise(settings, arguments))
    except LayaBatchError as error:
        sys.exit(f"laya-batch worker: {error}")


if __name__ == "__main__":
    main()
