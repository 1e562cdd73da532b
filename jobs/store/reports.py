"""Reading what was saved: jobs and their progress, answers, errors, and what the scoring cost. Changes nothing."""

import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pyarrow as pa
import sqlalchemy as sa

from jobs.errors import JobNotFoundError
from jobs.store.database import Database, seconds_from_now
from jobs.store.replay import replayed
from schemas.job import JobInfo, JobSpec, JobStatus, ShardStatus
from schemas.tables import (
    answers,
    backend_throughput,
    batches,
    input_files,
    job_progress,
    jobs,
    row_errors,
    shards,
    workers,
)

RESULT_CHUNK_ROWS = 10_000
# Between the batches of one shard and the next there may be less: opening a file, a claim.
PAUSE = timedelta(seconds=10)

RESULT_SCHEMA = pa.schema(
    [
        pa.field("row_number", pa.int64(), nullable=False),
        pa.field("row_id", pa.string()),
        pa.field("question", pa.string(), nullable=False),
        pa.field("type", pa.string(), nullable=False),
        pa.field("answer", pa.string(), nullable=False),  # as text: a label, true or false, a level's description
        pa.field("choice", pa.string()),
        pa.field("score", pa.float64()),
        pa.field("noul", pa.float64()),
        pa.field("probabilities", pa.string(), nullable=False),  # JSON: option -> probability
        pa.field("confidence", pa.float64(), nullable=False),
        pa.field("answer_confidence", pa.float64(), nullable=False),
        pa.field("act_probability", pa.float64(), nullable=False),
        pa.field("state_tokens_dropped", pa.int32(), nullable=False),
        pa.field("options_cut", pa.bool_(), nullable=False),  # whether the model could not tell some options apart
        pa.field("checkpoint", pa.string()),
        pa.field("language", pa.string()),  # of a routed row, null when undecided
        pa.field("route_reason", pa.string()),  # null where the job named one checkpoint
        pa.field("batch_id", pa.int64(), nullable=False),
    ]
)

ROW_ERROR_SCHEMA = pa.schema(
    [
        pa.field("row_number", pa.int64(), nullable=False),
        pa.field("row_id", pa.string()),
        pa.field("question", pa.string(), nullable=False),  # '*': the whole row
        pa.field("code", pa.string(), nullable=False),
        pa.field("message", pa.string(), nullable=False),
    ]
)


@replayed
def get_job(db: Database, job_id: int) -> JobInfo:
    """One job with its progress; raises JobNotFoundError."""
    with db.read() as connection:
        found = connection.execute(
            _jobs_with_progress().where(jobs.c.id == job_id, job_progress.c.job_id == job_id)
        ).one_or_none()
    if found is None:
        raise JobNotFoundError(job_id)
    return _job_info(found)


@replayed
def list_jobs(db: Database, limit: int) -> list[JobInfo]:
    """The newest jobs first."""
    newest = sa.select(jobs.c.id).order_by(jobs.c.id.desc()).limit(limit).subquery()
    with db.read() as connection:
        if (first := connection.scalar(sa.select(sa.func.min(newest.c.id)))) is None:
            return []
        # Said of the view, too: it counts the shards of every job that it is not told to leave out.
        shown = jobs.c.id >= first, job_progress.c.job_id >= first
        found = connection.execute(_jobs_with_progress().where(*shown).order_by(jobs.c.id.desc()).limit(limit)).all()
    return [_job_info(row) for row in found]


def read_results(db: Database, job_id: int, limit: int | None = None) -> Iterator[pa.RecordBatch]:
    """A job's answers ordered by row number and question, read from the database chunk by chunk."""
    for columns in _read_columns(db, answers, RESULT_SCHEMA, job_id, limit):
        columns["probabilities"] = tuple(json.dumps(p, ensure_ascii=False) for p in columns["probabilities"])
        yield _record_batch(columns, RESULT_SCHEMA)


def read_row_errors(db: Database, job_id: int, limit: int | None = None) -> Iterator[pa.RecordBatch]:
    """Why rows, or questions of them, have no answer; ordered by row number and question."""
    for columns in _read_columns(db, row_errors, ROW_ERROR_SCHEMA, job_id, limit):
        yield _record_batch(columns, ROW_ERROR_SCHEMA)


def _read_columns(
    db: Database, table: sa.FromClause, schema: pa.Schema, job_id: int, limit: int | None
) -> Iterator[dict[str, tuple[Any, ...]]]:
    selected = (
        sa.select(*(table.c[name] for name in schema.names))
        .where(table.c.job_id == job_id)
        .order_by(table.c.row_number, table.c.question)
        .limit(limit)
        .execution_options(yield_per=RESULT_CHUNK_ROWS)
    )
    with db.read() as connection:
        for rows in connection.execute(selected).partitions():
            yield dict(zip(schema.names, zip(*rows, strict=True), strict=True))


def _record_batch(columns: dict[str, tuple[Any, ...]], schema: pa.Schema) -> pa.RecordBatch:
    return pa.record_batch([pa.array(columns[field.name], field.type) for field in schema], schema=schema)


def count_answers(db: Database, job_id: int) -> list[dict[str, Any]]:
    """For each question and answer: how often it was given, and how surely on average. Most frequent first."""
    view, count = answers.c, sa.func.count().label("count")
    told_apart = (view.question, view.type, view.answer, view.level)  # two levels may be described alike
    counted = (
        sa.select(*told_apart, count, sa.func.avg(view.confidence).label("mean_confidence"))
        .where(view.job_id == job_id)
        .group_by(*told_apart)
        .order_by(view.question, count.desc(), view.answer)
    )
    return _rows(db, counted)


