"""A planned batch as padded arrays, and on a device. Owns that layout; `packing` chose what is in it."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from laya.model import ModelInputs
from laya.packing import Batch
from laya.sequence import EncodedSequences, Ints

LEAST_MARKERS = 2  # columns; a graph traced with one would be specialised on it


def collate(encoded: EncodedSequences, batch: Batch, pad: int, device: torch.device) -> ModelInputs:
    """The batch's sequences, padded on the right with the token `pad`, as the model's inputs on `device`."""
    index = batch.index
    lengths = encoded.lengths[index]
    counts = encoded.option_counts[index]
    columns = max(int(counts.max()), LEAST_MARKERS)
    input_ids = _padded(encoded.token_ids, encoded.offsets[index], lengths, (batch.bucket_length, pad))
    marker_pos = _padded(encoded.markers, encoded.marker_offsets[index], counts, (columns, 0))
    return ModelInputs(
        input_ids=_to_device(input_ids, device),
        lengths=_to_device(lengths, device),
        marker_pos=_to_device(marker_pos, device),
        marker_counts=_to_device(counts, device),
        qtype=_to_device(encoded.types[index], device),
        padded=bool(lengths.min() < batch.bucket_length),
    )


def synthetic_inputs(shape: tuple[int, int, int], device: torch.device) -> ModelInputs:
    """Inputs of (sequences, L, markers) for warming up: padded, every marker on the first token."""
    sequences, length, markers = shape
    return ModelInputs(
        input_ids=torch.zeros((sequences, length), dtype=torch.int64, device=device),
        lengths=torch.full((sequences,), max(1, length - 1), dtype=torch.int64, device=device),
        marker_pos=torch.zeros((sequences, markers), dtype=torch.int64, device=device),
        marker_counts=torch.full((sequences,), markers, dtype=torch.int64, device=device),
        qtype=torch.zeros((sequences,), dtype=torch.int64, device=device),
    )


def _padded(flat: NDArray[np.signedinteger[Any]], starts: Ints, lengths: Ints, width_and_fill: tuple[int, int]) -> Ints:
    """Rows of `width` int64 values, row i being `flat[starts[i]:starts[i] + lengths[i]]` and then `fill`."""
    width, fill = width_and_fill
    column = np.arange(width)
    inside = column < lengths[:, None]
    places = np.where(inside, starts[:, None] + column, 0)
    return np.where(inside, flat[places], fill).astype(np.int64, copy=False)


def _to_device(array: Ints, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
