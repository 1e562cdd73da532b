"""The main path: one claimed shard from rows to saved answers.

    read rows ─► tokenise ─► pack into batches ─► forward ─► decode ─► save

Windows of rows are prepared ahead in one thread and batches saved behind in another, so that the device waits for
neither. Everything goes out through the claim's fence: a worker that lost its lease saves nothing.
"""

import logging
from collections.abc import Callable, Iterator
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
from worker.halving import ForwardPass, Unscored, score_in_halves
from worker.pipeline import WriteBehind, read_ahead, write_behind
from worker.reader import Window, read_windows
from worker.routing import Part, Scorer, divide_window, load_scorers
from worker.session import CheckpointChangedError, Session, describe_batch
from worker.suspects import suspect_groups
from worker.timing import Stopwatch

log = logging.getLogger(__name__)

PERMANENT = (
    InputError,
    CheckpointChangedError,
    laya.QuestionError,
    laya.BackendError,
)  # what another attempt would meet again


class JobStoppedError(Exception):
    """The shard's job was cancelled or has failed."""


class DrainingError(Exception):
    """This worker is to stop at the next batch and give its shard back."""


@dataclass(frozen=True)
class PreparedWindow:
    """Rows ready to be scored by one agent, with the milliseconds that reading and tokenising them took."""

    part: Part
    errors: list[RowError]
    encoded: laya.EncodedSequences
    batches: list[laya.Batch]
    stage_ms: dict[str, float]


def run_shard(session: Session, claim: Claim) -> None:
    """Score and save every row of the shard that has neither answer nor error yet.

    Raises:
        JobStoppedError, DrainingError: to be stopped, or given back; what was saved stays.
        LeaseLostError: another worker has the shard.
        DeviceLostError: this process can score no more.
        InputError, laya.LayaError, DatabaseError: the attempt failed.
    """
    scorers = load_scorers(session, claim)
    for group in suspect_groups(session, claim):  # none, unless a process has died of this shard
        _score_rows(session, group, scorers)
    _score_rows(session, claim, scorers)


def _score_rows(session: Session, claim: Claim, scorers: dict[str, Scorer]) -> None:
    """Score and save the claim's rows; all is saved when this returns."""
    with write_behind() as writes:
        for window in read_ahead(prepare_windows(session, claim, scorers)):
            if window.errors:
                writes.put(partial(_save_errors, session, claim, window.errors))
            for batch in window.batches:
                if session.vitals.draining.is_set():
                    raise DrainingError
                _score_batch(session, claim, window, batch, writes)


def prepare_windows(session: Session, claim: Claim, scorers: dict[str, Scorer]) -> Iterator[PreparedWindow]:
    """Read, tokenise and pack the shard's rows window by window, leaving out what earlier attempts saved.

    A routed job's window comes in parts, one for each checkpoint that rows of it go to.
    """
    settings = session.settings
    saved = leases.saved_pairs(session.db, claim)
    windows = read_windows(claim, settings.input_roots, settings.rows_per_window)
    while True:
        watch = Stopwatch()
        with session.within("prepare"), watch.time("read"):
            window = next(windows, None)
        if window is None:
            return
        with watch.time("route"):
            parts = divide_window(window, scorers, routed=claim.spec.routes is not None)
        for part in parts:
            share = len(part.window.states) / max(1, len(window.states))
            stage_ms = {"read": (watch.ms["read"] + watch.ms["route"]) * share}
            yield _prepare_part(session, part, saved, stage_ms)


def _prepare_part(
    session: Session, part: Part, saved: set[tuple[int, str]], stage_ms: dict[str, float]
) -> PreparedWindow:
    agent, prepared, window, watch = part.scorer.agent, part.scorer.prepared, part.window, Stopwatch()
    with session.within("prepare"), watch.time("tokenise"):
        wanted = _unsaved(window, prepared, saved)
        encoded = agent.encode(window.states, prepared, wanted)
        batches = agent.pack(encoded, session.limits_of(agent))
    errors = _new_errors(window, prepared, encoded, saved)
    return PreparedWindow(part, errors, encoded, batches, {**stage_ms, **watch.ms})


def _score_batch(
    session: Session,
    claim: Claim,
    window: PreparedWindow,
    batch: laya.Batch,
    writes: WriteBehind,
) -> None:
    agent, prepared = window.part.scorer.agent, window.part.scorer.prepared
    for part, scored, forward_ms in score_in_halves(_forward_pass(session, claim, window), batch):
        if isinstance(scored, Unscored):
            writes.put(partial(_save_errors, session, claim, [_unscored_error(window, part, scored)]))
            continue
        watch = Stopwatch()
        with watch.time("decode"):
            answers = agent.decode(prepared, window.encoded, part, scored)
        share = len(part) / len(window.encoded)
        prepare_ms = {stage: ms * share for stage, ms in window.stage_ms.items()}
        stage_ms = {**prepare_ms, "forward": forward_ms, **watch.ms}
        record = describe_batch(session, window.part.scorer, part, scored, stage_ms)
        rows = partial(result_rows, prepared, window.part.window, answers, window.part.routes)
        writes.put(partial(_save_batch, session, claim, record, rows))


def _forward_pass(session: Session, claim: Claim, window: PreparedWindow) -> ForwardPass:
    agent = window.part.scorer.agent

    def run(batch: laya.Batch) -> laya.Logits:
        log.debug("%s: scoring %d sequences", claim, len(batch))
        with session.within("forward"):
            return agent.forward(window.encoded, batch)

    def check_device() -> None:
        _, shortest = agent.warmup_shapes(session.limits_of(agent))[-1]
        with session.within("forward"):
            agent.warmup([(1, shortest)])

    halve = partial(agent.halve, window.encoded)
    return ForwardPass(run, halve, check_device, session.settings.max_attempts)


def _save_batch(
    session: Session, claim: Claim, record: leases.BatchRecord, rows: Callable[[], list[dict[str, Any]]]
) -> None:
    if leases.save_batch(session.db, claim, session.settings.lease_s, record, rows()):
        raise JobStoppedError


def _save_errors(session: Session, claim: Claim, errors: list[RowError]) -> None:
    if leases.save_row_errors(session.db, claim, session.settings.lease_s, errors):
        raise JobStoppedError


def _unscored_error(window: PreparedWindow, part: laya.Batch, unscored: Unscored) -> RowError:
    """Of the one sequence of this part."""
    (sequence,) = part.index
    prepared, rows = window.part.scorer.prepared, window.part.window
    state = int(window.encoded.state_index[sequence])
    question = prepared.questions[int(window.encoded.question_index[sequence])].id
    row_number, row_id = rows.row_numbers[state], rows.row_ids[state]
    return RowError(row_number, question, row_id, unscored.code, unscored.message)


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
