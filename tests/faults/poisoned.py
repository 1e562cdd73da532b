"""Texts that break what scores them: a word for each fault, and workers whose backend knows the words."""

import json
from pathlib import Path

import pytest
import sqlalchemy as sa
from tokenizers import Tokenizer

import jobs
from schemas.question import WHOLE_ROW
from schemas.tables import results, row_errors
from tests.faults.counting import count_rows
from tests.faults.report import FaultReport
from tests.integration.service import QUESTIONS, Service

FOLDER = Path(__file__).parent / "poison"
TIMEOUT_S = 240.0

# Characters that the tiny checkpoint's tokenizer knows only by their bytes.
WORDS = {
    "kill": "☠☠",
    "crash": "⚡⚡",
    "hang": "⏳⏳",
    "wait": "⏰⏰",
    "swell": "🐘🐘",
    "exhaust": "💥💥",
    "fail": "✖✖",
    "lose_device": "☢☢",
}


def make_faulty(
    monkeypatch: pytest.MonkeyPatch, folder: Path, checkpoint: Path, delay_s: float = 0.0, most: int | None = None
) -> None:
    """Give the workers that the test starts from now on a backend that breaks at these words, and with more sequences
    than `most`.
    """
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer" / "tokenizer.json"))
    marks = {deed: tokenizer.encode(word, add_special_tokens=False).ids for deed, word in WORDS.items()}
    asked = folder / "faulty-backend.json"
    asked.write_text(json.dumps({"marks": marks, "delay_s": delay_s, "most": most}), encoding="utf-8")
    monkeypatch.setenv("FAULT_BACKEND", str(asked))
    monkeypatch.setenv("PYTHONPATH", str(FOLDER))


def submit(service: Service, path: Path, **asked: object) -> jobs.JobInfo:
    return jobs.submit(
        path,
        questions=QUESTIONS,
        state="text",
        row_id="ticket",
        checkpoint=service.settings.checkpoint,
        settings=service.settings,
        **asked,  # type: ignore[arg-type]
    )


def finish(service: Service, job: jobs.JobInfo, timeout_s: float = TIMEOUT_S) -> jobs.JobInfo:
    """The job once it has ended, however it did."""
    try:
        jobs.wait(job.id, timeout_s=timeout_s, settings=service.settings)
    except jobs.JobFailedError:
        pass
    except TimeoutError:
        pytest.fail(service.log[-6000:])
    return jobs.get(job.id, settings=service.settings)


def check_rows(service: Service, job: jobs.JobInfo, failed: dict[int, str]) -> None:
    """Every row has all its answers, or, if it is among `failed` (row number to code), its error and nothing else."""
    answered = service.query(sa.select(results.c.row_number, results.c.question).where(results.c.job_id == job.id))
    good = [row for row in range(job.rows) if row not in failed]
    assert sorted(map(tuple, answered)) == sorted((row, question) for row in good for question in QUESTIONS)
    errors = service.query(sa.select(row_errors).where(row_errors.c.job_id == job.id))
    assert {row.row_number: row.code for row in errors} == failed, service.log[-6000:]
    for row in errors:
        assert row.row_id == f"t{row.row_number}"
    whole = [row.row_number for row in errors if row.question == WHOLE_ROW]
    pairs = len(whole) * len(QUESTIONS) + len(errors) - len(whole)
    assert pairs == len(failed) * len(QUESTIONS)
    assert (job.answers, job.row_errors, job.unanswered) == (len(answered), len(failed), pairs)


def record(report: FaultReport, fault: str, times: int, service: Service, job: jobs.JobInfo) -> None:
    """A line of the table. Rescored is what a text took down with it, and what was scored again in smaller parts."""
    count = count_rows(service, job)
    assert (count.lost, count.doubled) == (0, 0)
    report.record(
        fault,
        times=times,
        rows=job.rows,
        lost=count.lost,
        doubled=count.doubled,
        rescored=count.rescored,
        recover_s=None,
    )
