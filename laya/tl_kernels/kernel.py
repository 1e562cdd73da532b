"""A TileLang program that is traced where it is made and compiled for CUDA where it is first called.

Owns importing TileLang, compiling once, several at a time where they are known before, and launching. Does not own any
arithmetic, nor the checks of arguments (`arguments`): a `Kernel` trusts the wrapper that calls it.
"""

import functools
import importlib
import os
import threading
import warnings
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from laya.errors import BackendError, BackendUnavailableError

P = ParamSpec("P")
R = TypeVar("R")


@functools.cache
def tilelang() -> Any:
    """The TileLang package. BackendError when it is not installed."""
    try:
        with warnings.catch_warnings():  # of the packages it stands on, none of them about what is done here
            warnings.simplefilter("ignore", DeprecationWarning)
            return importlib.import_module("tilelang")
    except ImportError as error:
        raise BackendUnavailableError(
            f"TileLang does not import ({error}): install laya-batch with its extra `gpu`, which brings it and nvcc "
            "(Linux only)"
        ) from error


def language() -> Any:
    """TileLang's language module, `T` in every kernel."""
    return tilelang().language


_tracing = threading.RLock()


def made_once(factory: Callable[P, R]) -> Callable[P, R]:
    """The factory, called once for each set of arguments, by one thread at a time: tracing is not reentrant."""
    cache = functools.cache(factory)

    @functools.wraps(factory)
    def locked(*args: P.args, **kwargs: P.kwargs) -> R:
        with _tracing:
            return cache(*args, **kwargs)  # type: ignore[arg-type]  # a cache knows no signature but "hashable"

    return locked


_gathering = threading.local()


@contextmanager
def gathered() -> Iterator[Collection["Kernel"]]:
    """Those kernels that this thread calls within the block. None is launched, so their outputs stay as they were."""
    _gathering.kernels = found = dict[Kernel, None]()
    try:
        yield found.keys()
    finally:
        del _gathering.kernels


def compile_together(kernels: Collection["Kernel"], device: torch.device) -> None:
    """Compile them for `device` at the same time, in TileLang's compiler and nvcc. BackendError as `Kernel.compile`."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda kernel: kernel.compile(device), kernels))


class Kernel:
    """A traced program, `prim_func`, that any machine can lower and a CUDA device can run.

    `fast_math` allows approximate exponentials and divisions (a few units in the last place of float32);
    `specialised` allows a warp group of its own for the copies, where the architecture has one (sm_90); `checked`
    guards every access that the program does not prove to be within its buffer.
    """

    def __init__(self, prim_func: Any, fast_math: bool = False, specialised: bool = True, checked: bool = True) -> None:
        self.prim_func = prim_func
        self.pass_configs = {
            "tl.enable_fast_math": fast_math,
            "tl.disable_warp_specialized": not specialised,
            "tl.disable_safe_memory_legalize": not checked,
        }
        self._lock = threading.Lock()
        self._compiled: dict[int, Any] = {}  # by index of the device

    def __call__(self, *arguments: Tensor | int | float, device: torch.device) -> None:
        """Launch on the current stream of `device`, after compiling when it is the first call there."""
        if (found := getattr(_gathering, "kernels", None)) is not None:
            found[self] = None
            return
        current = torch.cuda.current_device()
        index = current if device.index is None else device.index
        launch = self._compiled.get(index) or self.compile(device)
        if index == current:
            launch(*arguments)
        else:
            with torch.cuda.device(index):
                launch(*arguments)

    def compile(self, device: torch.device) -> Any:
        """The compiled program for `device`, a CUDA device. BackendError with the compiler's reason."""
        with self._lock, torch.cuda.device(device):
            index = torch.cuda.current_device()
            if index not in self._compiled:
                try:
                    self._compiled[index] = tilelang().compile(
                        self.prim_func, target="cuda", pass_configs=self.pass_configs
                    )
                except (RuntimeError, TypeError, ValueError, OSError) as error:
                    name = torch.cuda.get_device_name(index)
                    raise BackendError(f"TileLang cannot compile a kernel for {name}: {error}") from error
            return self._compiled[index]

    def cuda_source(self, arch: str) -> str:
        """The CUDA C++ this lowers to for `arch` ("sm_80", "sm_89", "sm_90"). Needs no GPU and no nvcc."""
        package = tilelang()
        target = package.tvm.target.Target({"kind": "cuda", "arch": arch})
        with package.tvm.transform.PassContext(opt_level=3, config=self.pass_configs), target:
            return str(package.lower(self.prim_func, target=target).kernel_source)
