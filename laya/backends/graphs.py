"""Small batches as CUDA graphs: a forward pass recorded once for each of a few shapes and replayed from then on.

A small batch spends its time in launches, which a replay makes at once. Owns recording and replaying; `packing` says
which shapes there are.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from laya.inputs import ModelInputs, widen
from laya.packing import GraphShape, graph_shape

Forward = Callable[[ModelInputs], tuple[Tensor, Tensor]]

_one_at_a_time = threading.Lock()  # a recording or a replay, whichever agent asks


class Graphed:
    """A forward pass on `device` of sequences up to `max_len` tokens, which replays the batches that are small.

    Safe to share between threads. All recordings take their memory from one pool, which is as large as the largest of
    them needs, and is given back when this object goes.
    """

    def __init__(self, forward: Forward, device: torch.device, max_len: int) -> None:
        self._forward = forward
        self._device = device
        self._max_len = max_len
        self._recordings: dict[GraphShape, Recording] = {}
        self._pool: Any = None
        self._replayed: torch.cuda.Event | None = None

    def __call__(self, inputs: ModelInputs) -> tuple[Tensor, Tensor]:
        rows, columns = inputs.markers.shape
        shape = graph_shape(len(inputs.input_ids), rows, columns)
        if shape is None:
            return self._forward(inputs)
        with _one_at_a_time, torch.cuda.device(self._device):
            stream = torch.cuda.current_stream()
            if self._replayed is not None:
                stream.wait_event(self._replayed)  # of another thread's stream: recordings share their memory
            widened = widen(inputs, shape.tokens, shape.sequences, shape.markers)
            if shape not in self._recordings:
                self._pool = self._pool or torch.cuda.graph_pool_handle()
                longest = min(shape.tokens, self._max_len)
                self._recordings[shape] = Recording(self._forward, widened, longest, self._pool)
            logits, act = self._recordings[shape].replay(widened)
            self._replayed = stream.record_event()
        return logits[:rows, :columns], act[:rows]


class Recording:
    """One forward pass over inputs that stay where they are, of sequences up to `longest` tokens."""

    def __init__(self, forward: Forward, like: ModelInputs, longest: int, pool: Any) -> None:
        self._places = tuple(tensor.clone() for tensor in like.tensors)
        inputs = ModelInputs(*self._places, longest)  # type: ignore[arg-type, call-arg]  # as many as there are
        forward(inputs)  # what is compiled or loaded at a first pass cannot be recorded
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may go on using the device meanwhile.
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self._outputs = forward(inputs)

    def replay(self, inputs: ModelInputs) -> tuple[Tensor, Tensor]:
        """The outputs for inputs of the same shape, in memory of their own."""
        for place, tensor in zip(self._places, inputs.tensors, strict=True):
            place.copy_(tensor)
        self._graph.replay()
        logits, act = self._outputs
        return logits.clone(), act.clone()  # the next replay writes over them
