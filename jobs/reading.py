"""The commands that read: what jobs there are, how far one is, what came out. An export writes its file, else nothing.

They read the database of LAYA_BATCH_DATABASE_URL where that is set, else the one that `run` keeps in the data folder;
`--data-dir` names such a folder and wins over both.
"""

import json
import shlex
import signal
from pathlib import Path
from typing import Annotated, Any

import typer

import jobs
from jobs import options
from jobs.client import follow_job, open_database
from jobs.display import (
    describe_ids,
    draw_answers,
    draw_error_counts,
    draw_fields,
    draw_jobs,
    draw_measures,
    draw_results,
    draw_row_errors,
    draw_workers,
)
from jobs.errors import DatabaseError
from jobs.progress import mention_errors, show_progress
from jobs.settings import Settings, load_settings
from jobs.store import reports
from jobs.store.database import Database
from jobs.store.row_ids import with_id_counts
from jobs.terminal import LiteralConsole, dump_json, say, warn
from schemas.job import JobInfo, JobStatus

TIMED_OUT = 124  # as timeout(1) exits

reading = typer.Typer()


def choose_database(data_dir: Path | None) -> Settings:
    """Return the settings of the database that a command reads, and say so where two could be meant.

    Raises DatabaseError when `data_dir` is given and holds no database.
    """
    settings = load_settings(data_dir=data_dir)
    embedded = settings.embedded_database
    if data_dir is not None:
        if not embedded.is_file():
            raise DatabaseError(f"{data_dir}: holds no database of `laya-batch run` ({embedded.name})")
        return settings.model_copy(update={"database_url": None})
    if settings.database_url is not None and embedded.is_file():
        warn(
            "laya-batch: this is the database of LAYA_BATCH_DATABASE_URL; for the jobs of `laya-batch run` add "
            f"--data-dir {shlex.quote(str(settings.data_dir))}"
        )
    return settings


@reading.command("list")
def list_command(
    limit: Annotated[int, typer.Option(min=1, help="Jobs to show.")] = 20, *, data_dir: options.ReadDataDir = None
) -> None:
    """Show the newest jobs."""
    with open_database(choose_database(data_dir)) as db:
        if found := reports.list_jobs(db, limit):
            LiteralConsole().print(draw_jobs(found))
        else:
            warn(f"there are no jobs in {db.shown_url}")


@reading.command()
def status(job_id: options.JobId, *, as_json: options.AsJson = False, data_dir: options.ReadDataDir = None) -> None:
    """Show a job's state and progress."""
    job = jobs.get(job_id, settings=choose_database(data_dir))
    fields, asked = _job_fields(job), job.spec.engine_options
    if as_json:
        print(dump_json({**fields, **asked}))
    else:
        given = {name: value for name, value in asked.items() if value is not None}
        fields["warnings"] = "; ".join(job.warnings) or None
        LiteralConsole().print(draw_fields({**fields, **given}))


def _job_fields(job: JobInfo) -> dict[str, Any]:
    times = {name: getattr(job, name) for name in ("created_at", "started_at", "finished_at")}
    return {
        **{
            name: getattr(job, name) for name in ("id", "name", "status", "priority", "rows", "rows_done", "row_errors")
        },
        **{name: getattr(job, name) for name in ("answers", "shards", "shards_done", "cancel_requested")},
        **{name: getattr(job, name) for name in ("error", "last_error")},
        **{name: getattr(job, name) for name in ("null_ids", "repeated_ids")},
        "warnings": list(job.warnings),
        **{name: None if time is None else time.isoformat(timespec="seconds") for name, time in times.items()},
    }


@reading.command()
def watch(
    job_id: options.JobId,
    *,
    timeout: Annotated[
        float | None,
        typer.Option(min=0, metavar="SECONDS", help="Leave after so many seconds; unset: when the job has ended."),
    ] = None,
    data_dir: options.ReadDataDir = None,
) -> None:
    """Show a job's progress until it ends, then what came out. Leaving does not stop the job.

    Exits with 0 when the job has succeeded, 1 when it has failed or was cancelled, 124 when --timeout has passed first.
    """
    settings = choose_database(data_dir)
    with open_database(settings, settings.database_retry_s) as db:
        try:
            job = show_progress(mention_errors(follow_job(db, settings, job_id, timeout, warn), warn))
        except TimeoutError as error:
            warn(f"laya-batch: {error}")
            raise typer.Exit(TIMED_OUT) from error
        print_summary(db, job)
    if job.status is not JobStatus.SUCCEEDED:
        raise typer.Exit(1)


