"""A model's parameters: their shapes, their dtypes, and where they lie. Owns no value of them and no arithmetic."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from laya.model import DecisionModel, ModelConfig


def in_compute_dtype(name: str) -> bool:
    """Whether the parameter `name` takes part in a matrix product that runs in the compute dtype."""
    return name.startswith(("encoder.layers.", "head.layers.")) and "norm" not in name


def place(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Move the model to `device`, its matrix products in `dtype` and all else in float32."""
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(device, dtype if in_compute_dtype(name) else torch.float32)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)


class _Uninitialised(TorchFunctionMode):
    """Leaves parameters as they were allocated.

    Not only to save time: on the meta device PyTorch would import its compiler for it, which sets the environment.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (Tensor.uniform_, Tensor.normal_) or getattr(func, "__module__", "") == nn.init.__name__:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def shape_model(config: ModelConfig) -> DecisionModel:
    """A model whose parameters have shapes and no values, to be given some."""
    with torch.device("meta"), _Uninitialised():
        return DecisionModel(config)


def parameter_shapes(config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    """The keys and shapes a checkpoint of this configuration must have."""
    return {name: tuple(value.shape) for name, value in shape_model(config).state_dict().items()}
