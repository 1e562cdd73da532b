"""A checkpoint as an ONNX graph: exporting it, and the agent that answers with it without loading the PyTorch model.

Owns the graph's shape and its file. `backends.onnx` runs it, and knows the names of its inputs and metadata.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from laya.agent import Agent
from laya.attention import Attention, AttentionSpec, additive, attend
from laya.backends.base import BackendContext
from laya.backends.onnx import FINGERPRINT, GRAPH_FILE, GRAPH_INPUTS, GRAPH_OUTPUTS, MAX_LEN, graph_paths, onnx_device
from laya.checkpoint import Checkpoint, load_model
from laya.errors import BackendError
from laya.inputs import LEAST_MARKERS, ModelInputs
from laya.model import DecisionModel
from laya.opening import LoadOptions, open_named
from laya.operations import Operations
from laya.parameters import shape_model
from laya.precision import choose_device
from laya.settings import Settings, read_settings

OPSET = 18  # what PyTorch's exporter writes without converting
MOST_INLINE_BYTES = 1_900_000_000  # of weights in the file itself; protobuf ends at 2 GiB
TRACED_ROWS, TRACED_TOKENS, TRACED_MARKERS = 3, 40, 5  # all different, and none 0 or 1, so that no two are tied


class ONNXAgent(Agent):
    """An agent on an exported graph: it tokenises, packs and decodes as any other. `model` has no weights."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        onnx_path: str | Path | None = None,
        device: str | torch.device | None = None,
        settings: Settings | None = None,
    ) -> None:
        """`onnx_path` is the graph, None for the one that `export_onnx` writes. Raises BackendError when it cannot
        run."""
        self._onnx_path = None if onnx_path is None else Path(onnx_path).expanduser()
        super().__init__(checkpoint, device=onnx_device(device), backend="onnx", strict=True, settings=settings)

    def set_backend(self, name: str = "onnx", strict: bool = True, warmup: bool | None = None) -> str:  # noqa: ARG002 - it always is
        """Refused but for `onnx`: there is no PyTorch model to run, or to fall back to."""
        if name != "onnx":
            raise BackendError(f"backend {name!r} wants the PyTorch model: laya.load the checkpoint with that backend")
        return super().set_backend(name, strict=True, warmup=warmup)

    def export_aot(self, path: str | Path | None = None) -> Path:  # noqa: ARG002 - nothing is written
        """Refused: there is no PyTorch model to compile."""
        raise BackendError("an artifact is compiled from the PyTorch model: laya.export_aot the checkpoint itself")

    def _make_context(self, asked: str | torch.device | None) -> BackendContext:
        model = shape_model(self.checkpoint.model_config)
        return BackendContext(
            model,
            choose_device(asked),
            torch.float32,
            self.checkpoint,
            self._settings.cache_dir,
            onnx_path=self._onnx_path,
        )


def export_onnx(checkpoint: str | Path | Agent, path: str | Path | None = None, *, opset: int = OPSET) -> Path:
    """Write a checkpoint's forward pass as an ONNX graph in float32, and return its path.

    Inputs, all int64: input_ids and attention_mask (rows, tokens), marker_pos and marker_mask (rows, markers), qtype
    (rows); outputs, float32: logits (rows, markers) and act_logits (rows, actions). Rows, tokens and markers may be any
    number, markers 2 at least. `checkpoint` is what `load` takes, or an agent, whose max_len the graph keeps; `path` a
    file, or a folder that gets `laya.onnx`. None is where `backend="onnx"` looks: the checkpoint's folder, or, for one
    from the Hub, ~/.cache/laya/onnx. The file appears whole or not at all; weights that do not fit in it lie beside it.
    Raises CheckpointError, or BackendError when it cannot be exported or written.
    """
    if isinstance(checkpoint, Agent):
        opened = checkpoint.checkpoint
    else:
        opened, _ = open_named(checkpoint, LoadOptions(), read_settings())
    if path is None:
        target = graph_paths(opened, read_settings().cache_dir)[0]
    else:
        target = Path(path).expanduser().absolute()
        target = target / GRAPH_FILE if target.is_dir() else target
    graph = _trace(load_model(opened, torch.device("cpu"), torch.float32), opset)
    graph.metadata_props.update({FINGERPRINT: opened.fingerprint, MAX_LEN: str(opened.max_len)})
    _name_axes(graph)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _write(graph, target, opened.fingerprint)
    except OSError as error:
        raise BackendError(f"{target}: cannot be written: {error}") from error
    return target


