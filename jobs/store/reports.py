"""Reading what was saved: jobs and their progress, answers, errors, and what the scoring cost. Changes nothing."""

import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import sqlalchemy as sa

from jobs.errors import JobNotFoundError
from jobs.store.database import Database, seconds_from_now
from jobs.store.replay import replayed
from schemas.job import JobInfo, JobSpec, JobStatus
from schemas.tables import (
    answers,
    backend_throughput,
    batches,
    input_files,
    job_progress,
    jobs,
    results,
    row_errors,
    workers,
)

RESULT_CHUNK_ROWS = 10_000

RESULT_SCHEMA = pa.schema(
    [
        pa.field("row_number", pa.int64(), nullable=False),
        pa.field("row_id", pa.string()),
        pa.field("question", pa.string(), nullable=False),
        pa.field("type", pa.string(), nullable=False),
        pa.field("choice", pa.string()),
        pa.field("score", pa.float64()),
        pa.field("noul", pa.float64()),
        pa.field("probabilities", pa.string(), nullable=False),  # JSON: option -> probability
        pa.field("confidence", pa.float64(), nullable=False),
        pa.field("answer_confidence", pa.float64(), nullable=False),
        pa.field("act_probability", pa.float64(), nullable=False),
        pa.field("state_tokens_dropped", pa.int32(), nullable=False),
        pa.field("checkpoint", pa.string()),
        pa.field("language", pa.string()),  # of a routed row, null when undecided
        pa.field("route_reason", pa.string()),  # null where the job named one checkpoint
        pa.field("batch_id", pa.int64(), nullable=False),
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
    with db.read() as connection:
        found = connection.execute(_jobs_with_progress().order_by(jobs.c.id.desc()).limit(limit)).all()
    return [_job_info(row) for row in found]


def read_results(db: Database, job_id: int, limit: int | None = None) -> Iterator[pa.RecordBatch]:
    """A job's answers ordered by row number and question, read from the database chunk by chunk."""
    columns = [(batches if name == "checkpoint" else results).c[name] for name in RESULT_SCHEMA.names]
    selected = (
        sa.select(*columns)
        .select_from(results.join(batches, batches.c.id == results.c.batch_id))
        .where(results.c.job_id == job_id)
        .order_by(results.c.row_number, results.c.question)
        .limit(limit)
        .execution_options(yield_per=RESULT_CHUNK_ROWS)
    )
    with db.read() as connection:
        for rows in connection.execute(selected).partitions():
            by_column = dict(zip(RESULT_SCHEMA.names, zip(*rows, strict=True), strict=True))
            by_column["probabilities"] = tuple(json.dumps(p, ensure_ascii=False) for p in by_column["probabilities"])
            yield pa.record_batch([pa.array(by_column[f.name], f.type) for f in RESULT_SCHEMA], schema=RESULT_SCHEMA)


def count_answers(db: Database, job_id: int) -> list[dict[str, Any]]:
    """For each question and answer: how often it was given, and how surely on average. Most frequent first."""
    count, mean = sa.func.count().label("count"), sa.func.avg(answers.c.confidence).label("mean_confidence")
    counted = (
        sa.select(answers.c.question, answers.c.type, answers.c.answer, count, mean)
        .where(answers.c.job_id == job_id)
        .group_by(answers.c.question, answers.c.type, answers.c.answer)
        .order_by(answers.c.question, count.desc(), answers.c.answer)
    )
    return _rows(db, counted)


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
def _rows(db: Database, statement: sa.Select[Any]) -> list[dict[str, Any]]:
    with db.read() as connection:
        return [dict(row) for row in connection.execute(statement).mappings()]


def _jobs_with_progress() -> sa.Select[Any]:
    progress = job_progress.c
    return sa.select(
        jobs,
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
        cancel_requested=row.cancel_requested_at is not None,
        created_at=row.created_at,
        started_at=row.started_at,
        finished_at=row.finished_at,
    )
