"""Rows of a shard, window by window, made ready to be scored: read, routed, tokenised and packed into batches.

Owns what an attempt leaves out because an earlier one saved it, and the errors that no scoring can mend.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import laya
from jobs.store import leases
from jobs.store.leases import RowError
from schemas.job import Claim
from schemas.question import WHOLE_ROW
from worker.reader import read_windows
from worker.routing import Part, Scorer, divide_window
from worker.session import Session
from worker.states import Window
from worker.timing import Stopwatch

# In all sequences of a window. A token takes four bytes, and 20 more while sequences are laid out; three windows are in
# memory at once.
WINDOW_TOKENS = 2**23


@dataclass(frozen=True)
class PreparedWindow:
    """Rows ready to be scored by one agent, with the milliseconds that reading and tokenising them took."""

    part: Part
    errors: list[RowError]
    encoded: laya.EncodedSequences
    batches: list[laya.Batch]
    stage_ms: dict[str, float]


def prepare_windows(session: Session, claim: Claim, scorers: dict[str, Scorer]) -> Iterator[PreparedWindow]:
    """Read, tokenise and pack the shard's rows window by window, leaving out what earlier attempts saved.

    A routed job's window comes in parts, one for each checkpoint that rows of it go to.
    """
    settings = session.settings
    saved = leases.saved_pairs(session.db, claim)
    windows = read_windows(claim, settings.input_roots, settings.rows_per_window, session.reader)
    while True:
        watch = Stopwatch()
        with session.within("prepare"), watch.time("read"):
            window = next(windows, None)
        if window is None:
            return
        with session.within("prepare"), watch.time("route"):
            parts = divide_window(window, scorers, claim.spec)
        for part in parts:
            for piece in _divide_part(part):
                share = len(piece.window.states) / max(1, len(window.states))
                stage_ms = {"read": (watch.ms["read"] + watch.ms["route"]) * share}
                yield _prepare_part(session, piece, saved, stage_ms)


def _divide_part(part: Part) -> Iterator[Part]:
    """The part in pieces of so few rows that the sequences of all questions have at most WINDOW_TOKENS."""
    agent, window = part.scorer.agent, part.window
    longest = len(part.scorer.prepared.questions) * agent.checkpoint.max_len
    most = max(1, WINDOW_TOKENS // longest)
    for start in range(0, max(1, len(window.states)), most):
        piece = slice(start, start + most)
        kept = Window(
            window.row_numbers[piece],
            window.row_ids[piece],
            window.states[piece],
            window.errors if start == 0 else [],
            window.languages[piece],
        )
        yield Part(part.scorer, kept, part.routes[piece])


def _prepare_part(
    session: Session, part: Part, saved: set[tuple[int, str]], stage_ms: dict[str, float]
) -> PreparedWindow:
    agent, prepared, window, watch = part.scorer.agent, part.scorer.prepared, part.window, Stopwatch()
    with session.within("prepare"), watch.time("tokenise"):
        wanted = _unsaved(window, prepared, saved)
        encoded = agent.encode(window.states, prepared, wanted)
        batches = agent.pack(encoded, session.limits_of(agent))
    errors = _new_errors(window, encoded, saved)
    return PreparedWindow(part, errors, encoded, batches, {**stage_ms, **watch.ms})


def _unsaved(window: Window, prepared: laya.PreparedQuestions, saved: set[tuple[int, str]]) -> Any:
    """Boolean (states, questions): the pairs to score."""
    wanted = np.ones((len(window.states), len(prepared.questions)), dtype=bool)
    if saved:
        for state, row_number in enumerate(window.row_numbers):
            whole_row_failed = (row_number, WHOLE_ROW) in saved
            for question, asked in enumerate(prepared.questions):
                wanted[state, question] = not whole_row_failed and (row_number, asked.id) not in saved
    return wanted


def _new_errors(window: Window, encoded: laya.EncodedSequences, saved: set[tuple[int, str]]) -> list[RowError]:
    """Errors of this window that no earlier attempt saved: no state, or no text."""
    rows = list(zip(window.row_numbers, window.row_ids, strict=True))
    errors = list(window.errors)
    errors += [
        RowError(rows[state][0], WHOLE_ROW, rows[state][1], "no_text", why) for state, why in encoded.unfit.items()
    ]
    return [error for error in errors if (error.row_number, error.question) not in saved]
