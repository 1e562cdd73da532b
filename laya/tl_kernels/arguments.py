"""The checks every kernel's wrapper makes of its arguments, and what follows from them."""

import functools
import math

import torch
from torch import Tensor

from laya.errors import BackendError

MOST_ELEMENTS = 2**31 - 1  # of one tensor: the kernels count in int32
MOST_BLOCKS = 65_535  # along the second and third axis of a CUDA grid
HALVES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
FLOATS = HALVES | {torch.float32: "float32"}


def expect(name: str, tensor: Tensor, shape: tuple[int | None, ...], dtype: torch.dtype, device: torch.device) -> None:
    """ValueError unless `tensor` is contiguous, 16-byte aligned, and of that shape (None: any), dtype and device."""
    fits = tensor.dim() == len(shape) and all(
        want is None or want == got for want, got in zip(shape, tensor.shape, strict=True)
    )
    if not (fits and tensor.dtype == dtype and tensor.device == device and tensor.is_contiguous()):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(
            f"{name}: expected a contiguous {dtype} tensor of shape ({wanted}) on {device}, got "
            f"{'a' if tensor.is_contiguous() else 'a strided'} {tensor.dtype} tensor of shape {tuple(tensor.shape)} "
            f"on {tensor.device}"
        )
    if tensor.data_ptr() % 16:
        raise ValueError(f"{name}: its data must start at a multiple of 16 bytes, which this view does not")
    check_size(name, tuple(tensor.shape))


def check_size(name: str, shape: tuple[int, ...]) -> None:
    """BackendError when a tensor of that shape has more elements than a kernel counts."""
    elements = math.prod(shape)
    if elements > MOST_ELEMENTS:
        raise BackendError(f"{name}: {elements} elements are more than the {MOST_ELEMENTS} that a kernel counts")


def dtype_name(name: str, tensor: Tensor, allowed: dict[torch.dtype, str]) -> str:
    """TileLang's name of the tensor's dtype. ValueError when the kernel is not made for it."""
    if tensor.dtype not in allowed:
        raise ValueError(f"{name}: expected {' or '.join(map(str, allowed))}, got {tensor.dtype}")
    return allowed[tensor.dtype]


def architecture(name: str, device: torch.device) -> tuple[int, int]:
    """The compute capability of `device`. BackendError when the kernels cannot run there."""
    if device.type != "cuda":
        raise BackendError(f"{name} runs on CUDA tensors, got {device}: laya.tl_kernels.reference has it in torch")
    return capability(device)


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a CUDA device that is at least 8.0."""
    found = torch.cuda.get_device_capability(device)
    if found < (8, 0):
        raise BackendError(f"the kernels need compute capability 8.0 or more, {device} has {found[0]}.{found[1]}")
    return found


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many a CUDA device has."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def result(out: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`out`, checked, or a new tensor whose contents are undefined."""
    if out is None:
        check_size("out", shape)
        return torch.empty(shape, dtype=dtype, device=device)
    expect("out", out, shape, dtype, device)
    return out