def warn_of_questions(job: JobInfo) -> None:
    """Print the job's warnings to standard error, before it is scored."""
    for warning in job.warnings:
        warn(f"laya-batch: warning: {warning}")


def print_summary(db: Database, job: JobInfo) -> None:
    """How a job ended: answers, errors, what ran, and where the database is."""
    out = LiteralConsole()
    job = with_id_counts(db, job)
    if answers := reports.count_answers(db, job.id):
        out.print(draw_answers(answers))
    if errors := reports.count_row_errors(db, job.id):
        out.print(draw_error_counts(errors))
    scoring_s, cut = reports.measure_scoring_s(db, job.id), reports.count_cut(db, job.id)
    out.print(draw_measures(reports.measure_backends(db, job.id), job, scoring_s, cut))
    for warning in [*job.warnings, *describe_ids(job)]:
        say(f"warning: {warning}")
    say(f"job {job.id} {job.status}" + (f": {job.error}" if job.error else ""))
    say(f"database: {db.shown_url}")


@reading.command()
def results(
    job_id: options.JobId,
    *,
    limit: Annotated[int, typer.Option(min=1, help="Answers to show.")] = 20,
    as_json: options.AsJsonLines = False,
    data_dir: options.ReadDataDir = None,
) -> None:
    """Show a job's answers, in the order of its rows."""
    settings = choose_database(data_dir)
    with open_database(settings) as db:
        job = reports.get_job(db, job_id)
    reader = jobs.results(job_id, limit=limit, settings=settings)
    if as_json:
        for batch in reader:
            for row in batch.to_pylist():
                print(dump_json({**row, "probabilities": json.loads(row["probabilities"])}))
    elif rows := reader.read_all().to_pylist():
        LiteralConsole().print(draw_results(rows, job.spec.questions))
    _say_how_many(min(limit, job.answers), job.answers, f"answers of job {job_id}")


def _say_how_many(shown: int, total: int, what: str) -> None:
    """Tell on standard error that there are more than were shown, or none."""
    if shown < total:
        warn(f"{shown:,} of {total:,} {what}; --limit shows more")
    elif total == 0:
        warn(f"there are no {what}")


@reading.command()
def errors(
    job_id: options.JobId,
    *,
    limit: Annotated[int, typer.Option(min=1, help="Row errors to show.")] = 20,
    as_json: options.AsJsonLines = False,
    data_dir: options.ReadDataDir = None,
) -> None:
    """Show which rows of a job have no answer, and why."""
    settings = choose_database(data_dir)
    reader = jobs.row_errors(job_id, limit=limit, settings=settings)
    shown = 0
    if as_json:
        for batch in reader:
            shown += batch.num_rows
            for row in batch.to_pylist():
                print(dump_json(row))
    elif rows := reader.read_all().to_pylist():
        shown = len(rows)
        LiteralConsole().print(draw_row_errors(rows))
    with open_database(settings) as db:
        _say_how_many(
            shown, sum(row["count"] for row in reports.count_row_errors(db, job_id)), f"row errors of job {job_id}"
        )


@reading.command()
def export(
    job_id: options.JobId,
    path: Annotated[str, typer.Argument(help="File to write, which ends in .parquet or .pq.", show_default=False)],
    *,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")] = False,
    partial: Annotated[
        bool, typer.Option("--partial", help="Write what there is of a job that has not succeeded.")
    ] = False,
    data_dir: options.ReadDataDir = None,
) -> None:
    """Write a job's answers to a Parquet file; it appears whole or not at all."""
    for stop in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(stop, signal.default_int_handler)  # so that the unfinished file is removed, as by Ctrl-C
    settings = choose_database(data_dir)
    written = jobs.export(job_id, path, overwrite=overwrite, partial=partial, progress=True, settings=settings)
    say(f"{written:,} answers written to {path}")


@reading.command()
def workers(
    limit: Annotated[int, typer.Option(min=1, help="Starts to show.")] = 20, *, data_dir: options.ReadDataDir = None
) -> None:
    """Show the workers: what they run on, since when they are silent, and why one could not boot."""
    settings = choose_database(data_dir)
    with open_database(settings) as db:
        if found := reports.list_workers(db, limit):
            LiteralConsole().print(draw_workers(found, settings.lease_s, settings.boot_timeout_s))
        else:
            warn(f"no worker has ever started on {db.shown_url}")
