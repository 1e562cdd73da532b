"""The aot backend: an artifact that `laya.export_aot` compiled, run on the checkpoint's parameters."""

from pathlib import Path

import torch
from torch import Tensor

from laya.aot import AheadOfTimeModel, describe, find_artifact
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
        index = context.device.index if context.device.type == "cuda" else -1
        self._compiled = torch._inductor.aoti_load_package(str(artifact), device_index=index)
        ahead = AheadOfTimeModel(context.model, self._operations)
        # Held here, since the artifact reads them where they lie.
        self._constants = ahead.constants(self._compiled.get_constant_fqns())
        self._compiled.load_constants(self._constants, check_full_update=True, user_managed=True)

    def forward(self, inputs: ModelInputs) -> tuple[Tensor, Tensor]:
        rows, columns = inputs.markers.shape
        with torch.inference_mode():
            logits, act = self._compiled(*plural_arguments(inputs))
        return logits[:rows, :columns], act[:rows]


def build_aot(context: BackendContext) -> Backend:
    """Raises BackendUnavailableError when no artifact fits, BackendError when one cannot be loaded."""
    artifact = find_artifact(context.artifact_folders, describe(context.checkpoint, context.device, context.dtype))
    try:
        return AotBackend(context, artifact)
    except RuntimeError as error:
        raise BackendError(f"{artifact}: {error}") from error
