"""Trains the demo's decision checkpoint on the CPU, from data/ into checkpoint/, in minutes.

    python examples/demo/train.py

Steps: a tokenizer of the training texts; an untrained checkpoint in the public format, which the engine loads to lay out the
sequences; training; temperatures and the action head from the validation rows; accuracy on held_out.parquet into
metrics.json. The data is made by prepare.py.
"""

import argparse
import json
import math
import time
T0=time.time()
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import laya
import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name every reader of PyTorch knows
from laya.checkpoint import read_model_config
from laya.model import DecisionModel
from material import HERE, Pairs, make_pairs, read_questions, read_rows, vary_questions, wording_texts
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import ModernBertConfig, PreTrainedTokenizerFast

CHECKPOINT = HERE / "checkpoint"
SPECIAL = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "mask_token": "[MASK]"}
DROPPED_OUT = ("embeddings.norm", "attn.Wo", "mlp.Wo", "self_attn.out_proj", "linear2")
SETTINGS = {
    "encoder": "demo (ModernBERT, trained from scratch)",
    "head_layers": 2,
    "act_costs": {"escalate": 0.5},
    "max_len": 256,
    "head_max_len": 160,
    "amp_dtype": "bf16",
}


@dataclass(frozen=True)
class Recipe:
    """Every number that training depends on."""

    vocab_size: int = 4096
    hidden_size: int = 128
    intermediate_size: int = 128
    layers: int = 3
    word_epochs: int = 3
    word_learning_rate: float = 1e-2
    epochs: int = 3
    batch_size: int = 48
    learning_rate: float = 1e-3
    weight_decay: float = 0.05
    warmup_share: float = 0.1
    dropout: float = 0.15
    word_dropout: float = 0.1
    wordings: int = 8
    topic_repeats: int = 4
    seed: int = 0
    threads: int = 2


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE over lower-cased text: every byte has a token, so nothing is ever unknown."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(SPECIAL.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)


def encoder_config(tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> ModernBertConfig:
    return ModernBertConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.hidden_size // 64,
        local_attention=128,
        max_position_embeddings=512,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.cls_token_id,
        eos_token_id=tokenizer.sep_token_id,
        cls_token_id=tokenizer.cls_token_id,
        sep_token_id=tokenizer.sep_token_id,
    )


def build_model(config: ModernBertConfig, recipe: Recipe) -> DecisionModel:
    """The engine's own forward pass with fresh weights, and dropout hooked on for training."""
    model = DecisionModel(read_model_config(config.to_dict(), SETTINGS, SETTINGS["max_len"]))
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            residual = name.endswith(("Wo.weight", "out_proj.weight", "linear2.weight"))
            nn.init.trunc_normal_(parameter, std=0.02 if residual else 0.05)
    for name, module in model.named_modules():
        if name.endswith(DROPPED_OUT):
            module.register_forward_hook(lambda module, _, out: F.dropout(out, recipe.dropout, module.training))
    return model


def write_checkpoint(model: DecisionModel, temperatures: dict[str, float]) -> None:
    """model.safetensors and rl_agent_config.json; `temperatures` by "<type>:<options>", empty before calibration."""
    weights = {name: value.detach().contiguous().clone() for name, value in model.state_dict().items()}
    by_type = [next((t for key, t in temperatures.items() if key.startswith(kind)), 1.0) for kind in TYPES]
    weights["temperature"] = torch.tensor(by_type)
    save_file(weights, CHECKPOINT / "model.safetensors", metadata={"format": "pt"})
    settings = {**SETTINGS, "temperature": by_type, "temperature_by_options": temperatures}
    (CHECKPOINT / "rl_agent_config.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")


TYPES = ("choice", "score", "noul")


def plan_epoch(wordings: list[Pairs], recipe: Recipe, draw: np.random.Generator) -> list[tuple[Pairs, np.ndarray]]:
    """Batches of one wording and of similar lengths; half of the pairs use the wording of questions.yaml."""
    base = wordings[0]
    rare = base.question_names.index("topic")
    pairs = np.arange(len(base)).repeat(np.where(base.encoded.question_index == rare, recipe.topic_repeats, 1))
    wording = np.where(draw.random(len(pairs)) < 0.5, 0, draw.integers(0, len(wordings), len(pairs)))
    batches = []
    for number, worded in enumerate(wordings):
        mine = pairs[wording == number]
        mine = mine[np.argsort(worded.lengths[mine] + draw.normal(0, 4, len(mine)))]
        batches += [(worded, part) for part in np.array_split(mine, math.ceil(len(mine) / recipe.batch_size))]
    draw.shuffle(batches)
    return batches


class WordModel(nn.Module):
    """An attention-weighted mean of a text's embedded tokens and one linear layer for each question.

    Seconds of it give the embeddings a sense of the labels, which the transformer would need many epochs to find.
    """

    def __init__(self, embeddings: nn.Module, width: int, questions: int, options: int) -> None:
        super().__init__()
        self.embeddings, self.shape = embeddings, (questions, options)
        self.weigh, self.answer = nn.Linear(width, 1), nn.Linear(width, questions * options)

    def forward(self, ids: Tensor, in_state: Tensor, question: Tensor) -> Tensor:
        hidden = F.dropout(self.embeddings(ids), 0.2, self.training)
        weight = self.weigh(hidden).squeeze(-1).masked_fill(~in_state, -1e4).softmax(-1)
        pooled = (hidden * weight[..., None]).sum(1)
        return self.answer(pooled).view(-1, *self.shape)[torch.arange(len(ids)), question]


