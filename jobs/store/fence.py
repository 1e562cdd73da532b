"""The fence: a shard is touched only under the attempt that holds it. And how an attempt that failed ends."""

from typing import Any

import sqlalchemy as sa

from jobs.errors import LeaseLostError
from jobs.store.database import seconds_from_now
from schemas.job import Claim, JobStatus, ShardStatus
from schemas.tables import jobs, shards

JOB_IS_OPEN = sa.exists().where(
    jobs.c.id == shards.c.job_id,
    jobs.c.status.in_([JobStatus.QUEUED, JobStatus.RUNNING]),
    jobs.c.cancel_requested_at.is_(None),
    jobs.c.error.is_(None),
)


def hold(connection: sa.Connection, claim: Claim, lease_s: float, **values: Any) -> None:
    """The fence: touch the shard only under the attempt that the claim made."""
    held = connection.execute(
        sa.update(shards)
        .where(*_held(claim.shard_id, claim.attempt))
        .values(lease_expires_at=seconds_from_now(lease_s), **values)
    )
    if held.rowcount != 1:
        raise LeaseLostError(
            f"shard {claim.shard_id} of job {claim.job_id} is no longer held by attempt {claim.attempt}"
        )


def count_failure(connection: sa.Connection, shard_id: int, attempt: int, error: str, max_attempts: int) -> bool:
    """End an attempt that failed. Returns True when the shard is queued again."""
    failures = get_held(connection, shard_id, attempt).failures + 1
    return end_attempt(connection, (shard_id, attempt), error, failures >= max_attempts, failures=failures)


def get_held(connection: sa.Connection, shard_id: int, attempt: int) -> sa.Row[Any]:
    """The shard's row; raises LeaseLostError unless this attempt holds it. The caller holds the job's lock."""
    found = connection.execute(sa.select(shards).where(*_held(shard_id, attempt))).one_or_none()
    if found is None:
        raise LeaseLostError(f"shard {shard_id} is no longer held by attempt {attempt}")
    return found


def end_attempt(connection: sa.Connection, held: tuple[int, int], error: str, exhausted: bool, **values: Any) -> bool:
    """Queue the shard again, or fail it when `exhausted`, or cancel it with its job. True when queued.

    `held` is the shard's id and the attempt that holds it.
    """
    job_id = connection.execute(sa.select(shards.c.job_id).where(shards.c.id == held[0])).scalar_one()
    if must_stop(connection, job_id):
        status = ShardStatus.CANCELLED
    else:
        status = ShardStatus.FAILED if exhausted else ShardStatus.QUEUED
    ended = {} if status == ShardStatus.QUEUED else {"finished_at": seconds_from_now()}
    released = {"status": status, "last_error": error, "lease_owner": None, "sent_at": seconds_from_now()}
    connection.execute(sa.update(shards).where(*_held(*held)).values(**released, **ended, **values))
    return status == ShardStatus.QUEUED


def _held(shard_id: int, attempt: int) -> tuple[sa.ColumnElement[bool], ...]:
    return shards.c.id == shard_id, shards.c.attempt == attempt, shards.c.status == ShardStatus.RUNNING


def must_stop(connection: sa.Connection, job_id: int) -> bool:
    """Whether the job was cancelled or has failed, so that its shards are to end."""
    job = connection.execute(sa.select(jobs.c.cancel_requested_at, jobs.c.error).where(jobs.c.id == job_id)).one()
    return job.cancel_requested_at is not None or job.error is not None
