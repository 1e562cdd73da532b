import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from laya.checkpoint import Checkpoint, Limits, load_model, open_checkpoint
from laya.errors import CheckpointError
from laya.location import find_checkpoint
from tests.checkpoints import CheckpointSpec, write_json

Make = Callable[[CheckpointSpec], Path]


def edit_json(path: Path, **changes: object) -> None:
    write_json(path, json.loads(path.read_text()) | changes)


def open_at(path: Path, expected: dict[str, str] | None = None, limits: Limits | None = None) -> Checkpoint:
    return open_checkpoint(find_checkpoint(path), expected, limits)


def test_both_rope_spellings_read_as_the_same_model(tmp_path: Path, make: Make) -> None:
    path = make(CheckpointSpec(older_rope_keys=True))
    older = open_at(path).model_config
    config = json.loads((path / "encoder" / "config.json").read_text())
    del config["global_rope_theta"], config["local_rope_theta"]
    rope = {
        "full_attention": {"rope_type": "default", "rope_theta": 160_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    write_json(path / "encoder" / "config.json", config | {"rope_parameters": rope})
    assert open_at(path).model_config == older
    write_json(path / "encoder" / "config.json", config | {"global_rope_theta": 7.0, "local_rope_theta": 5.0})
    other = open_at(path).model_config
    assert (other.full_theta, other.sliding_theta) == (7.0, 5.0)


def test_layer_types_and_the_period_of_full_layers_mean_the_same(make: Make) -> None:
    path = make(CheckpointSpec())
    expected = (True, False, False, True)
    assert open_at(path).model_config.full_layers == expected
    kinds = ["full_attention" if full else "sliding_attention" for full in expected]
    edit_json(path / "encoder" / "config.json", layer_types=kinds)
    assert open_at(path).model_config.full_layers == expected
    edit_json(path / "encoder" / "config.json", layer_types=None, global_attn_every_n_layers=2)
    assert open_at(path).model_config.full_layers == (True, False, True, False)


def test_the_reach_is_half_of_local_attention_or_the_sliding_window(make: Make) -> None:
    path = make(CheckpointSpec(encoder={"local_attention": 128}))
    assert open_at(path).model_config.reach == 64
    edit_json(path / "encoder" / "config.json", sliding_window=20)
    assert open_at(path).model_config.reach == 20


def test_keys_that_are_absent_have_the_public_loaders_defaults(make: Make) -> None:
    path = make(CheckpointSpec(agent={"head_layers": 0}))
    config = json.loads((path / "rl_agent_config.json").read_text())
    write_json(path / "rl_agent_config.json", {key: config[key] for key in ("head_layers", "act_costs")})
    opened = open_at(path)
    assert (opened.max_len, opened.head_max_len, opened.amp_dtype) == (512, 192, "fp16")
    assert opened.model_config.head_layers == 0
    assert opened.temperatures.of("choice", 3) == 1.0


@pytest.mark.parametrize(("spelled", "dtype"), [("bfloat16", "bf16"), ("FLOAT16", "fp16"), ("float32", "fp32")])
def test_a_dtype_may_be_spelled_out(make: Make, spelled: str, dtype: str) -> None:
    assert open_at(make(CheckpointSpec(agent={"amp_dtype": spelled}))).amp_dtype == dtype


def test_a_length_beyond_the_encoders_positions_is_taken_and_said(make: Make) -> None:
    path = make(CheckpointSpec(max_len=2000))
    with pytest.warns(RuntimeWarning, match="max_len 2000 is beyond the 1024 tokens"):
        assert open_at(path).model_config.max_len == 2000


@pytest.mark.parametrize(
    ("key", "tensor", "message"),
    [
        ("scorer.1.weight", None, "scorer.1.weight: expected shape (128, 128), found no such key"),
        ("scorer.1.weight", torch.zeros(2, 128), "scorer.1.weight: expected shape (128, 128), found (2, 128)"),
        ("scorer.1.bias", torch.zeros(128, dtype=torch.int64), "scorer.1.bias: expected a floating dtype, found I64"),
        ("extra.weight", torch.zeros(1), "extra.weight: expected"),
    ],
)
def test_wrong_weights_are_named(make: Make, key: str, tensor: torch.Tensor | None, message: str) -> None:
    path = make(CheckpointSpec())
    weights = load_file(path / "model.safetensors") | {key: tensor}
    save_file({name: value for name, value in weights.items() if value is not None}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors") as error:
        open_at(path)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("rl_agent_config.json", {"max_len": "512"}, "max_len: expected a positive whole number, found '512'"),
        ("rl_agent_config.json", {"head_max_len": None}, "head_max_len: expected a positive whole number"),
        ("rl_agent_config.json", {"max_len": 2_000_000}, "max_len: expected 1 to 1000000 tokens, found 2000000"),
        (
            "rl_agent_config.json",
            {"head_layers": None},
            "head_layers: expected a whole number of at least 0, found None",
        ),
        (
            "rl_agent_config.json",
            {"option_layout": "parallel"},
            "option_layout: expected 'sequential', found 'parallel'",
        ),
        ("rl_agent_config.json", {"act_costs": "escalate"}, "act_costs: expected an object of costs"),
        (
            "rl_agent_config.json",
            {"amp_dtype": "int8"},
            "amp_dtype: expected one of bf16, bfloat16, fp16, float16, half, fp32, float32, found 'int8'",
        ),
        ("rl_agent_config.json", {"temperature": [1.0]}, "temperature: expected a list of 3 numbers"),
        ("encoder/config.json", {"model_type": "bert"}, "model_type: expected 'modernbert', found 'bert'"),
        ("encoder/config.json", {"hidden_activation": "relu"}, "hidden_activation: expected 'gelu', found 'relu'"),
        ("encoder/config.json", {"num_attention_heads": 3}, "does not divide"),
        ("encoder/config.json", {"layer_types": ["full_attention"]}, "layer_types: expected 4"),
        ("encoder/config.json", {"rope_scaling": {"type": "linear"}}, "rope_type 'default', found 'linear'"),
        (
            "encoder/config.json",
            {"rope_parameters": {"rope_theta": 5.0}},
            "rope_parameters: expected an object of full",
        ),
        ("encoder/config.json", {"rope_parameters": {"full_attention": None}}, "full_attention: expected an object"),
        ("encoder/config.json", {"rope_parameters": {"full_attention": {"rope_theta": "5"}}}, "rope_theta: expected a"),
        ("encoder/config.json", {"norm_eps": None}, "norm_eps: expected a positive number, found None"),
        ("encoder/config.json", {"norm_bias": 0}, "norm_bias: expected true or false, found 0"),
        ("encoder/config.json", {"head_dim": 32}, "head_dim: expected 64, found 32"),
        ("encoder/config.json", {"local_attention": -1}, "local_attention: expected a whole number of at least 0"),
    ],
)
def test_a_wrong_setting_is_named(make: Make, file: str, changes: dict[str, object], message: str) -> None:
    path = make(CheckpointSpec())
    edit_json(path / file, **changes)
    with pytest.raises(CheckpointError) as error:
        open_at(path)
    assert message in str(error.value)


@pytest.mark.parametrize("file", ["rl_agent_config.json", "encoder/config.json", "tokenizer/tokenizer.json"])
def test_a_missing_file_is_named(make: Make, file: str) -> None:
    path = make(CheckpointSpec())
    (path / file).unlink()
    with pytest.raises(CheckpointError, match=file):
        open_at(path)


def test_pickled_weights_are_refused(make: Make) -> None:
    path = make(CheckpointSpec())
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickle is never read"):
        open_at(path)


def test_broken_weights_and_broken_json_are_errors_of_the_checkpoint(make: Make) -> None:
    path = make(CheckpointSpec())
    (path / "model.safetensors").write_bytes(b"no safetensors")
    with pytest.raises(CheckpointError, match="expected a safetensors file"):
        open_at(path)
    (path / "rl_agent_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"rl_agent_config\.json"):
        open_at(path)


def test_digests_are_verified_before_anything_is_parsed(make: Make) -> None:
    path = make(CheckpointSpec())
    (path / "rl_agent_config.json").write_text("not JSON at all")
    with pytest.raises(CheckpointError, match=r"rl_agent_config\.json: sha256: expected 00, found [0-9a-f]{64}"):
        open_at(path, {"rl_agent_config.json": "00"})


@pytest.mark.parametrize("file", ["../elsewhere", "/etc/hostname", "absent.json"])
def test_a_digest_of_no_file_of_the_checkpoint_is_refused(make: Make, file: str) -> None:
    with pytest.raises(CheckpointError, match="no file of the checkpoint"):
        open_at(make(CheckpointSpec()), {file: "00"})


def test_the_fingerprint_follows_every_file_and_nothing_else(make: Make) -> None:
    path = make(CheckpointSpec())
    before = open_at(path).fingerprint
    assert len(before) == 64
    (path / "README.md").write_text("a file that does not matter")
    assert open_at(path).fingerprint == before
    edit_json(path / "rl_agent_config.json", note="changed")
    assert open_at(path).fingerprint != before


def test_limits_replace_the_checkpoints_lengths(make: Make) -> None:
    path = make(CheckpointSpec())
    opened = open_at(path, limits=Limits(max_len=77, head_max_len=33))
    assert (opened.max_len, opened.head_max_len, opened.model_config.max_len) == (77, 33, 77)
    with pytest.raises(CheckpointError, match="max_len: expected 1 to 1000000 tokens, found 0"):
        open_at(path, limits=Limits(max_len=0))


def test_the_loaded_model_is_frozen_and_in_its_dtypes(make: Make) -> None:
    opened = open_at(make(CheckpointSpec()))
    model = load_model(opened, torch.device("cpu"), torch.bfloat16)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.encoder.layers[0].attn.Wqkv.weight.dtype == torch.bfloat16
    assert model.encoder.layers[1].attn_norm.weight.dtype == torch.float32
    assert model.act_head[0].weight.dtype == torch.float32
    assert model.encoder.full_table.device.type == "cpu"
