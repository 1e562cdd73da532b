"""Which sequences run together. Pure planning over lengths: no tokens, no tensors.

Owns the bucket lengths and the budgets of a batch; nothing else decides a shape.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

FINE_STEP, FINE_UNTIL, COARSE_STEP = 16, 256, 64  # tokens
# What one more forward costs beside its tokens, as tokens: about 4 ms of launches at 130,000 tokens/s. Where a backend
# pads, a batch takes shorter sequences only until they have padded this much.
FORWARD_COST_TOKENS = 512
# A CPU is fastest while a batch's activations stay in its cache: 15-20% faster at 2,048 tokens than at 16,384.
CPU_MAX_TOKENS = 2_048

# Below this many tokens a GPU waits for the launches, and a recorded graph is replayed instead.
GRAPH_TOKENS = (64, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)
GRAPH_TOKENS_PER_SEQUENCE = 16
GRAPH_MARKERS = 16

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class PackingLimits:
    """What a batch may not exceed, unless it is a single sequence that does so alone.

    max_tokens: tokens, with the padding where the backend pads. mask_budget_bytes: sequences x heads x L x L x bytes
    of an attention mask that a backend makes dense. max_sequences: None for no limit. sort_by_length: False keeps the
    order of the sequences.
    """

    max_tokens: int = 32_768
    mask_budget_bytes: int = 256 * 2**20
    max_sequences: int | None = None
    sort_by_length: bool = True

    def __post_init__(self) -> None:
        for name in ("max_tokens", "mask_budget_bytes", "max_sequences"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: expected at least 1, found {value}")


@dataclass(frozen=True)
class Shapes:
    """What of a model and its backend limits a batch.

    mask_bytes_per_element is 0 where no dense mask is made; `padded` says whether a batch costs its longest sequence
    for every one, or the tokens it has.
    """

    max_len: int
    heads: int
    mask_bytes_per_element: int
    padded: bool


@dataclass(frozen=True, eq=False)
class Batch:
    """`index` (n) int64 says which sequences; none is longer than `bucket_length`. `tokens` are the real ones,
    `padded_tokens` those computed."""

    index: Ints
    bucket_length: int
    tokens: int
    padded_tokens: int

    def __len__(self) -> int:
        return len(self.index)


def bucket_length(length: int, max_len: int) -> int:
    """What `length` tokens are padded to: a multiple of 16 up to 256, of 64 beyond, and never more than max_len."""
    return int(bucket_lengths(np.array([length]), max_len)[0])


def bucket_lengths(lengths: Ints, max_len: int) -> Ints:
    """`bucket_length` of many. Raises ValueError for a length outside 1 to max_len."""
    if len(lengths) and not 1 <= lengths.min() <= lengths.max() <= max_len:
        raise ValueError(f"lengths from {lengths.min()} to {lengths.max()} tokens, expected 1 to {max_len}")
    step = np.where(lengths <= FINE_UNTIL, FINE_STEP, COARSE_STEP)
    return np.minimum(-(-lengths // step) * step, max_len)


def capacity(bucket: int, limits: PackingLimits, shapes: Shapes) -> int:
    """The most sequences of this bucket length that fit in one batch; one always does."""
    return _fitting(np.full(limits.max_tokens // bucket + 1, bucket), limits, shapes)


def pack(lengths: Ints, limits: PackingLimits, shapes: Shapes) -> list[Batch]:
    """Plan the batches of sequences of these lengths (tokens): each sequence in exactly one, the longest first."""
    bucket_lengths(lengths, shapes.max_len)
    order = np.argsort(-lengths, kind="stable") if limits.sort_by_length else np.arange(len(lengths))
    most = limits.max_tokens // int(lengths.min(initial=limits.max_tokens)) + 1  # sequences that a batch could hold
    batches = []
    while len(order):
        count = _fitting(lengths[order[:most]], limits, shapes)
        batches.append(plan_batch(order[:count], lengths, shapes))
        order = order[count:]
    return batches


def plan_batch(index: Ints, lengths: Ints, shapes: Shapes) -> Batch:
    """The batch of the sequences at `index`, whatever the budgets say."""
    longest = bucket_length(int(lengths[index].max()), shapes.max_len)
    tokens = int(lengths[index].sum())
    return Batch(index, longest, tokens, len(index) * longest if shapes.padded else tokens)


def split_batch(batch: Batch, lengths: Ints, shapes: Shapes) -> tuple[Batch, Batch]:
    """The batch as two, of at least one sequence each."""
    middle = len(batch) // 2
    first, second = (plan_batch(index, lengths, shapes) for index in (batch.index[:middle], batch.index[middle:]))
    return first, second


def largest_batches(limits: PackingLimits, shapes: Shapes) -> list[tuple[int, int]]:
    """The largest batch that `pack` can emit for each bucket length: (sequences, bucket length), longest first."""
    every = np.unique(bucket_lengths(np.arange(1, shapes.max_len + 1), shapes.max_len))
    return [(capacity(int(bucket), limits, shapes), int(bucket)) for bucket in every[::-1]]


def warmup_shapes(limits: PackingLimits, shapes: Shapes) -> list[tuple[int, int]]:
    """(sequences, tokens of each) that leave a backend warm: its largest batch, and what else it prepares for.

    Where sequences are padded that is every bucket length's; else the largest batch, and one for each graph shape,
    the largest first, so that the memory of its recording serves the others.
    """
    if shapes.padded:
        return largest_batches(limits, shapes)
    longest = min(shapes.max_len, limits.max_tokens)
    small = [(max(1, tokens // shapes.max_len), min(tokens, shapes.max_len)) for tokens in GRAPH_TOKENS[::-1]]
    return [(limits.max_tokens // longest, longest), *small]


def padding_share(batches: Iterable[Batch]) -> float:
    """The share of the computed tokens that is padding; 0 for no batches."""
    counts = [(batch.tokens, batch.padded_tokens) for batch in batches]
    padded = sum(padded for _, padded in counts)
    return 1 - sum(tokens for tokens, _ in counts) / padded if padded else 0.0


def _fitting(lengths: Ints, limits: PackingLimits, shapes: Shapes) -> int:
    """How many of these sequences, from the first on, run as one batch; one always does."""
    count = np.arange(1, len(lengths) + 1)
    longest = np.maximum.accumulate(lengths)
    bucket = bucket_lengths(longest, shapes.max_len)
    tokens = np.cumsum(lengths)
    fits = (count * bucket if shapes.padded else tokens) <= limits.max_tokens
    fits &= count * bucket * bucket * (shapes.heads * shapes.mask_bytes_per_element) <= limits.mask_budget_bytes
    if limits.max_sequences is not None:
        fits &= count <= limits.max_sequences
    if shapes.padded and limits.sort_by_length:
        fits &= count * longest - tokens <= FORWARD_COST_TOKENS
    return max(1, int(fits.sum()))  # each limit, once passed, stays passed


@dataclass(frozen=True)
class GraphShape:
    """The sizes a small batch is widened to, so that few graphs serve all."""

    tokens: int
    sequences: int
    markers: int = GRAPH_MARKERS


def graph_shape(tokens: int, sequences: int, markers: int) -> GraphShape | None:
    """The smallest shape that holds the batch and a sequence of filling; None for a batch that needs no graph."""
    for most in GRAPH_TOKENS:
        shape = GraphShape(most, most // GRAPH_TOKENS_PER_SEQUENCE)
        if tokens <= shape.tokens and sequences < shape.sequences and markers <= shape.markers:
            return shape
    return None


def default_limits(device_type: str) -> PackingLimits:
    """The limits that suit a kind of device: `cpu`, `cuda`, …"""
    return PackingLimits(max_tokens=CPU_MAX_TOKENS) if device_type == "cpu" else PackingLimits()


def in_batches_of(limits: PackingLimits, sequences: int | None, sort_by_length: bool) -> PackingLimits:
    """`limits` with at most this many sequences a batch."""
    return replace(limits, max_sequences=sequences, sort_by_length=sort_by_length)
