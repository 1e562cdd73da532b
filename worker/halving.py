"""A batch that raises, or whose logits are not finite, is scored again in halves, until what cannot be scored stands
alone. Its neighbours are answered.

For errors that leave the process in health. One that does not, and a row that kills it, are `worker.suspects`'.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import laya
from jobs.errors import LayaBatchError
from laya.backends.base import is_out_of_memory
from worker.timing import Stopwatch

# What a forward pass raises when it fails: PyTorch's own errors are RuntimeErrors. Anything else is a fault of ours.
FORWARD_ERRORS = (RuntimeError, MemoryError)


OUT_OF_MEMORY, SCORING_FAILED, NOT_FINITE = "out_of_memory", "scoring_failed", "not_finite"  # codes of row errors
# Sequences of a batch that all fail by themselves, be it not for memory: so many are not to blame for it.
SUSPICIOUS_SEQUENCES = 8


class BatchFailedError(Exception):
    """Each sequence of a batch fails, even by itself, though the device runs others: it is not the sequences."""


class BrokenWeightsError(LayaBatchError):
    """The logits of a checkpoint are not finite, whatever it is asked about."""


class DeviceLostError(RuntimeError):
    """After a forward pass that raised, not even a small one succeeds: this process can score no more."""


@dataclass(frozen=True)
class Unscored:
    """Why one sequence has no logits."""

    code: str
    message: str


@dataclass(frozen=True)
class ForwardPass:
    """How a batch is run.

    `check_device` raises one of FORWARD_ERRORS when the device can run nothing at all, `check_weights` raises
    BrokenWeightsError when no logits at all are finite.
    """

    run: Callable[[laya.Batch], laya.Logits]
    halve: Callable[[laya.Batch], tuple[laya.Batch, laya.Batch]]
    check_device: Callable[[], None]
    check_weights: Callable[[], None]
    tries: int  # of a sequence alone


def score_in_halves(
    forward: ForwardPass, batch: laya.Batch
) -> Iterator[tuple[laya.Batch, laya.Logits | Unscored, float]]:
    """The parts of the batch, each with its logits and its forward's milliseconds; or a single sequence, and why not.

    Raises:
        DeviceLostError, BatchFailedError, BrokenWeightsError: it is not the sequences.
    """
    waiting, failed = [(batch, forward.tries)], []
    while waiting:
        part, tries = waiting.pop()
        watch = Stopwatch()
        with watch.time("forward"):
            scored = _attempt(forward, part)
        if isinstance(scored, laya.Logits):
            yield part, scored, watch.ms["forward"]
            continue
        if scored.code == NOT_FINITE:
            forward.check_weights()
        else:
            _check_device(forward, scored)
        if len(part) > 1:
            waiting += [(half, tries) for half in reversed(forward.halve(part))]
        elif tries > 1:
            waiting.append((part, tries - 1))
        else:
            failed.append((part, scored, watch.ms["forward"]))
    unscorable = [unscored for _, unscored, _ in failed if unscored.code == SCORING_FAILED]
    if len(unscorable) == len(batch) >= SUSPICIOUS_SEQUENCES:
        raise BatchFailedError(f"each of {len(batch)} sequences fails by itself; the last: {unscorable[-1].message}")
    yield from failed


def _attempt(forward: ForwardPass, part: laya.Batch) -> laya.Logits | Unscored:
    try:
        logits = forward.run(part)
        # In one pass a sequence may spoil the logits of the others, so that each must be seen without it.
        return logits if logits.finite else Unscored(NOT_FINITE, "its logits are not finite numbers")
    except FORWARD_ERRORS as error:
        # Not kept: its traceback would hold the memory of the pass.
        memory = isinstance(error, MemoryError) or is_out_of_memory(error)
        return Unscored(OUT_OF_MEMORY if memory else SCORING_FAILED, f"{type(error).__name__}: {error}")


def _check_device(forward: ForwardPass, failed: Unscored) -> None:
    try:
        forward.check_device()
    except FORWARD_ERRORS as error:
        raise DeviceLostError(f"{failed.message}; and then a small batch failed, too") from error
