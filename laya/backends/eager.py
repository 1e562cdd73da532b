"""The eager backend: the model as it is written, on any device."""

from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from laya.backends.base import Backend, BackendContext, ModelBackend
from laya.inputs import ModelInputs
from laya.operations import choose_operations

# Not cuDNN's: it builds a plan for every new shape, which takes as long as the whole forward pass of a batch.
ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class EagerBackend(ModelBackend):
    name = "eager"

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context, choose_operations(context.device, context.dtype))

    def forward(self, inputs: ModelInputs) -> tuple[Tensor, Tensor]:
        with torch.inference_mode(), sdpa_kernel(ATTENTION) if self.padded else nullcontext():
            logits, act = self._model(inputs, self._operations)
        return logits, act


def build_eager(context: BackendContext) -> Backend:
    return EagerBackend(context)
