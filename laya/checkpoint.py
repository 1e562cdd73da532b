"""A checkpoint opened: its digests verified, its configuration read, every key and shape of its weights checked.

Owns the file format. Does not find the folder (`location`) or apply what it reads; only safetensors is read, never
pickle, and no code of a checkpoint is run.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from laya.calibration import Temperatures, read_temperatures, warn_if_fitted_for_another
from laya.errors import CheckpointError, CheckpointMismatchError
from laya.location import Location
from laya.model import DecisionModel, ModelConfig
from laya.parameters import in_compute_dtype, parameter_shapes, shape_model
from laya.precision import DTYPES
from schemas.checkpoints import REQUIRED_FILES, TOKENIZER_CONFIGS, missing_files

WEIGHTS = "model.safetensors"
AGENT_CONFIG = "rl_agent_config.json"
ENCODER_CONFIG = "encoder/config.json"
FLOATING = {"F32", "F16", "BF16", "F64"}  # safetensors' names of the dtypes a parameter may be stored in
FULL_LAYER_EVERY = 3


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
    model_name: str
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
    `temperatures` replace the shipped ones. Raises
    CheckpointError, which names the file, the key, what was expected and what was found.
    """
    digests = _digest_files(location.path, expected_sha256 or {})
    limits = limits or Limits()
    agent = _read_json(location.path, AGENT_CONFIG)
    encoder = _read_json(location.path, ENCODER_CONFIG)
    own_max_len = _integer(agent, "max_len", AGENT_CONFIG)
    max_len = limits.max_len if limits.max_len is not None else own_max_len
    head = limits.head_max_len if limits.head_max_len is not None else _integer(agent, "head_max_len", AGENT_CONFIG)
    positions = _integer(encoder, "max_position_embeddings", ENCODER_CONFIG, 8192)
    for name, value in (("max_len", max_len), ("head_max_len", head)):
        if not 1 <= value <= positions:
            raise CheckpointMismatchError(f"{location.path}: {name}: expected 1 to {positions} tokens, found {value}")
    amp_dtype = agent.get("amp_dtype", "bf16")
    if amp_dtype not in DTYPES:
        raise CheckpointError(f"{AGENT_CONFIG}: amp_dtype: expected one of {', '.join(DTYPES)}, found {amp_dtype!r}")
    config = read_model_config(encoder, agent, max_len)
    if temperatures is not None:
        warn_if_fitted_for_another(temperatures, location.name, location.path, agent)
    _check_weights(location.path / WEIGHTS, config)
    return Checkpoint(
        name=location.name,
        path=location.path,
        revision=location.revision,
        fingerprint=_fingerprint(digests),
        digests=digests,
        max_len=max_len,
        head_max_len=head,
        own_max_len=own_max_len,
        amp_dtype=amp_dtype,
        model_name=str(agent.get("model_name", "rl-agent")),
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


def read_model_config(encoder: Mapping[str, Any], agent: Mapping[str, Any], max_len: int) -> ModelConfig:
    """The model's sizes from the two configuration files, in either spelling of the RoPE settings."""
    if encoder.get("model_type") != "modernbert":
        raise CheckpointError(
            f"{ENCODER_CONFIG}: model_type: expected 'modernbert', found {encoder.get('model_type')!r}"
        )
    activation = encoder.get("hidden_activation", "gelu")
    if activation != "gelu":
        raise CheckpointError(f"{ENCODER_CONFIG}: hidden_activation: expected 'gelu', found {activation!r}")
    layers = _integer(encoder, "num_hidden_layers", ENCODER_CONFIG)
    width, heads = (_integer(encoder, key, ENCODER_CONFIG) for key in ("hidden_size", "num_attention_heads"))
    if width % heads or (width // heads) % 2 or width % max(1, width // 64):
        raise CheckpointError(
            f"{ENCODER_CONFIG}: hidden_size: {width} does not divide into {heads} heads of even width"
        )
    return ModelConfig(
        vocab_size=_integer(encoder, "vocab_size", ENCODER_CONFIG),
        hidden_size=width,
        intermediate_size=_integer(encoder, "intermediate_size", ENCODER_CONFIG),
        heads=heads,
        full_layers=_full_layers(encoder, layers),
        full_theta=_theta(encoder, "full_attention", "global_rope_theta", 160_000.0),
        sliding_theta=_theta(encoder, "sliding_attention", "local_rope_theta", 10_000.0),
        reach=_integer(encoder, "local_attention", ENCODER_CONFIG, 128) // 2,
        norm_eps=float(encoder.get("norm_eps", 1e-5)),
        norm_bias=bool(encoder.get("norm_bias", False)),
        attention_bias=bool(encoder.get("attention_bias", False)),
        mlp_bias=bool(encoder.get("mlp_bias", False)),
        head_layers=_integer(agent, "head_layers", AGENT_CONFIG),
        act_outputs=len(agent.get("act_costs") or {}) + 1,
        max_len=max_len,
    )


def _full_layers(encoder: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    kinds = encoder.get("layer_types")
    if kinds is None:
        every = _integer(encoder, "global_attn_every_n_layers", ENCODER_CONFIG, FULL_LAYER_EVERY)
        return tuple(index % every == 0 for index in range(layers))
    if len(kinds) != layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise CheckpointError(
            f"{ENCODER_CONFIG}: layer_types: expected {layers} of full_attention or sliding_attention, found {kinds!r}"
        )
    return tuple(kind == "full_attention" for kind in kinds)


def _theta(encoder: Mapping[str, Any], layer_type: str, older_key: str, default: float) -> float:
    """transformers 5 keeps RoPE per layer type in `rope_parameters`; earlier files have one key per theta."""
    rope = (encoder.get("rope_parameters") or {}).get(layer_type) or {}
    kind = rope.get("rope_type", "default")
    if kind != "default" or encoder.get("rope_scaling"):
        raise CheckpointError(f"{ENCODER_CONFIG}: rope_parameters: expected rope_type 'default', found {kind!r}")
    theta = rope.get("rope_theta", encoder.get(older_key))
    return float(default if theta is None else theta)


def _integer(config: Mapping[str, Any], key: str, file: str, default: int | None = None) -> int:
    value = config.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"{file}: {key}: expected a positive whole number, found {value!r}")
    return value


def _read_json(folder: Path, file: str) -> dict[str, Any]:
    try:
        config = json.loads((folder / file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / file}: expected a readable JSON file: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{folder / file}: expected a JSON object, found {type(config).__name__}")
    return config


def _digest_files(folder: Path, expected: Mapping[str, str]) -> dict[str, str]:
    """SHA-256 of the checkpoint's files by relative path, compared with what is expected of them."""
    if missing := missing_files(folder):
        pickled = WEIGHTS in missing and (folder / "pytorch_model.bin").exists()
        hint = "; pytorch_model.bin is there, but pickle is never read: convert it to safetensors" if pickled else ""
        raise CheckpointError(f"{folder}: expected the files {', '.join(missing)}, found none{hint}")
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
