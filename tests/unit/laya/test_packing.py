import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laya.packing import (
    Batch,
    PackingLimits,
    Shapes,
    bucket_length,
    capacity,
    default_limits,
    largest_batches,
    pack,
    padding_share,
)

max_lens = st.integers(8, 1100)
limits_of_a_batch = st.builds(
    PackingLimits,
    max_tokens=st.integers(1, 20_000),
    mask_budget_bytes=st.integers(1, 50_000_000),
    max_sequences=st.none() | st.integers(1, 40),
    sort_by_length=st.booleans(),
)


@st.composite
def plans(draw: st.DrawFn) -> tuple[np.ndarray, PackingLimits, Shapes, list[Batch]]:
    max_len = draw(max_lens)
    lengths = np.array(draw(st.lists(st.integers(1, max_len), max_size=120)), dtype=np.int64)
    shapes = Shapes(max_len, heads=draw(st.integers(1, 16)), mask_bytes_per_element=draw(st.sampled_from((0, 2, 4))))
    limits = draw(limits_of_a_batch)
    return lengths, limits, shapes, pack(lengths, limits, shapes)


@given(plans())
def test_every_sequence_is_in_exactly_one_batch(plan: tuple[np.ndarray, PackingLimits, Shapes, list[Batch]]) -> None:
    lengths, _, _, batches = plan
    seen = np.concatenate([batch.index for batch in batches]) if batches else np.zeros(0, dtype=int)
    assert sorted(seen.tolist()) == list(range(len(lengths)))
    restored = np.zeros(len(lengths), dtype=np.int64)
    for batch in batches:
        restored[batch.index] = lengths[batch.index]
    assert restored.tolist() == lengths.tolist()


@given(plans())
def test_every_batch_is_under_every_budget_or_a_single_sequence(
    plan: tuple[np.ndarray, PackingLimits, Shapes, list[Batch]],
) -> None:
    _, limits, shapes, batches = plan
    for batch in batches:
        assert len(batch) >= 1
        if len(batch) == 1:
            continue
        length = batch.bucket_length
        assert batch.padded_tokens <= limits.max_tokens
        mask = len(batch) * shapes.heads * length * length * shapes.mask_bytes_per_element
        assert mask <= limits.mask_budget_bytes
        assert limits.max_sequences is None or len(batch) <= limits.max_sequences


@given(plans())
def test_bucket_lengths_hold_their_sequences_and_padding_is_reported(
    plan: tuple[np.ndarray, PackingLimits, Shapes, list[Batch]],
) -> None:
    lengths, _, shapes, batches = plan
    for batch in batches:
        longest = int(lengths[batch.index].max())
        assert batch.bucket_length == bucket_length(longest, shapes.max_len)
        assert batch.tokens == lengths[batch.index].sum()
        assert batch.padded_tokens == len(batch) * batch.bucket_length >= batch.tokens
    padded = sum(batch.padded_tokens for batch in batches)
    assert padding_share(batches) == pytest.approx(1 - lengths.sum() / padded if padded else 0.0)


@given(plans())
def test_sorted_batches_run_from_long_to_short_and_unsorted_ones_in_order(
    plan: tuple[np.ndarray, PackingLimits, Shapes, list[Batch]],
) -> None:
    _, limits, _, batches = plan
    order = np.concatenate([batch.index for batch in batches]).tolist() if batches else []
    if not limits.sort_by_length:
        assert order == sorted(order)


@given(length=st.integers(1, 1100), max_len=max_lens)
def test_a_bucket_length_is_a_multiple_of_16_or_64_or_max_len(length: int, max_len: int) -> None:
    if length > max_len:
        with pytest.raises(ValueError, match="expected 1 to"):
            bucket_length(length, max_len)
        return
    bucket = bucket_length(length, max_len)
    assert length <= bucket <= max_len
    step = 16 if length <= 256 else 64
    assert bucket == max_len or (bucket % step == 0 and bucket - length < step)


@given(plans())
def test_no_batch_is_larger_than_the_shapes_to_warm_up(
    plan: tuple[np.ndarray, PackingLimits, Shapes, list[Batch]],
) -> None:
    _, limits, shapes, batches = plan
    largest = {bucket: sequences for sequences, bucket in largest_batches(limits, shapes)}
    assert all(len(batch) <= largest[batch.bucket_length] for batch in batches)


def test_leftovers_of_near_buckets_run_together_and_far_ones_do_not() -> None:
    shapes = Shapes(max_len=512, heads=2, mask_bytes_per_element=4)
    near = pack(np.array([40, 33, 30, 17]), PackingLimits(), shapes)
    assert [(len(batch), batch.bucket_length) for batch in near] == [(4, 48)]
    far = pack(np.array([512, *[16] * 20]), PackingLimits(), shapes)
    assert [(len(batch), batch.bucket_length) for batch in far] == [(1, 512), (20, 16)]


def test_the_mask_budget_caps_long_batches_of_a_large_model() -> None:
    shapes = Shapes(max_len=1024, heads=12, mask_bytes_per_element=2)
    assert capacity(1024, PackingLimits(), shapes) == 10
    assert capacity(1024, PackingLimits(), Shapes(1024, 12, 0)) == 16
    assert capacity(1024, PackingLimits(mask_budget_bytes=1), shapes) == 1


def test_limits_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="max_tokens: expected at least 1, found 0"):
        PackingLimits(max_tokens=0)


def test_a_cpu_takes_smaller_batches() -> None:
    assert default_limits("cpu").max_tokens < default_limits("cuda").max_tokens == 16_384
