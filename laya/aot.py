"""Compiled ahead of time: an artifact that holds a checkpoint's forward pass for one kind of device.

Owns making an artifact, finding one, refusing one that does not fit, and loading its program, which has the code alone:
the parameters stay the checkpoint's. Running it is `backends.aot`'s.
"""

import ctypes
import functools
import hashlib
import importlib
import inspect
import json
import subprocess
import sys
import warnings
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tenacity import retry, retry_if_exception, stop_after_attempt
from torch import Tensor, nn

from laya.backends.compile import expected_compiler_warnings, forward_step, step_arguments
from laya.checkpoint import Checkpoint
from laya.compiled_code import import_flash_attention
from laya.errors import ArtifactMisfitError, BackendError, BackendUnavailableError, compiler_words
from laya.inputs import inputs_of_rows, widen
from laya.model import DecisionModel
from laya.operations import Operations

SUFFIX = ".pt2"
LOADING_S = 300  # in which a process must have loaded an artifact
ATTEMPTS = 3  # to compile an artifact
RUNNERS = 2  # passes that may be on the device at once: one runs while the next is queued
KEYS = ("checkpoint", "code", "torch", "architecture", "dtype", "max_len")
# What an artifact is compiled from, and what its inputs and parameters are laid out by.
SOURCES = ("aot", "attention", "backends.compile", "compiled_code", "inputs", "model", "operations", "parameters")


class AheadOfTimeModel(nn.Module):
    """A model whose forward pass takes tensors alone."""

    def __init__(self, model: DecisionModel, operations: Operations) -> None:
        super().__init__()
        self.model = model
        self._step = forward_step(model, operations)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        return self._step(*tensors)

    def constants(self, names: list[str]) -> dict[str, Tensor]:
        """The parameters and buffers an artifact asks for by name."""
        everything: dict[str, Tensor] = dict([*self.named_parameters(), *self.named_buffers()])
        return {name: everything[name].detach() for name in names}


def describe(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """What an artifact must have been made for."""
    return {
        "checkpoint": checkpoint.fingerprint,
        "code": code(),
        "torch": torch.__version__,
        "architecture": architecture(device),
        "dtype": str(dtype).removeprefix("torch."),
        "max_len": str(checkpoint.max_len),
    }


@functools.cache
def code() -> str:
    """A digest of the modules that an artifact is made from."""
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update(inspect.getsource(importlib.import_module(f"laya.{name}")).encode())
    return digest.hexdigest()[:12]


def architecture(device: torch.device) -> str:
    """sm_90 and its like; for a CPU, its vector instructions."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"sm_{major}{minor}"
    return f"{device.type}-{torch.backends.cpu.get_cpu_capability()}"


def file_name(description: Mapping[str, str]) -> str:
    """The artifact's name in a cache, which holds those of many checkpoints."""
    parts = (description["checkpoint"][:12], *(description[key] for key in KEYS[1:]))
    return "-".join(parts).replace("+", "_") + SUFFIX


def artifact_path(asked: Path | None, cache: Path, description: Mapping[str, str]) -> Path:
    """Where the artifact goes: into a folder, the cache's when None, or to a file. BackendError for another kind."""
    if asked is None or asked.is_dir():
        return (asked or cache) / file_name(description)
    if asked.suffix != SUFFIX:
        raise BackendError(
            f"{asked}: expected a folder, or a file that ends in {SUFFIX}, as those do that are looked for"
        )
    return asked


def write_artifact(model: DecisionModel, operations: Operations, description: Mapping[str, str], path: Path) -> None:
    """Compile the model for the device it is on, which takes minutes, and write the artifact at once.

    BackendError, and no artifact, when it does not compile, or a process that loads it does not survive that.
    """
    device = next(model.parameters()).device
    ahead = AheadOfTimeModel(model, operations)
    arguments = step_arguments(_example(device), 32)
    sizes = tuple(dict.fromkeys(range(tensor.dim()), torch.export.Dim.DYNAMIC) for tensor in arguments)
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        torch.no_grad(),
        expected_compiler_warnings(),
        TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as folder,
    ):
        warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)  # torch's, of its own use of it
        program = torch.export.export(ahead, arguments, dynamic_shapes=(sizes,), strict=False)
        unfinished = Path(folder) / f"artifact{SUFFIX}"
        options = {
            "aot_inductor.package_constants_in_so": False,
            "aot_inductor.metadata": {f"laya_{key}": value for key, value in description.items()},
        }
        try:
            compile_program(program, unfinished, options)
        except RuntimeError as error:
            raise BackendError(f"the model did not compile: {compiler_words(error)}") from error
        check_loads(unfinished, device)
        unfinished.replace(path)


def is_compile_error(error: BaseException) -> bool:
    """Whether the C++ compiler refused what torch wrote."""
    from torch._inductor.exc import CppCompileError  # noqa: PLC0415 - the compiler takes long to import

    return isinstance(getattr(error, "inner_exception", None), CppCompileError)


