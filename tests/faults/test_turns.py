"""Whose turn it is: cancelling, urgent jobs, and two workers that share two jobs."""

import itertools
import time
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest
import sqlalchemy as sa

import jobs
from schemas.tables import batches, shards, workers
from tests.faults.counting import BATCHES_IN_FLIGHT
from tests.faults.poisoned import finish, make_faulty, submit
from tests.integration.service import Service, make_texts, serve, write_tickets

pytestmark = pytest.mark.faults
DELAY_S = 0.2  # of each batch


@pytest.fixture
def service(
    monkeypatch: pytest.MonkeyPatch, postgres_url: str, redis_url: str, tmp_path: Path, tiny_checkpoint: Path
) -> Iterator[Service]:
    """A service whose batches take a while, of about five in a shard."""
    make_faulty(monkeypatch, tmp_path, tiny_checkpoint, delay_s=DELAY_S)
    options = {"checkpoint": str(tiny_checkpoint), "rows_per_shard": 30, "log_level": "DEBUG"}
    with serve(postgres_url, redis_url, tmp_path, **options) as one:
        yield one


def test_cancel_stops_within_one_batch_and_an_urgent_job_starts_within_one_shard(service: Service) -> None:
    service.start_worker()
    path = write_tickets(service.folder / "a.parquet", make_texts(900))
    nightly = submit(service, path, priority=0)
    service.wait_for(lambda: jobs.get(nightly.id, settings=service.settings).answers > 0)
    urgent = submit(service, write_tickets(service.folder / "b.parquet", make_texts(20)), priority=9)
    begun = count_claimed(service, nightly)  # one of them is in work
    urgent = finish(service, urgent)
    assert urgent.answers == 60
    before = shards.c.job_id == nightly.id, shards.c.started_at < urgent.started_at
    # Another may have been in the parent's hands when the urgent job came.
    assert service.query(sa.select(sa.func.count()).where(*before))[0][0] <= begun + 1

    jobs.cancel(nightly.id, settings=service.settings)
    at_cancel = count_begun(service, nightly)
    service.wait_for(lambda: jobs.get(nightly.id, settings=service.settings).is_finished)
    stopped = jobs.get(nightly.id, settings=service.settings)
    assert stopped.status is jobs.JobStatus.CANCELLED
    time.sleep(3 * DELAY_S)
    # What was in the forward pass is saved, and with that save the worker knows; meanwhile no more may have begun than
    # what waits to be saved.
    assert count_begun(service, nightly) <= at_cancel + BATCHES_IN_FLIGHT
    saved = service.query(sa.select(sa.func.sum(batches.c.sequences)).where(batches.c.job_id == nightly.id))
    assert saved[0][0] == stopped.answers < 2700
    jobs.retry(nightly.id, settings=service.settings)
    assert finish(service, nightly).answers == 2700


def test_two_workers_and_two_jobs_leave_no_worker_idle(service: Service) -> None:
    for _ in range(2):
        service.start_worker()
    path = write_tickets(service.folder / "a.parquet", make_texts(600))
    both = [submit(service, path) for _ in range(2)]
    for job in both:
        assert finish(service, job).answers == 1800
    spans: dict[int, list[datetime]] = {}
    found = service.query(
        sa.select(batches.c.worker_id, batches.c.created_at).order_by(batches.c.created_at).select_from(batches)
    )
    for worker_id, at in found:
        spans.setdefault(worker_id, []).append(at)
    assert len(spans) == 2
    counts = Counter(worker_id for worker_id, _ in found)
    began, ended = min(times[0] for times in spans.values()), max(times[-1] for times in spans.values())
    total_s = (ended - began).total_seconds()
    for worker_id, times in spans.items():
        waits = [(later - earlier).total_seconds() for earlier, later in itertools.pairwise(times)]
        share = (times[-1] - times[0]).total_seconds() / total_s
        print(
            f"worker {worker_id}: {counts[worker_id]} batches, {share:.0%} of {total_s:.1f} s, {max(waits):.1f} s idle"
        )
        # Each had work from near the beginning to near the end. How much of it is the scheduler's to say.
        assert share > 0.5
        assert max(waits) < 0.5 * total_s
    assert min(counts.values()) > 0.1 * sum(counts.values())
    assert len(service.query(sa.select(workers.c.id).where(workers.c.status == "ready"))) == 2


def count_claimed(service: Service, job: jobs.JobInfo) -> int:
    claimed = sa.select(sa.func.count()).where(shards.c.job_id == job.id, shards.c.attempt > 0)
    return int(service.query(claimed)[0][0])


def count_begun(service: Service, job: jobs.JobInfo) -> int:
    """Forward passes that were begun."""
    return sum(f"job {job.id} shard" in line and ": scoring " in line for line in service.log.splitlines())
