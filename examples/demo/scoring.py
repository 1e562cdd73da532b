"""Answers against labels: accuracy, the majority class, and how far a score lies from its level. Owns no model.

Labels come from held_out.parquet; answers from the engine (train.py) or from the results table (run_demo.py).
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

LABEL_OF = {"spam": "is_spam", "sentiment": "sentiment", "topic": "topic"}  # question -> the column of its labels


@dataclass(frozen=True)
class Answer:
    """One answer. `value` is what a label is compared with, `probability` what the model gives it (the engine's
    `answer_confidence`), `score` the expected level of a score question."""

    value: Any
    probability: float
    score: float | None = None


@dataclass(frozen=True)
class Summary:
    """How the labelled rows of one question were answered. Shares are 0 to 1; the last three are for scores only."""

    rows: int
    accuracy: float
    majority: float
    mean_probability: float  # of the answers given; near the accuracy where the model is well calibrated
    within_one: float | None = None
    mean_error_levels: float | None = None
    majority_error_levels: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


def read_answer(answer: dict[str, Any]) -> Answer:
    """An answer from its type, choice, score, noul, answer_confidence and probabilities, stored or predicted."""
    kind, probability = answer["type"], answer["answer_confidence"]
    if kind == "noul":
        return Answer(answer["noul"] >= 0.5, probability)
    if kind == "choice":
        return Answer(answer["choice"], probability)
    probabilities = answer["probabilities"]
    values = list(probabilities.values()) if isinstance(probabilities, dict) else list(probabilities)
    return Answer(values.index(max(values)), probability, answer["score"])


def summarise(pairs: Iterable[tuple[Any, Answer]]) -> Summary:
    """(label, answer) pairs of one question, every label given."""
    found = list(pairs)
    rows = len(found)
    labels = Counter(label for label, _ in found)
    summary = {
        "rows": rows,
        "accuracy": sum(label == answer.value for label, answer in found) / rows,
        "majority": max(labels.values()) / rows,
        "mean_probability": sum(answer.probability for _, answer in found) / rows,
    }
    if found[0][1].score is not None:
        middle = sorted(label for label, _ in found)[rows // 2]
        summary["within_one"] = sum(abs(label - answer.value) <= 1 for label, answer in found) / rows
        summary["mean_error_levels"] = sum(abs(label - (answer.score or 0.0)) for label, answer in found) / rows
        summary["majority_error_levels"] = sum(abs(label - middle) for label, _ in found) / rows
    return Summary(**summary)
