"""Small batches as CUDA graphs: a forward pass recorded once for each of a few shapes and replayed from then on.

A small batch spends its time in launches, which a replay makes at once. Owns recording and replaying; `packing` says
which shapes there are.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from laya.backends.base import is_out_of_memory
from laya.inputs import ModelInputs, widen
from laya.packing import GraphShape, graph_shape

Forward = Callable[[ModelInputs], tuple[Tensor, Tensor]]

_one_at_a_time = threading.RLock()  # a recording or a replay, whichever agent asks


def no_recording() -> AbstractContextManager[object]:
    """For what torch or CUDA forbid while any thread records: emptying the cache of memory, waiting for a device."""
    return _one_at_a_time


class Graphed:
    """A forward pass on `device` of sequences up to `max_len` tokens, which replays the batches that are small.

    Safe to share between threads. Its recordings take their memory from one pool, given back when this object goes.
    Once there was not enough for one, it records and replays no more. `forward` must not hold what holds this object.
    """

    def __init__(self, forward: Forward, device: torch.device, max_len: int) -> None:
        self._forward = forward
        self._device = device
        self._max_len = max_len
        self._recordings: dict[GraphShape, Recording] = {}
        self._replayed: torch.cuda.Event | None = None
        self._room = True  # for recordings
        self._stream: torch.cuda.Stream | None = None  # of its own: with it come the workspaces that a recording uses
        self._pool: Any = None

    def __call__(self, inputs: ModelInputs) -> tuple[Tensor, Tensor]:
        rows, columns = inputs.markers.shape
        shape = graph_shape(len(inputs.input_ids), rows, columns) if self._room else None
        if shape is None:
            return self._forward(inputs)
        widened = widen(inputs, shape.tokens, shape.sequences, shape.markers)
        with _one_at_a_time, torch.cuda.device(self._device):
            if not (shape in self._recordings or self._record(shape, widened)):
                return self._forward(inputs)
            stream = torch.cuda.current_stream()
            if self._replayed is not None:
                stream.wait_event(self._replayed)  # of another thread's stream: recordings share their memory
            logits, act = self._recordings[shape].replay(widened)
            self._replayed = stream.record_event()
        return logits[:rows, :columns], act[:rows]

    def _record(self, shape: GraphShape, inputs: ModelInputs) -> bool:
        """Whether there was room for it."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self._pool = torch.cuda.graph_pool_handle()
        longest = min(shape.tokens, self._max_len)
        try:
            self._recordings[shape] = Recording(self._forward, inputs, longest, self._stream, self._pool)
        except BaseException as error:  # torch may not use the pool of a recording that failed again
            self._room = False
            self._recordings.clear()
            if not is_out_of_memory(error):
                raise
        return self._room


class Recording:
    """One forward pass over inputs that stay where they are, of sequences up to `longest` tokens."""

    def __init__(self, forward: Forward, like: ModelInputs, longest: int, stream: torch.cuda.Stream, pool: Any) -> None:
        self._places = tuple(tensor.clone() for tensor in like.tensors)
        inputs = ModelInputs(*self._places, longest)  # type: ignore[arg-type, call-arg]  # as many as there are
        forward(inputs)  # what is compiled or loaded at a first pass cannot be recorded
        self._graph = torch.cuda.CUDAGraph()
        # The outer stream is what a recording that fails leaves current; other threads may go on launching meanwhile.
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
        ):
            self._outputs = forward(inputs)

    def replay(self, inputs: ModelInputs) -> tuple[Tensor, Tensor]:
        """The outputs for inputs of the same shape, in memory of their own."""
        for place, tensor in zip(self._places, inputs.tensors, strict=True):
            place.copy_(tensor)
        self._graph.replay()
        logits, act = self._outputs
        return logits.clone(), act.clone()  # the next replay writes over them
