"""Shards in a worker's hands: claimed, saved into, finished, failed, or given back.

Each claim raises the shard's attempt number, and each write checks it, and whose claim it was, in its own transaction:
a worker that lost its lease, however late it wakes, changes nothing.
"""

from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import sqlalchemy as sa

from jobs.errors import DatabaseConflictError, JobNotFoundError
from jobs.store.database import Database, seconds_from_now
from jobs.store.fence import JOB_IS_OPEN, count_failure, get_held, hold, lock_job_of, must_stop, stop_job
from jobs.store.lifecycle import cancel_waiting_shards, lock_job, settle_job, start_job
from jobs.store.replay import replayed
from jobs.store.traces import are_errors_saved, is_batch_saved
from jobs.urls import hide_secrets
from schemas.job import Claim, JobFile, JobSpec, JobStatus, ShardPlan, ShardStatus, Suspects, states_before
from schemas.message import ShardMessage
from schemas.question import WHOLE_ROW
from schemas.tables import batches, input_files, job_checkpoints, jobs, results, row_errors, shards

_SUSPECT_COLUMNS = [
    shards.c[name] for name in ("suspect_first_row", "suspect_last_row", "suspect_deaths", "last_error")
]


@dataclass(frozen=True)
class BatchRecord:
    """What the `batches` table keeps of one forward pass: what ran, on how much, for how long."""

    worker_id: int
    backend: str
    fallback_reason: str | None
    device: str
    dtype: str
    bucket_length: int
    sequences: int
    tokens: int
    padded_tokens: int
    read_ms: float
    tokenise_ms: float
    forward_ms: float
    decode_ms: float
    memory_splits: int = 0  # times it was run as two halves, out of memory
    cpu_sequences: int = 0  # of them, run on the CPU, out of memory
    checkpoint: str | None = None  # as the job names it; in a routed job, where its rows went


@dataclass(frozen=True)
class RowError:
    """Why one row, or one question of it, has no answer."""

    row_number: int
    question: str  # '*': the whole row
    row_id: str | None
    code: str
    message: str


@replayed
def claim_shard(db: Database, message: ShardMessage, owner: str, lease_s: float) -> Claim | None:
    """Take a waiting shard of an open job; None when there is nothing to take, as for a message that came twice.

    A shard that this owner holds is taken, too: a worker has one at a time, so this one has slipped out of its hands.
    """
    job_id, shard_id = message.job_id, message.shard_id
    with db.write() as connection:
        try:
            lock_job(connection, job_id)  # the order of locks everywhere: first the job, then its shards
        except JobNotFoundError:
            return None
        claimed = connection.execute(
            sa.update(shards)
            .where(
                shards.c.id == shard_id,
                shards.c.job_id == job_id,
                sa.or_(
                    shards.c.status.in_(states_before(ShardStatus.RUNNING)),
                    sa.and_(shards.c.status == ShardStatus.RUNNING, shards.c.lease_owner == owner),
                ),
                JOB_IS_OPEN,
            )
            .values(
                status=ShardStatus.RUNNING,
                attempt=shards.c.attempt + 1,
                lease_owner=owner,
                lease_expires_at=seconds_from_now(lease_s),
                started_at=sa.func.coalesce(shards.c.started_at, seconds_from_now()),
            )
            .returning(shards.c.attempt, shards.c.first_row_number, shards.c.rows, *_SUSPECT_COLUMNS)
        ).one_or_none()
        if claimed is None:
            return None
        start_job(connection, job_id)
        job = connection.execute(sa.select(jobs.c.spec, jobs.c.priority).where(jobs.c.id == job_id)).one()
        files = _files_of(connection, job_id, claimed.first_row_number, claimed.rows)
    plan = ShardPlan(claimed.first_row_number, claimed.rows, files)
    suspects = [getattr(claimed, column.name) for column in _SUSPECT_COLUMNS]
    return Claim(
        job_id,
        shard_id,
        claimed.attempt,
        owner,
        job.priority,
        JobSpec.model_validate(job.spec),
        plan,
        None if suspects[0] is None else Suspects(*suspects),
    )


def _files_of(connection: sa.Connection, job_id: int, first_row: int, rows: int) -> tuple[JobFile, ...]:
    """Return the files that hold these rows of the job, in order."""
    files, of_job = input_files.c, input_files.c.job_id == job_id
    first_file = sa.select(sa.func.max(files.first_row_number)).where(of_job, files.first_row_number <= first_row)
    held = sa.select(*(files[name] for name in JobFile.__dataclass_fields__)).where(
        of_job,
        files.first_row_number >= first_file.scalar_subquery(),
        files.first_row_number < first_row + rows,
        files.rows > 0,
    )
    return tuple(JobFile(**row) for row in connection.execute(held.order_by(files.number)).mappings())


