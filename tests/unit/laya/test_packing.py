import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laya.packing import (
    FORWARD_COST_TOKENS,
    GRAPH_TOKENS,
    Batch,
    GraphShape,
    PackingLimits,
    Shapes,
    bucket_length,
    capacity,
    default_limits,
    graph_shape,
    largest_batches,
    pack,
    padding_share,
    plan_batch,
    split_batch,
    warmup_shapes,
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
    mask_bytes, padded = draw(st.sampled_from(((0, False), (2, True), (4, True))))
    shapes = Shapes(max_len, draw(st.integers(1, 16)), mask_bytes, padded)
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
        computed = len(batch) * batch.bucket_length if shapes.padded else batch.tokens
        assert batch.padded_tokens == computed >= batch.tokens
    padded = sum(batch.padded_tokens for batch in batches)
    assert padding_share(batches) == pytest.approx(1 - lengths.sum() / padded if padded else 0.0)


@given(plans())
def test_sorted_batches_run_from_long_to_short_and_unsorted_ones_in_order(
    plan: tuple[np.ndarray, PackingLimits, Shapes, list[Batch]],
) -> None:
    lengths, limits, _, batches = plan
    order = np.concatenate([batch.index for batch in batches]) if batches else np.zeros(0, dtype=int)
    assert (np.diff(-lengths[order] if limits.sort_by_length else order) >= 0).all()


@given(plans())
def test_no_batch_could_take_the_sequence_after_it(
    plan: tuple[np.ndarray, PackingLimits, Shapes, list[Batch]],
) -> None:
    lengths, limits, shapes, batches = plan
    for batch, following in itertools.pairwise(batches):
        larger = plan_batch(np.append(batch.index, following.index[0]), lengths, shapes)
        longest = int(lengths[larger.index].max())
        assert (
            larger.padded_tokens > limits.max_tokens
            or len(larger) * shapes.heads * larger.bucket_length**2 * shapes.mask_bytes_per_element
            > limits.mask_budget_bytes
            or len(larger) > (limits.max_sequences or len(lengths))
            or (shapes.padded and len(larger) * longest - larger.tokens > FORWARD_COST_TOKENS)
        )


@given(plans())
def test_a_split_batch_is_two_that_hold_the_same(
    plan: tuple[np.ndarray, PackingLimits, Shapes, list[Batch]],
) -> None:
    lengths, _, shapes, batches = plan
    for batch in batches:
        if len(batch) > 1:
            first, second = split_batch(batch, lengths, shapes)
            assert len(first) >= 1
            assert np.concatenate((first.index, second.index)).tolist() == batch.index.tolist()
            assert first.tokens + second.tokens == batch.tokens


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
    assert not shapes.padded or all(len(batch) <= largest[batch.bucket_length] for batch in batches)
    for sequences, length in warmup_shapes(limits, shapes):
        assert sequences >= 1
        assert 1 <= length <= shapes.max_len


def test_where_padding_costs_near_lengths_run_together_and_far_ones_do_not() -> None:
    shapes = Shapes(max_len=512, heads=2, mask_bytes_per_element=4, padded=True)
    near = pack(np.array([40, 33, 30, 17]), PackingLimits(), shapes)
    assert [(len(batch), batch.bucket_length) for batch in near] == [(4, 48)]
    far = pack(np.array([512, *[16] * 20]), PackingLimits(), shapes)
    assert [(len(batch), batch.bucket_length) for batch in far] == [(2, 512), (19, 16)]
    free = pack(np.array([512, *[16] * 20]), PackingLimits(), Shapes(512, 2, 0, padded=False))
    assert [(len(batch), batch.padded_tokens) for batch in free] == [(21, 832)]


def test_the_mask_budget_caps_long_batches_of_a_large_model() -> None:
    shapes = Shapes(max_len=1024, heads=12, mask_bytes_per_element=2, padded=True)
    assert capacity(1024, PackingLimits(), shapes) == 10
    assert capacity(1024, PackingLimits(), Shapes(1024, 12, 0, padded=False)) == 32
    assert capacity(1024, PackingLimits(mask_budget_bytes=1), shapes) == 1


def test_limits_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="max_tokens: expected at least 1, found 0"):
        PackingLimits(max_tokens=0)


def test_a_cpu_takes_smaller_batches() -> None:
    assert default_limits("cpu").max_tokens < default_limits("cuda").max_tokens == 32_768


@given(tokens=st.integers(1, 6000), sequences=st.integers(1, 300), markers=st.integers(2, 20))
def test_a_graph_shape_holds_its_batch_and_one_sequence_of_filling(tokens: int, sequences: int, markers: int) -> None:
    shape = graph_shape(tokens, sequences, markers)
    if shape is None:
        assert tokens > GRAPH_TOKENS[-1] or sequences >= GRAPH_TOKENS[-1] // 16 or markers > 16
        return
    assert tokens <= shape.tokens
    assert sequences < shape.sequences
    assert markers <= shape.markers
    assert shape in [GraphShape(most, most // 16) for most in GRAPH_TOKENS]
