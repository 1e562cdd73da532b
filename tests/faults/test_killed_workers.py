"""Workers killed, drained and frozen while a job of several shards is scored by two of them."""

import random
import subprocess
import time

from tests.faults import scenes
from tests.faults.report import FaultReport
from tests.integration.service import Service

VICTIMS = ("child", "parent", "both")


def strike(service: Service, supervisor: subprocess.Popen[bytes], victim: str) -> float:
    """Kill this supervisor's child, its parent, or both; returns the seconds until a successor is warm."""
    child = scenes.child_of(service, supervisor)
    parent = scenes.parent_of(child)
    assert parent != supervisor.pid
    started = time.monotonic()
    scenes.kill(*{"child": (child,), "parent": (parent,), "both": (parent, child)}[victim])
    service.wait_for(lambda: scenes.child_of(service, supervisor) not in (0, child), supervisor)
    return time.monotonic() - started


def strike_often(service: Service, report: FaultReport, victims: list[str], rows: int) -> None:
    """Two workers; each strike hits one of them while a job is scored; a new job when one has ended."""
    chance = random.Random(len(victims))
    supervisors = [service.start_worker() for _ in range(2)]
    job = scenes.submit(service, rows)
    for victim in victims:
        if scenes.count_answers(service, job) > rows * 2:  # of three questions
            count = scenes.finish(service, job)
            report.record("jobs of the killed workers", times=0, **scenes.costs(count), recover_s=None)
            job = scenes.submit(service, rows)
        time.sleep(chance.uniform(0, 1.5))
        recover_s = strike(service, chance.choice(supervisors), victim)
        report.record(f"SIGKILL of the {victim}", times=1, rows=0, lost=0, doubled=0, rescored=0, recover_s=recover_s)
    scenes.finish(service, job)


def test_killed_workers_lose_and_double_nothing(service: Service, report: FaultReport) -> None:
    supervisors = [service.start_worker() for _ in range(2)]
    job = scenes.submit(service, 3000)
    scenes.await_answers(service, job)
    t = time.monotonic()
    recover_s = max(strike(service, supervisors[i % 2], victim) for i, victim in enumerate(VICTIMS))
    count = scenes.finish(service, job)
    print(time.monotonic() - t, count)
    assert count.endings == 1
    report.record("worker killed (SIGKILL)", times=3, **scenes.costs(count), recover_s=recover_s)
