"""Which device and which dtype a model runs on and in. Owns that policy; the arithmetic itself is `model`'s."""

import torch

from laya.errors import LayaError
from laya.settings import Settings

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BF16_CAPABILITY = 8  # CUDA compute capability from which bf16 runs on the tensor cores


def choose_device(asked: str | torch.device | None) -> torch.device:
    """The device asked for, else the current CUDA device, else the CPU. Raises LayaError when it is not there."""
    if asked is None:
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(asked)
    except RuntimeError as error:
        raise LayaError(f"device {asked!r} is not one PyTorch knows") from error
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise LayaError(f"device {asked!r} was asked for, but PyTorch finds no CUDA device")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise LayaError(f"device {asked!r} was asked for, but there are {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", index)


def choose_dtype(device: torch.device, amp_dtype: str, settings: Settings) -> torch.dtype:
    """The compute dtype: the checkpoint's `amp_dtype` on a recent CUDA device, fp16 on an older one, fp32 elsewhere."""
    if device.type == "cuda":
        recent = torch.cuda.get_device_capability(device)[0] >= BF16_CAPABILITY
        return DTYPES[settings.cuda_amp or (amp_dtype if recent else "fp16")]
    if device.type == "cpu" and settings.cpu_amp:
        return DTYPES[settings.cpu_amp]
    return torch.float32
