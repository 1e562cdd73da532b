"""A checkpoint opened: its digests verified, its configuration read, every key and shape of its weights checked.

Owns the files and the weights; the keys of the configuration are `configuration`'s. Does not find the folder
(`location`) or apply what it reads; only safetensors is read, never pickle, and no code of a checkpoint is run.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from laya.calibration import Temperatures, read_temperatures, warn_if_fitted_for_another
from laya.configuration import (
    AGENT_CONFIG,
    ENCODER_CONFIG,
    check_lengths,
    read_amp_dtype,
    read_config,
    read_lengths,
    read_model_config,
)
from laya.errors import CheckpointError, CheckpointMismatchError, MissingFileError
from laya.location import Location
from laya.model import DecisionModel, ModelConfig
from laya.parameters import in_compute_dtype, parameter_shapes, shape_model
from schemas.checkpoints import REQUIRED_FILES, TOKENIZER_CONFIGS, missing_files

WEIGHTS = "model.safetensors"
FLOATING = {"F32", "F16", "BF16", "F64"}  # safetensors' names of the dtypes a parameter may be stored in


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint. `fingerprint` is the SHA-256 of its files' paths and digests, as hex."""

    name: str
    path: Path
    revision: str | None
    fingerprint: str
    digests: Mapping[str, str]  # SHA-256 of its files by relative path, as hex
    max_len: int  # tokens
    head_max_len: int  # tokens
    own_max_len: int  # tokens; what the files say, where `max_len` may be a caller's
    amp_dtype: str
    temperatures: Temperatures
    model_config: ModelConfig
    agent_config: Mapping[str, Any]  # rl_agent_config.json

    @property
    def tokenizer_path(self) -> Path:
        return self.path / "tokenizer"


@dataclass(frozen=True)
class Limits:
    """Lengths in tokens that replace the checkpoint's own; None keeps them."""

    max_len: int | None = None
    head_max_len: int | None = None


def open_checkpoint(
    location: Location,
    expected_sha256: Mapping[str, str] | None = None,
    limits: Limits | None = None,
    temperatures: Temperatures | None = None,
) -> Checkpoint:
    """Verify and read everything but the weights' values.

    `expected_sha256` maps paths relative to the checkpoint to hex digests, compared before anything is parsed;
    `temperatures` replace the shipped ones. Raises CheckpointError, which names the file, the key, what was expected
    and what was found.
    """
    digests = _digest_files(location.path, expected_sha256 or {})
    limits = limits or Limits()
    agent = read_config(location.path, AGENT_CONFIG)
    encoder = read_config(location.path, ENCODER_CONFIG)
    own_max_len, own_head = read_lengths(agent)
    max_len = own_max_len if limits.max_len is None else limits.max_len
    head = own_head if limits.head_max_len is None else limits.head_max_len
    check_lengths(location.name, max_len, head, encoder)
    config = read_model_config(encoder, agent, max_len)
    _check_weights(location.path / WEIGHTS, config)
    if temperatures is not None:
        warn_if_fitted_for_another(temperatures, location.name, location.path, agent)
    return Checkpoint(
        name=location.name,
        path=location.path,
        revision=location.revision,
        fingerprint=_fingerprint(digests),
        digests=digests,
        max_len=max_len,
        head_max_len=head,
        own_max_len=own_max_len,
        amp_dtype=read_amp_dtype(agent),
        temperatures=temperatures or read_temperatures(agent, f"{location.name}: {AGENT_CONFIG}"),
        model_config=config,
        agent_config=agent,
    )


def load_model(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> DecisionModel:
    """The model on `device` for inference, its matrix products in `dtype`; the tensors go straight to the device."""
    model = shape_model(checkpoint.model_config)
    weights = {}
    with safe_open(checkpoint.path / WEIGHTS, framework="pt", device=str(device)) as file:
        for name in file.keys():  # noqa: SIM118 - a safetensors file is no mapping
            weights[name] = file.get_tensor(name).to(dtype if in_compute_dtype(name) else torch.float32)
    model.load_state_dict(weights, assign=True)
    return model.to(device).eval().requires_grad_(False)


def _digest_files(folder: Path, expected: Mapping[str, str]) -> dict[str, str]:
    """SHA-256 of the checkpoint's files by relative path, compared with what is expected of them."""
    if missing := missing_files(folder):
        pickled = WEIGHTS in missing and (folder / "pytorch_model.bin").exists()
        hint = "; pytorch_model.bin is there, but pickle is never read: convert it to safetensors" if pickled else ""
        raise MissingFileError(f"{folder}: expected the files {', '.join(missing)}, found none{hint}")
    files = [*REQUIRED_FILES, *(file for file in TOKENIZER_CONFIGS if (folder / file).is_file())]
    digests = {file: _digest(folder / file) for file in files}
    check_digests(folder, digests, expected)
    return digests


def check_digests(folder: Path, digests: Mapping[str, str], expected: Mapping[str, str]) -> None:
    """Compare what is expected of a checkpoint's files with their `digests`; other files of the folder are read.

    Raises CheckpointMismatchError.
    """
    for file, digest in expected.items():
        if Path(file).is_absolute() or ".." in Path(file).parts or not (folder / file).is_file():
            raise CheckpointMismatchError(
                f"{folder}: a digest is expected of {file!r}, which is no file of the checkpoint"
            )
        found = digests.get(file) or _digest(folder / file)
        if found != digest.strip().lower():
            raise CheckpointMismatchError(f"{folder / file}: sha256: expected {digest}, found {found}")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fingerprint(digests: Mapping[str, str]) -> str:
    lines = "".join(f"{file}\0{digests[file]}\n" for file in sorted(digests))
    return hashlib.sha256(lines.encode()).hexdigest()


def _check_weights(path: Path, config: ModelConfig) -> None:
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            shapes = {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in found.items()}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: expected a safetensors file: {error}") from error
    expected = parameter_shapes(config)
    for name, shape in expected.items():
        if name not in shapes:
            raise CheckpointError(f"{path}: {name}: expected shape {shape}, found no such key")
        if shapes[name][0] != shape:
            raise CheckpointError(f"{path}: {name}: expected shape {shape}, found {shapes[name][0]}")
        if shapes[name][1] not in FLOATING:
            raise CheckpointError(f"{path}: {name}: expected a floating dtype, found {shapes[name][1]}")
    unknown = sorted(shapes.keys() - expected.keys())
    if unknown:
        raise CheckpointError(f"{path}: {unknown[0]}: expected {len(expected)} known keys, found {len(unknown)} others")
