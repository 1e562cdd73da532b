"""What training reads: labelled rows, the wordings of the questions, and (text, question) pairs with targets.

Sequences come from the engine itself (`agent.prepare`, `agent.encode`), so that a text is laid out in training
exactly as in a job. Owns no model and no loop.
"""

import itertools
import random
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
import yaml
from scoring import LABEL_OF

from laya.collation import collate
from laya.inputs import ModelInputs
from laya.packing import Batch

HERE = Path(__file__).parent
QTYPE = {"choice": 0, "score": 1, "noul": 2}
# Where a rating of -4 to +4 lies between the five levels: the bounds of prepare.py fall halfway between two of them.
RATINGS, LEVELS = (-4.0, -2.0, -0.5, 0.5, 2.0, 4.0), (-0.5, 0.5, 1.5, 2.5, 3.5, 4.5)
LEVEL_SPREAD = 0.6  # in levels: how far a rating's target reaches into the neighbouring levels
LABEL_SMOOTHING = 0.05
ORDINARY_PERCENT = 8  # of reviews and chat turns that also serve as "not spam"
Questions = dict[str, dict[str, Any]]
Row = dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    rows: list[Row] = pq.read_table(path).to_pylist()
    return rows


def read_questions() -> Questions:
    questions: Questions = yaml.safe_load((HERE / "questions.yaml").read_text(encoding="utf-8"))
    return questions


def vary_questions(questions: Questions, count: int, seed: int) -> list[Questions]:
    """The questions as asked, then `count` rewordings; every other one puts the choice's options in another order."""
    paraphrases = yaml.safe_load((HERE / "paraphrases.yaml").read_text(encoding="utf-8"))
    draw = random.Random(seed)  # noqa: S311 - not for secrets
    wordings = [questions]
    for number in range(count):
        worded: Questions = {}
        for name, question in questions.items():
            other = paraphrases[name]
            instructions = draw.choice([question["instructions"], *other["instructions"]])
            criteria = draw.choice([question["criteria"], *other["criteria"]])
            if question["type"] == "choice" and number % 2:
                criteria = dict(draw.sample(list(criteria.items()), len(criteria)))
            worded[name] = {"type": question["type"], "instructions": instructions}
            if criteria is not None:
                worded[name]["criteria"] = criteria
        wordings.append(worded)
    return wordings


def wording_texts(questions: Questions) -> list[str]:
    """What of the questions becomes tokens, roughly: for the tokenizer to learn from."""
    texts = []
    for question in questions.values():
        criteria = question.get("criteria") or {}
        described = criteria.items() if isinstance(criteria, dict) else enumerate(criteria)
        options = [f" {name}: {text}" for name, text in described] + [f" level {level}: " for level in range(5)]
        texts += [f"{question['type']} question: {question['instructions']}", *options]
    return texts


