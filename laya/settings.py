"""The environment, read once. Owns the variables' names and their validation; no other module reads the environment."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from laya.errors import LayaError


@dataclass(frozen=True)
class Settings:
    """What the environment overrides. None leaves the choice to the checkpoint and the device."""

    cuda_amp: str | None = None  # LAYA_CUDA_AMP: fp16 or bf16
    cpu_amp: str | None = None  # LAYA_CPU_AMP: bf16


def read_settings(environ: Mapping[str, str] = os.environ) -> Settings:
    """The settings of `environ`. Raises LayaError for a value that is not one of a variable's choices."""
    return Settings(
        cuda_amp=_choice(environ, "LAYA_CUDA_AMP", ("fp16", "bf16")),
        cpu_amp=_choice(environ, "LAYA_CPU_AMP", ("bf16",)),
    )


def _choice(environ: Mapping[str, str], name: str, choices: tuple[str, ...]) -> str | None:
    value = environ.get(name, "").strip().lower()
    if not value:
        return None
    if value not in choices:
        raise LayaError(f"{name}={value!r}: expected {' or '.join(choices)}")
    return value
