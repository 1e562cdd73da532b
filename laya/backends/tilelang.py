"""The tilelang backend: the model's steps by the kernels of `laya.tl_kernels`, in bf16 or fp16 on CUDA.

The products that have nothing to fuse are left to cuBLAS.
"""

import torch
from torch import Tensor, nn

from laya import tl_kernels as kernels
from laya.attention import Attention, AttentionSpec, PackedAttention
from laya.backends.base import Backend, BackendContext, ModelBackend
from laya.errors import BackendUnavailableError
from laya.inputs import ModelInputs
from laya.operations import PackedOperations, choose_operations
from laya.tl_kernels.arguments import HALVES


class TileLangAttention(PackedAttention):
    """Reads the packed projection as it lies, rotated in place."""

    def encode(self, qkv: Tensor, full: bool) -> Tensor:
        inputs = self.inputs
        kernels.rope(qkv, inputs.positions, self._table(full), inputs.longest)
        return kernels.attn(qkv, inputs.offsets, inputs.longest, self._reach(full))

    def mix(self, qkv: Tensor) -> Tensor:
        return kernels.attn(qkv, self.inputs.offsets, self.inputs.longest, None)


class TileLangOperations(PackedOperations):
    def attention(self, inputs: ModelInputs, spec: AttentionSpec) -> Attention:
        return TileLangAttention(inputs, spec)

    def gated(self, x: Tensor, projection: nn.Linear) -> Tensor:
        if projection.bias is not None:
            return super().gated(x, projection)
        return kernels.gemm_geglu(x.to(projection.weight.dtype), projection.weight)

    def add_norm(self, hidden: Tensor, update: Tensor, norm: nn.LayerNorm, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        flat, update = hidden.flatten(0, -2), update.flatten(0, -2)
        summed, normed = kernels.add_ln(flat, update, norm.weight, norm.bias, norm.eps, dtype)
        return summed.view_as(hidden), normed.view_as(hidden)


class TileLangBackend(ModelBackend):
    name = "tilelang"

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context, TileLangOperations())

    def forward(self, inputs: ModelInputs) -> tuple[Tensor, Tensor]:
        with torch.inference_mode():
            logits, act = self._model(inputs, self._operations)
        return logits, act


def build_tilelang(context: BackendContext) -> Backend:
    """Raises BackendUnavailableError away from CUDA's half precision, or where TileLang is not installed.

    BackendError when it cannot compile here.
    """
    if not isinstance(choose_operations(context.device, context.dtype), PackedOperations):
        raise BackendUnavailableError(
            f"it runs bf16 and fp16 on CUDA of compute capability 8.0 or more, not {context.dtype} on {context.device}"
        )
    # One kernel now: a machine that cannot compile is better found here than at the first batch.
    config, dtype = context.checkpoint.model_config, HALVES[context.dtype]
    kernels.add_ln_kernel(config.hidden_size, dtype, dtype, config.norm_bias).compile(context.device)
    return TileLangBackend(context)
