"""The compile backend: the model through torch.compile, with every size of a batch dynamic.

Owns what keeps the number of graphs fixed, and where compiled code is kept. On CUDA the packed attention has no mask;
on a CPU, where only the older flag compiles, there is one.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from laya.backends.base import Backend, BackendContext, ModelBackend
from laya.backends.graphs import Forward, Graphed
from laya.compiled_code import keep_compiled
from laya.errors import BackendError, BackendUnavailableError
from laya.inputs import LEAST_MARKERS, ModelInputs, widen
from laya.model import DecisionModel
from laya.operations import Operations, choose_operations

Step = Callable[..., tuple[Tensor, Tensor]]


class CompileBackend(ModelBackend):
    """Compiles one graph for all sizes; with `reduce-overhead`, small batches are replayed as CUDA graphs of it."""

    name = "compile"
    compiles = True

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context, choose_operations(context.device, context.dtype))
        self._run = compiled_forward(context.model, self._operations)
        # Where sequences are padded, a graph shape would pad its filling and every empty sequence too.
        if context.compiling.mode == "reduce-overhead" and context.device.type == "cuda" and not self.padded:
            self._run = Graphed(self._run, context.device, context.checkpoint.max_len)

    def forward(self, inputs: ModelInputs) -> tuple[Tensor, Tensor]:
        # Not inference mode, a caller's included: torch compiles again for tensors that were made in it.
        with torch.inference_mode(False), torch.no_grad():
            return self._run(inputs)

    def close(self) -> None:
        del self._run  # and its recordings


def compiled_forward(model: DecisionModel, operations: Operations) -> Forward:
    """The forward pass through torch.compile, which happens when it is first called."""
    # Not dynamic=True, with which a constant of the model is taken for a size too, and traced twice.
    step: Step = torch.compile(with_own_code(forward_step(model, operations)), fullgraph=True, backend=inductor)

    def forward(inputs: ModelInputs) -> tuple[Tensor, Tensor]:
        rows, columns = inputs.markers.shape
        logits, act = step(*mark_sizes(plural_arguments(inputs)))
        return logits[:rows, :columns], act[:rows]

    return forward


def inductor(graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
    """Compile a graph with Inductor, torch's own compiler, without the warnings that nobody can act on."""
    from torch._inductor.compile_fx import compile_fx  # noqa: PLC0415 - the compiler takes long to import

    with expected_compiler_warnings():
        return compile_fx(graph, example_inputs)


@contextmanager
def expected_compiler_warnings() -> Iterator[None]:
    """Ignore what Inductor says on CUDA of choices that are meant, also where warnings are errors.

    What is computed in float32 stays so (no TensorFloat32), and a softmax that is split over blocks is an ordinary one.
    """
    with warnings.catch_warnings():
        for message in ("TensorFloat32 tensor cores", r"\s*Online softmax is disabled"):
            warnings.filterwarnings("ignore", message, UserWarning)
        yield


def forward_step(model: DecisionModel, operations: Operations) -> Step:
    """The forward pass over tensors alone, as a compiler or an exporter wants it.

    The last argument's length (L) stands for `longest`: a size can be dynamic where a number would be a constant.
    """

    def step(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        input_ids, positions, sequence, offsets, markers, marker_counts, qtype, column = tensors
        longest = column.shape[0]
        inputs = ModelInputs(input_ids, positions, sequence, offsets, markers, marker_counts, qtype, longest)
        logits, act = model(inputs, operations)
        return logits, act

    return step


def with_own_code(step: Step) -> Step:
    """The same function with a code object of its own.

    By that torch counts what it compiles, up to a limit: else all models of a process would share one limit, and each
    would take its part of it again whenever it came back to its device.
    """
    return FunctionType(step.__code__.replace(), step.__globals__, step.__name__, closure=step.__closure__)


def step_arguments(inputs: ModelInputs, longest: int) -> tuple[Tensor, ...]:
    """What `forward_step` takes."""
    return (*inputs.tensors, torch.empty(longest, dtype=torch.int8, device=inputs.input_ids.device))


def plural_arguments(inputs: ModelInputs) -> tuple[Tensor, ...]:
    """`step_arguments` of which no size is 1: for that, torch would want another graph."""
    rows, columns = inputs.markers.shape
    more = rows < 2
    inputs = widen(inputs, inputs.input_ids.shape[0] + more, rows + more, max(columns, LEAST_MARKERS))
    return step_arguments(inputs, max(inputs.longest, 2))


def mark_sizes(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The tensors, with every size marked as one that changes, so that a compiler does not tie equal ones."""
    # Importing it lets torch place the compiler's cache, unless `keep_compiled` has done so: now it is to be used.
    from torch._dynamo import maybe_mark_dynamic  # noqa: PLC0415

    # No views: the graph would depend on the sizes of what they are views of.
    tensors = tuple(tensor.clone() if tensor._is_view() else tensor for tensor in tensors)
    for tensor in tensors:
        maybe_mark_dynamic(tensor, list(range(tensor.dim())))
    return tensors


def build_compile(context: BackendContext) -> Backend:
    """Raises BackendUnavailableError off CUDA, unless asked to compile for the CPU.

    BackendError, or OSError where the options say so, when the folder of compiled code cannot be made.
    """
    options = context.compiling
    if context.device.type != "cuda" and not options.cpu:
        raise BackendUnavailableError(f"it compiles for CUDA, and the device is {context.device.type}")
    if options.cache_dir is not None:
        try:
            keep_compiled(options.cache_dir)
        except OSError as error:
            if options.cache_required:
                raise
            raise BackendError(f"compiled code cannot be kept: {error}") from error
    return CompileBackend(context)
