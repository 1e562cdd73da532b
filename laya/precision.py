"""Which device and which dtype a model runs on and in. Owns that policy; the arithmetic itself is `model`'s."""

import torch

from laya.errors import ArgumentError
from laya.settings import Settings

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BF16_CAPABILITY = 8  # CUDA compute capability from which bf16 runs on the tensor cores


def choose_device(asked: str | torch.device | None) -> torch.device:
    """The device asked for; for None and "auto" the current CUDA device, else the CPU. Raises ArgumentError when it is
    not there."""
    if asked is None or asked == "auto":
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(asked.strip().lower() if isinstance(asked, str) else asked)
    except RuntimeError as error:
        raise ArgumentError(f"device {asked!r} is not one PyTorch knows") from error
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type == "cuda":
        return _cuda_device(asked, device.index)
    if device.type == "meta":
        raise ArgumentError(f"device {asked!r} computes nothing")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # what PyTorch raises, by device
        raise ArgumentError(f"device {asked!r} was asked for, but PyTorch does not find it: {error}") from error
    return device


def _cuda_device(asked: str | torch.device, index: int | None) -> torch.device:
    if not torch.cuda.is_available():
        raise ArgumentError(f"device {asked!r} was asked for, but PyTorch finds no CUDA device")
    index = torch.cuda.current_device() if index is None else index
    if index >= torch.cuda.device_count():
        raise ArgumentError(f"device {asked!r} was asked for, but there are {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", index)


def choose_dtype(device: torch.device, amp_dtype: str, settings: Settings) -> torch.dtype:
    """The compute dtype: the checkpoint's `amp_dtype` on a recent CUDA device, fp16 on an older one, fp32 elsewhere.

    The environment may override both. Raises ArgumentError when it asks an older CUDA device for bf16.
    """
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if settings.cuda_amp == "bf16" and major < BF16_CAPABILITY:
            raise ArgumentError(
                f"LAYA_CUDA_AMP=bf16: {device} has compute capability {major}.{minor}, and bf16 needs "
                f"{BF16_CAPABILITY}.0 or more: its tensor cores have fp16 alone; unset the variable, or set it to fp16"
            )
        return DTYPES[settings.cuda_amp or (amp_dtype if major >= BF16_CAPABILITY else "fp16")]
    if device.type == "cpu" and settings.cpu_amp:
        return DTYPES[settings.cpu_amp]
    return torch.float32
