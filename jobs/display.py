"""Tables of jobs, workers, answers and errors, for a terminal of 80 columns or more.

Reads nothing: it draws what it is given. Names, ids, labels and errors wrap; states, times and numbers never do.
"""

import json
from datetime import UTC, datetime
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from schemas.job import JobInfo, JobStatus
from schemas.question import QuestionSet
from schemas.question_text import json_line

_COLOURS = {JobStatus.SUCCEEDED: "green", JobStatus.FAILED: "red", JobStatus.CANCELLED: "yellow"}
ANSWER_WIDTH = 40  # characters of an answer: a score's level may be described in a paragraph
OPTION_WIDTH = 20  # of one of the likeliest options beside it
OPTIONS_SHOWN = 3  # of an answer's probabilities, the highest
_STAGES = ("read", "tokenise", "forward", "decode", "write")


def _table(columns: dict[str, str], title: str | None = None) -> Table:
    """A table whose columns are each 'text' (wraps, cut nowhere), 'fixed' (never wraps) or 'number' (fixed, right)."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title=title, title_justify="left")
    for name, kind in columns.items():
        justify, no_wrap = "right" if kind == "number" else "left", kind != "text"
        table.add_column(name, justify=justify, no_wrap=no_wrap, overflow="fold")  # type: ignore[arg-type]
    return table


def format_time(moment: datetime) -> str:
    """A moment in UTC, to the minute."""
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M}"


def draw_jobs(found: list[JobInfo]) -> Table:
    """A table of jobs, one a line."""
    ranked = any(job.priority for job in found)
    columns = {"id": "number", "name": "text", "status": "fixed", "rows": "number", "done": "number"}
    columns |= {"errors": "number"} | ({"priority": "number"} if ranked else {}) | {"created, UTC": "fixed"}
    table = _table(columns)
    for job in found:
        status = Text(job.status, style=_COLOURS.get(job.status, "cyan"))
        share = f"{100 * job.rows_done / job.rows:.0f}%" if job.rows else "–"
        priority = [str(job.priority)] if ranked else []
        counts = (f"{job.rows:,}", share, f"{job.row_errors:,}", *priority)
        table.add_row(str(job.id), job.name or "", status, *counts, format_time(job.created_at))
    return table


def draw_fields(fields: dict[str, Any]) -> Table:
    """A job's fields, one a line."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for field, value in fields.items():
        table.add_row(field.replace("_", " "), "" if value is None else str(value))
    return table


def draw_workers(found: list[dict[str, Any]], silent_after_s: float, boot_timeout_s: float) -> Table:
    """A table of workers, one start a line; one that is silent for longer than its state allows has died."""
    allowed_s = {"ready": silent_after_s, "starting": boot_timeout_s}
    table = _table({"name": "text", "status": "fixed", "seen": "fixed", "runs": "text", "note": "text"})
    for worker in found:
        seen_s = (worker["now"] - worker["heartbeat_at"]).total_seconds()
        status = worker["status"]
        if seen_s > allowed_s.get(status, seen_s):
            status = f"{status}, silent"
        runs = f"{worker['backend'] or worker['backend_asked']} on {worker['device']}"
        runs += f" in {worker['dtype']}" if worker["dtype"] else ""
        runs += f", warm in {worker['warmup_s']:.1f} s" if worker["warmup_s"] is not None else ""
        refused = f"{worker['refused_messages']} messages refused" if worker["refused_messages"] else ""
        note = "; ".join(part for part in (worker["error"], worker["fallback_reason"], refused) if part)
        table.add_row(worker["name"], status, f"{format_span(seen_s)} ago", runs, note)
    return table


def format_span(seconds: float) -> str:
    """Some time in the unit that suits it."""
    for unit, length_s in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def draw_results(rows: list[dict[str, Any]], questions: QuestionSet) -> Table:
    """Answers, a line each, with the probability of the answer and the likeliest options."""
    columns = {"row": "number", "row id": "text", "question": "text", "answer": "text"}
    table = _table({**columns, "probability": "number", "confidence": "number", "likeliest options": "text"})
    for row in rows:
        probabilities = json.loads(row["probabilities"])
        levels = questions[row["question"]]["criteria"] if row["type"] == "score" else []
        named = zip(map(json_line, levels or probabilities), probabilities.values(), strict=True)
        highest = sorted(named, key=lambda pair: -pair[1])[:OPTIONS_SHOWN] if row["type"] != "noul" else []
        options = ", ".join(f"{_short(option, OPTION_WIDTH)} {p:.2f}" for option, p in highest)
        ids = (str(row["row_number"]), row["row_id"] or "")
        sure = (f"{_answer_probability(row, probabilities):.3f}", f"{row['confidence']:.3f}")
        table.add_row(*ids, row["question"], _short(row["answer"], ANSWER_WIDTH), *sure, options)
    return table


