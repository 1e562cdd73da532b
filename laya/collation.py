"""A planned batch as tensors on a device. Owns how they are filled; `packing` chose what is in the batch."""

import functools
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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
    inputs = ModelInputs(
        input_ids=_tensor(encoded.token_ids[encoded.offsets[index][sequence] + positions]),
        positions=_tensor(positions),
        sequence=_tensor(sequence),
        offsets=_tensor(offsets.astype(np.int32)),
        markers=_tensor(offsets[:-1, None] + np.where(there, within, 0)),
        marker_counts=_tensor(counts),
        qtype=_tensor(encoded.types[index]),
        longest=longest,
        equal=len(index) * longest == offsets[-1],
    )
    return inputs if device.type == "cpu" else _send(inputs, device)


def _tensor(array: NDArray[np.signedinteger[Any]]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def _send(inputs: ModelInputs, device: torch.device) -> ModelInputs:
    """To a GPU, by a stream of its own, so that the copies do not wait for the pass that is running."""
    reading, copying = torch.cuda.current_stream(device), _copying_stream(device)
    with torch.cuda.stream(copying):
        tensors = [tensor.pin_memory().to(device, non_blocking=True) for tensor in inputs.tensors]
    reading.wait_stream(copying)
    for tensor in tensors:
        tensor.record_stream(reading)  # or its memory might be taken for the next copy before it has been read
    return ModelInputs(*tensors, inputs.longest, inputs.equal)  # type: ignore[arg-type, call-arg]  # as many


@functools.cache
def _copying_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
