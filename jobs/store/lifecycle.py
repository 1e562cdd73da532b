"""Jobs from creation to their end: created whole, cancelled, retried, settled exactly once."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import sqlalchemy as sa

from jobs.errors import JobNotFoundError
from jobs.store.database import Database, seconds_from_now
from jobs.store.replay import repeated, replayed
from schemas.job import (
    FINISHED_JOBS,
    JobPlan,
    JobSpec,
    JobStatus,
    ShardStatus,
    TransitionError,
    check_transition,
    states_before,
)
from schemas.question_text import json_line
from schemas.tables import input_files, jobs, levels, row_errors, shards

NO_SUSPECTS = {"suspect_first_row": None, "suspect_last_row": None, "suspect_attempt": None, "suspect_deaths": 0}


@dataclass(frozen=True)
class JobOptions:
    """What does not change the answers: how a job is called, how urgent it is, which call made it, and warnings."""

    name: str | None = None
    priority: int = 0
    idempotency_key: str | None = None
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class MadeBefore:
    """A job that an idempotency key made: what it asks for, of which files, and how it is."""

    id: int
    spec: JobSpec
    status: JobStatus
    files: dict[str, tuple[int, str]]  # by name: size and time of change


@replayed
def find_by_key(db: Database, key: str) -> MadeBefore | None:
    """Return the job that this idempotency key made before, which stays from now on, or None."""
    with db.read() as connection:
        if connection.scalar(sa.select(jobs.c.id).where(jobs.c.idempotency_key == key)) is None:
            return None
    with db.write() as connection:
        # Marked first: the call that made it may be about to delete it, because the broker refused its messages.
        marked = sa.update(jobs).where(jobs.c.idempotency_key == key).values(returned=True)
        found = connection.execute(marked.returning(jobs.c.id, jobs.c.spec, jobs.c.status)).one_or_none()
        if found is None:
            return None
        files = connection.execute(
            sa.select(input_files.c.name, input_files.c.size, input_files.c.modified).where(
                input_files.c.job_id == found.id
            )
        )
        identities = {name: (size, modified) for name, size, modified in files}
        return MadeBefore(found.id, JobSpec.model_validate(found.spec), JobStatus(found.status), identities)


@replayed
def create_job(db: Database, spec: JobSpec, options: JobOptions, plan: JobPlan) -> int:
    """Write a job and all its shards in one transaction: it is either wholly there, queued, or not at all.

    Raises:
        DatabaseConflictError: the idempotency key was taken meanwhile, perhaps by this very call, whose
            answer was lost.
    """
    now = seconds_from_now()
    with db.write() as connection:
        job_id = connection.execute(
            sa.insert(jobs)
            .values(
                **asdict(options),
                status=JobStatus.PLANNING,  # until the shards are in, later in this transaction
                spec=spec.model_dump(mode="json"),
                rows=plan.rows,
                shards=len(plan.shards),
                questions=len(spec.questions),
                created_at=now,
            )
            .returning(jobs.c.id)
        ).scalar_one()
        connection.execute(
            sa.insert(input_files),
            [{"job_id": job_id, "number": number, **asdict(file)} for number, file in enumerate(plan.files)],
        )
        planned = [
            {"number": number, "first_row_number": shard.first_row_number, "rows": shard.rows}
            for number, shard in enumerate(plan.shards)
        ]
        if planned:
            connection.execute(sa.insert(shards).values(sent_at=now, status=ShardStatus.QUEUED, job_id=job_id), planned)
        if described := list(_describe_levels(spec)):
            connection.execute(sa.insert(levels).values(job_id=job_id), described)
        _move_job(connection, job_id, JobStatus.QUEUED)
        if not planned:  # no worker will ever end a job without rows
            start_job(connection, job_id)
            settle_job(connection, job_id)
    return int(job_id)


def _describe_levels(spec: JobSpec) -> Iterator[dict[str, Any]]:
    """The rows of `levels`: what the view `answers` calls the answer to a score."""
    for question_id, question in spec.questions.items():
        for level, text in enumerate(question["criteria"] if question["type"] == "score" else []):
            yield {"question": question_id, "level": level, "text": json_line(text)}


@replayed
def forget_job(db: Database, job_id: int) -> bool:
    """Delete a job that was not queued. False when it must stay: a worker has begun it, or another call knows it."""
    with db.write() as connection:
        unseen = jobs.c.id == job_id, jobs.c.status == JobStatus.QUEUED, jobs.c.returned.is_(False)
        connection.execute(sa.delete(jobs).where(*unseen))
        return connection.scalar(sa.select(jobs.c.id).where(jobs.c.id == job_id)) is None


@repeated
def request_cancel(db: Database, job_id: int) -> None:
    """Stop a job: waiting shards now, running ones at their next batch. Saved answers stay."""
    with db.write() as connection:
        status = lock_job(connection, job_id)
        if status in FINISHED_JOBS:
            check_transition(status, JobStatus.CANCELLED)
        connection.execute(sa.update(jobs).where(jobs.c.id == job_id).values(cancel_requested_at=seconds_from_now()))
        cancel_waiting_shards(connection, job_id)
        settle_job(connection, job_id)


@repeated
def retry_job(db: Database, job_id: int, max_row_errors: int | None) -> None:
    """Queue the failed and cancelled shards of a finished job again. Answers that were saved are not scored again.

    `max_row_errors`: a new limit; None keeps the old. Raises TransitionError when the job is over it already.
    """
    unfinished = shards.c.job_id == job_id, shards.c.status.in_([ShardStatus.FAILED, ShardStatus.CANCELLED])
    with db.write() as connection:
        check_transition(lock_job(connection, job_id), JobStatus.QUEUED)
        waiting: dict[str, Any] = {
            "status": ShardStatus.QUEUED,
            "failures": 0,
            "deaths": 0,
            **NO_SUSPECTS,
            "sent_at": seconds_from_now(),
            "finished_at": None,
        }
        if connection.execute(sa.update(shards).where(*unfinished).values(waiting)).rowcount == 0:
            raise TransitionError(f"job {job_id} has no row left to score: each has ended, in an error or an answer")
        renewed: dict[str, Any] = {"cancel_requested_at": None, "finished_at": None, "error": None}
        renewed |= {"null_ids": None, "repeated_ids": None}
        job = connection.execute(sa.select(jobs.c.spec, jobs.c.row_errors).where(jobs.c.id == job_id)).one()
        spec = JobSpec.model_validate(job.spec)
        if max_row_errors is not None:
            spec = spec.model_copy(update={"max_row_errors": max_row_errors})
            renewed["spec"] = spec.model_dump(mode="json")
        if spec.max_row_errors is not None and job.row_errors > spec.max_row_errors:
            raise TransitionError(
                f"job {job_id} has {job.row_errors} row errors; raise max_row_errors={spec.max_row_errors} to go on"
            )
        _move_job(connection, job_id, JobStatus.QUEUED, **renewed)


@replayed
def find_status(db: Database, job_id: int) -> JobStatus | None:
    """Return a job's state; None where there is no such job."""
    with db.read() as connection:
        status = connection.scalar(sa.select(jobs.c.status).where(jobs.c.id == job_id))
    return None if status is None else JobStatus(status)


