"""What a test does to processes that are not its own child: looks them up, ends them, and holds them still."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STOP_S = 30.0


def is_running(pid: int) -> bool:
    return status_of(pid, "State")[:1] not in ("", "Z")


def parent_of(pid: int) -> int:
    return int(status_of(pid, "PPid") or 0)


def descendants(pid: int) -> list[int]:
    """Its children, theirs, and so on."""
    parents = {int(folder.name): parent_of(int(folder.name)) for folder in Path("/proc").glob("[0-9]*")}
    found = [pid]
    for ancestor in found:
        found += [child for child, parent in parents.items() if parent == ancestor]
    return found[1:]


def status_of(pid: int, field: str) -> str:
    """A field of /proc/PID/status; empty when the process is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(f"{field}:")), "")


def kill(*pids: int, with_signal: signal.Signals = signal.SIGKILL) -> None:
    for pid in pids:
        assert pid > 1
        os.kill(pid, with_signal)


@contextmanager
def held_still(*pids: int) -> Iterator[None]:
    """Within the block, these processes do nothing: what a test arranges meanwhile, they cannot be too fast for."""
    try:
        kill(*pids, with_signal=signal.SIGSTOP)
        deadline = time.monotonic() + STOP_S
        while any(status_of(pid, "State")[:1] not in ("T", "Z", "") for pid in pids):
            assert time.monotonic() < deadline, f"{pids} still run"
            time.sleep(0.01)
        yield
    finally:
        for pid in filter(is_running, pids):
            kill(pid, with_signal=signal.SIGCONT)
