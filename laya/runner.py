"""A model on its device and the backend that runs it. Owns switching backends, and what happens out of memory.

A batch that does not fit is split and tried again; a single sequence that does not fit is run on the CPU, with the
model moved there for as long as that takes.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from laya.backends.base import Backend, BackendContext, is_out_of_memory
from laya.backends.eager import EagerBackend
from laya.backends.graphs import no_recording
from laya.backends.selection import DEFAULT, Choice, Resolution, resolve_backend
from laya.collation import collate
from laya.decode import Logits
from laya.errors import ArgumentError
from laya.gate import Gate
from laya.inputs import LEAST_MARKERS, ModelInputs, synthetic_inputs
from laya.model import ABSENT_LOGIT
from laya.packing import Batch, Shapes, split_batch
from laya.parameters import place
from laya.sequence import EncodedSequences

T = TypeVar("T")


@dataclass
class Degradations:
    """What an agent has done, since it was made, to go on without the memory it needed."""

    splits: int = 0  # batches run as two halves
    on_cpu: int = 0  # sequences run on the CPU


class Runner:
    """Forward passes of one model. Safe to share between threads; several may run at once."""

    def __init__(self, context: BackendContext, choice: Choice, strict: bool) -> None:
        self.context = context
        self.degradations = Degradations()
        self._gate = Gate()  # forward passes share it; whoever changes the backend or moves the model is alone
        resolution = self._resolve(choice, strict)
        self._choice = choice
        self.backend: Backend = resolution.backend
        self.fallback_reason: str | None = resolution.reason

    @property
    def shapes(self) -> Shapes:
        """What packing must know of the model and its backend."""
        checkpoint = self.context.checkpoint
        mask_bytes, padded = self.backend.mask_bytes_per_element, self.backend.padded
        return Shapes(checkpoint.max_len, checkpoint.model_config.most_heads, mask_bytes, padded)

    def set_backend(self, choice: Choice, strict: bool) -> None:
        """Run `choice` after the forward passes in flight; raises as `resolve_backend` does, and what ran goes on."""
        with self._gate.alone():
            resolution = self._resolve(choice, strict)
            self._choice = choice
            self._switch(resolution)

    def launch(self, encoded: EncodedSequences, batch: Batch) -> "Launched":
        """Queue one batch on the device. What does not fit there has been run in parts when this returns."""
        launched = self._try(encoded, batch)
        if launched is not None:
            return launched
        self._empty_cache()
        if len(batch) == 1:
            return Launched(self._forward_on_cpu(encoded, batch))
        self.degradations.splits += 1
        halves = split_batch(batch, encoded.lengths, self.shapes)
        first, second = (self.launch(encoded, half).result() for half in halves)
        return Launched(join(first, second))

    def warm(self, backend: Backend, shapes: Iterable[tuple[int, ...]]) -> None:
        """Run `backend` once on each shape: (sequences, tokens of each[, markers]); errors propagate."""
        max_len = self.context.checkpoint.max_len
        for sequences, length, *markers in shapes:
            if not 1 <= length <= max_len:
                raise ArgumentError(
                    f"warm-up shape ({sequences}, {length}): expected sequences of 1 to {max_len} tokens"
                )
            shape = (sequences, length, markers[0] if markers else LEAST_MARKERS)
            if min(shape) < 1:
                raise ArgumentError(f"warm-up shape {shape}: expected at least one sequence and one marker")
            logits, _ = forward(backend, synthetic_inputs(shape, backend.device))
            logits.cpu()  # waits for the device, so that its errors surface here

    def warmup(self, shapes: Iterable[tuple[int, ...]]) -> None:
        """`warm` for the active backend."""
        with self._gate.shared():
            self.warm(self.backend, shapes)

    def _resolve(self, choice: Choice, strict: bool) -> Resolution:
        # Every kind of batch once: several sequences, and one.
        shapes = ((2, min(64, self.context.checkpoint.max_len)), (1, min(16, self.context.checkpoint.max_len)))
        return resolve_backend(choice, self.context, strict, lambda backend: self.warm(backend, shapes))

    def _switch(self, resolution: Resolution) -> None:
        """Run another backend from now on, and close the one before; to be called alone in the gate."""
        before, self.backend, self.fallback_reason = self.backend, resolution.backend, resolution.reason
        if before.device.type == "cuda":
            with no_recording():
                torch.cuda.synchronize(before.device)  # passes have left the gate when they are queued
        before.close()

    def _empty_cache(self) -> None:
        """Give memory that is not in use back to the device."""
        if self.context.device.type == "cuda":
            with no_recording():
                torch.cuda.empty_cache()

    def _try(self, encoded: EncodedSequences, batch: Batch) -> "Launched | None":
        """None when there was not enough memory. The error ends here, and with it what its traceback holds."""
        try:
            with self._gate.shared():
                return run(self.backend, collate(encoded, batch, self.backend.device))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            model, device = self.context.model, self.context.device
            # An agent on a graph alone has no parameters that could run elsewhere.
            if len(batch) == 1 and (device.type == "cpu" or next(model.parameters()).is_meta):
                raise
            return None

    def _forward_on_cpu(self, encoded: EncodedSequences, batch: Batch) -> Logits:
        self.degradations.on_cpu += len(batch)
        home, host = self.context, replace(self.context, device=torch.device("cpu"), dtype=torch.float32)
        with self._gate.alone():
            name, reason = self.backend.name, self.fallback_reason
            # Held nowhere while the model is away, so that what it holds of the device's memory is free.
            self._switch(Resolution(EagerBackend(host), reason))
            try:
                place(home.model, host.device, host.dtype)
                self._empty_cache()
                logits = run(self.backend, collate(encoded, batch, host.device)).result()
            finally:
                self._return_home(name)
        return replace(logits, on_cpu=len(batch))

    def _return_home(self, name: str) -> None:
        """The model back to its device and backend, or, where it does not fit any more, to the CPU for good."""
        home = self.context
        try:
            place(home.model, home.device, home.dtype)
            # Built again rather than kept: the parameters lie elsewhere now, and recorded graphs know addresses.
            resolution = resolve_backend(replace(self._choice, name=name), home, False, lambda _: None)
            self._switch(Resolution(resolution.backend, resolution.reason or self.fallback_reason))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self.context = replace(home, device=torch.device("cpu"), dtype=torch.float32)
            place(home.model, self.context.device, self.context.dtype)
            reason = f"the model no longer fits in the memory of {home.device}"
            self._switch(Resolution(EagerBackend(self.context), reason))
            warnings.warn(f"{reason}; running {DEFAULT!r} on the CPU", RuntimeWarning, stacklevel=5)


def join(first: Logits, second: Logits) -> Logits:
    """The results of a batch's two halves as of one."""
    width = max(first.logits.shape[1], second.logits.shape[1])
    wide = [
        np.pad(part.logits, ((0, 0), (0, width - part.logits.shape[1])), constant_values=ABSENT_LOGIT)
        for part in (first, second)
    ]
    act = np.concatenate((first.act, second.act))
    return Logits(np.concatenate(wide), act, 1 + first.splits + second.splits, first.on_cpu + second.on_cpu)


