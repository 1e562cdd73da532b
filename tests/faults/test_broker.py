"""Redis restarted empty, frozen, cut off and filled, while a job is submitted and while it is scored."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pydantic import SecretStr

import jobs
from tests.faults.proxy import SilentProxy
from tests.faults.report import FaultReport
from tests.faults.scenes import QUICK, Scene, costs, start_workers, submit_file, timed
from tests.faults.servers import PrivateRedis
from tests.integration.service import make_texts, serve, write_tickets
from worker.watch import DRAIN_TIMEOUT_S

WITHIN_S = 60.0  # of the fault's end, workers go on by themselves
FAULT_S = 3.0
NOTICED_S = 32.0
UNREACHABLE_S = 60.0


@contextmanager
def stopped(redis: PrivateRedis) -> Iterator[None]:
    redis.stop()
    try:
        yield
    finally:
        redis.start()


@contextmanager
def frozen(redis: PrivateRedis) -> Iterator[None]:
    redis.freeze()
    try:
        yield
    finally:
        redis.thaw()


@contextmanager
def cut(redis: PrivateRedis) -> Iterator[None]:
    redis.cut_connections()
    yield
    redis.cut_connections()


@contextmanager
def full(redis: PrivateRedis) -> Iterator[None]:
    redis.fill()
    try:
        yield
    finally:
        redis.empty()


FAULTS = {
    "Redis restarted empty": stopped,
    "Redis frozen (SIGSTOP)": frozen,
    "Redis cuts every connection": cut,
    "Redis out of memory": full,
}


def some_at_length(*names: str) -> list[object]:
    """These faults; in `make test`, all but the first and the last are left out."""
    return [pytest.param(name, marks=[pytest.mark.faults] if name in names[1:-1] else []) for name in names]


@pytest.mark.parametrize("name", some_at_length(*FAULTS))
def test_workers_go_on_by_themselves_after(name: str, postgres_scene: Scene, report: FaultReport) -> None:
    children = [postgres_scene.await_child(supervisor) for supervisor in postgres_scene.supervisors]
    job = postgres_scene.submit_and_begin(600)
    with FAULTS[name](postgres_scene.redis):
        time.sleep(FAULT_S)
    recover_s = timed(lambda: postgres_scene.await_claim(job))
    assert recover_s < WITHIN_S
    report.record(name, times=1, **costs(postgres_scene.finish(job)), recover_s=recover_s)
    # No model was loaded again.
    assert [postgres_scene.child_of(supervisor) for supervisor in postgres_scene.supervisors] == children


@pytest.mark.parametrize(
    "name", some_at_length("Redis restarted empty", "Redis frozen (SIGSTOP)", "Redis out of memory")
)
def test_a_submit_leaves_nothing_or_a_job_and_may_be_repeated_during(
    name: str, postgres_scene: Scene, report: FaultReport
) -> None:
    settings = postgres_scene.service.settings
    path = write_tickets(postgres_scene.service.folder / f"{time.monotonic_ns()}.parquet", make_texts(150))
    before = len(jobs.list_jobs(limit=1000, settings=settings))
    with FAULTS[name](postgres_scene.redis):
        started = time.monotonic()
        with pytest.raises(jobs.BrokerError, match="cannot be used"):
            submit_file(postgres_scene.service, path, idempotency_key=name)
        print(name, time.monotonic() - started)
        assert len(jobs.list_jobs(limit=1000, settings=settings)) == before
    ended_at = time.monotonic()
    job = submit_file(postgres_scene.service, path, idempotency_key=name)
    assert submit_file(postgres_scene.service, path, idempotency_key=name).id == job.id
    count = postgres_scene.finish(job)
    report.record(f"{name}, during a submit", times=1, **costs(count), recover_s=time.monotonic() - ended_at)


@pytest.fixture
def distant(private_redis: PrivateRedis, tmp_path: Path, tiny_checkpoint: Path) -> Iterator[tuple[Scene, SilentProxy]]:
    """A warm worker that reaches Redis through a proxy, which the submitter does not."""
    url = f"sqlite:///{tmp_path / 'test.db'}"
    quick = {**QUICK, "checkpoint": str(tiny_checkpoint)}
    with SilentProxy(private_redis.port) as proxy, serve(url, private_redis.url, tmp_path, **quick) as service:
        scene = Scene(service, private_redis, [])
        line = private_redis.url.replace(str(private_redis.port), str(proxy.port))
        scene.supervisors = start_workers(service, 1, broker_url=SecretStr(line))
        scene.finish(scene.submit(10))
        yield scene, proxy


def test_a_line_that_falls_silent_is_noticed_within_half_a_minute(distant: tuple[Scene, SilentProxy]) -> None:
    """The poll of an idle worker on it may be answered with a message, which is lost: a sweep sends it again."""
    scene, proxy = distant
    child = scene.child_of(scene.supervisors[0])
    proxy.silence()
    job = scene.submit(10)
    assert scene.await_answers(job) < NOTICED_S
    assert scene.child_of(scene.supervisors[0]) == child  # no model was loaded again


@pytest.mark.faults  # a minute and a half
def test_a_broker_that_answers_no_new_line_either_is_noticed_and_a_signal_heeded(
    distant: tuple[Scene, SilentProxy],
) -> None:
    scene, proxy = distant
    (supervisor,) = scene.supervisors
    proxy.silence(new_ones=True)
    assert timed(lambda: scene.service.wait_for(lambda: "Cannot connect to redis" in scene.service.log)) < UNREACHABLE_S
    supervisor.send_signal(signal.SIGTERM)
    assert timed(lambda: supervisor.wait(DRAIN_TIMEOUT_S)) < DRAIN_TIMEOUT_S / 2
    assert supervisor.returncode == 0
    assert "does not end" not in scene.service.log  # it was not killed
