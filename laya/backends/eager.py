"""The eager backend: the model as it is written, on any device."""

import torch
from torch import Tensor

from laya.backends.base import Backend, BackendContext
from laya.model import ModelInputs


class EagerBackend(Backend):
    name = "eager"

    def __init__(self, context: BackendContext) -> None:
        self._model = context.model
        self._dtype = context.dtype

    @property
    def mask_bytes_per_element(self) -> int:
        return self._dtype.itemsize

    def forward(self, inputs: ModelInputs) -> tuple[Tensor, Tensor]:
        with torch.inference_mode():
            logits, act = self._model(inputs)
        return logits, act


def build_eager(context: BackendContext) -> Backend:
    return EagerBackend(context)
