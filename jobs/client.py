"""The functions that `import jobs` offers. Each opens the database for its own call."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from jobs.engine_options import EngineOptions
from jobs.errors import BrokerError, JobFailedError, OutputError
from jobs.output import open_output, write_parquet
from jobs.progress import mention_workers, show_progress, track_answers
from jobs.queue import check_broker, configure_app
from jobs.settings import Settings, follow_up, load_settings
from jobs.store import lifecycle, reports
from jobs.store.database import RETRY_S, Database
from jobs.store.lifecycle import JobOptions
from jobs.store.row_ids import with_id_counts
from jobs.store.workers import last_seen
from jobs.submission import Again, build_spec, send_job, submit_job
from jobs.terminal import warn
from schemas.job import JobInfo, JobStatus

POLL_S = 0.5

log = logging.getLogger(__name__)


@contextmanager
def open_database(settings: Settings, retry_s: float = RETRY_S) -> Iterator[Database]:
    """The settings' database with tables of this version: migrated if it is the embedded one, checked otherwise."""
    with closing(Database(settings.resolved_database_url, retry_s)) as db:
        if settings.owns_database:
            db.migrate()
        else:
            db.check_schema()
        yield db


def submit(  # noqa: PLR0913 - the call that users write; each is one thing to say about a job
    inputs: str | Path | Sequence[str | Path],
    *,
    questions: dict[str, Any] | str | Path,
    state: str | Sequence[str],
    row_id: str | None = None,
    checkpoint: str | Path = "english",
    routes: Mapping[str, str | Path] | None = None,
    language_column: str | None = None,
    default_route: str | None = None,
    revision: str | None = None,
    expected_sha256: Mapping[str, str] | None = None,
    max_len: int | None = None,
    head_max_len: int | None = None,
    calibration: str | Path | Mapping[str, Any] | None = None,
    backend: str = "auto",
    name: str | None = None,
    priority: int = 0,
    idempotency_key: str | None = None,
    max_row_errors: int | None = None,
    unique_ids: bool = False,
    return_existing: bool = False,
    retry_failed: bool = False,
    settings: Settings | None = None,
) -> JobInfo:
    """Queue a job that asks every question of every row.

    Args:
        inputs: a Parquet file, a folder, a glob, a URL that pyarrow's filesystems open, or a list of these.
        questions: a question set, or the path of a YAML or JSON file that holds one.
        state: the column that holds the state (text, or a list of turns), or several that make a JSON object a row.
        row_id: a column whose value is kept with each answer.
        checkpoint: `english`, `multilingual`, `typed-decisions`, a Hub repository, or a folder; or `router`, which
            sends each row to `english` or `multilingual` by its language.
        routes: for `router`, where these two are, when not where the public ones are.
        language_column: for `router`, a text column with each row's language; where it is null, it is detected.
        default_route: for `router`, `english` or `multilingual` for rows whose language is undecided; None: the latter.
        revision: of a checkpoint on the Hub, its commit, branch or tag; with `router`, of both.
        expected_sha256: digests by file in the checkpoint's folder, compared before a worker reads anything of it; with
            `router`, the paths begin with `english/` or `multilingual/`.
        max_len: tokens of a question and a text together, up to what the encoder reads; None: the checkpoint's.
        head_max_len: tokens that the question should not exceed; None: the checkpoint's. With `router`, both lengths
            are those of both checkpoints.
        calibration: a file of temperatures that replace the checkpoint's, or its content, which is kept with the job;
            with `router`, `{"english": …, "multilingual": …}`, or one of them.
        backend: `auto`, `eager`, `compile`, `tilelang`, `aot` or `onnx`.
        priority: 0 (nightly) to 9 (urgent); a worker takes the most urgent shard next.
        idempotency_key: the same call again with the same key returns the first job instead of a second; an error when
            the input files have changed since.
        return_existing: return the key's job whatever has become of its input files.
        retry_failed: retry the key's job if it has failed or was cancelled.
        max_row_errors: the job fails when more rows than this cannot be scored; None: never.
        unique_ids: refuse inputs in which a row has no id, or another row's; reads the id column of all files.

    Raises:
        QuestionSetError, InputError, SettingsError, IdempotencyError: what was asked is wrong, and is not queued.
        BrokerError, DatabaseError: a server cannot be used; nothing is queued.
    """
    settings = settings or load_settings()
    configure_app(settings)
    spec = build_spec(
        inputs=inputs,
        questions=questions,
        state=state,
        row_id=row_id,
        checkpoint=checkpoint,
        routes=routes,
        language_column=language_column,
        engine_options=EngineOptions(revision, expected_sha256, max_len, head_max_len, calibration, default_route),
        backend=backend,
        max_row_errors=max_row_errors,
        unique_ids=unique_ids,
    )
    with open_database(settings) as db:
        job_id = submit_job(
            db, settings, spec, JobOptions(name, priority, idempotency_key), Again(return_existing, retry_failed)
        )
        return reports.get_job(db, job_id)


def get(job_id: int, *, settings: Settings | None = None) -> JobInfo:
    """A job's state and progress, and once it has ended, its ids counted; raises JobNotFoundError."""
    with open_database(settings or load_settings()) as db:
        return with_id_counts(db, reports.get_job(db, job_id))


def list_jobs(*, limit: int = 20, settings: Settings | None = None) -> list[JobInfo]:
    """The newest jobs first."""
    with open_database(settings or load_settings()) as db:
        return reports.list_jobs(db, limit)


