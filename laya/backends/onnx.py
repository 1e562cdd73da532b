"""The onnx backend: the forward pass as a graph that onnxruntime runs. Owns running it; `laya.onnx` exports it.

The graph takes rows of padded tokens, so that other runtimes can call it as easily. It is float32.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from laya.backends.base import Backend, BackendContext
from laya.errors import BackendError
from laya.inputs import ModelInputs

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

GRAPH_FILE = "laya.onnx"
GRAPH_INPUTS = {
    "input_ids": ("rows", "tokens"),
    "attention_mask": ("rows", "tokens"),
    "marker_pos": ("rows", "markers"),
    "marker_mask": ("rows", "markers"),
    "qtype": ("rows",),
}
GRAPH_OUTPUTS = {"logits": ("rows", "markers"), "act_logits": ("rows", "actions")}
FINGERPRINT, MAX_LEN = "laya.fingerprint", "laya.max_len"  # metadata of the graph

# In the words of onnxruntime's allocator, and of CUDA.
OUT_OF_MEMORY = ("Failed to allocate memory", "out of memory")

CUDA_PROVIDER, CPU_PROVIDER = "CUDAExecutionProvider", "CPUExecutionProvider"


class OnnxBackend(Backend):
    name = "onnx"
    device = torch.device("cpu")  # wherever the session runs: it moves what it is fed itself

    def __init__(self, session: "InferenceSession") -> None:
        self._session = session

    @property
    def mask_bytes_per_element(self) -> int:
        return np.dtype(np.float32).itemsize  # of the attention scores, which the graph makes dense

    @property
    def padded(self) -> bool:
        return True

    def forward(self, inputs: ModelInputs) -> tuple[Tensor, Tensor]:
        try:
            logits, act = self._session.run(list(GRAPH_OUTPUTS), graph_feed(inputs))
        except Exception as error:  # onnxruntime's errors share no class of their own
            if any(words in str(error) for words in OUT_OF_MEMORY):
                raise torch.OutOfMemoryError(str(error)) from error
            raise
        return torch.from_numpy(logits), torch.from_numpy(act)


def graph_feed(inputs: ModelInputs) -> dict[str, Any]:
    """A packed batch as the graph's inputs: int64 arrays, one row a sequence, padded on the right with zeros."""
    ids, positions, sequence, offsets, markers, counts, qtype = (part.numpy() for part in inputs.tensors)
    input_ids = np.zeros((len(qtype), inputs.longest), dtype=np.int64)
    attention_mask = np.zeros_like(input_ids)
    input_ids[sequence, positions] = ids
    attention_mask[sequence, positions] = 1
    there = np.arange(markers.shape[1]) < counts[:, None]
    marker_pos = np.where(there, markers - offsets[:-1, None], 0)
    values = (input_ids, attention_mask, marker_pos, there.astype(np.int64), qtype)
    return dict(zip(GRAPH_INPUTS, values, strict=True))


def onnx_device(asked: str | torch.device | None) -> str | torch.device:
    """The device asked for; else a GPU where both PyTorch and onnxruntime see one, and the CPU elsewhere."""
    if asked is not None:
        return asked
    return "cuda" if torch.cuda.is_available() and CUDA_PROVIDER in _onnxruntime().get_available_providers() else "cpu"


def build_onnx(context: BackendContext) -> Backend:
    """Read the graph of the context's checkpoint. Raises BackendError when it is absent or of another checkpoint."""
    runtime, checkpoint, device = _onnxruntime(), context.checkpoint, context.device
    path = context.onnx_path or checkpoint.path / GRAPH_FILE
    if not path.is_file():
        raise BackendError(
            f"{path}: no such file; write it with laya.export_onnx({checkpoint.name!r}, {str(path)!r}), "
            "or say where it is with onnx_path="
        )
    if device.type == "cuda" and CUDA_PROVIDER not in runtime.get_available_providers():
        raise BackendError("onnxruntime finds no CUDA here; install onnxruntime-gpu, or load with device='cpu'")
    cuda = [(CUDA_PROVIDER, {"device_id": device.index or 0})] if device.type == "cuda" else []
    try:
        session = runtime.InferenceSession(str(path), _session_options(runtime), providers=[*cuda, CPU_PROVIDER])
    except Exception as error:  # onnxruntime's errors share no class of their own
        raise BackendError(f"{path}: onnxruntime cannot read it: {error}") from error
    _check_graph(session, path, context)
    return OnnxBackend(session)


def _session_options(runtime: Any) -> Any:
    """As many threads as torch has, which sleep while they wait, as torch's do (`laya.threads`)."""
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def _check_graph(session: "InferenceSession", path: Path, context: BackendContext) -> None:
    checkpoint, found = context.checkpoint, session.get_modelmeta().custom_metadata_map
    if found.get(FINGERPRINT) != checkpoint.fingerprint:
        whose = f"the checkpoint {found[FINGERPRINT][:12]}" if FINGERPRINT in found else "no checkpoint of laya's"
        raise BackendError(
            f"{path}: was exported from {whose}, but {checkpoint.name} has fingerprint {checkpoint.fingerprint[:12]}; "
            "export it again with laya.export_onnx"
        )
    if int(found[MAX_LEN]) < checkpoint.max_len:
        raise BackendError(
            f"{path}: was exported for sequences of {found[MAX_LEN]} tokens at most, not {checkpoint.max_len}; "
            "export it again from an agent with that max_len"
        )


def _onnxruntime() -> Any:
    try:
        import onnxruntime  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise BackendError(
            "onnxruntime is not installed: pip install onnxruntime (the extra `onnx` of laya-batch brings it)"
        ) from error
    return onnxruntime
