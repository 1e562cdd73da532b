"""A supervisor whose processes are all signalled, or whose database does not answer; and a worker without one."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
import sqlalchemy as sa

import jobs
from schemas.tables import shards, workers
from tests.faults.poisoned import WORDS, make_faulty, submit
from tests.faults.scenes import QUICK, Scene, start_workers
from tests.faults.servers import PrivatePostgres, PrivateRedis
from tests.integration.service import WAIT_S, Service, make_texts, serve, write_tickets
from tests.processes import descendants, held_still, is_running, kill, parent_of

HEEDED_S = 25.0  # less than the database is away, and more than a busy machine needs to start a process


@pytest.fixture
def service(private_redis: PrivateRedis, tmp_path: Path, tiny_checkpoint: Path) -> Iterator[Service]:
    """A service on SQLite and a Redis of its own, without workers yet."""
    url = f"sqlite:///{tmp_path / 'test.db'}"
    with serve(url, private_redis.url, tmp_path, checkpoint=str(tiny_checkpoint), **QUICK) as one:
        yield one


def test_a_signal_to_every_process_of_the_group_drains_it(service: Service) -> None:
    """As systemd sends it; and the supervisor passes it on, and its worker's standard input is closed."""
    (supervisor,) = start_workers(service, 1)
    scene = Scene(service, None, [supervisor])  # type: ignore[arg-type]
    job = scene.submit_and_begin(3000)
    for _ in range(2):
        kill(supervisor.pid, *descendants(supervisor.pid), with_signal=signal.SIGTERM)
        time.sleep(0.1)
    assert supervisor.wait(WAIT_S) == 0
    (ended,) = service.query(sa.select(workers.c.status, workers.c.error))
    assert tuple(ended) == ("stopped", None)
    assert scene.count_answers(job) < 9000
    states = service.query(sa.select(shards.c.status, shards.c.failures, shards.c.deaths))
    assert {tuple(state) for state in states} <= {("queued", 0, 0), ("done", 0, 0)}
    scene.supervisors = start_workers(service, 1)
    assert scene.finish(job).batches_in_vain == 0


@contextmanager
def locked(postgres: PrivatePostgres) -> Iterator[None]:
    """The sweep waits for a table."""
    with psycopg.connect(postgres.url.replace("+psycopg", "")) as rival:
        rival.execute("LOCK TABLE shards, jobs IN ACCESS EXCLUSIVE MODE")
        yield


@contextmanager
def frozen(postgres: PrivatePostgres) -> Iterator[None]:
    """Nothing answers, and no connection is closed."""
    server = int((postgres.folder / "data" / "postmaster.pid").read_text().split()[0])
    with held_still(server, *descendants(server)):
        yield


@pytest.mark.parametrize("fault", [locked, frozen])
def test_a_supervisor_heeds_its_workers_and_signals_while_the_database_does_not_answer(
    fault: type, private_postgres: PrivatePostgres, redis_url: str, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    with serve(private_postgres.url, redis_url, tmp_path, checkpoint=str(tiny_checkpoint), **QUICK) as service:
        (supervisor,) = start_workers(service, 1)
        (child,) = (row.pid for row in service.query(sa.select(workers.c.pid)))
        with fault(private_postgres):
            time.sleep(2 * QUICK["sweep_s"])  # a sweep has begun
            began = time.monotonic()
            kill(parent_of(child))
            service.wait_for(lambda: service.log.count("starting a worker") == 2, supervisor)
            assert time.monotonic() - began < HEEDED_S
            began = time.monotonic()
            supervisor.send_signal(signal.SIGTERM)
            assert supervisor.wait(WAIT_S) == 0
            assert time.monotonic() - began < HEEDED_S
        assert "Traceback" not in service.log


def test_a_scoring_process_that_hangs_beside_a_frozen_parent_loses_its_shard(
    service: Service, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    """And one whose parent and supervisor are killed ends; its shard is free when the lease ends, at the latest."""
    make_faulty(monkeypatch, tmp_path, tiny_checkpoint)
    first, second = start_workers(service, 2, lease_s=4.0, batch_timeout_s=4.0)
    scene = Scene(service, None, [first, second])  # type: ignore[arg-type]
    children = {scene.child_of(supervisor): supervisor for supervisor in scene.supervisors}
    job = submit(service, write_tickets(tmp_path / "a.parquet", [*make_texts(20), WORDS["wait"]]))
    taken = sa.select(workers.c.pid).join(shards, shards.c.lease_owner == workers.c.name)
    service.wait_for(lambda: service.query(taken))
    hanging = service.query(taken)[0].pid
    with held_still(parent_of(hanging)):
        service.wait_for(lambda: service.query(sa.select(shards.c.id).where(shards.c.attempt > 1)))
        assert is_running(hanging)
    kill(children[hanging].pid, parent_of(hanging))
    service.wait_for(lambda: not is_running(hanging))
    jobs.cancel(job.id, settings=service.settings)
