"""How soon a worker that ended is started again, and which signals end the supervisor."""

import subprocess
import sys
import time

import pytest

from worker.__main__ import FIRST_BACKOFF_S, HEALTHY_AFTER_S, LAST_BACKOFF_S, DeviceWorker


def test_a_worker_that_keeps_failing_is_started_ever_later_up_to_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    worker = DeviceWorker("cpu", "cpu-1@host-2", {}, started_at=1000.0)
    waits_s = [worker.plan_restart() for _ in range(9)]
    assert waits_s == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert worker.start_not_before == 1000.0 + LAST_BACKOFF_S


def test_a_worker_that_lived_for_a_while_is_started_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = DeviceWorker("cpu", "cpu-1@host-2", {}, started_at=0.0, backoff_s=LAST_BACKOFF_S)
    monkeypatch.setattr(time, "monotonic", lambda: HEALTHY_AFTER_S + 1)
    assert worker.plan_restart() == FIRST_BACKOFF_S


@pytest.mark.parametrize("ignored", [False, True])
def test_ctrl_c_stays_ignored_where_the_shell_ignores_it(ignored: bool) -> None:
    program = (
        "import signal\n"
        f"signal.signal(signal.SIGINT, signal.{'SIG_IGN' if ignored else 'default_int_handler'})\n"
        "from worker.__main__ import heed_signals\n"
        "heed_signals(lambda number, frame: print(number))\n"
        "signal.raise_signal(signal.SIGINT), signal.raise_signal(signal.SIGTERM)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == (["15"] if ignored else ["2", "15"])
