"""Workers that cannot boot, hear nothing, or grow too large: ended with a reason, and started again, ever later."""

import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from jobs.settings import environment_of
from schemas.tables import batches, shards, workers
from tests.faults.report import FaultReport
from tests.faults.scenes import QUICK, Scene, costs, start_workers
from tests.faults.servers import PrivateRedis
from tests.integration.service import WAIT_S, Service, serve
from tests.processes import held_still, is_running, kill, parent_of

# Found on the path before torch, which it becomes once the gate is open.
GATE = """
import sys, time
from pathlib import Path

folder = Path(__file__).parent
while not (folder / "open").exists():
    time.sleep(0.05)
sys.path.remove(str(folder))
del sys.modules["torch"]
import torch
"""


@dataclass(frozen=True)
class Gate:
    """While it is closed, a worker that boots gets as far as the import of its engine."""

    folder: Path

    def open(self) -> None:
        (self.folder / "open").touch()

    def close(self) -> None:
        (self.folder / "open").unlink()


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Closed, for the workers that the test starts from now on."""
    folder = tmp_path / "gate"
    folder.mkdir()
    (folder / "torch.py").write_text(GATE, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return Gate(folder)


@pytest.fixture
def service(private_redis: PrivateRedis, tmp_path: Path, tiny_checkpoint: Path) -> Any:
    """A service on SQLite and a Redis of its own, without workers yet."""
    url = f"sqlite:///{tmp_path / 'test.db'}"
    with serve(url, private_redis.url, tmp_path, checkpoint=str(tiny_checkpoint), **QUICK) as one:
        yield one


def starts(service: Service, status: str, error: str) -> list[Any]:
    """Starts of workers that ended so, the oldest first."""
    wanted = workers.c.status == status, workers.c.error.contains(error, autoescape=True)
    return service.query(sa.select(workers).where(*wanted).order_by(workers.c.id))


def laya_batch(service: Service, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [str(Path(sys.executable).with_name("laya-batch")), *arguments]
    environment = {**environment_of(service.settings), "COLUMNS": "300"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_a_warm_up_that_takes_too_long_is_ended_and_tried_again(service: Service, gate: Gate) -> None:
    service.launch(boot_timeout_s=5.0)
    service.wait_for(lambda: len(starts(service, "failed", "it was not warm after 5 s (boot_timeout_s)")) >= 2)
    shown = laya_batch(service, "workers")
    assert "it was not warm after 5 s" in shown.stdout
    sick = laya_batch(service, "health")
    assert sick.returncode == 1
    assert "it was not warm after 5 s" in sick.stderr


def test_a_worker_whose_engine_cannot_be_loaded_says_why(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = service.folder / "broken"
    broken.mkdir()
    (broken / "torch.py").write_text("raise ImportError('libcuda.so.1: cannot open shared object file')\n")
    monkeypatch.setenv("PYTHONPATH", str(broken))
    service.launch()
    service.wait_for(lambda: len(starts(service, "failed", "ImportError: libcuda.so.1: cannot open")) >= 2)
    assert "starting a worker" in service.log


def test_a_worker_whose_process_boots_again_takes_no_message_beside_an_idle_one(service: Service, gate: Gate) -> None:
    gate.open()
    booting, idle = start_workers(service, 2)
    scene = Scene(service, None, [booting, idle])  # type: ignore[arg-type]
    gate.close()
    before = scene.child_of(booting)
    kill(before)
    for _ in range(8):  # the first of them while the poll that was sent before the death may still be under way
        scene.finish(scene.submit(10))
    owners = service.query(sa.select(workers.c.name).join(batches, batches.c.worker_id == workers.c.id).distinct())
    (owner,) = [row.name for row in owners]
    assert owner.endswith(f"-{idle.pid}")
    gate.open()
    scene.await_child(booting, but_not=before)
    kill(scene.child_of(idle))  # and then it takes them again
    gate.close()
    scene.finish(scene.submit(10))
    gate.open()


@pytest.mark.faults
def test_a_process_that_dies_while_it_boots_is_no_endless_loop(service: Service, gate: Gate) -> None:
    """A worker's first child, and a successor of a warm one: both may die in a driver, without a word."""
    supervisor = service.launch()

    def booting() -> int:
        found = service.query(sa.select(workers.c.pid).where(workers.c.status == "starting"))
        return int(found[0].pid) if found and is_running(found[0].pid) else 0

    for killed in range(1, 3):
        service.wait_for(booting, supervisor)
        kill(booting(), with_signal=signal.SIGSEGV)
        service.wait_for(lambda n=killed: len(starts(service, "failed", "ended while it booted")) == n)
        if killed == 1:
            gate.open()
            child = Scene(service, None, [supervisor]).await_child(supervisor)  # type: ignore[arg-type]
            gate.close()
            kill(child)
    assert service.log.count("starting a worker") >= 2


@pytest.mark.faults
def test_a_worker_that_the_broker_does_not_answer_is_started_again(
    service: Service, private_redis: PrivateRedis, report: FaultReport
) -> None:
    supervisors = start_workers(service, 1, poll_timeout_s=10.0)
    scene = Scene(service, private_redis, supervisors)
    child = scene.child_of(supervisors[0])
    time.sleep(13)
    assert scene.child_of(supervisors[0]) == child  # that there is no message is an answer
    private_redis.freeze()
    try:
        service.wait_for(lambda: starts(service, "stopped", "the broker did not answer for 10 s (poll_timeout_s)"))
    finally:
        private_redis.thaw()
    thawed_at = time.monotonic()
    job = scene.submit(150)
    scene.await_answers(job)
    recover_s = time.monotonic() - thawed_at
    report.record("broker silent past poll_timeout_s", times=1, **costs(scene.finish(job)), recover_s=recover_s)


@pytest.mark.faults
def test_a_worker_past_its_memory_gives_its_shard_back_and_is_started_again(
    service: Service, private_redis: PrivateRedis, report: FaultReport
) -> None:
    scene = Scene(service, private_redis, [])
    job = scene.submit(300)
    big = service.launch(max_rss_bytes=50_000_000)
    service.wait_for(lambda: starts(service, "stopped", "50000000 bytes in memory (max_rss_bytes)"), big)
    big.send_signal(signal.SIGTERM)
    assert big.wait(WAIT_S) == 0
    left = service.query(sa.select(shards.c.status, shards.c.failures).where(shards.c.job_id == job.id))
    assert {(row.status, row.failures) for row in left} <= {("queued", 0), ("done", 0)}
    scene.supervisors = start_workers(service, 1)
    count = scene.finish(job)
    assert count.rescored == 0
    report.record("memory past max_rss_bytes", times=1, **costs(count), recover_s=None)


@pytest.mark.faults
def test_no_process_outlives_its_worker(service: Service) -> None:
    """A child whose parent was killed would keep its device's memory from the successor."""
    supervisor = service.launch("--no-restart")  # a successor would answer the probe
    child = Scene(service, None, [supervisor]).await_child(supervisor)  # type: ignore[arg-type]
    with held_still(child):  # so that it cannot see that its parent is gone
        kill(parent_of(child))
        service.wait_for(lambda: not is_running(child))
    assert supervisor.wait(WAIT_S) != 0
    assert laya_batch(service, "health").returncode == 1
