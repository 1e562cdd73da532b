"""The main path: one claimed shard from rows to saved answers.

    read rows ─► tokenise ─► pack into batches ─► forward ─► decode ─► save

Windows of rows are prepared ahead in one thread, batches saved behind in another, and each batch is queued on the
device before the one ahead of it is decoded, so that the device waits for none of it. Everything goes out through the
claim's fence: a worker that lost its lease saves nothing.
"""

import logging
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import laya
from jobs.errors import DatabaseConflictError, DatabaseRefusedError, InputError
from jobs.store import leases
from jobs.store.leases import RowError
from laya.runner import one_behind
from schemas.job import Claim
from worker.answers import result_rows
from worker.halving import FORWARD_ERRORS, BrokenWeightsError, ForwardPass, Unscored, score_in_halves
from worker.pipeline import WriteBehind, read_ahead, write_behind
from worker.routing import Scorer, check_fit, load_scorers
from worker.session import CheckpointChangedError, RanOn, Session, describe_batch, ran_on
from worker.suspects import suspect_groups
from worker.timing import Stopwatch
from worker.windows import PreparedWindow, prepare_windows

log = logging.getLogger(__name__)

# What every shard of the job would meet, and what another attempt of this one would.
OF_THE_JOB = (
    *(DatabaseRefusedError, BrokenWeightsError),
    *(laya.CheckpointMismatchError, laya.CheckpointNotFoundError, laya.QuestionError),
)
PERMANENT = (
    DatabaseConflictError,
    InputError,
    CheckpointChangedError,
    laya.BackendError,
)


class JobStoppedError(Exception):
    """The shard's job was cancelled or has failed."""


class DrainingError(Exception):
    """This worker is to stop at the next batch and give its shard back."""


def run_shard(session: Session, claim: Claim) -> None:
    """Score and save every row of the shard that has neither answer nor error yet.

    Raises:
        JobStoppedError, DrainingError: to be stopped, or given back; what was saved stays.
        LeaseLostError: another worker has the shard.
        DeviceLostError: this process can score no more.
        InputError, laya.LayaError, DatabaseError: the attempt failed.
    """
    with session.within("load"):
        scorers = load_scorers(session, claim)
    check_fit(session, claim, scorers)
    for group in suspect_groups(session, claim):  # none, unless a process has died of this shard
        _score_rows(session, group, scorers)
    _score_rows(session, claim, scorers)


def _score_rows(session: Session, claim: Claim, scorers: dict[str, Scorer]) -> None:
    """Score and save the claim's rows; all is saved when this returns."""
    # Closed before the shard ends, however it does: else its reader would go on beside the next shard's.
    with write_behind() as writes, closing(_launch_batches(session, claim, scorers, writes)) as launches:
        for flight in one_behind(launches, lambda flight: flight.done):
            _score_batch(session, claim, flight, writes)


def _launch_batches(
    session: Session, claim: Claim, scorers: dict[str, Scorer], writes: WriteBehind
) -> Generator["Flight", None, None]:
    with closing(read_ahead(prepare_windows(session, claim, scorers))) as windows:
        for window in windows:
            if window.errors:
                writes.put(partial(_save_errors, session, claim, window.errors))
            for batch in window.batches:
                if session.vitals.draining.is_set():
                    raise DrainingError
                yield _launch(session, claim, window, batch)


@dataclass(frozen=True)
class Flight:
    """A batch on its way through the device, or what its launch raised after `launch_ms`; and what runs it."""

    window: PreparedWindow
    batch: laya.Batch
    launched: laya.Launched | Exception
    launch_ms: float
    ran_on: RanOn

    @property
    def done(self) -> bool:
        """Whether there is nothing to wait for."""
        return isinstance(self.launched, Exception) or self.launched.done

    def land(self, session: Session) -> laya.Logits:
        """Wait for it; raises what the pass raised."""
        if isinstance(self.launched, Exception):
            raise self.launched
        with session.within("forward"):
            return self.launched.result()


def _launch(session: Session, claim: Claim, window: PreparedWindow, batch: laya.Batch) -> Flight:
    log.debug("%s: scoring %d sequences", claim, len(batch))
    agent, watch = window.part.scorer.agent, Stopwatch()
    launched: laya.Launched | Exception
    with session.within("forward"), watch.time("launch"):
        try:
            launched = agent.launch(window.encoded, batch)
        except FORWARD_ERRORS as error:
            launched = error.with_traceback(None)  # which would hold the memory of the pass
    return Flight(window, batch, launched, watch.ms["launch"], ran_on(agent))


def _score_batch(session: Session, claim: Claim, flight: Flight, writes: WriteBehind) -> None:
    window, batch, launch_ms = flight.window, flight.batch, flight.launch_ms
    agent, prepared = window.part.scorer.agent, window.part.scorer.prepared
    launched = [flight]

    def run(part: laya.Batch) -> laya.Logits:
        nonlocal flight  # at first the one of the whole batch, which is tried first
        flight = launched.pop() if launched else _launch(session, claim, window, part)
        return flight.land(session)

    def check_device() -> None:
        _, shortest = agent.warmup_shapes(session.limits_of(agent))[-1]
        with session.within("forward"):
            torch.cuda.empty_cache()  # nothing, where there is no GPU
            agent.warmup([(1, shortest)])

    def check_weights() -> None:
        with session.within("forward"):
            if not window.part.scorer.has_finite_answers:
                raise BrokenWeightsError(
                    f"checkpoint {window.part.scorer.checkpoint}: its logits are not finite numbers, not even of plain "
                    f"texts; its weights are broken, or exceed what {agent.dtype} holds"
                )

    halve, tries = partial(agent.halve, window.encoded), session.settings.max_attempts
    forward = ForwardPass(run, halve, check_device, check_weights, tries)
    for part, scored, forward_ms in score_in_halves(forward, batch):
        if isinstance(scored, Unscored):
            writes.put(partial(_save_errors, session, claim, [_unscored_error(window, part, scored)]))
            continue
        watch = Stopwatch()
        with watch.time("decode"):
            answers = agent.decode(prepared, window.encoded, part, scored)
        share = len(part) / len(window.encoded)
        prepare_ms = {stage: ms * share for stage, ms in window.stage_ms.items()}
        stage_ms = {**prepare_ms, "forward": launch_ms + forward_ms, **watch.ms}
        launch_ms = 0.0  # told once; a part's own is in its forward
        record = describe_batch(session, window.part.scorer.checkpoint, flight.ran_on, part, scored, stage_ms)
        rows = partial(result_rows, prepared, window.part.window, answers, window.part.routes)
        writes.put(partial(_save_batch, session, claim, record, rows))


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
