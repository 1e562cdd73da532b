"""A batch that raises, scored in halves. The forward pass is a stand-in: what is told of it is which sequences fail."""

from dataclasses import dataclass, field

import numpy as np
import pytest

import laya
from laya.packing import Shapes, plan_batch, split_batch
from worker.halving import BatchFailedError, BrokenWeightsError, DeviceLostError, ForwardPass, Unscored, score_in_halves

LENGTHS, SHAPES = np.full(64, 10), Shapes(max_len=512, heads=1, mask_bytes_per_element=0, padded=False)


def halve(batch: laya.Batch) -> tuple[laya.Batch, laya.Batch]:
    return split_batch(batch, LENGTHS, SHAPES)


@dataclass
class Device:
    """Fails on some sequences; `breaks_at`: from the pass of this number on, it fails on all.

    `poison`: sequences that make the logits of their whole pass NaN; `broken`: its weights do so themselves.
    """

    bad: set[int]
    breaks_at: int = 10**9
    poison: set[int] = field(default_factory=set)
    broken: bool = False
    error: type[Exception] = MemoryError
    passes: list[list[int]] = field(default_factory=list)

    def run(self, batch: laya.Batch) -> laya.Logits:
        self.passes.append(batch.index.tolist())
        if self.bad & set(batch.index.tolist()) or len(self.passes) >= self.breaks_at:
            raise self.error(f"{len(batch)} are too many")
        value = np.nan if self.broken or self.poison & set(batch.index.tolist()) else 0.0
        return laya.Logits(np.full((len(batch), 2), value, np.float32), np.zeros((len(batch), 1), np.float32))

    def check_weights(self) -> None:
        if self.broken:
            raise BrokenWeightsError("broken")

    def check(self) -> None:
        if len(self.passes) >= self.breaks_at:
            raise RuntimeError("CUDA error")


def forward_pass(device: Device, tries: int) -> ForwardPass:
    return ForwardPass(device.run, halve, device.check, device.check_weights, tries)


def score(device: Device, count: int, tries: int = 2) -> tuple[list[int], dict[int, Unscored]]:
    """Which sequences have logits, and which have a reason."""
    batch = plan_batch(np.arange(count), LENGTHS, SHAPES)
    scored: list[int] = []
    unscored: dict[int, Unscored] = {}
    tokens = 0
    for part, outcome, forward_ms in score_in_halves(forward_pass(device, tries), batch):
        assert forward_ms >= 0
        assert part.bucket_length == 16
        tokens += part.tokens
        if isinstance(outcome, Unscored):
            unscored[int(part.index[0])] = outcome
        else:
            assert len(outcome.logits) == len(part)
            scored += part.index.tolist()
    assert tokens == count * 10
    return sorted(scored), unscored


def test_a_batch_that_succeeds_runs_once() -> None:
    device = Device(set())
    assert score(device, 37) == (list(range(37)), {})
    assert len(device.passes) == 1


@pytest.mark.parametrize("bad", [{0}, {36}, {11, 12}, {5, 20, 33}])
def test_only_what_fails_alone_is_left_out(bad: set[int]) -> None:
    device = Device(bad)
    scored, unscored = score(device, 37)
    assert scored == sorted(set(range(37)) - bad)
    assert unscored == dict.fromkeys(bad, Unscored("out_of_memory", "MemoryError: 1 are too many"))
    for sequence in bad:
        assert device.passes.count([sequence]) == 2
    assert len(device.passes) <= 1 + len(bad) * (2 * 6 + 1)


@pytest.mark.parametrize("count", [1, 37])
@pytest.mark.parametrize("poison", [{0}, {0, 20}])
def test_what_is_not_finite_alone_is_left_out_and_what_it_spoilt_is_scored_without_it(
    poison: set[int], count: int
) -> None:
    poison = poison & set(range(count))
    device = Device(set(), poison=poison)
    scored, unscored = score(device, count)
    assert scored == sorted(set(range(count)) - poison)
    assert unscored == dict.fromkeys(poison, Unscored("not_finite", "its logits are not finite numbers"))


def test_a_batch_full_of_what_is_not_finite_is_the_rows_fault_while_the_weights_are_sound() -> None:
    scored, unscored = score(Device(set(), poison=set(range(9))), 9)
    assert (scored, unscored.keys()) == ([], set(range(9)))


def test_broken_weights_are_no_sequences_fault_and_are_found_in_one_pass() -> None:
    device = Device(set(), broken=True)
    with pytest.raises(BrokenWeightsError):
        score(device, 37)
    assert len(device.passes) == 1


def test_a_device_that_fails_on_all_is_not_blamed_on_a_sequence() -> None:
    device = Device({3}, breaks_at=4)
    with pytest.raises(DeviceLostError, match=r"MemoryError: .* and then a small batch failed, too"):
        score(device, 37)
    assert len(device.passes) == 4


def test_a_batch_of_which_every_sequence_fails_blames_none_of_them() -> None:
    with pytest.raises(BatchFailedError, match="each of 9 sequences fails by itself; the last: RuntimeError: 1"):
        score(Device(set(range(9)), error=RuntimeError), 9)
    few = Device(set(range(3)), error=RuntimeError)
    assert score(few, 3)[1].keys() == {0, 1, 2}  # so few may all be bad
    assert score(Device(set(range(9))), 9)[1].keys() == set(range(9))  # and as many may be too long


def test_a_fault_of_ours_is_raised_as_it_is() -> None:
    def run(_: laya.Batch) -> laya.Logits:
        raise TypeError("a bug")

    forward = ForwardPass(run, halve, lambda: None, lambda: None, 2)
    with pytest.raises(TypeError, match="a bug"):
        list(score_in_halves(forward, plan_batch(np.arange(4), LENGTHS, SHAPES)))
