"""The environment, read once. Owns the variables' names and their validation; no other module reads the environment."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from laya.errors import ArgumentError

TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
CUDA_AMP = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16"}
CPU_AMP = {"bf16": "bf16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class Settings:
    """What the environment overrides. None leaves the choice to the checkpoint and the device."""

    cuda_amp: str | None = None  # LAYA_CUDA_AMP: fp16 or bf16
    cpu_amp: str | None = None  # LAYA_CPU_AMP: bf16
    compile_warmup: bool = True  # LAYA_COMPILE_WARMUP: 0 leaves compiling to the first request
    revision: str | None = None  # LAYA_REVISION: of every checkpoint from the Hub; `reviewed` for the known ones alone
    sha256_digests: Mapping[str, str] | None = None  # LAYA_SHA256_DIGESTS: by path in a checkpoint, as JSON
    cache_dir: Path = field(default_factory=lambda: Path.home() / ".cache" / "laya")  # under XDG_CACHE_HOME
    inductor_cache_dir: Path = field(default_factory=lambda: Path.home() / ".cache" / "laya" / "inductor")


def read_settings(environ: Mapping[str, str] = os.environ) -> Settings:
    """The settings of `environ`. Raises ArgumentError for a value that is not one of a variable's choices."""
    home = Path(environ.get("HOME") or Path.home())
    xdg = Path(environ.get("XDG_CACHE_HOME", ""))
    inductor = environ.get("LAYA_INDUCTOR_CACHE_DIR", "").strip()
    return Settings(
        cuda_amp=_choice(environ, "LAYA_CUDA_AMP", CUDA_AMP),
        cpu_amp=_choice(environ, "LAYA_CPU_AMP", CPU_AMP),
        compile_warmup=_flag(environ, "LAYA_COMPILE_WARMUP", default=True),
        revision=environ.get("LAYA_REVISION", "").strip() or None,
        sha256_digests=_digests(environ, "LAYA_SHA256_DIGESTS"),
        cache_dir=(xdg if xdg.is_absolute() else home / ".cache") / "laya",
        inductor_cache_dir=Path(inductor).expanduser() if inductor else home / ".cache" / "laya" / "inductor",
    )


def _choice(environ: Mapping[str, str], name: str, choices: Mapping[str, str]) -> str | None:
    value = environ.get(name, "").strip().lower()
    if value and value not in choices:
        raise ArgumentError(f"{name}={value!r}: expected {' or '.join(choices)}")
    return choices[value] if value else None


def _flag(environ: Mapping[str, str], name: str, default: bool) -> bool:
    value = environ.get(name, "").strip().lower()
    if value and value not in TRUE + FALSE:
        raise ArgumentError(f"{name}={value!r}: expected {' or '.join(TRUE + FALSE)}")
    return value in TRUE if value else default


def _digests(environ: Mapping[str, str], name: str) -> Mapping[str, str] | None:
    value = environ.get(name, "").strip()
    if not value:
        return None
    try:
        digests = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{name}: expected a JSON object of SHA-256 digests by path: {error}") from error
    if not isinstance(digests, dict) or not all(isinstance(digest, str) for digest in digests.values()):
        raise ArgumentError(f"{name}: expected a JSON object of SHA-256 digests by path, found {value:.200}")
    return digests
