"""Tiny random checkpoints in the public format, made in code: a byte-level tokenizer and seeded weights.

The weights are drawn wide and the scorer's last layer is scaled up, so that probabilities spread and two
implementations cannot agree by both being uniform.
"""

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from laya.configuration import read_model_config
from laya.model import DecisionModel

SPECIAL = {
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "mask_token": "[MASK]",
}
SENTENCES = (
    "The customer was billed twice in March and wants the second charge refunded.",
    "Which department should handle this request? billing, technical, account",
    "How urgent is it: not urgent, this week, today, drop everything",
    "The statement holds. no, the statement does not hold; yes, the statement holds",
    "我这个月被重复扣款了两次，退款一直没有到账。",
    "تم خصم المبلغ مرتين من حسابي هذا الشهر",
    "मार्च का बिल दो बार लिया गया, कृपया रिफंड करें।",
    "Клиент требует вернуть деньги сегодня же 😀🎉",
    '{"role": "user", "content": "where is my refund?"}',
)


@dataclass(frozen=True)
class CheckpointSpec:
    """What a test may want to vary."""

    max_len: int = 128
    head_max_len: int = 48
    seed: int = 0
    older_rope_keys: bool = False
    scale: float = 0.1  # standard deviation of the weights
    encoder: dict[str, Any] = field(default_factory=dict)
    agent: dict[str, Any] = field(default_factory=dict)
    tokenizer: dict[str, Any] = field(default_factory=dict)


def make_checkpoint(folder: Path, spec: CheckpointSpec = CheckpointSpec()) -> Path:
    """Write a checkpoint into `folder`, which is returned."""
    (folder / "encoder").mkdir(parents=True)
    (folder / "tokenizer").mkdir()
    tokenizer = train_tokenizer()
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 8192, **SPECIAL}
    write_json(folder / "tokenizer" / "tokenizer_config.json", tokenizer_config | spec.tokenizer)
    encoder = encoder_config(tokenizer, spec)
    write_json(folder / "encoder" / "config.json", encoder)
    agent = agent_config(spec)
    write_json(folder / "rl_agent_config.json", agent)
    weights = random_weights(DecisionModel(read_model_config(encoder, agent, spec.max_len)), spec.seed, spec.scale)
    save_file(weights, folder / "model.safetensors")
    return folder


def train_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token=SPECIAL["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=list(SPECIAL.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


def encoder_config(tokenizer: Tokenizer, spec: CheckpointSpec) -> dict[str, Any]:
    thetas = {"full_attention": 160_000.0, "sliding_attention": 10_000.0}
    if spec.older_rope_keys:
        rope: dict[str, Any] = {"global_rope_theta": 160_000.0, "local_rope_theta": 10_000.0}
    else:
        rope = {"rope_parameters": {kind: {"rope_type": "default", "rope_theta": t} for kind, t in thetas.items()}}
    special = {f"{role}_token_id": tokenizer.token_to_id(f"[{role.upper()}]") for role in ("cls", "sep", "pad")}
    return {
        "model_type": "modernbert",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 128,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "local_attention": 32,
        "max_position_embeddings": 1024,
        "bos_token_id": special["cls_token_id"],
        "eos_token_id": special["sep_token_id"],
        **special,
        **rope,
        **spec.encoder,
    }


def agent_config(spec: CheckpointSpec) -> dict[str, Any]:
    return {
        "encoder": "tests/tiny",
        "head_layers": 2,
        "act_costs": {"escalate": 0.5},
        "max_len": spec.max_len,
        "head_max_len": spec.head_max_len,
        "amp_dtype": "bf16",
        "temperature": [1.6, 1.25, 2.0],
        "temperature_by_options": {"choice:3-5": 1.75, "score:3-5": 1.5},
        **spec.agent,
    }


def random_weights(model: DecisionModel, seed: int, scale: float = 0.1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, value in model.state_dict().items():
        drawn = torch.randn(value.shape, generator=generator) * scale
        weights[name] = 1 + drawn if "norm" in name and name.endswith("weight") else drawn
    weights["scorer.0.weight"] = 1 + weights["scorer.0.weight"]
    weights["scorer.3.weight"] *= 10
    weights["temperature"] = torch.ones(3)
    return weights


def spoil_weights(source: Path, folder: Path, word: str | None) -> Path:
    """A copy of a checkpoint that gives NaN: for texts with this word, or, when it is None, for every text."""
    shutil.copytree(source, folder)
    weights = load_file(folder / "model.safetensors")
    if word is None:
        weights["scorer.3.weight"][:] = torch.nan
    else:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
        # Of the bytes that it is made of, the last in the vocabulary is in no ordinary text.
        token = max(tokenizer.encode(word, add_special_tokens=False).ids)
        weights["encoder.embeddings.tok_embeddings.weight"][token] = torch.nan
    save_file(weights, folder / "model.safetensors")
    return folder


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")
