"""The aot backend: an artifact that `laya.export_aot` compiled, run on the checkpoint's parameters."""

from pathlib import Path

import torch
from torch import Tensor

from laya.aot import AheadOfTimeModel, describe, find_artifact, load_program
from laya.artifacts import artifact_folders
from laya.backends.base import Backend, BackendContext, ModelBackend
from laya.backends.compile import plural_arguments
from laya.errors import BackendError
from laya.inputs import ModelInputs
from laya.operations import choose_operations


class AotBackend(ModelBackend):
    name = "aot"

    def __init__(self, context: BackendContext, artifact: Path) -> None:
        super().__init__(context, choose_operations(context.device, context.dtype))
        self.artifact = artifact
        self._compiled = load_program(str(artifact), context.device)
        ahead = AheadOfTimeModel(context.model, self._operations)
        # Held here, since the artifact reads them where they lie.
        self._constants = ahead.constants(self._compiled.get_constant_fqns())
        self._compiled.load_constants(self._constants, False, check_full_update=True, user_managed=True)

    def forward(self, inputs: ModelInputs) -> tuple[Tensor, Tensor]:
        rows, columns = inputs.markers.shape
        before = allocation_failures(self.device)
        try:
            with torch.inference_mode():
                logits, act = self._compiled.run(plural_arguments(inputs))
        except RuntimeError as error:
            # The program's errors arrive as plain ones, without what they were about.
            if allocation_failures(self.device) == before:
                raise
            raise torch.OutOfMemoryError(f"{self.artifact.name}: CUDA out of memory") from error
        return logits[:rows, :columns], act[:rows]

    def close(self) -> None:
        for tensor in self._constants.values():  # torch never lets go of those it was given
            tensor.data = tensor.new_empty(0)
        del self._compiled, self._constants


def allocation_failures(device: torch.device) -> int:
    """How often an allocation of this process has found a CUDA device full; 0 for any other."""
    return int(torch.cuda.memory_stats_as_nested_dict(device).get("num_ooms", 0)) if device.type == "cuda" else 0


def build_aot(context: BackendContext) -> Backend:
    """Raises BackendUnavailableError when no artifact fits, BackendError when one cannot be loaded."""
    folders = artifact_folders(context.checkpoint, context.cache_dir, "aot")
    artifact = find_artifact(folders, describe(context.checkpoint, context.device, context.dtype))
    try:
        return AotBackend(context, artifact)
    except (RuntimeError, KeyError) as error:
        raise BackendError(f"{artifact}: {error}") from error
