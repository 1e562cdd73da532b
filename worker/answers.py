"""From a batch's columns of answers to rows of the results table. Rounds nothing: the store keeps full precision."""

from collections.abc import Sequence
from typing import Any

import laya
from worker.states import Window


def result_rows(
    prepared: laya.PreparedQuestions,
    window: Window,
    answers: laya.Answers,
    routes: Sequence[laya.Route | None],
) -> list[dict[str, Any]]:
    """One dict for each answer: the columns of `results` but for job and batch.

    `routes` has one for each row of the window, None where the job names one checkpoint. A column that does not belong
    to the question's type is None, never 0 or an empty string.
    """
    columns = zip(
        answers.state_index.tolist(),
        answers.question_index.tolist(),
        answers.choice_index.tolist(),
        answers.score.tolist(),
        answers.noul.tolist(),
        answers.probabilities.tolist(),
        answers.confidence.tolist(),
        answers.answer_confidence.tolist(),
        answers.act_probability.tolist(),
        answers.state_tokens_dropped.tolist(),
        strict=True,
    )
    options = [[str(option) for option in question.options] for question in prepared.questions]
    alike = [question.id in prepared.alike for question in prepared.questions]
    rows = []
    for state, question, choice, score, noul, probabilities, confidence, answer_confidence, act, dropped in columns:
        kind, route = prepared.questions[question].type, routes[state]
        rows.append(
            {
                "row_number": window.row_numbers[state],
                "row_id": window.row_ids[state],
                "question": prepared.questions[question].id,
                "type": kind,
                "choice": options[question][choice] if kind == "choice" else None,
                "score": score if kind == "score" else None,
                "noul": noul if kind == "noul" else None,
                "probabilities": dict(zip(options[question], probabilities, strict=False)),
                "confidence": confidence,
                "answer_confidence": answer_confidence,
                "act_probability": act,
                "state_tokens_dropped": dropped,
                "options_cut": alike[question],
                "language": route and route.language,
                "route_reason": route and route.reason,
            }
        )
    return rows