def _answer_probability(row: dict[str, Any], probabilities: dict[str, float]) -> float:
    """Of the option that `answer` names: of a score, the nearest level, which need not be the likeliest."""
    if row["type"] == "choice":
        return probabilities[row["choice"]]
    if row["type"] == "noul":
        return float(max(row["noul"], 1 - row["noul"]))
    return list(probabilities.values())[int(row["score"] + 0.5)]  # the levels from the lowest up


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def draw_answers(counts: list[dict[str, Any]]) -> Table:
    """Answers for each question, with counts and mean confidence."""
    columns = {"question": "text", "type": "fixed", "answer": "text"}
    table = _table({**columns, "count": "number", "share": "number", "mean confidence": "number"}, "Answers")
    totals: dict[str, int] = {}
    for row in counts:
        totals[row["question"]] = totals.get(row["question"], 0) + row["count"]
    previous = None
    for row in sorted(counts, key=_answer_order):
        repeated = row["question"] == previous
        if previous is not None and not repeated:
            table.add_section()
        question = ("", "") if repeated else (row["question"], row["type"])
        share = f"{100 * row['count'] / totals[row['question']]:.1f}%"
        table.add_row(
            *question, _short(row["answer"], ANSWER_WIDTH), f"{row['count']:,}", share, f"{row['mean_confidence']:.3f}"
        )
        previous = row["question"]
    return table


def _answer_order(row: dict[str, Any]) -> tuple[str, int]:
    """A score's levels from the lowest up, other answers from the most frequent down."""
    return row["question"], -row["count"] if row["level"] is None else row["level"]


def draw_error_counts(counts: list[dict[str, Any]]) -> Table:
    """Row errors by code, with an example of each."""
    table = _table({"code": "fixed", "count": "number", "example": "text"}, "Row errors")
    for row in counts:
        table.add_row(row["code"], f"{row['count']:,}", row["example"])
    return table


def describe_ids(job: JobInfo) -> list[str]:
    """What is amiss with the ids of a job's rows, in words."""
    said = ((job.null_ids, "have no"), (job.repeated_ids, "share with another row their"))
    return [f"{count:,} of {job.rows:,} rows {have} {job.spec.row_id!r}" for count, have in said if count]


def draw_row_errors(rows: list[dict[str, Any]]) -> Table:
    """Row errors, a line each."""
    table = _table({"row": "number", "row id": "text", "question": "text", "code": "fixed", "message": "text"})
    for row in rows:
        table.add_row(str(row["row_number"]), row["row_id"] or "", row["question"], row["code"], row["message"])
    return table


def draw_measures(measured: list[dict[str, Any]], job: JobInfo, scoring_s: float, cut: tuple[int, int]) -> Table:
    """How fast the job was, what ran, where the time went. `cut`: rows and answers that saw only a part of a text."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    if scoring_s > 0:
        speed = job.rows_done / scoring_s
        table.add_row("speed", f"{job.rows_done:,} rows in {scoring_s:,.1f} s of scoring: {speed:,.0f} rows/s")
    for row in measured:
        padding = 1 - row["tokens"] / row["padded_tokens"]
        stages_ms = {stage: row[f"{stage}_ms"] or 0.0 for stage in _STAGES}
        shares = ", ".join(f"{stage} {100 * ms / sum(stages_ms.values()):.1f}%" for stage, ms in stages_ms.items())
        table.add_row("backend", f"{row['backend']} on {row['device']} in {row['dtype']}")
        table.add_row("batches", f"{row['batches']:,}, {100 * padding:.1f}% of their tokens padding")
        table.add_row("time", shares)
    rows, answers = cut
    if rows:
        shares = (
            f"{rows:,} rows ({100 * rows / job.rows:.1f}%), {answers:,} answers ({100 * answers / job.answers:.1f}%)"
        )
        table.add_row(
            "cut texts",
            f"{shares} saw only a part of a text that is longer than what is read; their state_tokens_dropped says how "
            "much is missing. Raise --max-len if the checkpoint reads more, or shorten or split these texts",
        )
    return table
