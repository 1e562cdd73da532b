"""The demo: a real job over rows the checkpoint never saw, then its answers beside their labels.

    python examples/demo/run_demo.py

Runs the installed `laya-batch run` on held_out.parquet with its data under .cache/demo, then reads the SQLite database
that the job left. It imports neither the engine nor PyTorch: everything shown comes out of the results table.
"""

import argparse
import json
import os
import sqlite3
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from textwrap import shorten
from typing import Any

import pyarrow.parquet as pq
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from scoring import LABEL_OF, Answer, read_answer, summarise

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
DATABASE = "laya-batch.db"
LATEST_JOB = "SELECT max(id) FROM jobs"
RESULTS = (
    "SELECT row_id, question, type, choice, score, noul, answer_confidence, probabilities FROM results WHERE job_id = ?"
)
SAMPLE_QUERY = "SELECT row_id, noul, confidence FROM results WHERE question = 'spam' ORDER BY noul DESC LIMIT 10;"
# Chosen by hand: the messages are real, and some of the others are abusive.
SAMPLE_IDS = (
    "sms-05470",
    "sms-04799",
    "sms-02499",
    "movie-9351",
    "movie-8595",
    "amazon-302_2",
    "chat-02051",
    "chat-02774",
)
TEXT_WIDTH = 80  # characters of a text in the sample
LEVEL_NAMES = ("very negative", "negative", "neutral", "positive", "very positive")
Found = dict[str, dict[str, Answer]]  # row id -> question -> answer


def run_job(data_dir: Path) -> None:
    """`laya-batch run` on the held-out rows; its output goes straight to the terminal."""
    command = [
        str(Path(sys.executable).with_name("laya-batch")),
        "run",
        str(HERE / "held_out.parquet"),
        *("--questions", str(HERE / "questions.yaml")),
        *("--state", "text", "--row-id", "id"),
        *("--checkpoint", str(HERE / "checkpoint")),
        *("--name", "demo", "--data-dir", str(data_dir)),
    ]
    if not Path(command[0]).exists():
        sys.exit(f"{command[0]} is missing: install the repository first (pip install -e .), or run `make demo`.")
    # The embedded defaults, whatever database or broker this shell is set up for.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LAYA_BATCH_")}
    code = subprocess.run(command, check=False, env=environment).returncode
    if code:
        sys.exit(f"laya-batch run ended with exit code {code}.")


def read_results(database: Path) -> tuple[int, Found]:
    """The latest job's id and answers."""
    if not database.exists():
        sys.exit(f"{database} is missing: the job left no database there.")
    connection = sqlite3.connect(f"{database.resolve().as_uri()}?mode=ro", uri=True)
    try:
        connection.row_factory = sqlite3.Row
        job = connection.execute(LATEST_JOB).fetchone()[0]
        found: Found = defaultdict(dict)
        for stored in connection.execute(RESULTS, (job,)):
            answer = {**stored, "probabilities": json.loads(stored["probabilities"])}
            found[stored["row_id"]][stored["question"]] = read_answer(answer)
    finally:
        connection.close()
    if not found:
        sys.exit(f"Job {job} in {database} has no results.")
    return job, found


def accuracy_table(rows: list[dict[str, Any]], found: Found) -> Table:
    """One line per question: only the rows that carry its label count."""
    table = Table(title="Answers against the labels of rows the training never saw")
    for heading in ("question", "rows", "accuracy", "majority class", "mean P(answer)"):
        table.add_column(heading, justify="left" if heading == "question" else "right")
    for question, column in LABEL_OF.items():
        labelled = [row for row in rows if row[column] is not None and question in found.get(row["id"], {})]
        if not labelled:
            continue
        summary = summarise((row[column], found[row["id"]][question]) for row in labelled)
        accuracy, majority = f"[bold]{summary.accuracy:.1%}[/bold]", f"{summary.majority:.1%}"
        table.add_row(question, f"{summary.rows:,}", accuracy, majority, f"{summary.mean_probability:.1%}")
        if summary.within_one is not None:
            table.caption = (
                f"{question}: {summary.within_one:.1%} at most one level off, "
                f"the expected level {summary.mean_error_levels:.2f} levels off on average"
            )
    return table


def show_value(question: str, value: Any) -> str:
    if question == "spam":
        return "spam" if value else "not spam"
    return LEVEL_NAMES[value] if question == "sentiment" else str(value)


def show_cell(question: str, answer: Answer | None, label: Any) -> str:
    """The answer and its probability; where the row has a label, whether they agree and the label if not."""
    if answer is None:
        return "-"
    shown = f"{show_value(question, answer.value)} {answer.probability:.2f}"
    if label is None:
        return f"[dim]{shown}[/dim]"
    if answer.value == label:
        return f"[green]✓ {shown}[/green]"
    return f"[red]✗ {shown}[/red]\n  is {show_value(question, label)}"


def sample_table(rows: list[dict[str, Any]], found: Found) -> Table:
    """A few rows with all their answers; ✓ or ✗ stands at the question that the row is labelled for."""
    table = Table(title="A few rows: answer and P(answer); ✓ ✗ where the row has a label", show_lines=True)
    table.add_column("text", ratio=1)
    for question in LABEL_OF:
        table.add_column(question, no_wrap=True)
    by_id = {row["id"]: row for row in rows}
    for row_id in SAMPLE_IDS:
        if row_id in by_id and row_id in found:
            row, answers = by_id[row_id], found[row_id]
            text = escape(shorten(" ".join(row["text"].split()), TEXT_WIDTH, placeholder=" …"))
            cells = (show_cell(question, answers.get(question), row[column]) for question, column in LABEL_OF.items())
            table.add_row(text, *cells)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=ROOT / ".cache" / "demo")
    parser.add_argument("--report-only", action="store_true", help="show the latest job's answers without a new job")
    options = parser.parse_args()
    if not options.report_only:
        run_job(options.data_dir)
    database = options.data_dir / DATABASE
    job, found = read_results(database)
    rows = pq.read_table(HERE / "held_out.parquet").to_pylist()
    console = Console(emoji=False)
    console.print(accuracy_table(rows, found))
    console.print(sample_table(rows, found))
    console.print(f"Job {job} is in {database}", soft_wrap=True, highlight=False)
    console.print(f'Try: sqlite3 "{database}" "{SAMPLE_QUERY}"', soft_wrap=True, highlight=False)


if __name__ == "__main__":
    main()
