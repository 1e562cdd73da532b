"""Messages that are lost one by one, and attempts that fail, while much else waits in the queue."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
import sqlalchemy as sa

import jobs
from jobs.queue import READ_AT_ONCE, configure_app, count_messages, read_shard_ids, send_shards
from schemas.job import MAX_PRIORITY
from schemas.message import QueuedShard
from schemas.tables import shards
from tests.faults.poisoned import finish, make_faulty, submit
from tests.integration.service import Service, make_texts, serve, write_tickets

NIGHTLY = 60  # shards
SOON = 40  # shards, of which the worker ends a few a second; far fewer than wait
QUICK = {"rows_per_shard": 10, "rows_per_window": 10, "resend_s": 0.5, "sweep_s": 0.5, "max_attempts": 1000}


@pytest.fixture
def service(
    monkeypatch: pytest.MonkeyPatch, database_url: str, redis_url: str, tmp_path: Path, tiny_checkpoint: Path
) -> Iterator[Service]:
    """A service on each store, whose batches take a while."""
    make_faulty(monkeypatch, tmp_path, tiny_checkpoint, delay_s=0.2)
    with serve(database_url, redis_url, tmp_path, checkpoint=str(tiny_checkpoint), **QUICK) as one:
        yield one


def count(service: Service, job: jobs.JobInfo, *where: sa.ColumnElement[bool]) -> int:
    return int(service.query(sa.select(sa.func.count()).where(shards.c.job_id == job.id, *where))[0][0])


def begun(service: Service, job: jobs.JobInfo) -> int:
    return count(service, job, shards.c.attempt > 0)


def test_an_urgent_shard_that_is_lost_or_fails_is_next_however_many_wait(service: Service) -> None:
    service.start_worker()
    nightly = submit(service, write_tickets(service.folder / "a.parquet", make_texts(NIGHTLY * 10)), priority=0)
    service.wait_for(lambda: begun(service, nightly))
    with service.holding_messages(), redis.Redis.from_url(service.settings.require_broker_url()) as client:
        before = set(client.keys(f"{service.settings.queue}*"))
        lost = submit(service, write_tickets(service.folder / "b.parquet", make_texts(10)), priority=MAX_PRIORITY)
        (urgent_queue,) = set(client.keys(f"{service.settings.queue}*")) - before
        assert client.llen(urgent_queue) == 1
        client.delete(urgent_queue)
    at_loss = begun(service, nightly)
    assert finish(service, lost).status is jobs.JobStatus.SUCCEEDED
    assert begun(service, nightly) <= at_loss + SOON

    path = write_tickets(service.folder / "c.parquet", make_texts(10))
    whole = path.read_bytes()
    with service.holding_messages():
        torn = submit(service, path, priority=MAX_PRIORITY)
        write_over(path, whole[:4] + bytes(len(whole) // 2) + whole[4 + len(whole) // 2 :])
    service.wait_for(lambda: count(service, torn, shards.c.failures > 0))
    write_over(path, whole)
    at_failure = begun(service, nightly)
    assert finish(service, torn).status is jobs.JobStatus.SUCCEEDED
    assert begun(service, nightly) <= min(at_failure + SOON, NIGHTLY - 1)
    # Nothing else was sent again: what the messages outnumber the waiting shards by is in the hands of the worker.
    with service.holding_messages():
        messages = count_messages(service.settings)
        assert messages <= count(service, nightly, shards.c.status == "queued")
    jobs.cancel(nightly.id, settings=service.settings)


def write_over(path: Path, content: bytes) -> None:
    """Keep the file's size and time of change, by which another file would be told."""
    times = path.stat()
    assert times.st_size == len(content)
    path.write_bytes(content)
    os.utime(path, ns=(times.st_mtime_ns, times.st_mtime_ns))


def test_the_shards_in_the_queue_are_read_by_priority(service: Service) -> None:
    configure_app(service.settings)
    nightly = {READ_AT_ONCE * 2 + i for i in range(READ_AT_ONCE + 10)}
    send_shards(service.settings, [QueuedShard(1, shard_id, 0) for shard_id in nightly] + [QueuedShard(2, 7, 9)])
    assert read_shard_ids(service.settings, 0) == nightly
    assert read_shard_ids(service.settings, 9) == {7}
    assert read_shard_ids(service.settings, 5) == set()
