"""Which sequences run together, and padded to what length. Pure planning over lengths: no tokens, no tensors.

Owns the bucket lengths and the budgets of a batch; nothing else decides a shape.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

FINE_STEP, FINE_UNTIL, COARSE_STEP = 16, 256, 64  # tokens
# What one more forward costs beside its tokens, as tokens: about 4 ms of launches at 130,000 tokens/s. Leftovers of
# two buckets run together when that pads less than this.
FORWARD_COST_TOKENS = 512
# A CPU is fastest while a batch's activations stay in its cache: 15-20% faster at 2,048 tokens than at 16,384.
CPU_MAX_TOKENS = 2_048

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class PackingLimits:
    """What a batch may not exceed, unless it is a single sequence that does so alone.

    max_tokens: padded tokens. mask_budget_bytes: sequences x heads x L x L x bytes of an attention mask that a backend
    makes dense. max_sequences: None for no limit. sort_by_length: False keeps the order of the sequences.
    """

    max_tokens: int = 16_384
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
    """What of a model and its backend limits a batch. mask_bytes_per_element is 0 where no dense mask is made."""

    max_len: int
    heads: int
    mask_bytes_per_element: int


@dataclass(frozen=True, eq=False)
class Batch:
    """`index` (n) int64 says which sequences; all are padded to `bucket_length` tokens. `tokens` are the real ones."""

    index: Ints
    bucket_length: int
    tokens: int

    def __len__(self) -> int:
        return len(self.index)

    @property
    def padded_tokens(self) -> int:
        """The tokens of the batch's shape, the padding included."""
        return len(self.index) * self.bucket_length


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
    """The most sequences that fit in one batch of this bucket length; one always does."""
    fitting = limits.max_tokens // bucket
    mask_bytes = shapes.heads * bucket * bucket * shapes.mask_bytes_per_element
    if mask_bytes:
        fitting = min(fitting, limits.mask_budget_bytes // mask_bytes)
    if limits.max_sequences is not None:
        fitting = min(fitting, limits.max_sequences)
    return max(1, fitting)


def pack(lengths: Ints, limits: PackingLimits, shapes: Shapes) -> list[Batch]:
    """Plan the batches of sequences of these lengths (tokens): each sequence in exactly one, the longest first."""
    buckets = bucket_lengths(lengths, shapes.max_len)
    groups = (
        _sorted_groups(lengths, buckets, limits, shapes)
        if limits.sort_by_length
        else _ordered_groups(buckets, limits, shapes)
    )
    return [Batch(index, int(buckets[index].max()), int(lengths[index].sum())) for index in groups]


def largest_batches(limits: PackingLimits, shapes: Shapes) -> list[tuple[int, int]]:
    """The largest batch that `pack` can emit for each bucket length: (sequences, bucket length), longest first."""
    every = np.unique(bucket_lengths(np.arange(1, shapes.max_len + 1), shapes.max_len))
    return [(capacity(int(bucket), limits, shapes), int(bucket)) for bucket in every[::-1]]


def padding_share(batches: Iterable[Batch]) -> float:
    """The share of the computed tokens that is padding; 0 for no batches."""
    counts = [(batch.tokens, batch.padded_tokens) for batch in batches]
    padded = sum(padded for _, padded in counts)
    return 1 - sum(tokens for tokens, _ in counts) / padded if padded else 0.0


def _sorted_groups(lengths: Ints, buckets: Ints, limits: PackingLimits, shapes: Shapes) -> list[Ints]:
    """Full batches of each bucket, longest first; a bucket's leftover joins the one before where that pays."""
    order = np.argsort(-lengths, kind="stable")
    of_one_bucket = np.split(order, np.flatnonzero(np.diff(buckets[order])) + 1) if len(order) else []
    groups: list[Ints] = []
    waiting, waiting_bucket = order[:0], 0  # the leftover of longer buckets, not yet a batch
    for members in of_one_bucket:
        bucket = int(buckets[members[0]])
        full = capacity(bucket, limits, shapes)
        *whole, leftover = np.split(members, range(full, len(members) + 1, full))
        groups.extend(whole)
        padding = len(leftover) * (waiting_bucket - bucket)
        room = capacity(waiting_bucket, limits, shapes) - len(waiting) if len(waiting) else 0
        if len(leftover) <= room and padding <= FORWARD_COST_TOKENS:
            waiting = np.concatenate((waiting, leftover))
        else:
            groups.append(waiting)
            waiting, waiting_bucket = leftover, bucket
    return [group for group in (*groups, waiting) if len(group)]


def _ordered_groups(buckets: Ints, limits: PackingLimits, shapes: Shapes) -> list[Ints]:
    """Runs of consecutive sequences, each as long as its longest bucket allows."""
    groups: list[Ints] = []
    start, longest = 0, 0
    for index, bucket in enumerate(buckets.tolist()):
        longer = max(longest, bucket)
        if index > start and index - start + 1 > capacity(longer, limits, shapes):
            groups.append(np.arange(start, index))
            start, longer = index, bucket
        longest = longer
    return [*groups, np.arange(start, len(buckets))] if len(buckets) else groups


def default_limits(device_type: str) -> PackingLimits:
    """The limits that suit a kind of device: `cpu`, `cuda`, …"""
    return PackingLimits(max_tokens=CPU_MAX_TOKENS) if device_type == "cpu" else PackingLimits()


def in_batches_of(limits: PackingLimits, sequences: int | None, sort_by_length: bool) -> PackingLimits:
    """`limits` with at most this many sequences a batch."""
    return replace(limits, max_sequences=sequences, sort_by_length=sort_by_length)