def lock_job(connection: sa.Connection, job_id: int) -> JobStatus:
    """Hold the job's row until the transaction ends: whoever changes a job or counts its shards does so alone."""
    # Not FOR UPDATE: inserting a result takes a share lock on the job's key, and must not wait for this one.
    locked = sa.select(jobs.c.status).where(jobs.c.id == job_id).with_for_update(key_share=True)
    status = connection.scalar(locked)
    if status is None:
        raise JobNotFoundError(job_id)
    return JobStatus(status)


def start_job(connection: sa.Connection, job_id: int) -> None:
    """Mark the job running when its first shard is claimed."""
    connection.execute(
        sa.update(jobs)
        .where(jobs.c.id == job_id, jobs.c.status == JobStatus.QUEUED)
        .values(status=JobStatus.RUNNING, started_at=sa.func.coalesce(jobs.c.started_at, seconds_from_now()))
    )


def cancel_waiting_shards(connection: sa.Connection, job_id: int) -> None:
    """Cancel every shard of the job that nobody holds: those that wait, and those whose lease has ended."""
    expired = sa.and_(shards.c.status == ShardStatus.RUNNING, shards.c.lease_expires_at < seconds_from_now())
    connection.execute(
        sa.update(shards)
        .where(shards.c.job_id == job_id, sa.or_(shards.c.status == ShardStatus.QUEUED, expired))
        .values(status=ShardStatus.CANCELLED, finished_at=seconds_from_now())
    )