def warm_embeddings(model: DecisionModel, pairs: Pairs, recipe: Recipe, draw: np.random.Generator) -> None:
    options = pairs.targets.shape[1]
    words = WordModel(model.encoder.embeddings, recipe.hidden_size, len(pairs.question_names), options)
    plans = [plan_epoch([pairs], recipe, draw) for _ in range(recipe.word_epochs)]
    optimiser, schedule = make_optimiser(words, recipe.word_learning_rate, sum(map(len, plans)), recipe)
    questions = torch.from_numpy(np.asarray(pairs.encoded.question_index, dtype=np.int64))
    for plan in plans:
        for _, index in plan:
            inputs, in_state = pairs.batch(index)
            width = int(in_state.sum(1).max())
            order = in_state.int().argsort(dim=1, descending=True, stable=True)[:, :width]
            ids, state = inputs.input_ids.gather(1, order), in_state.gather(1, order)
            logits = words(ids, state & (torch.rand(ids.shape) > 0.2), questions[index])
            targets = pairs.targets[index]
            logits = logits.masked_fill(torch.arange(options) >= inputs.marker_counts[:, None], -1e4)
            step(-(targets * logits.log_softmax(-1)).sum(-1).mean(), words, optimiser, schedule)


def make_optimiser(model: nn.Module, learning_rate: float, steps: int, recipe: Recipe) -> tuple[Any, Any]:
    """AdamW with warm-up and a cosine to zero; norms and biases do not decay."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.98), fused=True)
    warmup = recipe.warmup_share * steps
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda at: min((at + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * at / steps))
    )
    return optimiser, schedule


def step(loss: Tensor, model: nn.Module, optimiser: Any, schedule: Any) -> None:
    optimiser.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    schedule.step()


def fit(model: DecisionModel, wordings: list[Pairs], validation: Pairs, unknown_id: int, recipe: Recipe) -> None:
    """Cross-entropy of the option logits; a share of each text's tokens is replaced by the unknown token."""
    draw = np.random.default_rng(recipe.seed)
    warm_embeddings(model, wordings[0], recipe, draw)
    plans = [plan_epoch(wordings, recipe, draw) for _ in range(recipe.epochs)]
    steps = sum(map(len, plans))
    optimiser, schedule = make_optimiser(model, recipe.learning_rate, steps, recipe)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task = progress.add_task("training", total=steps)
        for epoch, plan in enumerate(plans, start=1):
            model.train()
            for pairs, index in plan:
                inputs, in_state = pairs.batch(index)
                dropped = in_state & (torch.rand(in_state.shape) < recipe.word_dropout)
                inputs.input_ids[dropped] = unknown_id
                targets = pairs.targets[index, : inputs.marker_pos.shape[1]]
                step(-(targets * model(inputs)[0].log_softmax(-1)).sum(-1).mean(), model, optimiser, schedule)
                progress.advance(task)
            scores = measure(validation, infer(model, validation)[0])
            progress.console.print(f"epoch {epoch}: validation accuracy " + describe(scores), time.time()-T0)


@torch.inference_mode()
def infer(model: DecisionModel, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """Logits (pairs, options) and what the action head read (pairs, d + 4), without dropout."""
    model.eval()
    logits = torch.full_like(pairs.targets, -1e4)
    read: list[Tensor] = []
    hook = model.act_head.register_forward_pre_hook(lambda _, args: read.append(args[0]))
    order = np.argsort(pairs.lengths)
    for index in np.array_split(order, math.ceil(len(order) / 128)):
        out = model(pairs.batch(index)[0])[0]
        logits[index, : out.shape[1]] = out
    hook.remove()
    features = torch.empty(len(pairs), read[0].shape[1])
    features[order] = torch.cat(read)
    return logits, features


def measure(pairs: Pairs, logits: Tensor) -> dict[str, float]:
    right = logits.argmax(-1).numpy() == pairs.labels
    return {name: right[pairs.encoded.question_index == i].mean() for i, name in enumerate(pairs.question_names)}


def describe(scores: dict[str, float]) -> str:
    return ", ".join(f"{name} {score:.1%}" for name, score in scores.items())


def main() -> None:
    recipe = Recipe()
    torch.manual_seed(recipe.seed)
    torch.set_num_threads(recipe.threads)
    rows = read_rows(HERE / "data/train.parquet")
    questions = read_questions()
    wordings = vary_questions(questions, recipe.wordings, recipe.seed)
    # The questions weigh as much as a few hundred texts, so that their words are whole tokens and heads stay short.
    texts = [row["text"] for row in rows] + 40 * [text for wording in wordings for text in wording_texts(wording)]
    tokenizer = train_tokenizer(texts, recipe.vocab_size)
    tokenizer.save_pretrained(CHECKPOINT / "tokenizer")
    config = encoder_config(tokenizer, recipe)
    config.save_pretrained(CHECKPOINT / "encoder")
    model = build_model(config, recipe)
    write_checkpoint(model, {})
    agent = laya.load(str(CHECKPOINT))
    q = read_questions()
    t=time.time()
    wordings = [make_pairs(agent, rows, w, True) for w in wordings]
    print(time.time()-t, len(wordings[0]), wordings[0].lengths.mean(), sum(p.numel() for p in model.parameters()))
    validation = make_pairs(agent, read_rows(HERE / "data/validation.parquet"), q)
    held = make_pairs(agent, read_rows(HERE / "held_out.parquet"), q)
    t=time.time()
    fit(model, wordings, validation, tokenizer.unk_token_id, recipe)
    print("train s", time.time()-t)
    lo = infer(model, held)[0]
    print(describe(measure(held, lo)))

main()
