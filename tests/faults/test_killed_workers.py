"""Workers killed, drained and frozen while a job of several shards is scored by two of them."""

import random
import signal
import subprocess
import time

import pytest
import sqlalchemy as sa

from schemas.tables import shards
from tests.faults.counting import count_rows
from tests.faults.report import FaultReport
from tests.faults.scenes import Scene, costs, timed
from tests.integration.service import WAIT_S
from tests.processes import held_still, kill, parent_of

MOMENTS = 30  # on each store
ROWS = 3000


def strike(scene: Scene, supervisor: "subprocess.Popen[bytes]", victim: str) -> float:
    """Kill this supervisor's child, its parent, or both; returns the seconds until a successor is warm."""
    child = scene.await_child(supervisor)
    parent = parent_of(child)
    assert parent != supervisor.pid
    kill(*{"child": (child,), "parent": (parent,), "both": (parent, child)}[victim])
    return timed(lambda: scene.await_child(supervisor, but_not=child))


def replace(scene: Scene, number: int, with_signal: signal.Signals) -> float:
    """End a supervisor, as a service manager or a power cut would, and start another; returns the seconds it takes."""
    before = scene.supervisors[number]
    kill(before.pid, with_signal=with_signal)

    def start_another() -> None:
        before.wait(WAIT_S)
        scene.supervisors[number] = scene.service.start_worker()

    return timed(start_another)


@pytest.mark.faults
def test_a_killed_child_and_a_killed_parent_cost_no_row(postgres_scene: Scene, report: FaultReport) -> None:
    job = postgres_scene.submit_and_begin(1500)
    for number, victim in enumerate(("child", "parent")):
        recover_s = strike(postgres_scene, postgres_scene.supervisors[number], victim)
        report.record(f"SIGKILL of a worker's {victim}", times=1, **costs(), recover_s=recover_s)
    count = postgres_scene.finish(job)
    # The job has ended before the worker can say so.
    service = postgres_scene.service
    service.wait_for(lambda: count_rows(service, job).endings == 1)
    report.record("SIGKILL of a worker's child", times=0, **costs(count), recover_s=None)


def freeze_within_a_transaction(scene: Scene, pid: int) -> int:
    """Stop the process at the worst moment, with locks on the rows of its shard; returns the shard's id."""
    owned = sa.text(
        "SELECT shards.id FROM shards JOIN workers ON name = lease_owner "
        "JOIN pg_stat_activity ON application_name = left(name, 63) "
        f"WHERE workers.pid = {pid} AND state = 'idle in transaction' AND backend_xid IS NOT NULL"
    )
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        kill(pid, with_signal=signal.SIGSTOP)
        time.sleep(0.05)
        if held := scene.service.query(owned):
            return int(held[0].id)
        kill(pid, with_signal=signal.SIGCONT)
        time.sleep(random.uniform(0, 0.02))
    pytest.fail(f"process {pid} was never found within a transaction\n{scene.service.log[-4000:]}")


@pytest.mark.faults
def test_a_frozen_worker_cannot_write_after_its_lease(postgres_scene: Scene, report: FaultReport) -> None:
    service = postgres_scene.service
    frozen, other = (postgres_scene.await_child(supervisor) for supervisor in postgres_scene.supervisors)
    try:
        with held_still(other):  # so that the first must take a shard
            job = postgres_scene.submit_and_begin(ROWS)
            shard_id = freeze_within_a_transaction(postgres_scene, frozen)
        ours = sa.select(shards.c.id).where(shards.c.id == shard_id)
        recover_s = timed(lambda: service.wait_for(lambda: service.query(ours.where(shards.c.status != "running"))))
        service.wait_for(lambda: service.query(ours.where(shards.c.attempt > 1)))
    finally:
        kill(frozen, with_signal=signal.SIGCONT)
    count = postgres_scene.finish(job)
    claim = f"job {job.id} shard {shard_id} attempt 1"
    refused = f"{claim}: left to the next worker: shard {shard_id} of job {job.id} is no longer held"
    service.wait_for(lambda: refused in service.log)
    assert postgres_scene.await_child(postgres_scene.supervisors[0]) == frozen
    report.record("worker frozen (SIGSTOP) past its lease", times=1, **costs(count), recover_s=recover_s)


@pytest.mark.faults
@pytest.mark.timeout(1800)
def test_workers_killed_at_random_moments(scene: Scene, report: FaultReport) -> None:
    chance = random.Random(MOMENTS)
    victims = [("child", "parent", "both")[i % 3] for i in range(MOMENTS)]
    job = scene.submit_and_begin(ROWS)
    for i, victim in enumerate(victims):
        if scene.count_answers(job) > ROWS * 2:  # of three questions
            report.record("SIGKILL of a worker's child", times=0, **costs(scene.finish(job)), recover_s=None)
            job = scene.submit_and_begin(ROWS)
        time.sleep(chance.uniform(0, 1))
        recover_s = strike(scene, scene.supervisors[i % 2], victim)
        name = "SIGKILL of both" if victim == "both" else f"SIGKILL of a worker's {victim}"
        report.record(name, times=1, **costs(), recover_s=recover_s)
    report.record("SIGKILL of a worker's child", times=0, **costs(scene.finish(job)), recover_s=None)


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_supervisors_killed_and_drained(scene: Scene, report: FaultReport) -> None:
    for with_signal, name in ((signal.SIGKILL, "SIGKILL of the supervisor"), (signal.SIGTERM, "SIGTERM: drained")):
        job = scene.submit_and_begin(ROWS)
        recover_s = max(replace(scene, number, with_signal) for number in range(2))
        count = scene.finish(job)
        # A worker that loses its supervisor drains, too.
        assert count.batches_in_vain == 0
        failures = sa.select(sa.func.sum(shards.c.failures)).where(shards.c.job_id == job.id)
        assert scene.service.query(failures)[0][0] == 0
        report.record(name, times=2, **costs(count), recover_s=recover_s)