@replayed
def hold_checkpoint(db: Database, claim: Claim, fingerprint: str, revision: str | None) -> str:
    """Note the weights that score this job, the first time; returns the fingerprint that the job is held to."""
    with db.write() as connection:
        lock_job_of(connection, claim)
        get_held(connection, claim.lease)
        connection.execute(
            sa.update(jobs)
            .where(jobs.c.id == claim.job_id, jobs.c.checkpoint_fingerprint.is_(None))
            .values(checkpoint_fingerprint=fingerprint, checkpoint_revision=revision)
        )
        return str(connection.scalar(sa.select(jobs.c.checkpoint_fingerprint).where(jobs.c.id == claim.job_id)))


@replayed
def hold_route(db: Database, claim: Claim, checkpoint: str, fingerprint: str, revision: str | None) -> str:
    """The same for one of the checkpoints that a routed job's rows go to."""
    of_route = job_checkpoints.c.job_id == claim.job_id, job_checkpoints.c.checkpoint == checkpoint
    held = sa.select(job_checkpoints.c.fingerprint).where(*of_route)
    with db.write() as connection:
        lock_job_of(connection, claim)
        get_held(connection, claim.lease)
        if (held_to := connection.scalar(held)) is not None:
            return str(held_to)
        noted = {"job_id": claim.job_id, "checkpoint": checkpoint, "fingerprint": fingerprint, "revision": revision}
        connection.execute(sa.insert(job_checkpoints).values(noted))
        return fingerprint


@replayed
def note_warnings(db: Database, claim: Claim, found: list[str]) -> None:
    """Add to the job's warnings those that it does not have."""
    of_job = jobs.c.id == claim.job_id
    with db.write() as connection:
        lock_job_of(connection, claim)
        noted: list[str] = connection.execute(sa.select(jobs.c.warnings).where(of_job)).scalar_one()
        if new := [warning for warning in found if warning not in noted]:
            connection.execute(sa.update(jobs).where(of_job).values(warnings=noted + new))


@replayed
def saved_pairs(db: Database, claim: Claim) -> set[tuple[int, str]]:
    """(row number, question) of every answer and error that earlier attempts saved; question '*' is the whole row."""
    first, rows = claim.plan.first_row_number, claim.plan.rows
    saved = [
        sa.select(table.c.row_number, table.c.question).where(
            table.c.job_id == claim.job_id, table.c.row_number.between(first, first + rows - 1)
        )
        for table in (results, row_errors)
    ]
    with db.read() as connection:
        return {(row_number, question) for row_number, question in connection.execute(sa.union_all(*saved))}


@replayed
def save_batch(db: Database, claim: Claim, lease_s: float, batch: BatchRecord, answers: list[dict[str, Any]]) -> bool:
    """Save one batch's answers (columns of `results` without job and batch), and prolong the lease.

    Returns True when the job was cancelled or has failed, so that the worker stops here.

    Raises:
        LeaseLostError: another attempt holds the shard; nothing was saved.
    """
    try:
        return _insert_batch(db, claim, lease_s, batch, answers)
    except DatabaseConflictError:
        if not is_batch_saved(db, claim, {(answer["row_number"], answer["question"]) for answer in answers}):
            raise
        return _read_must_stop(db, claim)


def _insert_batch(
    db: Database, claim: Claim, lease_s: float, batch: BatchRecord, answers: list[dict[str, Any]]
) -> bool:
    started = perf_counter()
    with db.write() as connection:
        hold(connection, claim, lease_s, answers=shards.c.answers + len(answers), failures=0, deaths=0)
        batch_id = connection.execute(
            sa.insert(batches)
            .values(
                **asdict(batch),
                job_id=claim.job_id,
                shard_id=claim.shard_id,
                attempt=claim.attempt,
                created_at=seconds_from_now(),
            )
            .returning(batches.c.id)
        ).scalar_one()
        connection.execute(sa.insert(results).values(job_id=claim.job_id, batch_id=batch_id), answers)
        write_ms = (perf_counter() - started) * 1000
        connection.execute(sa.update(batches).where(batches.c.id == batch_id).values(write_ms=write_ms))
        return must_stop(connection, claim.job_id)


