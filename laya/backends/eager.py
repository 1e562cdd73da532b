"""The eager backend: the model as it is written, on any device."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from laya.backends.base import Backend, BackendContext
from laya.model import ModelInputs

# Not cuDNN's: it builds a plan for every new shape, which takes as long as the whole forward pass of a batch.
ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class EagerBackend(Backend):
    name = "eager"

    def __init__(self, context: BackendContext) -> None:
        self._model = context.model
        self._dtype = context.dtype

    @property
    def mask_bytes_per_element(self) -> int:
        return self._dtype.itemsize

    def forward(self, inputs: ModelInputs) -> tuple[Tensor, Tensor]:
        with torch.inference_mode(), sdpa_kernel(ATTENTION):
            logits, act = self._model(trim(inputs) if inputs.lengths.device.type == "cpu" else inputs)
        return logits, act


def trim(inputs: ModelInputs) -> ModelInputs:
    """The inputs without the columns that are padding in every sequence.

    A CPU gains by any shorter length; a GPU would wait to read the lengths, and wants its multiples of 16.
    """
    shortest, longest = (int(length) for length in inputs.lengths.aminmax())
    return replace(inputs, input_ids=inputs.input_ids[:, :longest], padded=shortest < longest)


def build_eager(context: BackendContext) -> Backend:
    return EagerBackend(context)
