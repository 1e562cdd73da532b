"""Counting rows after a fault: what was lost, what doubled, and what was scored more than once.

The database says what was saved. What was scored is in the workers' log: at level DEBUG they write a line before each
forward pass, which a process that is killed later cannot take back.
"""

import re
from collections import Counter
from dataclasses import dataclass

import sqlalchemy as sa

import jobs
from schemas.question import WHOLE_ROW
from schemas.tables import batches, results, row_errors
from tests.integration.service import Service
from worker.pipeline import WRITES_AHEAD

# One in the forward pass, one in the writer's hands, and those that wait for it.
BATCHES_IN_FLIGHT = 2 + WRITES_AHEAD

_FORWARD = re.compile(r"job (\d+) shard (\d+) attempt (\d+): scoring (\d+) sequences")


@dataclass(frozen=True)
class RowCount:
    """What became of one job's rows."""

    rows: int
    lost: int  # rows with a question that has neither answer nor error
    doubled: int  # pairs with two answers, or counted twice in the batches
    rescored: int  # sequences whose forward pass left no answer: scored in vain, and so scored again
    batches_in_vain: int  # the most that one attempt at a shard scored in vain
    endings: int  # how often a worker saw the job end


def count_rows(service: Service, job: jobs.JobInfo) -> RowCount:
    """Count the rows of a job that has ended, from its answers, its row errors, its batches and the log."""
    answered = Counter(
        (row.row_number, row.question)
        for row in service.query(sa.select(results.c.row_number, results.c.question).where(results.c.job_id == job.id))
    )
    failed = {
        (row.row_number, row.question)
        for row in service.query(
            sa.select(row_errors.c.row_number, row_errors.c.question).where(row_errors.c.job_id == job.id)
        )
    }
    lost = sum(
        any(
            (row, question) not in answered and not {(row, question), (row, WHOLE_ROW)} & failed
            for question in job.spec.questions
        )
        for row in range(job.rows)
    )
    saved = service.query(
        sa.select(batches.c.shard_id, batches.c.attempt, batches.c.sequences).where(batches.c.job_id == job.id)
    )
    kept = sum(row.sequences for row in saved)
    doubled = sum(count - 1 for count in answered.values()) + abs(kept - answered.total())
    doubled += sum((row, question) in answered for row, question in failed)
    log = service.log
    scored = [tuple(map(int, found)) for found in _FORWARD.findall(log) if int(found[0]) == job.id]
    begun = Counter((shard, attempt) for _, shard, attempt, _ in scored)
    begun.subtract((row.shard_id, row.attempt) for row in saved)
    return RowCount(
        rows=job.rows,
        lost=lost,
        doubled=doubled,
        rescored=sum(sequences for *_, sequences in scored) - kept,
        batches_in_vain=max(begun.values(), default=0),
        endings=len(re.findall(rf"job {job.id} shard \d+ attempt \d+: done; the job", log)),
    )
