"""The command `laya-batch`: each command is one call of `jobs`. Those that only read are in `jobs.reading`."""

import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

import jobs
from jobs import options
from jobs.client import open_database
from jobs.embedded import EmbeddedServer, count_devices, embedded_servers, embedded_worker, watch_job
from jobs.errors import BrokerError, DatabaseError, InputError, LayaBatchError
from jobs.progress import mention_errors, show_progress
from jobs.queue import configure_app, ping_workers
from jobs.reading import choose_database, print_summary, reading, warn_of_questions
from jobs.settings import Settings, environment_of, follow_up, load_settings
from jobs.store import reports
from jobs.store.database import Database
from jobs.submission import send_job
from jobs.terminal import is_utf8, never_fail_to_encode, printable, say, show_error, warn
from schemas.job import JobInfo, JobStatus, TransitionError
from schemas.question import QuestionSetError

cli = typer.Typer(
    name="laya-batch",
    help="Score texts in Parquet with typed questions; the answers land in SQL.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # help, defaults and errors are text: [/SUBFOLDER] is no markup
)

cli.add_typer(reading)

EXAMPLE = "Example: laya-batch {} tickets.parquet --questions triage.yaml --state text --row-id ticket_id"


@cli.command(epilog=EXAMPLE.format("run"))
def run(  # noqa: PLR0913 - one option each
    inputs: Annotated[list[str] | None, typer.Argument(help="Parquet files, folders, globs or URLs.")] = None,
    *,
    questions: Annotated[Path | None, typer.Option(help="YAML or JSON file of questions.")] = None,
    state: Annotated[
        list[str] | None, typer.Option(help="Column of the text or conversation; repeat it to make a JSON object.")
    ] = None,
    row_id: options.RowId = None,
    checkpoint: options.Checkpoint = "english",
    route: options.Route = None,
    language_column: options.LanguageColumn = None,
    default_route: options.DefaultRoute = None,
    revision: options.Revision = None,
    expected_sha256: options.ExpectedSha256 = None,
    max_len: options.MaxLen = None,
    head_max_len: options.HeadMaxLen = None,
    calibration: options.CalibrationFile = None,
    backend: options.Backend = "auto",
    name: options.Name = None,
    max_row_errors: options.MaxRowErrors = None,
    unique_ids: options.UniqueIds = False,
    resume: Annotated[
        int | None,
        typer.Option(callback=options.check_job_id, help="Go on with this unfinished job instead of a new one."),
    ] = None,
    data_dir: options.DataDir = None,
) -> None:
    """Score files on this machine, with no server to set up, and show what came out."""
    asked = (inputs, questions, state)
    if resume is None and not all(asked):
        raise typer.BadParameter("give INPUTS, --questions and --state, or --resume ID")
    given = (*asked, row_id, name, route, language_column, checkpoint != "english", backend != "auto")
    options_given = (default_route, revision, expected_sha256, max_len, head_max_len, calibration, unique_ids)
    if resume is not None and any((*given, *options_given)):
        raise typer.BadParameter("--resume takes all but --max-row-errors and --data-dir from the job")
    _stop_on_signals()
    routes = options.read_pairs(route, "--route", "english=FOLDER or multilingual=FOLDER")
    with embedded_servers(load_settings(data_dir=data_dir)) as (settings, server), open_database(settings) as db:
        if resume is None:
            job = jobs.submit(
                inputs or [],
                questions=questions or "",
                state=state or [],
                row_id=row_id,
                checkpoint=checkpoint,
                routes=routes,
                language_column=language_column,
                default_route=default_route,
                revision=revision,
                expected_sha256=options.read_pairs(expected_sha256, "--expected-sha256", "model.safetensors=DIGEST"),
                max_len=max_len,
                head_max_len=head_max_len,
                calibration=options.read_calibration_option(calibration, checkpoint),
                backend=backend,
                name=name,
                max_row_errors=max_row_errors,
                unique_ids=unique_ids,
                settings=settings,
            )
        else:
            job = _wake(db, settings, resume, max_row_errors)
        warn_of_questions(job)
        if not job.is_finished:  # as a job without rows is at once
            job = _run_worker(db, settings, job, server)
        print_summary(db, job)
        say(f"answers: {follow_up(f'results {job.id}', settings)}")
        say(f"to a file: {follow_up(f'export {job.id} answers.parquet', settings)}")
    if job.status is not JobStatus.SUCCEEDED:
        raise typer.Exit(1)


def _wake(db: Database, settings: Settings, job_id: int, max_row_errors: int | None) -> JobInfo:
    """Send an interrupted job's messages again, or retry a failed or cancelled one."""
    job = reports.get_job(db, job_id)
    if job.status is JobStatus.SUCCEEDED:
        raise TransitionError(f"job {job.id} has succeeded; there is nothing to resume")
    if job.is_finished:
        return jobs.retry(job.id, max_row_errors=max_row_errors, settings=settings)
    if max_row_errors is not None:
        raise TransitionError(f"job {job.id} is {job.status}; max_row_errors changes only with a job that has ended")
    configure_app(settings)
    send_job(db, settings, job.id)
    return job


def _stop_on_signals() -> None:
    """Take a service manager's stop, and a terminal that is closed, for Ctrl-C; ignored ones (nohup) stay ignored."""

    def stop(_signal: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a closing terminal may send it again; a second stop kills
        for stream in (1, 2):
            try:
                os.write(stream, b"")
            except OSError:  # the terminal is gone: what is still to be shown must not end the drain
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, stop)


