"""What a forward pass reads: one batch of sequences laid end to end, without padding between them.

Owns that layout as tensors. `collation` fills it from a planned batch; `attention` is where sequences keep apart.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the name every reader of PyTorch knows
from torch import Tensor

LEAST_MARKERS = 2  # columns; a graph traced with one would be specialised on it


@dataclass(frozen=True)
class ModelInputs:
    """One batch of n sequences, T tokens together, with up to k options each; all on one device.

    input_ids, positions and sequence (T) int32: each token's id, its place in its sequence, and which sequence that is;
    offsets (n + 1) int32: where each sequence begins, then T; markers (n, k) int64: the places among T of the options'
    mask tokens, any place where absent; marker_counts (n) int64; qtype (n) int64: choice 0, score 1, noul 2.

    Known on the host, so that no device is asked: `longest`, at least the tokens of the longest sequence, the filling
    of `widen` aside; `equal`, True only when every sequence has exactly that many.
    """

    input_ids: Tensor
    positions: Tensor
    sequence: Tensor
    offsets: Tensor
    markers: Tensor
    marker_counts: Tensor
    qtype: Tensor
    longest: int
    equal: bool = False

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The fields before `longest`, in their order."""
        return (
            *(self.input_ids, self.positions, self.sequence, self.offsets),
            *(self.markers, self.marker_counts, self.qtype),
        )


def widen(inputs: ModelInputs, tokens: int, sequences: int, markers: int) -> ModelInputs:
    """The same batch in a larger shape: one sequence more holds the added tokens, and further ones are empty.

    What the model answers about the first n sequences and k markers stays the same.
    """
    rows, columns = inputs.markers.shape
    more, empty = tokens - len(inputs.input_ids), sequences - rows
    if more == empty == markers - columns == 0:
        return inputs
    filler = (0, more)
    return ModelInputs(
        input_ids=F.pad(inputs.input_ids, filler),
        positions=F.pad(inputs.positions, filler),
        sequence=F.pad(inputs.sequence, filler, value=rows),
        offsets=F.pad(inputs.offsets, (0, empty), value=tokens),
        markers=F.pad(inputs.markers, (0, markers - columns, 0, empty)),
        marker_counts=F.pad(inputs.marker_counts, (0, empty), value=1),
        qtype=F.pad(inputs.qtype, (0, empty)),
        longest=inputs.longest,
    )


def inputs_of_rows(input_ids: Tensor, marker_pos: Tensor, marker_counts: Tensor, qtype: Tensor) -> ModelInputs:
    """Rows of one length as inputs: input_ids (n, L), marker_pos (n, k) int64 places in a row; the rest as above."""
    rows, length = input_ids.shape
    device = input_ids.device
    start = torch.arange(rows + 1, device=device) * length
    return ModelInputs(
        input_ids=input_ids.flatten().int(),
        positions=torch.arange(length, device=device, dtype=torch.int32).repeat(rows),
        sequence=torch.arange(rows, device=device, dtype=torch.int32).repeat_interleave(length),
        offsets=start.int(),
        markers=marker_pos + start[:-1, None],
        marker_counts=marker_counts,
        qtype=qtype,
        longest=length,
        equal=True,
    )


def synthetic_inputs(shape: tuple[int, int, int], device: torch.device) -> ModelInputs:
    """Inputs of (sequences, L, markers) for warming up, every marker on the first token."""
    rows, length, markers = shape
    return inputs_of_rows(
        torch.zeros((rows, length), dtype=torch.int64, device=device),
        torch.zeros((rows, markers), dtype=torch.int64, device=device),
        torch.full((rows,), markers, dtype=torch.int64, device=device),
        torch.zeros((rows,), dtype=torch.int64, device=device),
    )
