"""The fence: a shard is touched only by the worker and attempt that hold it. And how an attempt that failed ends."""

from typing import Any

import sqlalchemy as sa

from jobs.errors import JobNotFoundError, LeaseLostError
from jobs.store.database import seconds_from_now
from jobs.store.lifecycle import cancel_waiting_shards, lock_job
from schemas.job import Claim, JobStatus, Lease, ShardStatus
from schemas.tables import jobs, shards

OPEN_JOBS = sa.and_(
    jobs.c.status.in_([JobStatus.QUEUED, JobStatus.RUNNING]),
    jobs.c.cancel_requested_at.is_(None),
    jobs.c.error.is_(None),
)
JOB_IS_OPEN = sa.exists().where(jobs.c.id == shards.c.job_id, OPEN_JOBS)


def hold(connection: sa.Connection, claim: Claim, lease_s: float, **values: Any) -> None:
    """Prolong the lease and change the shard's `values`; raises LeaseLostError unless the claim still holds it."""
    held = connection.execute(
        sa.update(shards).where(*_held(claim.lease)).values(lease_expires_at=seconds_from_now(lease_s), **values)
    )
    if held.rowcount != 1:
        raise LeaseLostError(
            f"shard {claim.shard_id} of job {claim.job_id} is no longer held by attempt {claim.attempt}"
        )


def lock_job_of(connection: sa.Connection, claim: Claim) -> None:
    """As `lock_job`; raises LeaseLostError when the job has been deleted, and its shards with it."""
    try:
        lock_job(connection, claim.job_id)
    except JobNotFoundError as error:
        raise LeaseLostError(f"job {claim.job_id} has been deleted") from error


def count_failure(connection: sa.Connection, lease: Lease, error: str, max_attempts: int) -> bool:
    """End an attempt that failed. Returns True when the shard is queued again."""
    failures = get_held(connection, lease).failures + 1
    return end_attempt(connection, lease, error, failures >= max_attempts, failures=failures)


def get_held(connection: sa.Connection, lease: Lease) -> sa.Row[Any]:
    """Return the shard's row; raises LeaseLostError unless this lease holds it. The caller holds the job's lock."""
    found = connection.execute(sa.select(shards).where(*_held(lease))).one_or_none()
    if found is None:
        raise LeaseLostError(f"shard {lease.shard_id} is no longer held by attempt {lease.attempt}")
    return found


def end_attempt(connection: sa.Connection, lease: Lease, error: str, exhausted: bool, **values: Any) -> bool:
    """Queue the shard again, or fail it when `exhausted`, or cancel it with its job. True when queued."""
    job_id = connection.execute(sa.select(shards.c.job_id).where(shards.c.id == lease.shard_id)).scalar_one()
    if must_stop(connection, job_id):
        status = ShardStatus.CANCELLED
    else:
        status = ShardStatus.FAILED if exhausted else ShardStatus.QUEUED
    ended = {} if status == ShardStatus.QUEUED else {"finished_at": seconds_from_now()}
    released = {"status": status, "last_error": error, "lease_owner": None, "sent_at": seconds_from_now()}
    connection.execute(sa.update(shards).where(*_held(lease)).values(**released, **ended, **values))
    return status == ShardStatus.QUEUED


def _held(lease: Lease) -> tuple[sa.ColumnElement[bool], ...]:
    return (
        shards.c.id == lease.shard_id,
        shards.c.attempt == lease.attempt,
        shards.c.lease_owner == lease.owner,
        shards.c.status == ShardStatus.RUNNING,
    )


def stop_job(connection: sa.Connection, job_id: int, error: str) -> None:
    """Give a job the error that fails it: waiting shards are cancelled, running ones stop at their next batch."""
    failed = jobs.c.id == job_id, jobs.c.error.is_(None)
    connection.execute(sa.update(jobs).where(*failed).values(error=error))
    cancel_waiting_shards(connection, job_id)


def must_stop(connection: sa.Connection, job_id: int) -> bool:
    """Whether the job was cancelled or has failed, so that its shards are to end."""
    job = connection.execute(sa.select(jobs.c.cancel_requested_at, jobs.c.error).where(jobs.c.id == job_id)).one()
    return job.cancel_requested_at is not None or job.error is not None