def _run_worker(db: Database, settings: Settings, job: JobInfo, server: EmbeddedServer) -> JobInfo:
    try:
        with embedded_worker(settings, db, job, server) as process:
            return show_progress(mention_errors(watch_job(db, job.id, process, server, settings), warn))
    except KeyboardInterrupt:
        again = follow_up(f"run --resume {job.id}", settings)
        warn(f"Interrupted; what was scored is saved. Go on with: {again}")
        raise typer.Exit(130) from None


@cli.command(epilog=EXAMPLE.format("submit"))
def submit(  # noqa: PLR0913 - one option each
    inputs: options.Inputs,
    *,
    questions: options.Questions,
    state: options.State,
    row_id: options.RowId = None,
    checkpoint: options.Checkpoint = "english",
    route: options.Route = None,
    language_column: options.LanguageColumn = None,
    default_route: options.DefaultRoute = None,
    revision: options.Revision = None,
    expected_sha256: options.ExpectedSha256 = None,
    max_len: options.MaxLen = None,
    head_max_len: options.HeadMaxLen = None,
    calibration: options.CalibrationFile = None,
    backend: options.Backend = "auto",
    name: options.Name = None,
    priority: options.Priority = 0,
    idempotency_key: Annotated[str | None, typer.Option(help="The same key again returns the same job.")] = None,
    max_row_errors: options.MaxRowErrors = None,
    unique_ids: options.UniqueIds = False,
    return_existing: Annotated[
        bool, typer.Option("--return-existing", help="Return the key's job even if its input files have changed since.")
    ] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Retry the key's job if it has failed or was cancelled.")
    ] = False,
) -> None:
    """Queue a job for the workers; prints its id."""
    job = jobs.submit(
        inputs,
        questions=questions,
        state=state,
        row_id=row_id,
        checkpoint=checkpoint,
        routes=options.read_pairs(route, "--route", "english=FOLDER or multilingual=FOLDER"),
        language_column=language_column,
        default_route=default_route,
        revision=revision,
        expected_sha256=options.read_pairs(expected_sha256, "--expected-sha256", "model.safetensors=DIGEST"),
        max_len=max_len,
        head_max_len=head_max_len,
        calibration=options.read_calibration_option(calibration, checkpoint),
        backend=backend,
        name=name,
        priority=priority,
        idempotency_key=idempotency_key,
        max_row_errors=max_row_errors,
        unique_ids=unique_ids,
        return_existing=return_existing,
        retry_failed=retry_failed,
    )
    warn_of_questions(job)
    print(job.id)


@cli.command()
def worker(
    checkpoint: Annotated[
        str | None, typer.Option(help="Checkpoint to warm at boot; others are loaded when a job names them.")
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="Backend to warm at boot: the one that your jobs ask for.")
    ] = None,
    input_root: Annotated[list[str] | None, typer.Option(help="Folder or URL to read under; repeat it.")] = None,
) -> None:
    """Run one worker for each device of this machine, until told to stop."""
    settings = load_settings(checkpoint=checkpoint, backend=backend, input_roots=input_root)
    settings.require_broker_url()
    # This process becomes the worker: signals reach it directly.
    os.execve(sys.executable, [sys.executable, "-m", "worker"], environment_of(settings))  # noqa: S606


@cli.command()
def cancel(job_id: options.JobId, *, data_dir: options.ReadDataDir = None) -> None:
    """Stop a job at its next batch; answers saved so far stay."""
    job = jobs.cancel(job_id, settings=choose_database(data_dir))
    say(f"job {job.id} {job.status}" if job.is_finished else f"job {job.id} stops at its next batch")


@cli.command()
def retry(
    job_id: options.JobId,
    max_row_errors: Annotated[
        int | None, typer.Option(min=0, help="Rows that may stay without an answer; unset: as many as before.")
    ] = None,
) -> None:
    """Queue what a failed or cancelled job left unscored."""
    say(f"job {jobs.retry(job_id, max_row_errors=max_row_errors).id} queued")


@cli.command()
def health() -> None:
    """Exit with 0 when a worker answers for each device of this machine, else with 1: for probes."""
    settings, host = load_settings(), socket.gethostname()
    names = [name for name in ping_workers(settings) if _host_of(name) == host]
    if len(names) < (expected := count_devices(settings)):
        reasons = ""
        with suppress(DatabaseError), open_database(settings) as db:
            errors = reports.list_worker_errors(db, host)
            reasons = f"; the last that ended said: {errors[-1]}" if errors else ""
        raise BrokerError(f"{len(names)} of {expected} workers on {host} answer{reasons}")
    for name in names:
        say(name)


def _host_of(worker_name: str) -> str:
    """Of `device-token@host-pid`."""
    return worker_name.partition("@")[2].rpartition("-")[0]


@cli.command()
def migrate() -> None:
    """Bring the database's tables to this version's shape."""
    db = Database(load_settings().resolved_database_url)
    db.migrate()
    say(f"{db.shown_url} is up to date")
    db.close()


@contextmanager
def _plain_errors() -> Iterator[None]:
    """What the user can mend is one clear message and exit code 1, not a traceback."""
    try:
        yield
    except (LayaBatchError, QuestionSetError, TransitionError) as error:
        show_error(str(error))
        sys.exit(1)


def _check_arguments(arguments: list[str]) -> None:
    """Raise InputError for an argument that is not UTF-8: no database keeps it, and no Parquet reader opens it."""
    for argument in arguments:
        if not is_utf8(argument):
            raise InputError(f"{printable(argument)}: is not UTF-8; write it in UTF-8, or rename the file")


def main() -> None:
    """The entry point of the command."""
    never_fail_to_encode()
    with _plain_errors():
        _check_arguments(sys.argv[1:])
        cli()
