from typing import Any

import pytest

from laya.errors import QuestionError
from laya.questions import Question, check_questions

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


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ("text", "expected an object"),
        ({"type": "rank", "instructions": "x"}, "type must be one of choice, score, noul, found 'rank'"),
        ({"instructions": "x"}, "type must be one of"),
        ({"type": "noul"}, "instructions must hold"),
        ({"type": "noul", "instructions": " \n"}, "instructions must hold"),
        ({"type": "choice", "instructions": "x"}, "criteria must be"),
        ({**CHOICE, "criteria": {}}, "at least one option"),
        ({**CHOICE, "criteria": "a"}, "criteria must be"),
        ({**CHOICE, "criteria": ["a", None]}, "a label must be text, a number or a boolean, found None"),
        ({**CHOICE, "criteria": ["a", ["b"]]}, "a label must be text, a number or a boolean, found ['b']"),
        ({**CHOICE, "criteria": ["a", "a"]}, "'a' is there twice"),
        ({**CHOICE, "criteria": [1, True]}, "True is there twice"),
        ({**CHOICE, "critera": 1}, "unknown key 'critera'"),
        ({**CHOICE, "labels": {"true": "a", "false": "b"}}, "labels belong to a noul"),
        ({**CHOICE, "option_order": [0, 0]}, "option_order must hold each of 0 to 1 once"),
        ({**CHOICE, "option_order": [0]}, "option_order must hold each of 0 to 1 once"),
        ({**CHOICE, "option_order": "01"}, "option_order must hold each of 0 to 1 once"),
        ({**CHOICE, "option_order": [False, True]}, "option_order must hold each of 0 to 1 once"),
        ({**CHOICE, "criteria": {"a": {1, 2}}}, "a text that has no JSON"),
        ({**CHOICE, "criteria": {"a": "\ud800"}}, "half a surrogate pair"),
        ({"type": "score", "instructions": "x", "criteria": {"0": "a"}}, "criteria must be a list of level"),
        ({"type": "score", "instructions": "x", "criteria": []}, "criteria must be a list of level"),
        ({"type": "score", "instructions": "x", "criteria": ["a", None]}, "level 1 must not be null"),
        ({"type": "noul", "instructions": "x", "criteria": {"yes": "a"}}, "keyed by 'true' and 'false' only"),
        ({"type": "noul", "instructions": "x", "criteria": ["a"]}, "keyed by 'true' and 'false' only"),
        ({"type": "noul", "instructions": "x", "labels": {"true": "a"}}, "two different texts"),
        ({"type": "noul", "instructions": "x", "labels": {"true": "a", "false": "a"}}, "two different texts"),
        ({"type": "noul", "instructions": "x", "option_order": [1, 0]}, "always read in the order false, true"),
    ],
)
def test_a_malformed_question_is_refused_by_name(question: Any, message: str) -> None:
    with pytest.raises(QuestionError) as error:
        check_questions({"good": CHOICE, "the id": question})
    assert str(error.value).startswith("question 'the id': ")
    assert message in str(error.value)


@pytest.mark.parametrize("questions", [{}, [], None, {1: CHOICE}, {"": CHOICE}])
def test_questions_are_an_object_with_text_ids(questions: Any) -> None:
    with pytest.raises(QuestionError):
        check_questions(questions)
