"""The main path: one claimed shard from rows to saved answers.

    read rows ─► tokenise ─► pack into batches ─► forward ─► decode ─► save

Windows of rows are prepared ahead in one thread and batches saved behind in another, so that the device waits for
neither. Everything goes out through the claim's fence: a worker that lost its lease saves nothing.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import laya
from jobs.errors import InputError
from jobs.store import leases
from jobs.store.leases import RowError
from schemas.job import Claim
from schemas.question import WHOLE_ROW
from worker.answers import result_rows
from worker.pipeline import WriteBehind, read_ahead, write_behind
from worker.reader import Window, read_windows
from worker.session import CheckpointChangedError, Session, describe_batch
from worker.timing import Stopwatch

log = logging.getLogger(__name__)

PERMANENT = (InputError, CheckpointChangedError, laya.QuestionError)  # what another attempt would meet again


class JobStoppedError(Exception):
    """The shard's job was cancelled or has failed."""


class DrainingError(Exception):
    """This worker is to stop at the next batch and give its shard back."""


@dataclass(frozen=True)
class PreparedWindow:
    """Rows ready to be scored, with the milliseconds that reading and tokenising them took."""

    window: Window
    errors: list[RowError]
    encoded: laya.EncodedSequences
    batches: list[laya.Batch]
    stage_ms: dict[str, float]


def run_shard(session: Session, claim: Claim) -> None:
    """Score and save every row of the shard that has neither answer nor error yet.

    Raises:
        JobStoppedError, DrainingError: to be stopped, or given back; what was saved stays.
        LeaseLostError: another worker has the shard.
        InputError, laya.LayaError, DatabaseError: the attempt failed.
    """
    agent = session.agent_of(claim)
    prepared = agent.prepare(claim.spec.questions)
    with write_behind() as writes:
        for window in read_ahead(prepare_windows(session, claim, agent, prepared)):
            if window.errors:
                writes.put(partial(_save_errors, session, claim, window.errors))
            for batch in window.batches:
                if session.draining.is_set():
                    raise DrainingError
                _score_batch(session, claim, agent, (prepared, window, batch), writes)


def prepare_windows(
    session: Session, claim: Claim, agent: laya.Agent, prepared: laya.PreparedQuestions
) -> Iterator[PreparedWindow]:
    """Read, tokenise and pack the shard's rows window by window, leaving out what earlier attempts saved."""
    settings = session.settings
    saved = leases.saved_pairs(session.db, claim)
    windows = read_windows(claim, settings.input_roots, settings.rows_per_window)
    while True:
        watch = Stopwatch()
        with watch.time("read"):
            window = next(windows, None)
        if window is None:
            return
        with watch.time("tokenise"):
            wanted = _unsaved(window, prepared, saved)
            encoded = agent.encode(window.states, prepared, wanted)
            batches = agent.pack(encoded, session.limits_of(agent))
        errors = _new_errors(window, prepared, encoded, saved)
        yield PreparedWindow(window, errors, encoded, batches, watch.ms)


def _score_batch(
    session: Session,
    claim: Claim,
    agent: laya.Agent,
    work: tuple[laya.PreparedQuestions, PreparedWindow, laya.Batch],
    writes: WriteBehind,
) -> None:
    prepared, window, batch = work
    log.debug("%s: scoring %d sequences", claim, len(batch))
    watch = Stopwatch()
    with watch.time("forward"):
        logits = agent.forward(window.encoded, batch)
    with watch.time("decode"):
        answers = agent.decode(prepared, window.encoded, batch, logits)
    share = len(batch) / len(window.encoded)
    stage_ms = {**{stage: ms * share for stage, ms in window.stage_ms.items()}, **watch.ms}
    record = describe_batch(session, agent, batch, stage_ms)

    def save() -> None:
        rows = result_rows(prepared, window.window, answers)
        if leases.save_batch(session.db, claim, session.settings.lease_s, record, rows):
            raise JobStoppedError

    writes.put(save)


def _save_errors(session: Session, claim: Claim, errors: list[RowError]) -> None:
    if leases.save_row_errors(session.db, claim, session.settings.lease_s, errors):
        raise JobStoppedError


def _unsaved(window: Window, prepared: laya.PreparedQuestions, saved: set[tuple[int, str]]) -> Any:
    """Boolean (states, questions): the pairs to score."""
    wanted = np.ones((len(window.states), len(prepared.questions)), dtype=bool)
    if saved:
        for state, row_number in enumerate(window.row_numbers):
            whole_row_failed = (row_number, WHOLE_ROW) in saved
            for question, asked in enumerate(prepared.questions):
                wanted[state, question] = not whole_row_failed and (row_number, asked.id) not in saved
    return wanted


def _new_errors(
    window: Window, prepared: laya.PreparedQuestions, encoded: laya.EncodedSequences, saved: set[tuple[int, str]]
) -> list[RowError]:
    """Errors of this window that no earlier attempt saved: no state, no text, or a question that does not fit."""
    rows = list(zip(window.row_numbers, window.row_ids, strict=True))
    errors = list(window.errors)
    errors += [
        RowError(rows[state][0], WHOLE_ROW, rows[state][1], "no_text", why) for state, why in encoded.unfit.items()
    ]
    for question, why in prepared.unfit.items():
        errors += [
            RowError(row_number, question, row_id, "question_does_not_fit", why)
            for state, (row_number, row_id) in enumerate(rows)
            if state not in encoded.unfit
        ]
    return [error for error in errors if (error.row_number, error.question) not in saved]