def settle_job(connection: sa.Connection, job_id: int) -> JobStatus | None:
    """End the job if its last shard has ended; the caller holds its lock. Returns the state it ended in, or None."""
    counted = connection.execute(
        sa.select(
            shards.c.status,
            sa.func.count().label("shards"),
            sa.func.sum(shards.c.row_errors).label("row_errors"),
            sa.func.sum(shards.c.answers).label("answers"),
        )
        .where(shards.c.job_id == job_id)
        .group_by(shards.c.status)
    ).all()
    shard_counts = {ShardStatus(row.status): row.shards for row in counted}
    if shard_counts.keys() & {ShardStatus.QUEUED, ShardStatus.RUNNING}:
        return None
    job = connection.execute(
        sa.select(jobs.c.status, jobs.c.cancel_requested_at, jobs.c.error).where(jobs.c.id == job_id)
    ).one()
    if JobStatus(job.status) in FINISHED_JOBS:
        return None
    failed_rows = int(sum(row.row_errors for row in counted))
    ended: dict[str, Any] = {"row_errors": failed_rows, "finished_at": seconds_from_now()}
    if job.error is not None:
        outcome = JobStatus.FAILED
    elif failed := shard_counts.get(ShardStatus.FAILED):
        outcome = JobStatus.FAILED
        ended["error"] = (
            f"{failed} of {sum(shard_counts.values())} shards ran out of attempts: {_last_error(connection, job_id)}"
        )
    elif job.cancel_requested_at is not None and ShardStatus.CANCELLED in shard_counts:
        outcome = JobStatus.CANCELLED
    elif failed_rows and not any(row.answers for row in counted):
        outcome = JobStatus.FAILED
        ended["error"] = f"no row was answered: {_commonest_row_error(connection, job_id)}"
    else:
        outcome = JobStatus.SUCCEEDED
    _move_job(connection, job_id, outcome, **ended)
    return outcome


def _last_error(connection: sa.Connection, job_id: int) -> str | None:
    failed = shards.c.job_id == job_id, shards.c.status == ShardStatus.FAILED
    return connection.scalar(sa.select(shards.c.last_error).where(*failed).order_by(shards.c.number).limit(1))


def _commonest_row_error(connection: sa.Connection, job_id: int) -> str:
    errors, count = row_errors.c, sa.func.count().label("count")
    commonest = (
        sa.select(errors.code, count, sa.func.min(errors.message).label("example"))
        .where(errors.job_id == job_id)
        .group_by(errors.code)
        .order_by(count.desc(), errors.code)
        .limit(1)
    )
    found = connection.execute(commonest).one()
    return f"the commonest error, {found.code} ({found.count:,} times), is for example: {found.example}"


def _move_job(connection: sa.Connection, job_id: int, status: JobStatus, **values: Any) -> None:
    moved = connection.execute(
        sa.update(jobs)
        .where(jobs.c.id == job_id, jobs.c.status.in_(states_before(status)))
        .values(status=status, **values)
    )
    if moved.rowcount != 1:
        check_transition(lock_job(connection, job_id), status)
