"""The environment, read once. Owns the variables' names and their validation; no other module reads the environment."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from laya.errors import LayaError


@dataclass(frozen=True)
class Settings:
    """What the environment overrides. None leaves the choice to the checkpoint and the device."""

    cuda_amp: str | None = None  # LAYA_CUDA_AMP: fp16 or bf16
    cpu_amp: str | None = None  # LAYA_CPU_AMP: bf16
    compile_warmup: bool = True  # LAYA_COMPILE_WARMUP: 0 leaves compiling to the first request
    cache_dir: Path = field(default_factory=lambda: Path.home() / ".cache" / "laya")  # under XDG_CACHE_HOME
    inductor_cache_dir: Path = field(default_factory=lambda: Path.home() / ".cache" / "laya" / "inductor")


def read_settings(environ: Mapping[str, str] = os.environ) -> Settings:
    """The settings of `environ`. Raises LayaError for a value that is not one of a variable's choices."""
    home = Path(environ.get("HOME") or Path.home())
    xdg = Path(environ.get("XDG_CACHE_HOME", ""))
    inductor = environ.get("LAYA_INDUCTOR_CACHE_DIR", "").strip()
    return Settings(
        cuda_amp=_choice(environ, "LAYA_CUDA_AMP", ("fp16", "bf16")),
        cpu_amp=_choice(environ, "LAYA_CPU_AMP", ("bf16",)),
        compile_warmup=_choice(environ, "LAYA_COMPILE_WARMUP", ("0", "1", "false", "true")) not in ("0", "false"),
        cache_dir=(xdg if xdg.is_absolute() else home / ".cache") / "laya",
        inductor_cache_dir=Path(inductor).expanduser() if inductor else home / ".cache" / "laya" / "inductor",
    )


def _choice(environ: Mapping[str, str], name: str, choices: tuple[str, ...]) -> str | None:
    value = environ.get(name, "").strip().lower()
    if not value:
        return None
    if value not in choices:
        raise LayaError(f"{name}={value!r}: expected {' or '.join(choices)}")
    return value
