"""Logits to answers. Owns the formulas of probabilities, confidences and scores, vectorised over a batch.

The answers here are columns at full precision; the dictionary form of them is `replies`'.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from laya.calibration import Temperatures
from laya.packing import Batch
from laya.sequence import EncodedSequences, Ints, PreparedQuestions
from schemas.calibration import TYPE_NAMES

NOUL = TYPE_NAMES.index("noul")
TRUE_OPTION = 1  # of a noul, whose options are false and true

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Logits:
    """A forward pass on the host: `logits` (n, k) and `act` (n, actions), both float32.

    Out of memory, it was taken in parts: `splits` times into halves, with `on_cpu` of its sequences on the CPU.
    """

    logits: NDArray[np.float32]
    act: NDArray[np.float32]
    splits: int = 0
    on_cpu: int = 0

    @property
    def finite(self) -> bool:
        """Whether all of them are numbers, so that there are answers."""
        return bool(np.isfinite(self.logits).all() and np.isfinite(self.act).all())


@dataclass(frozen=True)
class Answers:
    """The answers of a batch's n sequences, in the batch's order, options in their question's order.

    `probabilities` is (n, k), 0 where an option is absent. `score` means something for score questions, `noul` for
    nouls; `choice_index` is the most probable option, the first of equals.
    """

    state_index: Ints
    question_index: Ints
    option_count: Ints
    probabilities: Floats
    choice_index: Ints
    score: Floats
    noul: Floats
    confidence: Floats
    answer_confidence: Floats
    act_probability: Floats
    state_tokens_dropped: Ints

    def __len__(self) -> int:
        return len(self.state_index)


def question_temperatures(prepared: PreparedQuestions, temperatures: Temperatures) -> Floats:
    """The temperature of each question."""
    return np.array([temperatures.of(question.type, len(question.options)) for question in prepared.questions])


def decode(
    prepared: PreparedQuestions, encoded: EncodedSequences, batch: Batch, logits: Logits, temperatures: Temperatures
) -> Answers:
    """The answers of a batch. p = softmax(logits / T) over the options that are there.

    confidence is 1 - H(p) / ln k for choice and score, 1 where k < 2, and max(p) for noul; answer_confidence is max(p),
    or the value of its bin where a calibration has bins for the question; score is the sum of i p_i; act_probability is
    the first of softmax(act).
    """
    question = encoded.question_index[batch.index]
    counts = encoded.option_counts[batch.index]
    per_question = question_temperatures(prepared, temperatures)
    scaled = logits.logits.astype(np.float64) / per_question[question][:, None]
    scaled[np.arange(scaled.shape[1]) >= counts[:, None]] = -np.inf
    probabilities = _in_question_order(softmax(scaled), prepared, question)
    top = probabilities.max(axis=1)
    certainty = _certainty(probabilities, counts)
    return Answers(
        state_index=encoded.state_index[batch.index],
        question_index=question,
        option_count=counts,
        probabilities=probabilities,
        choice_index=probabilities.argmax(axis=1),
        score=probabilities @ np.arange(probabilities.shape[1], dtype=np.float64),
        noul=probabilities[:, TRUE_OPTION],
        confidence=np.where(prepared.types[question] == NOUL, top, certainty),
        answer_confidence=_in_bins(top, prepared, question, temperatures),
        act_probability=softmax(logits.act.astype(np.float64))[:, 0],
        state_tokens_dropped=encoded.state_tokens_dropped[batch.index],
    )


def softmax(values: Floats) -> Floats:
    """Over the last axis."""
    exponentials = np.exp(values - values.max(axis=-1, keepdims=True))
    return np.asarray(exponentials / exponentials.sum(axis=-1, keepdims=True), dtype=np.float64)


def _certainty(probabilities: Floats, counts: Ints) -> Floats:
    """1 - H(p) / ln k, and 1 for a single option."""
    logarithms = np.log(probabilities, out=np.zeros_like(probabilities), where=probabilities > 0)
    entropy = -(probabilities * logarithms).sum(axis=1)
    return np.where(counts < 2, 1.0, 1.0 - entropy / np.log(np.maximum(counts, 2)))


def _in_bins(top: Floats, prepared: PreparedQuestions, question: Ints, temperatures: Temperatures) -> Floats:
    """Replace each confidence by the value of the bin that it lies in; NaN, and questions without bins, keep theirs."""
    replaced = top.copy()
    for index in np.unique(question).tolist() if temperatures.bins else ():
        asked = prepared.questions[index]
        if (values := temperatures.bins_of(asked.type, len(asked.options))) is not None:
            rows = np.flatnonzero((question == index) & ~np.isnan(top))
            places = (top[rows] * len(values)).astype(np.int64)
            replaced[rows] = np.array(values)[np.minimum(places, len(values) - 1)]
    return replaced


def _in_question_order(probabilities: Floats, prepared: PreparedQuestions, question: Ints) -> Floats:
    """Undo `option_order`: place j of what the model read is option order[j] of the question."""
    if all(asked.order is None for asked in prepared.questions):
        return probabilities
    width = probabilities.shape[1]
    order = np.tile(np.arange(width), (len(prepared.questions), 1))
    for index in np.unique(question).tolist():
        places = prepared.questions[index].order
        if places is not None:
            order[index, : len(places)] = places
    ordered = np.empty_like(probabilities)
    np.put_along_axis(ordered, order[question], probabilities, axis=1)
    return ordered
