import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import laya
from laya.calibration import Temperatures, read_calibration, read_temperatures
from laya.decode import Logits, decode
from laya.model import ABSENT_LOGIT
from laya.packing import Batch
from laya.sequence import EncodedSequences, PreparedQuestions

TEMPERATURES = read_temperatures({"temperature": [1.5, 0.75, 3.0], "temperature_by_options": {"choice:3-5": 2.0}}, "x")
QUESTIONS: dict[str, Any] = {
    "plain": {"type": "choice", "instructions": "Which?", "criteria": ["a", "b", "c"]},
    "turned": {"type": "choice", "instructions": "Which?", "criteria": ["a", "b", "c"], "option_order": [2, 0, 1]},
    "one": {"type": "choice", "instructions": "Which?", "criteria": ["a"]},
    "score": {"type": "score", "instructions": "How?", "criteria": ["l", "m", "h", "x"]},
    "noul": {"type": "noul", "instructions": "Is it?"},
}
COUNTS = [3, 3, 1, 4, 2]
WIDTH = 5


@pytest.fixture(scope="module")
def encoded(agent: laya.Agent) -> tuple[PreparedQuestions, EncodedSequences]:
    prepared = agent.prepare(QUESTIONS)
    return prepared, agent.encode(["state"], prepared)


def decode_all(
    encoded: tuple[PreparedQuestions, EncodedSequences],
    logits: np.ndarray,
    act: np.ndarray,
    temperatures: Temperatures = TEMPERATURES,
) -> laya.Answers:
    batch = Batch(np.arange(len(COUNTS)), 64, 1, 64)
    return decode(*encoded, batch, Logits(logits.astype(np.float32), act.astype(np.float32)), temperatures)


finite = st.floats(-50, 50, width=32)
blocks = st.lists(st.lists(finite, min_size=WIDTH, max_size=WIDTH), min_size=len(COUNTS), max_size=len(COUNTS))


@settings(deadline=None)
@given(block=blocks, act=st.tuples(finite, finite))
def test_arrays_give_what_the_formulas_give_one_by_one(
    encoded: tuple[PreparedQuestions, EncodedSequences], block: list[list[float]], act: tuple[float, float]
) -> None:
    logits = np.array(block)
    answers = decode_all(encoded, logits, np.tile(act, (len(COUNTS), 1)))
    for row, (question, count) in enumerate(zip(encoded[0].questions, COUNTS, strict=True)):
        temperature = TEMPERATURES.of(question.type, count)
        weights = [math.exp((x - max(block[row][:count])) / temperature) for x in block[row][:count]]
        read = [weight / sum(weights) for weight in weights]
        p = [read[(question.order or range(count)).index(option)] for option in range(count)]
        assert answers.probabilities[row, :count] == pytest.approx(p, abs=1e-9)
        assert answers.probabilities[row, count:].tolist() == [0.0] * (WIDTH - count)
        assert p[answers.choice_index[row]] == pytest.approx(max(p))
        assert answers.answer_confidence[row] == pytest.approx(max(p))
        entropy = -sum(x * math.log(x) for x in p if x > 0)
        spread = 1 - entropy / math.log(count) if count > 1 else 1.0
        assert answers.confidence[row] == pytest.approx(max(p) if question.type == "noul" else spread, abs=1e-9)
        assert answers.score[row] == pytest.approx(sum(i * x for i, x in enumerate(p)), abs=1e-9)
        assert answers.noul[row] == pytest.approx(p[1] if count > 1 else 0.0)
        assert answers.act_probability[row] == pytest.approx(1 / (1 + math.exp(min(act[1] - act[0], 700))))
    assert answers.option_count.tolist() == COUNTS


@settings(deadline=None)
@given(block=blocks)
def test_absent_options_change_nothing(
    encoded: tuple[PreparedQuestions, EncodedSequences], block: list[list[float]]
) -> None:
    logits = np.array(block)
    absent = np.arange(WIDTH) >= np.array(COUNTS)[:, None]
    act = np.zeros((len(COUNTS), 2))
    answers = decode_all(encoded, logits, act)
    masked = decode_all(encoded, np.where(absent, ABSENT_LOGIT, logits), act)
    assert (answers.probabilities == masked.probabilities).all()
    assert (answers.confidence == masked.confidence).all()
    assert answers.probabilities.sum(axis=1) == pytest.approx(np.ones(len(COUNTS)))


def test_equal_options_choose_the_first_and_huge_logits_stay_finite(
    encoded: tuple[PreparedQuestions, EncodedSequences],
) -> None:
    logits = np.full((len(COUNTS), WIDTH), 7.0)
    answers = decode_all(encoded, logits, np.zeros((len(COUNTS), 2)))
    assert answers.choice_index.tolist() == [0] * len(COUNTS)
    assert answers.confidence[:4] == pytest.approx([0, 0, 1, 0], abs=1e-12)
    logits[:, 0] = 3e4
    answers = decode_all(encoded, logits, np.array([[9e4, -9e4]] * len(COUNTS)))
    assert np.isfinite(answers.confidence).all()
    assert answers.act_probability.tolist() == [1.0] * len(COUNTS)
    assert answers.choice_index.tolist() == [0, 2, 0, 0, 0]


@settings(deadline=None)
@given(block=blocks)
def test_bins_replace_the_confidence_of_their_bucket_alone(
    encoded: tuple[PreparedQuestions, EncodedSequences], block: list[list[float]]
) -> None:
    values = [0.9, 0.5, 0.7, 0.2]
    content = {"temperature": [1.5, 0.75, 3.0], "temperature_by_options": {"choice:3-5": 2.0}}
    binned = read_calibration({**content, "binning_map": {"choice:3-5": {"bins": len(values), "values": values}}})
    act = np.zeros((len(COUNTS), 2))
    answers, plain = decode_all(encoded, np.array(block), act, binned), decode_all(encoded, np.array(block), act)
    for row, top in enumerate(plain.answer_confidence.tolist()):
        replaced = values[min(int(top * len(values)), len(values) - 1)] if row < 2 else top
        assert answers.answer_confidence[row] == replaced
    for other in ("probabilities", "choice_index", "confidence", "score", "noul", "act_probability"):
        assert np.array_equal(getattr(answers, other), getattr(plain, other))


def test_a_confidence_that_is_not_a_number_has_no_bin(
    encoded: tuple[PreparedQuestions, EncodedSequences],
) -> None:
    binned = read_calibration({"temperature": [1, 1, 1], "binning_map": {"noul:2": {"bins": 1, "values": [0.5]}}})
    logits = np.zeros((len(COUNTS), WIDTH))
    logits[4] = math.nan
    answers = decode_all(encoded, logits, np.zeros((len(COUNTS), 2)), binned)
    assert math.isnan(answers.answer_confidence[4])
    assert answers.answer_confidence[2] == 1.0