class _RowsModel(nn.Module):
    """The model over rows of padded tokens. Its steps say nothing of sizes that a trace would turn into constants."""

    def __init__(self, model: DecisionModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, marker_pos: Tensor, marker_mask: Tensor, qtype: Tensor
    ) -> tuple[Tensor, Tensor]:
        rows, length = input_ids.shape
        row, column = torch.arange(rows), torch.arange(length)
        start = torch.arange(rows + 1) * length
        inputs = ModelInputs(
            input_ids=input_ids.flatten(),
            positions=column.expand(rows, length).flatten(),
            sequence=row[:, None].expand(rows, length).flatten(),
            offsets=start,
            markers=marker_pos + start[:-1, None],
            marker_counts=marker_mask.long().sum(dim=1),
            qtype=qtype,
            longest=length,
            equal=True,
        )
        logits, act = self.model(inputs, _RowsOperations(attention_mask))
        return logits, act


class _RowsOperations(Operations):
    def __init__(self, attention_mask: Tensor) -> None:
        self._mask = attention_mask

    def attention(self, inputs: ModelInputs, spec: AttentionSpec) -> Attention:
        return _RowsAttention(inputs, spec, self._mask)


class _RowsAttention(Attention):
    """Both masks always, where `PaddedAttention` asks how long the sequences are."""

    def __init__(self, inputs: ModelInputs, spec: AttentionSpec, attention_mask: Tensor) -> None:
        super().__init__(inputs, spec)
        self._shape = attention_mask.shape
        position = torch.arange(attention_mask.shape[1])
        real = attention_mask.bool()[:, None, None, :]
        distance = (position[:, None] - position).abs()
        self._full = additive(real, spec.dtype)
        # Far into the padding a query would see no key at all, and softmax over nothing is NaN: it always sees itself.
        self._sliding = additive(((distance <= spec.reach) & real) | (distance == 0), spec.dtype)

    def within(self, query: Tensor, key: Tensor, value: Tensor, reach: int | None) -> Tensor:
        mask = self._full if reach is None else self._sliding
        return attend(self._rows(query), self._rows(key), self._rows(value), mask).flatten(0, 1)

    def at(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend(query, self._rows(key), self._rows(value), self._full)

    def _rows(self, x: Tensor) -> Tensor:
        return x.view(*self._shape, *x.shape[1:])


def _trace(model: DecisionModel, opset: int) -> Any:
    """The model as an onnx_ir.Model."""
    dims = {name: torch.export.Dim(name, min=1) for name in ("rows", "tokens")}
    dims["markers"] = torch.export.Dim("markers", min=LEAST_MARKERS)
    sizes = {"rows": TRACED_ROWS, "tokens": TRACED_TOKENS, "markers": TRACED_MARKERS}
    example = [torch.ones([sizes[axis] for axis in axes], dtype=torch.int64) for axes in GRAPH_INPUTS.values()]
    dynamic = tuple({place: dims[axis] for place, axis in enumerate(axes)} for axes in GRAPH_INPUTS.values())
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # about the insides of PyTorch's exporter
        program = torch.export.export(_RowsModel(model), tuple(example), dynamic_shapes=dynamic, strict=False)
        return _exporter()(
            program,
            dynamo=True,
            input_names=list(GRAPH_INPUTS),
            output_names=list(GRAPH_OUTPUTS),
            opset_version=opset,
            verbose=False,
        ).model


def _exporter() -> Callable[..., Any]:
    try:
        import onnxscript  # noqa: F401, PLC0415 - an extra, which torch.onnx.export imports late
    except ImportError as error:
        raise BackendError(
            "exporting needs onnxscript: pip install onnxscript (the extra `onnx` of laya-batch brings it)"
        ) from error
    return torch.onnx.export


def _name_axes(graph: Any) -> None:
    """Call the inputs' and outputs' axes what they are, for whoever looks at the file."""
    from onnx_ir import Shape  # noqa: PLC0415 - comes with onnxscript

    values, names = (*graph.graph.inputs, *graph.graph.outputs), (*GRAPH_INPUTS.values(), *GRAPH_OUTPUTS.values())
    for value, axes in zip(values, names, strict=True):
        value.shape = Shape(
            size if isinstance(size, int) else axis for size, axis in zip(value.shape, axes, strict=True)
        )


def _write(graph: Any, target: Path, fingerprint: str) -> None:
    """Write beside the target, then move: first the weights under a name of their own, then the graph that names it."""
    import onnx_ir  # noqa: PLC0415 - comes with onnxscript

    size = sum(value.const_value.nbytes for value in graph.graph.initializers.values())
    weights = f"{target.name}.{fingerprint[:12]}.data" if size > MOST_INLINE_BYTES else None
    with TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as folder:
        onnx_ir.save(graph, Path(folder) / target.name, external_data=weights)
        if weights is not None:
            (Path(folder) / weights).replace(target.with_name(weights))
        (Path(folder) / target.name).replace(target)
