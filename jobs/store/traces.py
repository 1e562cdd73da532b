"""What a transaction leaves behind, to be found when the reply to its COMMIT was lost and its replay meets its rows."""

import sqlalchemy as sa

from jobs.store.database import Database
from schemas.job import Claim
from schemas.tables import batches, results, row_errors

Pairs = set[tuple[int, str]]  # (row number, question)


def is_batch_saved(db: Database, claim: Claim, pairs: Pairs) -> bool:
    """Whether this attempt has saved the answers of exactly these pairs as one batch."""
    row_number, question = min(pairs)
    batch = (
        sa.select(results.c.batch_id)
        .join(batches)
        .where(
            results.c.job_id == claim.job_id,
            results.c.row_number == row_number,
            results.c.question == question,
            batches.c.shard_id == claim.shard_id,
            batches.c.attempt == claim.attempt,
        )
    )
    saved = sa.select(results.c.row_number, results.c.question).where(results.c.batch_id == batch.scalar_subquery())
    return _pairs(db, saved) == pairs


def are_errors_saved(db: Database, claim: Claim, pairs: Pairs) -> bool:
    """Whether all of these have their row error: an attempt saves only what none before it did, so this one did it."""
    rows = [row_number for row_number, _ in pairs]
    saved = sa.select(row_errors.c.row_number, row_errors.c.question).where(
        row_errors.c.job_id == claim.job_id, row_errors.c.row_number.between(min(rows), max(rows))
    )
    return _pairs(db, saved) >= pairs


def _pairs(db: Database, selected: sa.Select[tuple[int, str]]) -> Pairs:
    with db.read() as connection:
        return {(row.row_number, row.question) for row in connection.execute(selected)}
