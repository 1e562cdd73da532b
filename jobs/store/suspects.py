"""Rows that may have killed the process that scored them: narrowed down with each death until one is left.

The first death with a shard in hand makes suspects of all its rows. A worker tries suspects a few at a time and notes
which before it begins: if it dies again, only these are suspects still. A row that killed `max_attempts` processes
alone is set aside. While no process dies, none of this costs a statement.
"""

import sqlalchemy as sa

from jobs.store.database import Database
from jobs.store.fence import end_attempt, get_held, hold, lock_job_of
from jobs.store.leases import RowError, save_row_errors
from jobs.store.lifecycle import NO_SUSPECTS, settle_job
from jobs.store.replay import replayed
from schemas.job import Claim, Lease
from schemas.message import QueuedShard
from schemas.tables import shards

# Times `max_attempts`, deaths without one answer in between: then it is not a row that kills. Isolating one takes six.
DEATHS_PER_ATTEMPT = 10


@replayed
def mark_suspects(db: Database, claim: Claim, lease_s: float, first_row: int, last_row: int) -> None:
    """Note the rows that are about to be tried, all others being free of suspicion. Raises LeaseLostError."""
    same = sa.and_(shards.c.suspect_first_row == first_row, shards.c.suspect_last_row == last_row)
    with db.write() as connection:
        hold(
            connection,
            claim,
            lease_s,
            suspect_first_row=first_row,
            suspect_last_row=last_row,
            suspect_attempt=claim.attempt,
            suspect_deaths=sa.case((same, shards.c.suspect_deaths), else_=0),
        )


@replayed
def clear_suspects(db: Database, claim: Claim, lease_s: float) -> None:
    """All suspects were tried, and the process lives. Raises LeaseLostError."""
    with db.write() as connection:
        hold(connection, claim, lease_s, **NO_SUSPECTS)


def set_aside(db: Database, claim: Claim, lease_s: float, errors: list[RowError]) -> bool:
    """Save the errors of the one row that is left, which ends the search. Returns as `save_row_errors` does."""
    return save_row_errors(db, claim, lease_s, errors, **NO_SUSPECTS)


def record_death(db: Database, claim: Claim, reason: str, max_attempts: int) -> list[QueuedShard]:
    """What a process that must end says of itself. Returns what is queued again, whose messages must be sent."""
    with db.write() as connection:
        lock_job_of(connection, claim)
        queued = count_death(connection, claim.lease, reason, max_attempts)
        settle_job(connection, claim.job_id)
    return [QueuedShard(claim.job_id, claim.shard_id, claim.priority)] if queued else []


def count_death(connection: sa.Connection, lease: Lease, reason: str, max_attempts: int) -> bool:
    """End the attempt of a process that died. Returns True when the shard is queued again.

    A death while suspects were tried narrows them. One before the first was tried is a failure like any other.
    """
    shard = get_held(connection, lease)
    values = {"deaths": shard.deaths + 1, "failures": shard.failures}
    if shard.suspect_first_row is None:
        first, last = shard.first_row_number, shard.first_row_number + shard.rows - 1
        values |= {"suspect_first_row": first, "suspect_last_row": last}
    elif shard.suspect_attempt == lease.attempt:
        values["suspect_deaths"] = shard.suspect_deaths + 1
    else:
        values["failures"] += 1
    exhausted = values["failures"] >= max_attempts or values["deaths"] >= DEATHS_PER_ATTEMPT * max_attempts
    return end_attempt(connection, lease, reason, exhausted, **values)
