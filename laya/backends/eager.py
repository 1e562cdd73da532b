"""The eager backend: the model as it is written, on any device."""

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from laya.backends.base import Backend, BackendContext
from laya.inputs import ModelInputs
from laya.operations import choose_operations

# Not cuDNN's: it builds a plan for every new shape, which takes as long as the whole forward pass of a batch.
ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class EagerBackend(Backend):
    name = "eager"

    def __init__(self, context: BackendContext) -> None:
        self._model = context.model
        self._dtype = context.dtype
        self._operations = choose_operations(context.device, context.dtype)

    @property
    def mask_bytes_per_element(self) -> int:
        return self._dtype.itemsize if self.padded else 0

    @property
    def padded(self) -> bool:
        return self._operations.padded

    def forward(self, inputs: ModelInputs) -> tuple[Tensor, Tensor]:
        with torch.inference_mode(), sdpa_kernel(ATTENTION):
            logits, act = self._model(inputs, self._operations)
        return logits, act


def build_eager(context: BackendContext) -> Backend:
    return EagerBackend(context)
