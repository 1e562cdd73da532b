"""A checkpoint's two configuration files: which keys change an answer, their defaults, and what is refused in them.

Owns reading them. A key that changes answers in a way that this engine does not follow is an error; keys that change
none are let be. `dtype` of the encoder's file is such a key: the device decides on precision (`precision`).
"""

import json
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from laya.errors import CheckpointError, CheckpointMismatchError
from laya.model import ModelConfig

AGENT_CONFIG = "rl_agent_config.json"
ENCODER_CONFIG = "encoder/config.json"
# What a key that is absent means: of the agent as the public loader has it, of the encoder as transformers has it.
MAX_LEN, HEAD_MAX_LEN, AMP_DTYPE = 512, 192, "fp16"
VOCABULARY, WIDTH, INTERMEDIATE, LAYERS, HEADS, POSITIONS = 50_368, 768, 1152, 22, 12, 8192
LOCAL_ATTENTION, FULL_LAYER_EVERY = 128, 3
FULL_THETA, SLIDING_THETA = 160_000.0, 10_000.0
MOST_TOKENS = 1_000_000  # of a sequence; the rotary tables have a row for each

SPELLINGS = {"bf16": ("bf16", "bfloat16"), "fp16": ("fp16", "float16", "half"), "fp32": ("fp32", "float32")}
AMP_DTYPES = {spelling: dtype for dtype, spellings in SPELLINGS.items() for spelling in spellings}
WHY_SEQUENTIAL = "its weights would read the options of a question in places that this engine does not give them"
KINDS = ("full_attention", "sliding_attention")


def read_config(folder: Path, file: str) -> dict[str, Any]:
    """Return a configuration file's object. Raises CheckpointError when it is none."""
    try:
        config = json.loads((folder / file).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder / file}: expected a readable JSON file: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{folder / file}: expected a JSON object, found {type(config).__name__}")
    return config


def read_lengths(agent: Mapping[str, Any]) -> tuple[int, int]:
    """Return max_len and head_max_len, in tokens."""
    return integer(agent, "max_len", AGENT_CONFIG, MAX_LEN), integer(agent, "head_max_len", AGENT_CONFIG, HEAD_MAX_LEN)


def check_lengths(name: str, max_len: int, head_max_len: int, encoder: Mapping[str, Any]) -> None:
    """Refuse lengths that cannot be, with CheckpointMismatchError; warn of one that the encoder was not trained for."""
    for key, value in (("max_len", max_len), ("head_max_len", head_max_len)):
        if not 1 <= value <= MOST_TOKENS:
            raise CheckpointMismatchError(f"{name}: {key}: expected 1 to {MOST_TOKENS} tokens, found {value}")
    positions = integer(encoder, "max_position_embeddings", ENCODER_CONFIG, POSITIONS)
    if max_len > positions:
        warnings.warn(
            f"{name}: max_len {max_len} is beyond the {positions} tokens (max_position_embeddings) that its encoder "
            "was made for; answers about longer texts are untried",
            RuntimeWarning,
            stacklevel=4,
        )


def read_amp_dtype(agent: Mapping[str, Any]) -> str:
    """Return bf16, fp16 or fp32 from any spelling of them."""
    asked = agent.get("amp_dtype", AMP_DTYPE)
    found = AMP_DTYPES.get(asked.strip().lower()) if isinstance(asked, str) else None
    if found is None:
        raise CheckpointMismatchError(
            f"{AGENT_CONFIG}: amp_dtype: expected one of {', '.join(AMP_DTYPES)}, found {asked!r}"
        )
    return found