@dataclass(frozen=True)
class Launched:
    """A forward pass on its way: `logits` may be read once `copied` has happened on the device."""

    logits: Logits
    copied: torch.cuda.Event | None = None

    @property
    def done(self) -> bool:
        """Whether it ended as it was launched, as on a CPU."""
        return self.copied is None

    def result(self) -> Logits:
        """Waits for this pass, not for those queued after it."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.logits


def forward(backend: Backend, inputs: ModelInputs) -> tuple[Tensor, Tensor]:
    """The backend's own precision, whatever the caller has told torch."""
    with torch.autocast(inputs.input_ids.device.type, enabled=False):
        return backend.forward(inputs)


def run(backend: Backend, inputs: ModelInputs) -> Launched:
    """Queue a forward pass and the copy of what comes out of it."""
    logits, act = forward(backend, inputs)
    if logits.device.type != "cuda":
        return Launched(Logits(logits.numpy(), act.numpy()))
    host = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in (logits, act)]
    for there, here in zip((logits, act), host, strict=True):
        here.copy_(there, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record(torch.cuda.current_stream(logits.device))
    return Launched(Logits(host[0].numpy(), host[1].numpy()), copied)


def one_behind(items: Iterable[T], done: Callable[[T], bool]) -> Iterator[T]:
    """Yield what is done at once, and anything else once the item after it is there, or has failed to come."""
    waiting: list[T] = []
    try:
        for item in items:
            waiting.append(item)
            while len(waiting) > 1 or (waiting and done(waiting[0])):
                yield waiting.pop(0)
    except Exception:
        yield from waiting
        raise
    yield from waiting
