"""The contract of a backend: one forward pass over one packed batch. Owns nothing else.

A backend is built around a model and reads its parameters; it never patches the model, so that removing it leaves
nothing behind. Which backend runs is `selection`'s choice.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from laya.checkpoint import Checkpoint
from laya.inputs import ModelInputs
from laya.model import DecisionModel
from laya.operations import Operations


@dataclass(frozen=True)
class CompileOptions:
    """How the compile backend runs. The defaults are those of backend="compile"; `selection` knows the older flag's.

    `cpu` lets it compile for a CPU; `best_effort` makes a failed warm-up a warning and keeps the backend installed.
    """

    mode: str = "reduce-overhead"
    cpu: bool = False
    warm: bool = True  # run it once when it is installed
    best_effort: bool = False
    cache_dir: Path | None = None  # of compiled code, unless TORCHINDUCTOR_CACHE_DIR says another
    cache_required: bool = False  # a cache_dir that cannot be made is an OSError, not a reason to run another backend


@dataclass(frozen=True)
class BackendContext:
    """What a backend is built from."""

    model: DecisionModel
    device: torch.device
    dtype: torch.dtype  # of the matrix products
    checkpoint: Checkpoint
    cache_dir: Path  # of what was measured, exported or compiled ahead of time
    compiling: CompileOptions = CompileOptions()
    onnx_path: Path | None = None  # of an exported graph; None: where `export_onnx` writes it


class Backend(ABC):
    """Runs the forward pass that `DecisionModel.forward` defines, to within the rounding of its dtype."""

    name: ClassVar[str]
    compiles: ClassVar[bool] = False  # whether its first forward pass takes much longer than the next
    device: torch.device  # where its inputs must lie

    @property
    @abstractmethod
    def mask_bytes_per_element(self) -> int:
        """Bytes of one element of a dense attention mask (sequences, heads, L, L); 0 when the path makes none."""

    @property
    @abstractmethod
    def padded(self) -> bool:
        """Whether a batch costs as many tokens as its longest sequence for every one."""

    @abstractmethod
    def forward(self, inputs: ModelInputs) -> tuple[Tensor, Tensor]:
        """Logits (n, k) and action logits (n, actions), float32 on the device, that no later call overwrites."""

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Release what the backend holds beside the model. Called once, after its last forward."""


class ModelBackend(Backend):
    """One that runs the context's model, by operations of its own."""

    def __init__(self, context: BackendContext, operations: Operations) -> None:
        self.device = context.device
        self._model, self._dtype, self._operations = context.model, context.dtype, operations

    @property
    def mask_bytes_per_element(self) -> int:
        return self._dtype.itemsize if self.padded else 0

    @property
    def padded(self) -> bool:
        return self._operations.padded


def is_out_of_memory(error: BaseException) -> bool:
    """Of a device; CUDA itself and its libraries say so in words alone."""
    words = ("CUDA error: out of memory", "CUDA driver error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or any(said in str(error) for said in words)


# Imports what the backend needs when it is called; raises BackendError with the reason when it cannot run.
BackendFactory = Callable[[BackendContext], Backend]
