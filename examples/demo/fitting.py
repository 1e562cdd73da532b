"""The training loop: embeddings first, then the whole model; afterwards the temperatures and the action head.

Owns the arithmetic of learning. Does not own the data (`material`) or the files of a checkpoint (`train`).
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name every reader of PyTorch knows
from material import Pairs, option_spans
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor, nn

from laya.model import DecisionModel

BASE_SHARE = 0.7  # of the pairs use the wording of questions.yaml, the others any wording
TEMPERATURES = (0.5, 5.0)  # what the engine clamps to


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
    batch_size: int = 32
    learning_rate: float = 1e-3
    weight_decay: float = 0.05
    warmup_share: float = 0.1
    dropout: float = 0.15
    word_dropout: float = 0.1
    wordings: int = 8
    topic_repeats: int = 4
    seed: int = 0


def plan_epoch(wordings: list[Pairs], recipe: Recipe, draw: np.random.Generator) -> list[tuple[Pairs, np.ndarray]]:
    """Batches of one wording and of similar lengths; most pairs use the wording of questions.yaml."""
    base = wordings[0]
    rare = base.question_names.index("topic")
    pairs = np.arange(len(base)).repeat(np.where(base.encoded.question_index == rare, recipe.topic_repeats, 1))
    wording = np.where(draw.random(len(pairs)) < BASE_SHARE, 0, draw.integers(0, len(wordings), len(pairs)))
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
    counts = torch.from_numpy(np.diff(pairs.encoded.marker_offsets))
    spans = option_spans(pairs)
    for plan in plans:
        for _, index in plan:
            ids, state = pairs.state_tokens(index)
            logits = words(ids, state & (torch.rand(ids.shape) > 0.2), questions[index])
            targets = pairs.targets[index]
            logits = logits.masked_fill(torch.arange(options) >= counts[index, None], -1e4)
            named = F.cross_entropy(words(*spans[:3]), spans[3])
            step(cross_entropy(logits, targets) + 0.2 * named, words, optimiser, schedule)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return -(targets * logits.log_softmax(-1)).sum(-1).mean()


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
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as progress:
        task = progress.add_task("training", total=steps)
        for epoch, plan in enumerate(plans, start=1):
            model.train()
            for pairs, index in plan:
                inputs, in_state = pairs.batch(index)
                dropped = in_state & (torch.rand(in_state.shape) < recipe.word_dropout)
                inputs.input_ids[dropped] = unknown_id
                targets = pairs.targets[index, : inputs.markers.shape[1]]
                step(cross_entropy(model(inputs)[0], targets), model, optimiser, schedule)
                progress.advance(task)
            scores = measure(validation, infer(model, validation)[0])
            progress.console.print(f"epoch {epoch}: validation accuracy " + describe(scores))


@torch.no_grad()
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


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """The T that makes softmax(logits / T) likeliest, by a search over what the engine accepts."""
    candidates = torch.logspace(math.log10(TEMPERATURES[0]), math.log10(TEMPERATURES[1]), 200)
    losses = torch.stack([F.cross_entropy(logits / t, labels) for t in candidates])
    return round(float(candidates[losses.argmin()]), 4)


def fit_act_head(model: DecisionModel, features: Tensor, right: Tensor, weight_decay: float = 1.0) -> None:
    """Action 0 (answer) where the model was right, action 1 (escalate) where it was wrong; only act_head learns."""
    optimiser = torch.optim.AdamW(model.act_head.parameters(), lr=1e-3, weight_decay=weight_decay)
    targets = 1 - right.long()
    for _ in range(150):
        optimiser.zero_grad()
        F.cross_entropy(model.act_head(features), targets).backward()
        optimiser.step()
