"""A planned batch as tensors on a device. Owns how they are filled; `packing` chose what is in the batch."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from laya.inputs import LEAST_MARKERS, ModelInputs
from laya.packing import Batch
from laya.sequence import EncodedSequences


def collate(encoded: EncodedSequences, batch: Batch, device: torch.device) -> ModelInputs:
    """The batch's sequences laid end to end, as the model's inputs on `device`."""
    index = batch.index
    lengths, counts = encoded.lengths[index], encoded.option_counts[index]
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    sequence = np.repeat(np.arange(len(index), dtype=np.int32), lengths)
    positions = np.arange(offsets[-1], dtype=np.int32) - offsets[sequence].astype(np.int32)
    columns = np.arange(max(int(counts.max()), LEAST_MARKERS))
    there = columns < counts[:, None]
    within = encoded.markers[np.where(there, encoded.marker_offsets[index, None] + columns, 0)]
    longest = int(lengths.max())
    return ModelInputs(
        input_ids=_to_device(encoded.token_ids[encoded.offsets[index][sequence] + positions], device),
        positions=_to_device(positions, device),
        sequence=_to_device(sequence, device),
        offsets=_to_device(offsets.astype(np.int32), device),
        markers=_to_device(offsets[:-1, None] + np.where(there, within, 0), device),
        marker_counts=_to_device(counts, device),
        qtype=_to_device(encoded.types[index], device),
        longest=longest,
        equal=len(index) * longest == offsets[-1],
    )


def _to_device(array: NDArray[np.signedinteger[Any]], device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
