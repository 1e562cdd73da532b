"""A job's progress and summary, drawn for a terminal. Reads nothing: it draws what it is given."""

import json
from collections.abc import Iterable, Iterator
from textwrap import shorten
from typing import Any

import pyarrow as pa
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from schemas.job import JobInfo, JobStatus

_COLOURS = {JobStatus.SUCCEEDED: "green", JobStatus.FAILED: "red", JobStatus.CANCELLED: "yellow"}
LEVEL_WIDTH = 40  # characters of a level's description in the table of answers
_STAGES = ("read", "tokenise", "forward", "decode", "write")


class _RowsPerSecond(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:,.0f} rows/s" if speed else "– rows/s", style="progress.data.speed")


def show_progress(states: Iterable[JobInfo]) -> JobInfo:
    """Draw a bar with rows, rows/s and the time left until `states` ends; returns the last state."""
    columns = (
        *(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("rows"), _RowsPerSecond()),
        *(TextColumn("ETA"), TimeRemainingColumn(), TextColumn("{task.fields[note]}")),
    )
    with Progress(*columns, console=Console(stderr=True), speed_estimate_period=30) as progress:
        task, previous = None, None
        for job in states:
            note = f"{job.row_errors:,} row errors" if job.row_errors else ""
            label = f"job {job.id} {job.status}"
            if task is None or (previous is not None and previous.started_at is None and job.started_at is not None):
                if task is not None:
                    progress.remove_task(task)  # time spent waiting for a worker is no part of the speed
                task = progress.add_task(label, total=job.rows, completed=job.rows_done, note=note)
            progress.update(task, description=label, completed=job.rows_done, note=note)
            previous = job
    if previous is None:
        raise ValueError("no state to show")
    return previous


def track_answers(batches: Iterable[pa.RecordBatch], total: int) -> Iterator[pa.RecordBatch]:
    """The batches, with a bar of the answers in those that were taken."""
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("answers, ETA"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)
        for batch in batches:
            yield batch
            progress.advance(task, batch.num_rows)


def draw_jobs(found: list[JobInfo]) -> Table:
    """A table of jobs, one a line."""
    table = Table(
        "id", "name", "status", "rows", "done", "row errors", "priority", Column("created, UTC", no_wrap=True)
    )
    for job in found:
        status = Text(job.status, style=_COLOURS.get(job.status, "cyan"))
        share = f"{100 * job.rows_done / job.rows:.0f}%"
        created = f"{job.created_at:%Y-%m-%d %H:%M}"
        errors = f"{job.row_errors:,}"
        table.add_row(str(job.id), job.name or "", status, f"{job.rows:,}", share, errors, str(job.priority), created)
    return table


def draw_workers(found: list[dict[str, Any]], silent_after_s: float) -> Table:
    """A table of workers, one start a line; one that is ready but silent for `silent_after_s` has died."""
    table = Table("name", "status", "seen", "device", "backend", "dtype", "warm-up", "note")
    for worker in found:
        seen_s = (worker["now"] - worker["heartbeat_at"]).total_seconds()
        status = worker["status"]
        if status in ("ready", "starting") and seen_s > silent_after_s:
            status = f"{status}, silent"
        asked = worker["backend_asked"]
        backend = worker["backend"] or asked
        warmup = "" if worker["warmup_s"] is None else f"{worker['warmup_s']:.1f} s"
        refused = f"{worker['refused_messages']} messages refused" if worker["refused_messages"] else ""
        note = "; ".join(part for part in (worker["error"], worker["fallback_reason"], refused) if part)
        columns = (
            worker["name"],
            status,
            f"{seen_s:,.0f} s ago",
            worker["device"],
            backend,
            worker["dtype"] or "",
            warmup,
        )
        table.add_row(*columns, note)
    return table


def draw_results(rows: list[dict[str, Any]]) -> Table:
    """Answers, a line each."""
    table = Table("row", "row id", "question", "answer", "confidence", "probabilities")
    for row in rows:
        answer = row["choice"] if row["type"] == "choice" else f"{row[row['type']]:.3f}"
        probabilities = ", ".join(f"{option} {p:.2f}" for option, p in json.loads(row["probabilities"]).items())
        ids = (str(row["row_number"]), row["row_id"] or "")
        table.add_row(*ids, row["question"], answer, f"{row['confidence']:.3f}", probabilities)
    return table


def draw_answers(counts: list[dict[str, Any]], job: JobInfo) -> Table:
    """Answers for each question, with counts and mean confidence."""
    table = Table(
        "question", "type", "answer", "count", "share", "mean confidence", title="Answers", title_justify="left"
    )
    for column in table.columns[3:]:
        column.justify = "right"
    totals: dict[str, int] = {}
    for row in counts:
        totals[row["question"]] = totals.get(row["question"], 0) + row["count"]
    previous = None
    for row in sorted(counts, key=_answer_order):
        repeated = row["question"] == previous
        if previous is not None and not repeated:
            table.add_section()
        question = ("", "") if repeated else (row["question"], row["type"])
        answer = row["answer"]
        if row["type"] == "score":
            level = job.spec.questions[row["question"]]["criteria"][int(answer)]
            answer = f"{answer} {shorten(str(level), LEVEL_WIDTH, placeholder='…')}"
        share = f"{100 * row['count'] / totals[row['question']]:.1f}%"
        table.add_row(*question, answer, f"{row['count']:,}", share, f"{row['mean_confidence']:.3f}")
        previous = row["question"]
    return table


def _answer_order(row: dict[str, Any]) -> tuple[str, int]:
    """A question's levels from the lowest up, its other answers from the most frequent down."""
    return row["question"], int(row["answer"]) if row["type"] == "score" else -row["count"]


def draw_row_errors(counts: list[dict[str, Any]]) -> Table:
    """Row errors by code, with an example of each."""
    table = Table("code", "count", "example", title="Row errors", title_justify="left")
    for row in counts:
        table.add_row(row["code"], f"{row['count']:,}", row["example"])
    return table


def draw_backends(measured: list[dict[str, Any]], job: JobInfo) -> Table:
    """What ran, and where the time went: one line for each backend, device and dtype."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    if job.started_at is not None and job.finished_at is not None:
        seconds = max((job.finished_at - job.started_at).total_seconds(), 1e-3)
        table.add_row("speed", f"{job.rows_done:,} rows in {seconds:,.1f} s: {job.rows_done / seconds:,.0f} rows/s")
    for row in measured:
        padding = 1 - row["tokens"] / row["padded_tokens"]
        stages_ms = {stage: row[f"{stage}_ms"] or 0.0 for stage in _STAGES}
        shares = ", ".join(f"{stage} {100 * ms / sum(stages_ms.values()):.1f}%" for stage, ms in stages_ms.items())
        table.add_row("backend", f"{row['backend']} on {row['device']} in {row['dtype']}")
        table.add_row("batches", f"{row['batches']:,}, {100 * padding:.1f}% of their tokens padding")
        table.add_row("time", shares)
    return table