def count_cut(db: Database, job_id: int) -> tuple[int, int]:
    """Rows, and answers, whose text did not fit into the checkpoint's length beside the question."""
    view = answers.c
    counted = sa.select(sa.func.count(view.row_number.distinct()).label("rows"), sa.func.count().label("answers"))
    (found,) = _rows(db, counted.where(view.job_id == job_id, view.state_tokens_dropped > 0))
    return found["rows"], found["answers"]


def count_row_errors(db: Database, job_id: int) -> list[dict[str, Any]]:
    """For each code: how many errors, and one of them as an example."""
    errors = row_errors.c
    counted = (
        sa.select(errors.code, sa.func.count().label("count"), sa.func.min(errors.message).label("example"))
        .where(errors.job_id == job_id)
        .group_by(errors.code)
        .order_by(sa.func.count().desc())
    )
    return _rows(db, counted)


def measure_backends(db: Database, job_id: int) -> list[dict[str, Any]]:
    """For each backend that ran: batches, sequences, tokens, padding, and milliseconds of each stage."""
    return _rows(db, sa.select(backend_throughput).where(backend_throughput.c.job_id == job_id))


def measure_scoring_s(db: Database, job_id: int) -> float:
    """Seconds in which the job's shards were scored, counted once where several were at a time.

    Each claim of a shard scores from the beginning of its first batch to the end of its last. Longer gaps between
    claims are no part of it: the job waited for a worker, for other jobs, or to be retried or resumed.
    """
    by_claim = (
        sa.select(
            sa.func.min(batches.c.id).label("first_id"),
            sa.func.min(batches.c.created_at).label("first_end"),
            sa.func.max(batches.c.created_at).label("last_end"),
        )
        .where(batches.c.job_id == job_id)
        .group_by(batches.c.shard_id, batches.c.attempt)
        .subquery()
    )
    first_ms = batches.c.read_ms + batches.c.tokenise_ms + batches.c.forward_ms + batches.c.decode_ms
    found = sa.select(first_ms.label("first_ms"), by_claim.c.first_end, by_claim.c.last_end).join(
        by_claim, batches.c.id == by_claim.c.first_id
    )
    spans = sorted(
        (row["first_end"] - timedelta(milliseconds=row["first_ms"]), row["last_end"]) for row in _rows(db, found)
    )
    total, until = timedelta(), None
    for start, end in spans:
        if until is None or start - until > PAUSE:
            total += end - start
        else:
            total += max(end - until, timedelta())
        until = end if until is None else max(until, end)
    return total.total_seconds()


def list_files(db: Database, job_id: int) -> list[str]:
    """The input files of a job."""
    named = sa.select(input_files.c.name).where(input_files.c.job_id == job_id).order_by(input_files.c.number)
    return [row["name"] for row in _rows(db, named)]


def list_workers(db: Database, limit: int) -> list[dict[str, Any]]:
    """The newest starts of workers first, each with the database's time as `now`."""
    return _rows(db, sa.select(workers, seconds_from_now().label("now")).order_by(workers.c.id.desc()).limit(limit))


def list_worker_errors(db: Database, host: str, supervisor_pid: int | None = None) -> list[str]:
    """Why workers of this host, or of this one supervisor, could not boot or ended by themselves; the last one last."""
    ended = sa.select(workers.c.error).where(workers.c.host == host, workers.c.error.is_not(None))
    if supervisor_pid is not None:
        ended = ended.where(workers.c.name.endswith(f"@{host}-{supervisor_pid}", autoescape=True))
    return [row["error"] for row in _rows(db, ended.order_by(workers.c.id))]


@replayed
def _rows(db: Database, statement: sa.Executable) -> list[dict[str, Any]]:
    with db.read() as connection:
        return [dict(row) for row in connection.execute(statement).mappings()]


def _jobs_with_progress() -> sa.Select[Any]:
    progress = job_progress.c
    unfinished = shards.c.job_id == jobs.c.id, shards.c.status.in_([ShardStatus.QUEUED, ShardStatus.RUNNING])
    last_error = (
        sa.select(shards.c.last_error)
        .where(*unfinished, shards.c.last_error.is_not(None))
        .order_by(shards.c.number)
        .limit(1)
        .scalar_subquery()
    )
    return sa.select(
        jobs,
        last_error.label("last_error"),
        progress.shards_done,
        progress.answers,
        progress.unanswered,
        progress.row_errors.label("row_errors_so_far"),
    ).join(job_progress, progress.job_id == jobs.c.id)


def _job_info(row: sa.Row[Any]) -> JobInfo:
    return JobInfo(
        id=row.id,
        name=row.name,
        status=JobStatus(row.status),
        spec=JobSpec.model_validate(row.spec),
        priority=row.priority,
        rows=row.rows,
        shards=row.shards,
        shards_done=row.shards_done,
        answers=row.answers,
        unanswered=row.unanswered,
        row_errors=row.row_errors_so_far,
        error=row.error,
        last_error=row.last_error,
        cancel_requested=row.cancel_requested_at is not None,
        created_at=row.created_at,
        started_at=row.started_at,
        finished_at=row.finished_at,
        null_ids=row.null_ids,
        repeated_ids=row.repeated_ids,
        warnings=tuple(row.warnings),
    )
