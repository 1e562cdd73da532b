"""PostgreSQL restarted, cut off, in conflict and full; SQLite locked and full. What is replayed is neither lost nor double."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa

from tests.faults.report import FaultReport
from tests.faults.scenes import Scene, costs
from tests.faults.servers import PrivatePostgres

FAULT_S = 3.0


@contextmanager
def restarted(postgres: PrivatePostgres) -> Iterator[None]:
    postgres.stop()
    try:
        time.sleep(FAULT_S)
        yield
    finally:
        postgres.start()


@contextmanager
def connections_ended(postgres: PrivatePostgres) -> Iterator[None]:
    for _ in range(10):
        postgres.terminate_connections()
        time.sleep(FAULT_S / 10)
    yield


FAULTS = {"PostgreSQL restarted": restarted, "pg_terminate_backend of every connection": connections_ended}


@pytest.mark.parametrize("name", FAULTS)
def test_workers_replay_what_they_were_writing_after(name: str, postgres_scene: Scene, report: FaultReport) -> None:
    assert postgres_scene.postgres is not None
    job = postgres_scene.submit_and_begin(900)
    with FAULTS[name](postgres_scene.postgres):
        pass
    recover_s = postgres_scene.await_progress(job)
    count = postgres_scene.finish(job)
    failures = f"SELECT sum(failures), max(attempt) FROM shards WHERE job_id = {job.id}"
    assert [tuple(row) for row in postgres_scene.service.query(sa.text(failures))] == [(0, 1)]
    assert count.rescored == 0
    report.record(name, times=1, **costs(count), recover_s=recover_s)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_connection_that_dies_while_it_commits(moment: Any, postgres_scene: Scene, report: FaultReport) -> None:
    assert postgres_scene.proxy is not None
    with postgres_scene.proxy.cutting(moment, every=4):
        job = postgres_scene.submit(900, name=moment)
        count = postgres_scene.finish(job)
    cuts = postgres_scene.proxy.cuts
    assert cuts > 20
    failures = f"SELECT sum(failures), max(attempt) FROM shards WHERE job_id = {job.id}"
    found = [tuple(row) for row in postgres_scene.service.query(sa.text(failures))]
    print(found, cuts, count)
    assert found[0][0] == 0
    assert count.rescored == 0
    report.record(f"connection lost {moment} COMMIT arrived", times=cuts, **costs(count), recover_s=None)
