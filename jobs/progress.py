"""A job's progress while it is waited for: a bar on a terminal, a line about once a minute anywhere else.

Reads nothing: it shows the states that it is given, on standard error.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta

import pyarrow as pa
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from jobs.display import format_span, format_time
from jobs.store.workers import WorkersSeen
from jobs.terminal import LiteralConsole, warn
from schemas.job import JobInfo

LINE_EVERY_S = 60.0
SPEED_OVER_S = 30.0
NO_WORKER_EVERY_S = 300.0  # how often it is said again
CHECK_WORKERS_EVERY_S = 10.0


class _Figures(ProgressColumn):
    """Rows, rows/s and the time left, which are never cut: the bar gives way."""

    def render(self, task: Task) -> Text:
        rows = f"{task.completed:,.0f}/{task.total or 0:,.0f} rows"
        return Text(f"{rows}  {_speed_of(task)}  ETA {_time_left(task)}", style="progress.data.speed", no_wrap=True)


def _speed_of(task: Task) -> str:
    speed = task.finished_speed or task.speed
    return f"{speed:,.0f} rows/s" if speed else "– rows/s"


def _time_left(task: Task) -> str:
    left = task.time_remaining
    return "–" if left is None else str(timedelta(seconds=int(left)))


def show_progress(states: Iterable[JobInfo], line_every_s: float = LINE_EVERY_S) -> JobInfo:
    """Draw rows, rows/s, row errors and the time left until `states` ends; returns the last state.

    Without a terminal: a line at each change of state, and one every `line_every_s` seconds.
    """
    console = LiteralConsole(stderr=True)
    live = console.is_jupyter or (sys.stderr.isatty() and not console.is_dumb_terminal)
    columns = (
        *(TextColumn("{task.description}", markup=False), BarColumn(bar_width=None), _Figures(Column(no_wrap=True))),
        TextColumn("{task.fields[note]}", markup=False),
    )
    # Speed is measured from the rows that are seen to be added: no pause is in it, nor what an earlier run scored.
    progress = Progress(*columns, console=console, speed_estimate_period=SPEED_OVER_S, expand=True)
    if live:
        with progress:
            return _follow(states, progress)
    return _follow(states, progress, _Lines(line_every_s))


def _follow(states: Iterable[JobInfo], progress: Progress, tell: "_Lines | None" = None) -> JobInfo:
    task_id, last = None, None
    for job in states:
        last, label = job, f"job {job.id} {job.status}"
        note = f"{job.row_errors:,} errors" if job.row_errors else ""
        if task_id is None:
            task_id = progress.add_task(label, total=job.rows, completed=job.rows_done, note=note)
        progress.update(task_id, description=label, completed=job.rows_done, note=note)
        if tell is not None:
            tell.tell(job, progress.tasks[0])
    if last is None:
        raise ValueError("no state to show")
    return last


class _Lines:
    """Progress as lines of a log."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._told_at = 0.0
        self._status: str | None = None

    def tell(self, job: JobInfo, task: Task) -> None:
        """Print a line, if there is a reason to."""
        now = time.monotonic()
        if job.status == self._status and now - self._told_at < self._every_s:
            return
        self._told_at, self._status = now, job.status
        parts = [
            f"job {job.id} {job.status}: {job.rows_done:,} of {job.rows:,} rows",
            *([_speed_of(task)] if task.speed else []),
            *([f"ETA {_time_left(task)}"] if task.speed and not job.is_finished else []),
            f"{job.row_errors:,} row errors",
        ]
        warn(", ".join(parts))


def mention_errors(states: Iterable[JobInfo], say: Callable[[str], None]) -> Iterator[JobInfo]:
    """The same states; says why a shard is being tried again, once for each reason."""
    said: str | None = None
    for job in states:
        if job.last_error is not None and job.last_error != said and not job.is_finished:
            said = job.last_error
            say(f"job {job.id}: a shard is tried again: {said}")
        yield job


def mention_workers(
    states: Iterable[JobInfo], last_seen: Callable[[], WorkersSeen], tell: Callable[[str], None], remedy: str
) -> Iterator[JobInfo]:
    """Pass the states through; tell when no worker is alive, at once and every few minutes, and when one is back."""
    checked_at = told_at = None
    for job in states:
        now = time.monotonic()
        if not job.is_finished and (checked_at is None or now - checked_at >= CHECK_WORKERS_EVERY_S):
            checked_at, seen = now, last_seen()
            if seen.alive and told_at is not None:
                tell(f"job {job.id}: a worker is alive again")
                told_at = None
            elif not seen.alive and (told_at is None or now - told_at >= NO_WORKER_EVERY_S):
                tell(f"job {job.id} waits: {_no_worker(seen)}; {remedy}")
                told_at = now
        yield job


def _no_worker(seen: WorkersSeen) -> str:
    if seen.last_at is None:
        return "no worker has ever started on this database"
    silent_s = (seen.now - seen.last_at).total_seconds()
    return f"no worker is alive since {format_time(seen.last_at)} UTC ({format_span(silent_s)} ago)"


def track_answers(batches: Iterable[pa.RecordBatch], total: int) -> Iterator[pa.RecordBatch]:
    """The batches, with a bar of the answers in those that were taken, on a terminal."""
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("answers, ETA", markup=False), TimeRemainingColumn())
    console = LiteralConsole(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("", total=total)
        for batch in batches:
            yield batch
            progress.advance(task, batch.num_rows)