@dataclass(frozen=True)
class Pairs:
    """(text, question) pairs in one wording. `targets` (pairs, options) float32: rows sum to 1."""

    encoded: Any
    targets: torch.Tensor
    labels: np.ndarray  # (pairs,) int64: the position of the right option
    question_names: tuple[str, ...]
    qtypes: np.ndarray

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def lengths(self) -> np.ndarray:
        lengths: np.ndarray = np.diff(self.encoded.offsets)
        return lengths

    def batch(self, index: np.ndarray) -> tuple[ModelInputs, torch.Tensor]:
        """The pairs at `index`, and a mask (T) of the tokens that belong to a state."""
        lengths = self.lengths[index]
        tokens = int(lengths.sum())
        inputs = collate(self.encoded, Batch(index, int(lengths.max()), tokens, tokens), torch.device("cpu"))
        end = torch.from_numpy(lengths - 1)
        start = end - torch.from_numpy(self._state_lengths(index))
        in_state = (inputs.positions >= start[inputs.sequence]) & (inputs.positions < end[inputs.sequence])
        return inputs, in_state

    def state_tokens(self, index: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens (n, L) of the pairs' states alone, and a mask of those that are no padding."""
        kept = self._state_lengths(index)
        ids = fill(self.encoded.token_ids, self.encoded.offsets[index] + self.lengths[index] - 1 - kept, kept)
        return torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(np.arange(ids.shape[1]) < kept[:, None])

    def _state_lengths(self, index: np.ndarray) -> np.ndarray:
        kept: np.ndarray = (self.encoded.state_tokens - self.encoded.state_tokens_dropped)[index]
        return kept


def option_spans(pairs: Pairs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Every option of every question as a text of its own: ids (options, L), mask (options, L), question, position."""
    encoded, spans = pairs.encoded, []
    for question in range(len(pairs.question_names)):
        pair = int(np.flatnonzero(encoded.question_index == question)[0])
        markers = encoded.markers[encoded.marker_offsets[pair] : encoded.marker_offsets[pair + 1]]
        stop = pairs.lengths[pair] - 2 - (encoded.state_tokens - encoded.state_tokens_dropped)[pair]
        bounds = [*markers, stop]
        for position, (start, end) in enumerate(itertools.pairwise(bounds)):
            first = encoded.offsets[pair]
            spans.append((encoded.token_ids[first + start + 1 : first + end], question, position))
    ids = torch.zeros(len(spans), max(len(tokens) for tokens, _, _ in spans), dtype=torch.int64)
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    for row, (tokens, _, _) in enumerate(spans):
        ids[row, : len(tokens)] = torch.from_numpy(np.asarray(tokens, dtype=np.int64))
        mask[row, : len(tokens)] = True
    return ids, mask, torch.tensor([q for _, q, _ in spans]), torch.tensor([p for _, _, p in spans])


def fill(flat: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Rows of `flat` that begin at `starts`, padded with zeros to the longest: (n, longest)."""
    position = np.arange(lengths.max())
    inside = position < lengths[:, None]
    return np.where(inside, flat[np.where(inside, starts[:, None] + position, 0)], 0)


def option_names(question: dict[str, Any]) -> list[Any]:
    """An option's label in the data, in the order of the sequence's markers."""
    if question["type"] == "noul":
        return [False, True]
    return list(question["criteria"]) if question["type"] == "choice" else list(range(len(question["criteria"])))


def find_label(row: Row, name: str, with_ordinary: bool) -> Any:
    """The row's label for the question, or None when it must not be asked of that row."""
    label = row[LABEL_OF[name]]
    if label is None and name == "spam" and with_ordinary and zlib.crc32(row["id"].encode()) % 100 < ORDINARY_PERCENT:
        return False
    return label


def make_target(row: Row, name: str, label: int, options: int) -> np.ndarray:
    """One row of targets: spread around the rating for the sentiment, smoothed for the other two."""
    if name == "sentiment":
        distance = np.arange(options) - np.interp(row["rating"], RATINGS, LEVELS)
        target = np.exp(-((distance / LEVEL_SPREAD) ** 2) / 2)
    else:
        target = np.full(options, LABEL_SMOOTHING / options)
        target[label] += 1 - LABEL_SMOOTHING
    return target / target.sum()


def make_pairs(agent: Any, rows: list[Row], questions: Questions, with_ordinary: bool = False) -> Pairs:
    """Every labelled (row, question) pair; their order is the same for every wording of the questions."""
    names = tuple(questions)
    found = [[find_label(row, name, with_ordinary) for name in names] for row in rows]
    wanted = np.array([[label is not None for label in labels] for labels in found])
    encoded = agent.encode([row["text"] for row in rows], agent.prepare(questions), wanted=wanted)
    options = {name: option_names(question) for name, question in questions.items()}
    targets = np.zeros((len(encoded.state_index), max(map(len, options.values()))), dtype=np.float32)
    labels = np.zeros(len(targets), dtype=np.int64)
    for pair, (state, question) in enumerate(zip(encoded.state_index, encoded.question_index, strict=True)):
        name = names[question]
        labels[pair] = options[name].index(found[state][question])
        count = len(options[name])
        targets[pair, :count] = make_target(rows[state], name, labels[pair], count)
    qtypes = np.array([QTYPE[questions[name]["type"]] for name in names])[encoded.question_index]
    return Pairs(encoded, torch.from_numpy(targets), labels, names, qtypes)
