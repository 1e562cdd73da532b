"""The onnx backend: the forward pass as a graph that onnxruntime runs. Owns running it; `laya.onnx` exports it.

The graph takes rows of padded tokens, so that other runtimes can call it as easily. It is float32.
"""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from laya.artifacts import artifact_folders
from laya.backends.base import Backend, BackendContext
from laya.checkpoint import Checkpoint
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
# What an input may be declared as: exports of the public package have a boolean marker_mask, ours int64 throughout.
INPUT_DTYPES = {
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(bool)": np.bool_,
    "tensor(float)": np.float32,
}
FINGERPRINT, MAX_LEN = "laya.fingerprint", "laya.max_len"  # metadata of the graph

# In the words of onnxruntime's allocator, and of CUDA.
OUT_OF_MEMORY = ("Failed to allocate memory", "out of memory")

CUDA_PROVIDER, CPU_PROVIDER = "CUDAExecutionProvider", "CPUExecutionProvider"


class OnnxBackend(Backend):
    name = "onnx"
    device = torch.device("cpu")  # wherever the session runs: it moves what it is fed itself

    def __init__(self, session: "InferenceSession") -> None:
        self._session = session
        self._dtypes = {one.name: INPUT_DTYPES[one.type] for one in session.get_inputs()}

    @property
    def mask_bytes_per_element(self) -> int:
        return np.dtype(np.float32).itemsize  # of the attention scores, which the graph makes dense

    @property
    def padded(self) -> bool:
        return True

    def forward(self, inputs: ModelInputs) -> tuple[Tensor, Tensor]:
        try:
            logits, act = self._session.run(list(GRAPH_OUTPUTS), self._feed(inputs))
        except Exception as error:  # onnxruntime's errors share no class of their own
            if any(words in str(error) for words in OUT_OF_MEMORY):
                raise torch.OutOfMemoryError(str(error)) from error
            raise
        return torch.from_numpy(logits), torch.from_numpy(act)

    def _feed(self, inputs: ModelInputs) -> dict[str, Any]:
        return {name: value.astype(self._dtypes[name], copy=False) for name, value in graph_feed(inputs).items()}


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


def graph_paths(checkpoint: Checkpoint, cache_dir: Path) -> list[Path]:
    """Return where a checkpoint's graph may lie: beside it, and in our cache, by its fingerprint."""
    *beside, ours = artifact_folders(checkpoint, cache_dir, "onnx")
    return [*(folder / GRAPH_FILE for folder in beside), ours / f"laya-{checkpoint.fingerprint[:12]}.onnx"]


def find_graph(context: BackendContext) -> Path:
    """Return the graph asked for, or the first one there is. Raises BackendError when there is none."""
    checkpoint, asked = context.checkpoint, context.onnx_path
    paths = [asked] if asked is not None else graph_paths(checkpoint, context.cache_dir)
    for path in paths:
        if path.is_file():
            return path
    where = repr(str(asked)) if asked is not None else None
    arguments = ", ".join(filter(None, (repr(checkpoint.name), where)))
    raise BackendError(
        f"{' or '.join(map(str, paths))}: no such file; write it with laya.export_onnx({arguments}), "
        "or say where it is with onnx_path="
    )


def build_onnx(context: BackendContext) -> Backend:
    """Read the graph of the context's checkpoint. Raises BackendError when it is absent or of another checkpoint."""
    runtime, device = _onnxruntime(), context.device
    path = find_graph(context)
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
    """Refuse a graph that takes or gives something else, or is of another checkpoint; warn where that is not known."""
    _check_signature(session, path)
    checkpoint, found = context.checkpoint, session.get_modelmeta().custom_metadata_map
    if FINGERPRINT not in found:
        warnings.warn(
            f"{path}: records no fingerprint of a checkpoint, so whether it is {checkpoint.name} is not known: its "
            "answers are taken as they are",
            RuntimeWarning,
            stacklevel=2,
        )
    elif found[FINGERPRINT] != checkpoint.fingerprint:
        raise BackendError(
            f"{path}: was exported from the checkpoint {found[FINGERPRINT][:12]}, but {checkpoint.name} has "
            f"fingerprint {checkpoint.fingerprint[:12]}; export it again with laya.export_onnx"
        )
    if MAX_LEN in found and int(found[MAX_LEN]) < checkpoint.max_len:
        raise BackendError(
            f"{path}: was exported for sequences of {found[MAX_LEN]} tokens at most, not {checkpoint.max_len}; "
            "export it again from an agent with that max_len"
        )


def _check_signature(session: "InferenceSession", path: Path) -> None:
    inputs, outputs = session.get_inputs(), {one.name for one in session.get_outputs()}
    names = {one.name for one in inputs}
    if names != GRAPH_INPUTS.keys() or not GRAPH_OUTPUTS.keys() <= outputs:
        raise BackendError(
            f"{path}: expected a graph from {', '.join(GRAPH_INPUTS)} to {', '.join(GRAPH_OUTPUTS)}, found one from "
            f"{', '.join(sorted(names))} to {', '.join(sorted(outputs))}"
        )
    for one in inputs:
        if one.type not in INPUT_DTYPES:
            raise BackendError(f"{path}: {one.name}: expected one of {', '.join(INPUT_DTYPES)}, found {one.type}")
        if fixed := [size for size in one.shape if isinstance(size, int)]:
            raise BackendError(
                f"{path}: {one.name}: has a fixed dimension of {fixed[0]}, but batches differ in rows, tokens and "
                "markers; export the graph with dynamic axes"
            )


def _onnxruntime() -> Any:
    try:
        import onnxruntime  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise BackendError(
            "onnxruntime is not installed: pip install onnxruntime (the extra `onnx` of laya-batch brings it)"
        ) from error
    return onnxruntime
