"""Inputs of a forward pass, of random tokens, for tests that skip the tokenizer."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from laya.inputs import ModelInputs


def bare_inputs(lengths: Sequence[int], vocabulary: int, device: torch.device, seed: int | None = None) -> ModelInputs:
    """Sequences of `lengths` with up to three options each, at their first tokens; the same for the same seed, which is
    the sum of the lengths when None."""
    generator = torch.Generator().manual_seed(sum(lengths) if seed is None else seed)
    counts, rows = torch.tensor(lengths), torch.arange(len(lengths))
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
    inputs = ModelInputs(
        input_ids=torch.randint(5, vocabulary, (int(offsets[-1]),), generator=generator).int(),
        positions=torch.cat([torch.arange(length) for length in lengths]).int(),
        sequence=rows.repeat_interleave(counts).int(),
        offsets=offsets.int(),
        markers=offsets[:-1, None] + torch.tensor([0, 1, 2]) % counts[:, None],
        marker_counts=torch.tensor([3, 2, 1])[rows % 3],
        qtype=rows % 3,
        longest=max(lengths),
    )
    moved = {name: value.to(device) for name, value in vars(inputs).items() if isinstance(value, torch.Tensor)}
    return replace(inputs, **moved)
