"""Before the rest of its shard: the rows that may have killed a process, a few at a time, each few noted first."""

import logging
from collections.abc import Iterator
from dataclasses import replace

from jobs.store import leases, suspects
from jobs.store.leases import RowError
from schemas.job import Claim, Suspects
from schemas.question import WHOLE_ROW
from worker.reader import read_row_id
from worker.session import Session

log = logging.getLogger(__name__)

# Each further death costs the start of a process, and each further group no more than a small batch: so from all rows
# to 64, to 8, to 1.
MOST_ROWS = 64
NARROWING = 8


def suspect_groups(session: Session, claim: Claim) -> Iterator[Claim]:
    """The claim narrowed to some suspects, and then to the next; each is to be scored and saved before the next.

    A row that has killed enough processes by itself is set aside instead.
    """
    found = claim.suspects
    if found is None:
        return
    lease_s = session.settings.lease_s
    rows = _unsaved_rows(session, claim, found)
    if rows and found.rows == 1 and found.deaths >= session.settings.max_attempts:
        suspects.set_aside(session.db, claim, lease_s, _errors_of(session, claim, found))
        return
    step = max(1, min(MOST_ROWS, len(rows) // NARROWING))
    for start in range(0, len(rows), step):
        first, last = rows[start], rows[min(start + step, len(rows)) - 1]
        suspects.mark_suspects(session.db, claim, lease_s, first, last)
        yield replace(claim, plan=claim.plan.part(first, last - first + 1))
    suspects.clear_suspects(session.db, claim, lease_s)


def _unsaved_rows(session: Session, claim: Claim, found: Suspects) -> list[int]:
    """The suspects that lack an answer to some question."""
    saved = leases.saved_pairs(session.db, replace(claim, plan=claim.plan.part(found.first_row, found.rows)))
    return [
        row
        for row in range(found.first_row, found.last_row + 1)
        if (row, WHOLE_ROW) not in saved and any((row, question) not in saved for question in claim.spec.questions)
    ]


def _errors_of(session: Session, claim: Claim, found: Suspects) -> list[RowError]:
    """The errors of the one row that is left, for each question that it has no answer to."""
    alone = replace(claim, plan=claim.plan.part(found.first_row, 1))
    saved = leases.saved_pairs(session.db, alone)
    unanswered = [question for question in claim.spec.questions if (found.first_row, question) not in saved]
    questions = [WHOLE_ROW] if len(unanswered) == len(claim.spec.questions) else unanswered
    message = f"{found.deaths} processes died of scoring this row alone, the last: {found.reason}"
    log.error("job %d row %d is set aside: %s", claim.job_id, found.first_row, message)
    with session.within("prepare"):
        row_id = read_row_id(alone, session.settings.input_roots)
    return [RowError(found.first_row, question, row_id, "killed_worker", message) for question in questions]