def wait(
    job_id: int, *, timeout_s: float | None = None, progress: bool = False, settings: Settings | None = None
) -> JobInfo:
    """Wait until a job has ended; `progress` shows a bar with rows, rows/s and the time left, or lines in a log.

    That no worker is alive is said, too: by a log message at level WARNING without `progress`.

    Raises:
        JobFailedError: it failed or was cancelled; the message says why.
        TimeoutError: it has not ended within `timeout_s` seconds; it goes on.
    """
    settings = settings or load_settings()
    with open_database(settings, settings.database_retry_s) as db:
        states = follow_job(db, settings, job_id, timeout_s, warn if progress else log.warning)
        job = show_progress(states) if progress else deque(states, maxlen=1).pop()
    if job.status is not JobStatus.SUCCEEDED:
        raise JobFailedError(f"job {job_id} {job.status}" + (f": {job.error}" if job.error else ""))
    return get(job_id, settings=settings)


def follow_job(
    db: Database, settings: Settings, job_id: int, timeout_s: float | None, tell: Callable[[str], None]
) -> Iterator[JobInfo]:
    """`poll_job`, and tell when no worker is alive, and how to start one."""
    remedy = "start one with: laya-batch worker"
    if settings.owns_database and settings.broker_url is None:
        remedy = f"go on with: {follow_up(f'run --resume {job_id}', settings)}"
    seen = partial(last_seen, db, settings.lease_s, settings.boot_timeout_s)
    return mention_workers(poll_job(db, job_id, timeout_s), seen, tell, remedy)


def poll_job(db: Database, job_id: int, timeout_s: float | None = None) -> Iterator[JobInfo]:
    """The job as it is, again and again, ending with its end."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        job = reports.get_job(db, job_id)
        yield job
        if job.is_finished:
            return
        if deadline is not None and time.monotonic() > deadline:
            raise TimeoutError(f"job {job_id} is still {job.status} after {timeout_s} s; it goes on")
        time.sleep(POLL_S)


def results(job_id: int, *, limit: int | None = None, settings: Settings | None = None) -> pa.RecordBatchReader:
    """A job's answers so far, one for each row and question, ordered by row number and question.

    The reader fetches from the database as it is read; `probabilities` is a JSON object of option to probability.
    """
    return _stream(job_id, reports.RESULT_SCHEMA, reports.read_results, limit, settings)


def _stream(
    job_id: int,
    schema: pa.Schema,
    read: Callable[[Database, int, int | None], Iterator[pa.RecordBatch]],
    limit: int | None,
    settings: Settings | None,
) -> pa.RecordBatchReader:
    settings = settings or load_settings()
    with open_database(settings) as db:
        reports.get_job(db, job_id)  # that there is such a job; its ids are not counted for this

    def chunks() -> Iterator[pa.RecordBatch]:
        with open_database(settings) as db:
            yield from read(db, job_id, limit)

    return pa.RecordBatchReader.from_batches(schema, chunks())


def row_errors(job_id: int, *, limit: int | None = None, settings: Settings | None = None) -> pa.RecordBatchReader:
    """Return why rows, or questions of them, have no answer, ordered by row number; streams as `results` does."""
    return _stream(job_id, reports.ROW_ERROR_SCHEMA, reports.read_row_errors, limit, settings)


def export(
    job_id: int,
    path: str | Path,
    *,
    overwrite: bool = False,
    partial: bool = False,
    progress: bool = False,
    settings: Settings | None = None,
) -> int:
    """Write a job's answers to a Parquet file (local, or a URL that pyarrow opens); returns how many.

    The file appears whole or not at all, and `progress` shows a bar with the time left.

    Args:
        path: ends in `.parquet` or `.pq`; never an input of the job.
        overwrite: replace a file that is there.
        partial: write the answers so far of a job that has not succeeded.

    Raises:
        OutputError: the file cannot be written, or one of the above is not given.
    """
    settings = settings or load_settings()
    with open_database(settings) as db:
        job, inputs = reports.get_job(db, job_id), reports.list_files(db, job_id)
    file = open_output(str(path), inputs, overwrite)
    if job.status is not JobStatus.SUCCEEDED and not partial:
        raise OutputError(
            f"job {job_id} is {job.status}, with {job.rows_done:,} of {job.rows:,} rows done; to write the answers "
            "that there are, export with partial (--partial)"
        )
    with results(job_id, settings=settings) as reader:
        return write_parquet(file, reader.schema, track_answers(reader, job.answers) if progress else reader, overwrite)


def cancel(job_id: int, *, settings: Settings | None = None) -> JobInfo:
    """Stop a job at its next batch; answers saved so far stay. Raises TransitionError when it has ended already."""
    with open_database(settings or load_settings()) as db:
        lifecycle.request_cancel(db, job_id)
        return reports.get_job(db, job_id)


def retry(job_id: int, *, max_row_errors: int | None = None, settings: Settings | None = None) -> JobInfo:
    """Queue what a failed or cancelled job left unscored; saved answers are kept, not scored again.

    `max_row_errors`: a new limit, for a job that failed over the old one. Raises TransitionError when it has not ended.
    """
    settings = settings or load_settings()
    configure_app(settings)
    with open_database(settings) as db:
        check_broker(settings)
        lifecycle.retry_job(db, job_id, max_row_errors)
        with suppress(BrokerError):  # queued it is; the workers' sweep will send what this could not
            send_job(db, settings, job_id)
        return reports.get_job(db, job_id)
