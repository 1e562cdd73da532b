"""What is asked, as the engine takes it: checked as a job's questions are, the answers keyed by the labels as given.

The rules are `schemas.question`'s, the wording `schemas.question_text`'s; the tokens are `sequence`'s.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from laya.errors import QuestionError
from schemas import question, question_text
from schemas.question_text import Question


def check_questions(questions: Mapping[str, Mapping[str, Any]]) -> tuple[Question, ...]:
    """Check and word the questions, in their order. Raises QuestionError, naming each question and what to change."""
    try:
        checked = question.check_questions(questions)
    except question.QuestionSetError as error:
        raise QuestionError("\n".join(error.problems)) from error
    worded = question_text.word_questions(checked)
    return tuple(_with_given_labels(one, given) for one, given in zip(worded, questions.values(), strict=True))


def _with_given_labels(worded: Question, given: Mapping[str, Any]) -> Question:
    """Key the answers of a choice by the labels as they were given, where these are numbers or booleans."""
    if worded.type != "choice":
        return worded
    labels = zip(worded.options, given["criteria"], strict=True)
    return replace(worded, options=tuple(text if isinstance(label, str) else label for text, label in labels))
