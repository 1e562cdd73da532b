"""The parent's watch over its child: ends one that hangs or takes too much memory, and notes how one died.

The parent can do it because it does nothing else: it loads no model, and its threads never wait for the device.
"""

import logging
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from jobs.settings import Settings
from worker.vitals import Vitals

log = logging.getLogger(__name__)

POLL_S = 0.1
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def watch_children(pool: Any, vitals: Vitals, settings: Settings) -> None:
    """Watch the pool's child, and each that replaces it, until one cannot boot."""
    while not vitals.failed.is_set():
        for process in list(pool):
            watch_child(process.pid, vitals, settings)
        time.sleep(POLL_S)


def watch_child(pid: int, vitals: Vitals, settings: Settings) -> None:
    """End the child if it must end; note how it ended, if it has."""
    if how := _must_end(pid, vitals, settings):
        log.error("ending the scoring process %d: %s", pid, how)
        vitals.death = how  # before it dies: its successor asks
        vitals.forget_deadlines()
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    elif vitals.death is None and (how := _how_ended(pid)):
        vitals.death = how


def _must_end(pid: int, vitals: Vitals, settings: Settings) -> str | None:
    if stage := vitals.overdue():
        doing = "scoring a batch" if stage == "forward" else "reading rows"
        return f"{doing} took longer than LAYA_BATCH_BATCH_TIMEOUT_S={settings.batch_timeout_s:g}"
    limit = settings.memory_limit_bytes
    if limit is not None and (used := _resident_bytes(pid)) > limit:
        return f"it used {used} bytes of memory, more than LAYA_BATCH_MEMORY_LIMIT_BYTES={limit}"
    return None


def _resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * PAGE_BYTES
    except (OSError, IndexError):
        return 0  # it has ended, or this system does not say


def _how_ended(pid: int) -> str | None:
    """How a child ended that its parent has not yet waited for; it stays so."""
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if ended is None:
        return None
    if ended.si_code == os.CLD_EXITED:
        return f"it ended with exit code {ended.si_status}"
    by_kernel = ", as the system does when memory runs out" if ended.si_status == signal.SIGKILL else ""
    return f"killed by {signal.Signals(ended.si_status).name}{by_kernel}"
