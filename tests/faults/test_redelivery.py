"""Messages that come again: while their shard is scored, and to two workers at once."""

import time
from pathlib import Path

import pytest
import redis
import sqlalchemy as sa

from schemas.tables import shards
from tests.faults.report import FaultReport
from tests.faults.scenes import QUICK, Scene, costs, start_workers
from tests.integration.service import serve

COPIES = 4


def multiply_messages(broker: redis.Redis, queue: str, copies: int) -> int:
    """Put each waiting message on the queue so many times, next to itself; returns how many messages there were."""
    (key,) = [key for key in broker.keys(f"{queue}*") if broker.type(key) == b"list"]
    waiting = broker.lrange(key, 0, -1)
    with broker.pipeline() as together:
        together.delete(key)
        for message in waiting:
            together.rpush(key, *[message] * copies)
        together.execute()
    return len(waiting)


def test_a_message_that_two_workers_get_at_once_is_scored_once(postgres_scene: Scene, report: FaultReport) -> None:
    service, dropped = postgres_scene.service, "nothing to claim"
    dropped_before = service.log.count(dropped)
    for supervisor in postgres_scene.supervisors:
        postgres_scene.await_child(supervisor)
    # Neither takes a message meanwhile, but for one that each had asked for before.
    with postgres_scene.redis.client() as broker, service.holding_messages():
        job = postgres_scene.submit(600)
        multiplied = multiply_messages(broker, service.settings.queue, COPIES)
    assert multiplied >= 2
    count = postgres_scene.finish(job)
    attempts = sa.select(sa.func.max(shards.c.attempt)).where(shards.c.job_id == job.id)
    assert service.query(attempts)[0][0] == 1
    assert count.rescored == 0
    service.wait_for(lambda: service.log.count(dropped) >= dropped_before + multiplied * (COPIES - 1))
    report.record(f"each message delivered {COPIES} times", times=multiplied, **costs(count), recover_s=None)


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_a_visibility_timeout_shorter_than_a_shard(
    database_url: str, redis_url: str, tmp_path: Path, tiny_checkpoint: Path, report: FaultReport
) -> None:
    long_shards = {**QUICK, "rows_per_shard": 2000, "visibility_timeout_s": 1}
    with serve(database_url, redis_url, tmp_path, checkpoint=str(tiny_checkpoint), **long_shards) as service:
        scene = Scene(service, None, start_workers(service, 1))  # type: ignore[arg-type]
        job = scene.submit_and_begin(4000)
        time.sleep(2)
        # A worker that begins to poll gives out again what was not acknowledged in time.
        scene.supervisors += start_workers(service, 1)
        service.wait_for(lambda: f"job {job.id} shard" in service.log and "nothing to claim" in service.log)
        count = scene.finish(job)
        assert count.rescored == 0
        report.record("visibility timeout shorter than a shard", times=2, **costs(count), recover_s=None)