def read_model_config(encoder: Mapping[str, Any], agent: Mapping[str, Any], max_len: int) -> ModelConfig:
    """Return the model's sizes from the two files, in either spelling of the RoPE settings.

    Raises CheckpointMismatchError, which names the file and the key, for values that this engine does not follow.
    """
    _expect(agent, "option_layout", AGENT_CONFIG, "sequential", WHY_SEQUENTIAL)
    _expect(encoder, "model_type", ENCODER_CONFIG, "modernbert", "no other encoder is built", required=True)
    _expect(encoder, "hidden_activation", ENCODER_CONFIG, "gelu", "no other activation is built")
    layers = integer(encoder, "num_hidden_layers", ENCODER_CONFIG, LAYERS)
    width = integer(encoder, "hidden_size", ENCODER_CONFIG, WIDTH)
    heads = integer(encoder, "num_attention_heads", ENCODER_CONFIG, HEADS)
    if width % heads or (width // heads) % 2 or width % max(1, width // 64):
        raise CheckpointMismatchError(
            f"{ENCODER_CONFIG}: hidden_size: {width} does not divide into {heads} heads of even width"
        )
    if encoder.get("head_dim") is not None:
        _expect(encoder, "head_dim", ENCODER_CONFIG, width // heads, "a head has hidden_size / num_attention_heads")
    return ModelConfig(
        vocab_size=integer(encoder, "vocab_size", ENCODER_CONFIG, VOCABULARY),
        hidden_size=width,
        intermediate_size=integer(encoder, "intermediate_size", ENCODER_CONFIG, INTERMEDIATE),
        heads=heads,
        full_layers=_full_layers(encoder, layers),
        full_theta=_theta(encoder, "full_attention", "global_rope_theta", FULL_THETA),
        sliding_theta=_theta(encoder, "sliding_attention", "local_rope_theta", SLIDING_THETA),
        reach=_reach(encoder),
        norm_eps=_number(encoder, "norm_eps", 1e-5),
        norm_bias=_flag(encoder, "norm_bias"),
        attention_bias=_flag(encoder, "attention_bias"),
        mlp_bias=_flag(encoder, "mlp_bias"),
        head_layers=integer(agent, "head_layers", AGENT_CONFIG, least=0),
        act_outputs=_act_outputs(agent),
        max_len=max_len,
    )


def integer(config: Mapping[str, Any], key: str, file: str, default: int | None = None, least: int = 1) -> int:
    """Return a whole number of at least `least`, `default` where the key is absent. Raises CheckpointMismatchError."""
    value = config.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        wanted = "a positive whole number" if least == 1 else f"a whole number of at least {least}"
        raise CheckpointMismatchError(f"{file}: {key}: expected {wanted}, found {value!r}")
    return value


def _expect(config: Mapping[str, Any], key: str, file: str, wanted: object, why: str, required: bool = False) -> None:
    if (required or key in config) and config.get(key) != wanted:
        raise CheckpointMismatchError(f"{file}: {key}: expected {wanted!r}, found {config.get(key)!r}: {why}")


def _number(config: Mapping[str, Any], key: str, default: float) -> float:
    value = config.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not (math.isfinite(value) and value > 0):
        raise CheckpointMismatchError(f"{ENCODER_CONFIG}: {key}: expected a positive number, found {value!r}")
    return float(value)


def _flag(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key, False)
    if not isinstance(value, bool):
        raise CheckpointMismatchError(f"{ENCODER_CONFIG}: {key}: expected true or false, found {value!r}")
    return value


def _act_outputs(agent: Mapping[str, Any]) -> int:
    costs = agent.get("act_costs", {})
    if not isinstance(costs, Mapping | list):
        raise CheckpointMismatchError(
            f"{AGENT_CONFIG}: act_costs: expected an object of costs by action, found {costs!r}"
        )
    return len(costs) + 1


def _reach(encoder: Mapping[str, Any]) -> int:
    """Keys that a query of a sliding layer sees on either side; transformers lets `sliding_window` say it, too."""
    reach = integer(encoder, "local_attention", ENCODER_CONFIG, LOCAL_ATTENTION, least=0) // 2
    return (
        reach if encoder.get("sliding_window") is None else integer(encoder, "sliding_window", ENCODER_CONFIG, least=0)
    )


def _full_layers(encoder: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    kinds = encoder.get("layer_types")
    if kinds is None:
        every = integer(encoder, "global_attn_every_n_layers", ENCODER_CONFIG, FULL_LAYER_EVERY)
        return tuple(index % every == 0 for index in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in KINDS for kind in kinds):
        raise CheckpointMismatchError(
            f"{ENCODER_CONFIG}: layer_types: expected {layers} of {' or '.join(KINDS)}, found {kinds!r}"
        )
    return tuple(kind == "full_attention" for kind in kinds)


def _theta(encoder: Mapping[str, Any], layer_type: str, older_key: str, default: float) -> float:
    """transformers 5 keeps RoPE per layer type in `rope_parameters`; earlier files have one key per theta."""
    _check_rope_type(encoder.get("rope_scaling"), "rope_scaling")
    rope = encoder.get("rope_parameters") or {}
    if not isinstance(rope, Mapping) or any(kind not in KINDS for kind in rope):
        raise CheckpointMismatchError(
            f"{ENCODER_CONFIG}: rope_parameters: expected an object of {' and '.join(KINDS)}, found {rope!r}"
        )
    if layer_type in rope:
        _check_rope_type(rope[layer_type], f"rope_parameters: {layer_type}", required=True)
        if "rope_theta" in rope[layer_type]:
            return _number(rope[layer_type], "rope_theta", default)
    return _number(encoder, older_key, default)


def _check_rope_type(rope: object, key: str, required: bool = False) -> None:
    if rope is None and not required:
        return
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, Mapping) else rope
    if kind != "default":
        raise CheckpointMismatchError(
            f"{ENCODER_CONFIG}: {key}: expected an object with rope_type 'default', found {kind!r}: no other is built"
        )
