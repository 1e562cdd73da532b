from typing import Any

import pytest

from laya.errors import QuestionError
from laya.questions import check_questions
from schemas.question_text import Question

CHOICE = {"type": "choice", "instructions": "Which?", "criteria": {"a": "x", "b": None}}


def check(question: Any) -> Question:
    return check_questions({"q": question})[0]


def test_a_choice_is_worded_by_label_and_description() -> None:
    criteria = {"a": "x", "b": None, "c": "", "d": {"é": [1, 2.0, None]}, "e": 0, "f": False, 3: "three"}
    question = check({"type": "choice", "instructions": "Which?", "criteria": criteria})
    assert question.text == "choice question: Which?"
    assert question.options == ("a", "b", "c", "d", "e", "f", 3)
    assert question.option_texts == ("a: x", "b", "c", 'd: {"é": [1, 2.0, null]}', "e: 0", "f: false", "3: three")


def test_a_choice_may_be_a_list_of_labels() -> None:
    assert check({**CHOICE, "criteria": ["a", 2.5]}).option_texts == ("a", "2.5")


def test_a_score_is_worded_by_level_and_keeps_its_legend() -> None:
    question = check({"type": "score", "instructions": ["rate", 1], "criteria": ["bad", {"d": 1}]})
    assert question.text == 'score question: ["rate", 1]'
    assert question.options == ("0", "1")
    assert question.legend == ("bad", '{"d": 1}')
    assert question.option_texts == ("level 0: bad", 'level 1: {"d": 1}')


def test_a_noul_reads_false_then_true() -> None:
    plain = check({"type": "noul", "instructions": "It holds."})
    assert plain.option_texts == ("false: no, the statement does not hold", "true: yes, the statement holds")
    worded = check(
        {
            "type": "noul",
            "instructions": "It holds.",
            "criteria": {"true": "it does", "false": None},
            "labels": {"true": "ja", "false": "nein"},
        }
    )
    assert worded.option_texts == ("nein: no, the statement does not hold", "ja: it does")
    assert worded.options == ("false", "true")


@pytest.mark.parametrize("questions", [{}, [], None, {1: CHOICE}, {"": CHOICE}, {"q": {**CHOICE, "criteria": []}}])
def test_a_malformed_question_is_the_engines_own_error(questions: Any) -> None:
    with pytest.raises(QuestionError):
        check_questions(questions)
