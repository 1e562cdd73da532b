"""Answers in the dictionary form of `predict`: rounded, by question id. Owns that form; the numbers are `decode`'s."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from laya.decode import Answers
from laya.sequence import EncodedSequences, PreparedQuestions
from schemas.question_text import Question

DIGITS = 4


def render_replies(
    model: str, states: int, prepared: PreparedQuestions, encoded: EncodedSequences, parts: Sequence[Answers]
) -> list[dict[str, Any]]:
    """One reply for each of `states` states, in their order, out of the answers of all batches."""
    answers: list[dict[str, Any]] = [
        dict.fromkeys(question.id for question in prepared.questions) for _ in range(states)
    ]
    for part in parts:
        for question_index in np.unique(part.question_index).tolist():
            question = prepared.questions[question_index]
            rows = np.flatnonzero(part.question_index == question_index)
            for state, answer in zip(part.state_index[rows].tolist(), _render(question, part, rows), strict=True):
                answers[state][question.id] = answer
    return [
        {"model": model, "answers": answer, "usage": usage}
        for answer, usage in zip(answers, _render_usage(states, prepared, encoded), strict=True)
    ]


def _render(question: Question, part: Answers, rows: np.ndarray[Any, Any]) -> Iterator[dict[str, Any]]:
    """One question's answers, as Python values of a whole column at a time."""
    probabilities = part.probabilities[rows, : len(question.options)].round(DIGITS).tolist()
    columns = (part.choice_index, part.score, part.noul, part.confidence, part.answer_confidence, part.act_probability)
    values = zip(probabilities, *(column[rows].round(DIGITS).tolist() for column in columns), strict=True)
    legend = dict(zip(question.options, question.legend, strict=False))
    for p, choice, score, noul, confidence, answer_confidence, act in values:
        answer: dict[str, Any] = {"type": question.type}
        if question.type == "noul":
            answer["noul"] = noul
        else:
            if question.type == "choice":
                answer["choice"] = question.options[choice]
            else:
                answer |= {"score": score, "legend": dict(legend)}
            answer["probabilities"] = dict(zip(question.options, p, strict=True))
        answer |= {"confidence": confidence, "answer_confidence": answer_confidence, "action": {"act_probability": act}}
        yield answer


def _render_usage(states: int, prepared: PreparedQuestions, encoded: EncodedSequences) -> Iterator[dict[str, Any]]:
    tokens = np.bincount(encoded.state_index, weights=encoded.lengths, minlength=states).astype(np.int64)
    state_tokens, dropped = np.zeros(states, dtype=np.int64), np.zeros(states, dtype=np.int64)
    state_tokens[encoded.state_index] = encoded.state_tokens
    np.maximum.at(dropped, encoded.state_index, encoded.state_tokens_dropped)
    truncated: list[list[str]] = [[] for _ in range(states)]
    for sequence in np.flatnonzero(encoded.state_tokens_dropped).tolist():
        truncated[encoded.state_index[sequence]].append(prepared.questions[encoded.question_index[sequence]].id)
    alike = _render_alike(prepared)
    columns = (tokens.tolist(), state_tokens.tolist(), dropped.tolist(), truncated)
    for total, whole, lost, questions in zip(*columns, strict=True):
        usage = {
            "input_tokens": total,
            "output_tokens": 0,
            "state_tokens": whole,
            "state_tokens_dropped": lost,
            "truncated": lost > 0,
            "truncated_questions": questions,
        }
        yield usage | {"options": alike} if alike else usage


def _render_alike(prepared: PreparedQuestions) -> dict[str, dict[str, int | None]]:
    """By question id, the options of a question some of which are alike to the model, for what was cut of them."""
    columns = (np.diff(prepared.marker_offsets), prepared.options_distinct, prepared.option_tokens)
    return {
        question.id: {"total": total, "distinct": distinct, "tokens_per_option": most or None}
        for question, total, distinct, most in zip(
            prepared.questions, *(column.tolist() for column in columns), strict=True
        )
        if distinct < total
    }
