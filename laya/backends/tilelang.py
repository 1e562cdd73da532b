"""The tilelang backend: the model's steps by the kernels of `laya.tl_kernels`, in bf16 or fp16 on CUDA.

The products that have nothing to fuse are left to cuBLAS.
"""

import functools
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor, nn

from laya import tl_kernels as kernels
from laya.attention import Attention, AttentionSpec, PackedAttention
from laya.backends.base import Backend, BackendContext, ModelBackend
from laya.backends.graphs import Graphed
from laya.errors import BackendError, BackendUnavailableError
from laya.inputs import ModelInputs, synthetic_inputs
from laya.model import ModelConfig
from laya.operations import PackedOperations, choose_operations
from laya.tl_kernels.arguments import HALVES, capability
from laya.tl_kernels.kernel import Kernel, compile_together, gathered
from laya.tl_kernels.tiles import BIG_TOKENS, Tiles, kept_file, tuned_tiles


class TileLangAttention(PackedAttention):
    """Reads the packed projection as it lies, rotated as it is made (where there is a tile for that) or afterwards."""

    def __init__(self, inputs: ModelInputs, spec: AttentionSpec, tiles: Tiles) -> None:
        super().__init__(inputs, spec)
        self._tiles = tiles

    def encode(self, x: Tensor, projection: nn.Linear, full: bool) -> Tensor:
        inputs, table, tile = self.inputs, self._table(full), self._tiles.qkv_of(len(x))
        if tile is None:
            qkv = kernels.rope(self.projected(x, projection), inputs.positions, table, inputs.longest)
        else:
            weight = projection.weight
            qkv = kernels.gemm_rope(x.to(weight.dtype), weight, inputs.positions, table, inputs.longest, tile)
        return kernels.attn(qkv, inputs.offsets, inputs.longest, self._reach(full), tiles=self._tiles)

    def mix(self, qkv: Tensor) -> Tensor:
        return kernels.attn(qkv, self.inputs.offsets, self.inputs.longest, None, tiles=self._tiles)


class TileLangOperations(PackedOperations):
    def __init__(self, tiles: Tiles) -> None:
        self._tiles = tiles

    def attention(self, inputs: ModelInputs, spec: AttentionSpec) -> Attention:
        return TileLangAttention(inputs, spec, self._tiles)

    def gated(self, x: Tensor, projection: nn.Linear) -> Tensor:
        tile = self._tiles.geglu_of(len(x))
        if projection.bias is not None or tile is None:
            return super().gated(x, projection)
        return kernels.gemm_geglu(x.to(projection.weight.dtype), projection.weight, tile=tile)

    def add_norm(self, hidden: Tensor, update: Tensor, norm: nn.LayerNorm, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        flat, update = hidden.flatten(0, -2), update.flatten(0, -2)
        summed, normed = kernels.add_ln(flat, update, norm.weight, norm.bias, norm.eps, dtype)
        return summed.view_as(hidden), normed.view_as(hidden)


class TileLangBackend(ModelBackend):
    name = "tilelang"

    def __init__(self, context: BackendContext) -> None:
        operations = TileLangOperations(choose_tiles(context))
        super().__init__(context, operations)
        self._launch = functools.partial(context.model, operations=operations)
        self._run = Graphed(self._launch, context.device, context.checkpoint.max_len)

    def compile_kernels(self) -> None:
        """What small and large batches need, at once; a kernel that there was no room to ask for compiles when called.

        BackendError when one does not compile.
        """
        config = self._model.config
        length = min(config.reach + 2, config.max_len, BIG_TOKENS - 1)  # where the window begins to hide something
        with gathered() as found, suppress(torch.OutOfMemoryError):
            for tokens in (length, BIG_TOKENS):
                self._launch(synthetic_inputs((-(-tokens // length), length, 2), self.device))
        compile_together(found, self.device)

    def forward(self, inputs: ModelInputs) -> tuple[Tensor, Tensor]:
        with torch.inference_mode():
            return self._run(inputs)

    def close(self) -> None:
        del self._run  # and its recordings


def build_tilelang(context: BackendContext) -> Backend:
    """Raises BackendUnavailableError away from CUDA's half precision, for a model of other widths than the kernels', or
    where TileLang is not installed; BackendError when a kernel does not compile or run here.
    """
    if not isinstance(choose_operations(context.device, context.dtype), PackedOperations):
        raise BackendUnavailableError(
            f"it runs bf16 and fp16 on CUDA of compute capability 8.0 or more, not {context.dtype} on {context.device}"
        )
    try:
        trace_kernels(context.checkpoint.model_config, HALVES[context.dtype])
    except ValueError as error:
        raise BackendUnavailableError(str(error)) from error
    backend = TileLangBackend(context)
    # A machine that cannot compile or run the kernels is better found here than at the first batch.
    norm = context.model.encoder.final_norm
    try:
        with torch.inference_mode():
            backend.compile_kernels()
            row = torch.zeros(1, *norm.normalized_shape, device=context.device)
            kernels.add_ln(row, row.to(context.dtype), norm.weight, norm.bias, norm.eps, context.dtype)
            torch.cuda.current_stream(context.device).synchronize()
    except (RuntimeError, ValueError, TypeError) as error:
        raise BackendError(f"a kernel of TileLang's does not run here: {error}") from error
    return backend


def trace_kernels(config: ModelConfig, dtype: str) -> list[Kernel]:
    """A kernel of each width that the model has, traced but not compiled. ValueError when one cannot be that wide."""
    hidden, heads, head_width = config.hidden_size, config.heads, config.hidden_size // config.heads
    traced = [
        kernels.add_ln_kernel(hidden, dtype, dtype, config.norm_bias),
        kernels.rope_kernel(heads, head_width, dtype),
        kernels.attn_kernel(heads, head_width, dtype, config.reach),
        kernels.attn_kernel(config.decision_heads, hidden // config.decision_heads, dtype),
    ]
    if not config.mlp_bias:
        traced.append(kernels.gemm_geglu_kernel(config.intermediate_size, hidden, dtype))
    return traced


def choose_tiles(context: BackendContext) -> Tiles:
    """What was measured for this card and model, or else its architecture's shapes.

    Without those for the projection that rotates what it makes, where this model's cannot.
    """
    config, dtype, found = context.checkpoint.model_config, HALVES[context.dtype], capability(context.device)
    card = torch.cuda.get_device_name(context.device)
    tiles = tuned_tiles(found, kept_file(context.cache_dir / "tiles", card, config, dtype))
    hidden = config.hidden_size
    if not config.attention_bias:
        with suppress(ValueError):
            for tile in filter(None, (tiles.qkv, tiles.qkv_small)):
                kernels.gemm_rope_kernel(hidden, hidden, hidden // config.heads, dtype, tile)
            return tiles
    return replace(tiles, qkv=None, qkv_small=None)
