"""The steps of a forward pass that backends run in different ways; here, each in plain PyTorch.

`model` says in which order they are taken. A backend with kernels of its own overrides the ones it has.
"""

import torch
import torch.nn.functional as F  # noqa: N812 - the name every reader of PyTorch knows
from torch import Tensor, nn

from laya.attention import Attention, AttentionSpec, PackedAttention, PaddedAttention
from laya.compiled_code import import_flash_attention
from laya.inputs import ModelInputs


class Operations:
    """x is (T, d) in the dtype of the matrix products, hidden (T, d) the float32 residual stream."""

    padded = True  # whether attention costs each sequence as much as the longest

    def attention(self, inputs: ModelInputs, spec: AttentionSpec) -> Attention:
        """The attention of one batch."""
        return PaddedAttention(inputs, spec)

    def gated(self, x: Tensor, projection: nn.Linear) -> Tensor:
        """`geglu` of the projection."""
        return geglu(projection(x))

    def add_norm(self, hidden: Tensor, update: Tensor, norm: nn.LayerNorm, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """hidden + update in float32, and its norm as `dtype`."""
        hidden = hidden + update
        return hidden, norm(hidden).to(dtype)


def geglu(projected: Tensor) -> Tensor:
    """The first half (T, d), through exact GELU, times the second (Shazeer 2020, arXiv:2002.05202)."""
    value, gate = projected.chunk(2, dim=-1)
    return F.gelu(value) * gate


class PackedOperations(Operations):
    """With attention over sequences as they lie."""

    padded = False

    def attention(self, inputs: ModelInputs, spec: AttentionSpec) -> Attention:
        return PackedAttention(inputs, spec)


def choose_operations(device: torch.device, dtype: torch.dtype) -> Operations:
    """Plain PyTorch's best for a device: the flash kernels want half precision and compute capability 8.0."""
    half = dtype in (torch.float16, torch.bfloat16)
    if device.type == "cuda" and half and torch.cuda.get_device_capability(device) >= (8, 0):
        import_flash_attention()  # here, where no compiler follows what is imported
        return PackedOperations()
    return Operations()