# torch 2.11 now and then writes a program with a name that it has not declared: it knows what it has declared by the
# address of an object that is gone, which the next may take. What it has compiled for the device is not compiled anew.
@retry(retry=retry_if_exception(is_compile_error), stop=stop_after_attempt(ATTEMPTS), reraise=True)
def compile_program(program: torch.export.ExportedProgram, path: Path, options: dict[str, Any]) -> None:
    """Write the package. RuntimeError, torch's own, when it does not compile."""
    torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=options)


def check_loads(artifact: Path, device: torch.device) -> None:
    """BackendError unless a process of its own can load the artifact: what is native in one can end any."""
    # It finds modules where this process does, and not in its working folder.
    program = f"import sys; sys.path[:] = {sys.path!r}; import torch, laya.aot; " + (
        "laya.aot.load_program(sys.argv[1], torch.device(sys.argv[2]))"
    )
    command = [sys.executable, "-P", "-X", "faulthandler", "-c", program, str(artifact), str(device)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LOADING_S)
    except subprocess.TimeoutExpired as error:
        raise BackendError(f"the artifact was compiled, but loading it did not end in {LOADING_S} s") from error
    if done.returncode:
        said = next((line for line in reversed(done.stderr.splitlines()) if "Error" in line), done.stderr[:200])
        raise BackendError(f"the artifact was compiled, but a process that loaded it ended ({done.returncode}): {said}")


def load_program(artifact: str, device: torch.device) -> Any:
    """The artifact's program, without parameters. RuntimeError when it cannot be loaded."""
    with suppress(OSError):
        # Some compilers link the C++ runtime into the program. Two in a process share half of their state and crash;
        # where torch's is visible to all, the program takes that.
        ctypes.CDLL("libstdc++.so.6", mode=ctypes.RTLD_GLOBAL)
    if device.type == "cuda":
        import_flash_attention()  # the program calls its operator
        torch.cuda.init()  # type: ignore[no-untyped-call]
    index = -1 if device.type == "cpu" else device.index or 0
    # Not `torch._inductor.aoti_load_package`: it asks the compiler about this machine, which takes up to a minute, and
    # where loading fails it loads a second time.
    return torch._C._aoti.AOTIModelPackageLoader(artifact, "model", False, RUNNERS, index)


def find_artifact(folders: Sequence[Path], wanted: Mapping[str, str]) -> Path:
    """Return the first artifact that fits; the last folder holds those of other checkpoints, too.

    Raises ArtifactMisfitError when there are some for this checkpoint and none fits, BackendUnavailableError when there
    is none for it, saying what was found instead.
    """
    refused, of_checkpoint = [], False
    for folder in folders:
        for path in sorted(folder.glob(f"[!.]*{SUFFIX}")):
            reason = misfit(path, wanted)
            if reason is None:
                return path
            refused.append(reason)
            of_checkpoint |= folder != folders[-1] or path.name.startswith(wanted["checkpoint"][:12])
    if of_checkpoint:
        raise ArtifactMisfitError(f"{'; '.join(refused)}; make another with laya.export_aot(checkpoint)")
    where = " or ".join(str(folder) for folder in folders)
    raise BackendUnavailableError(
        "; ".join(refused) or f"no artifact lies in {where}; make one with laya.export_aot(checkpoint)"
    )


def misfit(path: Path, wanted: Mapping[str, str]) -> str | None:
    """Why the artifact at `path` cannot run what is wanted; None when it can."""
    try:
        found = read_description(path)
    except (OSError, EOFError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        return f"{path}: expected an artifact of laya.export_aot: {error}"
    differences = [
        f"{key} {wanted[key]} is wanted, it was made for {found.get(key)}"
        for key in KEYS
        if found.get(key) != wanted[key]
    ]
    return f"{path}: {'; '.join(differences)}" if differences else None


def read_description(path: Path) -> dict[str, str]:
    """What the artifact says it was made for. Raises ValueError when it says nothing, or holds no program."""
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        if not any(name.endswith(".so") for name in names):
            raise ValueError("it holds no program")
        for name in names:
            if name.endswith("_metadata.json"):
                metadata = json.loads(archive.read(name))
                if not isinstance(metadata, dict):
                    break
                return {key: metadata.get(f"laya_{key}", "?") for key in KEYS}
    raise ValueError("it has no description")


def _example(device: torch.device) -> Any:
    """Inputs whose sizes all differ, so that none is taken for another."""
    ids = torch.zeros((3, 24), dtype=torch.int64, device=device)
    markers = torch.zeros((3, 2), dtype=torch.int64, device=device)
    counts = torch.full((3,), 2, dtype=torch.int64, device=device)
    return widen(inputs_of_rows(ids, markers, counts, torch.zeros_like(counts)), 80, 5, 4)