@replayed
def save_row_errors(db: Database, /, claim: Claim, lease_s: float, errors: list[RowError], **shard: Any) -> bool:
    """Save rows, or questions of rows, that cannot be scored. Returns True when the worker must stop, as `save_batch`.

    Past the job's `max_row_errors` the job fails: its waiting shards are cancelled and its running ones stop. `shard`
    has columns of the shard that are to change with it.
    """
    try:
        return _insert_row_errors(db, claim, lease_s, errors, shard)
    except DatabaseConflictError:
        if not are_errors_saved(db, claim, {(error.row_number, error.question) for error in errors}):
            raise
        return _read_must_stop(db, claim)


def _insert_row_errors(
    db: Database, claim: Claim, lease_s: float, errors: list[RowError], shard: dict[str, Any]
) -> bool:
    failed_rows = {error.row_number for error in errors}
    pairs = sum(len(claim.spec.questions) if error.question == WHOLE_ROW else 1 for error in errors)
    with db.write() as connection:
        lock_job_of(connection, claim)
        hold(
            connection,
            claim,
            lease_s,
            row_errors=shards.c.row_errors + len(failed_rows - _rows_with_errors(connection, claim)),
            unanswered=shards.c.unanswered + pairs,
            **shard,
        )
        connection.execute(sa.insert(row_errors).values(job_id=claim.job_id), [asdict(error) for error in errors])
        limit = claim.spec.max_row_errors
        total = connection.scalar(sa.select(sa.func.sum(shards.c.row_errors)).where(shards.c.job_id == claim.job_id))
        if limit is not None and total > limit:
            example = f"row {errors[0].row_number}: {errors[0].message}"
            message = f"{total} rows failed, more than max_row_errors={limit}; for example {example}"
            stop_job(connection, claim.job_id, message)
        return must_stop(connection, claim.job_id)


def _rows_with_errors(connection: sa.Connection, claim: Claim) -> set[int]:
    """Rows of the claim that count as failed already: another question of theirs did."""
    first, last = claim.plan.first_row_number, claim.plan.first_row_number + claim.plan.rows - 1
    ours = row_errors.c.job_id == claim.job_id, row_errors.c.row_number.between(first, last)
    return set(connection.scalars(sa.select(row_errors.c.row_number).where(*ours)))


def _read_must_stop(db: Database, claim: Claim) -> bool:
    with db.read() as connection:
        return must_stop(connection, claim.job_id)


@replayed
def renew_lease(db: Database, claim: Claim, lease_s: float) -> None:
    """Prolong the lease while a batch runs; raises LeaseLostError when it is another's."""
    with db.write() as connection:
        hold(connection, claim, lease_s)


def finish_shard(db: Database, claim: Claim) -> JobStatus | None:
    """All its rows have ended. Returns the job's final state when this was its last shard."""
    return _release(db, claim, status=ShardStatus.DONE, finished_at=seconds_from_now())


def stop_shard(db: Database, claim: Claim) -> JobStatus | None:
    """Its job was cancelled or has failed; what was saved stays."""
    return _release(db, claim, status=ShardStatus.CANCELLED, finished_at=seconds_from_now())


def give_back(db: Database, claim: Claim) -> None:
    """Leave the rest of the shard to another worker; not counted as a failure. Its message must be sent again."""
    _release(db, claim, status=ShardStatus.QUEUED, sent_at=seconds_from_now())


@replayed
def fail_shard(db: Database, claim: Claim, error: str, max_attempts: int) -> None:
    """An attempt ended in an error. Its message is left to the sweep: what failed just now may work in a while."""
    with db.write() as connection:
        lock_job_of(connection, claim)
        count_failure(connection, claim.lease, hide_secrets(error), max_attempts)
        settle_job(connection, claim.job_id)


@replayed
def fail_job(db: Database, claim: Claim, error: str) -> None:
    """Fail the shard and its job, whose other shards would meet the same error. What was saved stays."""
    with db.write() as connection:
        lock_job_of(connection, claim)
        error = hide_secrets(error)
        count_failure(connection, claim.lease, error, max_attempts=1)
        stop_job(connection, claim.job_id, error)
        settle_job(connection, claim.job_id)


@replayed
def _release(db: Database, /, claim: Claim, **values: Any) -> JobStatus | None:
    ended_so = shards.c.id == claim.shard_id, shards.c.attempt == claim.attempt, shards.c.status == values["status"]
    with db.write() as connection:
        lock_job_of(connection, claim)
        if connection.scalar(sa.select(shards.c.id).where(*ended_so)):
            return None  # it was committed before, and the reply was lost
        hold(connection, claim, 0, lease_owner=None, **values)
        if values["status"] == ShardStatus.QUEUED and must_stop(connection, claim.job_id):
            cancel_waiting_shards(connection, claim.job_id)
        return settle_job(connection, claim.job_id)
