import datetime
import enum
import json
import time
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import laya
from laya.questions import check_questions as check_for_engine
from schemas.question import QuestionSetError, check_questions

GOOD = {
    "urgent": {"type": "noul", "instructions": "Is it urgent?"},
    "severity": {"type": "score", "instructions": "How severe?", "criteria": ["low", {"label": "high", "cvss": 7.5}]},
    "route": {
        "type": "choice",
        "instructions": {"task": "route"},
        "criteria": {"billing": None, "tech": "bugs", 3: ""},
    },
    "intent": {"type": "choice", "instructions": "Intent?", "criteria": ["up", "down"], "option_order": [1, 0]},
}

CHOICE = {"type": "choice", "instructions": "x", "criteria": ["a", "b"]}
SCORE = {"type": "score", "instructions": "x", "criteria": ["low", "high"]}
NOUL = {"type": "noul", "instructions": "x"}
RECURSIVE: list[Any] = []
RECURSIVE.append(RECURSIVE)
DEEP: Any = "x"
for _ in range(40):
    DEEP = [DEEP]
BOMB: Any = "lol"
for _ in range(12):
    BOMB = [BOMB] * 9

BAD: list[tuple[Any, str]] = [
    ("text", "must be a mapping"),
    ({"type": "rank", "instructions": "x"}, "unknown type 'rank'; use choice, score or noul"),
    ({"type": ["noul"], "instructions": "x"}, "unknown type"),
    ({"instructions": "x"}, "no type"),
    ({"type": "noul"}, "no instructions"),
    ({**NOUL, "instructions": "  "}, "instructions is empty"),
    ({**NOUL, "instructions": None}, "instructions is empty"),
    ({**NOUL, "instructions": {}}, "instructions is empty"),
    ({**NOUL, "instructions": ()}, "instructions is empty"),
    ({"type": "choice", "instructions": "x"}, "no criteria"),
    ({**CHOICE, "criteria": {}}, "needs at least one"),
    ({**CHOICE, "criteria": "ab"}, "must map each label"),
    ({**CHOICE, "criteria": ["a", "a"]}, "label 'a' is repeated"),
    ({**CHOICE, "criteria": {1: None, "1": None}}, "label '1' is repeated"),
    ({**CHOICE, "criteria": [1, "1"]}, "label '1' is repeated"),
    ({**CHOICE, "criteria": [1, 1.0]}, "label 1 is repeated"),
    ({**CHOICE, "criteria": [1, True]}, "label 1 is repeated"),
    ({**CHOICE, "criteria": ["\ud83d\ude00", "😀"]}, "label '😀' is repeated"),
    ({**CHOICE, "criteria": ["a", None]}, "a label is null"),
    ({**CHOICE, "criteria": ["a", ["b"]]}, "is a list; labels are text, numbers or booleans"),
    ({**CHOICE, "criteria": ["a", float("nan")]}, "label nan is no number"),
    ({**CHOICE, "criteria": ["a", datetime.date(2024, 1, 1)]}, "is a date; labels are"),
    ({**CHOICE, "criteria": {"a": "\ud800"}}, "criteria.a holds half a surrogate pair"),
    ({**CHOICE, "criteria": ["\ud800"]}, "holds half a surrogate pair"),
    ({**CHOICE, "criteria": {"a": {1, 2}}}, "criteria.a is a set, which JSON cannot hold"),
    ({**CHOICE, "criteria": {"a": {(1, 2): "x"}}}, "criteria.a key '(1, 2)' is a tuple; keys are text"),
    ({**CHOICE, "criteria": {"a": {1: "x", "1": "y"}}}, "criteria.a key '1' is repeated"),
    ({**CHOICE, "criteria": [str(i) for i in range(1001)]}, "has 1001 options; a question has at most 1000"),
    ({**CHOICE, "labels": {"true": "a", "false": "b"}}, "labels belong to a noul"),
    ({**CHOICE, "critera": 1}, "unknown key 'critera'"),
    ({**CHOICE, 1: 2}, "unknown key '1'"),
    ({**CHOICE, "option_order": [0, 0]}, "option_order must hold each of 0 to 1 once"),
    ({**CHOICE, "option_order": [0]}, "option_order must hold each of 0 to 1 once"),
    ({**CHOICE, "option_order": "01"}, "option_order must list whole numbers"),
    ({**CHOICE, "option_order": ["0", "1"]}, "option_order must list whole numbers"),
    ({**CHOICE, "option_order": [False, True]}, "option_order must list whole numbers"),
    ({**CHOICE, "option_order": [0.0, 1.0]}, "option_order must list whole numbers"),
    ({**SCORE, "criteria": []}, "needs at least one"),
    ({**SCORE, "criteria": ["low", None]}, "level 1 is null"),
    ({**SCORE, "criteria": {"a": 1}}, "must list the levels"),
    ({**SCORE, "criteria": ["low", {"since": datetime.date(2024, 1, 1)}]}, "criteria[1].since is a date, which JSON"),
    ({**SCORE, "criteria": ["low", float("inf")]}, "criteria[1] is inf, which JSON cannot hold"),
    ({**SCORE, "criteria": ["low", 10**5000]}, "criteria[1] is an integer of more than 1024 bits"),
    ({**NOUL, "criteria": {"yes": "a"}}, "key 'yes' is not allowed"),
    ({**NOUL, "criteria": ["a"]}, "must map 'true' and 'false'"),
    ({**NOUL, "criteria": []}, "must map 'true' and 'false'"),
    ({**NOUL, "criteria": {"true": "a", True: "b"}}, "key 'true' is repeated"),
    ({**NOUL, "criteria": {"true": "a", "True": "b"}}, "names a side twice"),
    ({**NOUL, "labels": {"true": "a"}}, "two different texts"),
    ({**NOUL, "labels": {"true": "a", "false": ""}}, "two different texts"),
    ({**NOUL, "labels": {"true": "a", "false": " "}}, "two different texts"),
    ({**NOUL, "labels": {"true": "a", "false": "a"}}, "two different texts"),
    ({**NOUL, "labels": {"true": "a", "false": " a "}}, "two different texts"),
    ({**NOUL, "labels": {"true": "a", "false": None}}, "a label is null"),
    ({**NOUL, "option_order": [1, 1]}, "must hold each of 0 to 1 once"),
    ({**NOUL, "option_order": [1, 0]}, "option_order is not for a noul"),
    ({**NOUL, "answers": 2}, "unknown key 'answers'"),
    ({**NOUL, "instructions": "a\x00b"}, "holds a NUL character"),
    ({**NOUL, "instructions": {"a": b"x"}}, "instructions.a is a bytes, which JSON cannot hold"),
    ({**NOUL, "instructions": np.zeros(2)}, "instructions is a ndarray, which JSON cannot hold"),
    ({**NOUL, "instructions": np.datetime64("2024-01-01")}, "instructions is a date, which JSON cannot hold"),
    ({**NOUL, "instructions": RECURSIVE}, "holds itself"),
    ({**NOUL, "instructions": DEEP}, "is nested more than 32 levels deep"),
]
TOO_MUCH: list[tuple[Any, str]] = [
    ({**NOUL, "instructions": BOMB}, "there are more than 20000 values"),
    ({**NOUL, "instructions": ["x" * 100_000] * 20}, "there are more than 524288 characters"),
]


def test_good_questions_pass_in_their_order_with_labels_as_text() -> None:
    checked = check_questions(GOOD)
    assert list(checked) == list(GOOD)
    assert checked["route"]["criteria"] == {"billing": None, "tech": "bugs", "3": ""}
    assert checked["severity"] == GOOD["severity"]
    assert json.loads(json.dumps(checked)) == checked


@pytest.mark.parametrize(("question", "problem"), BAD + TOO_MUCH)
def test_a_bad_question_is_refused_alike_by_jobs_and_engine_with_its_name_and_what_to_change(
    question: object, problem: str
) -> None:
    started = time.perf_counter()
    with pytest.raises(QuestionSetError) as raised:
        check_questions({**GOOD, "triage": question})
    assert time.perf_counter() - started < 1
    assert problem in str(raised.value)
    assert all(text.startswith("question 'triage': ") for text in raised.value.problems)
    with pytest.raises(laya.QuestionError) as by_engine:
        check_for_engine({**GOOD, "triage": question})  # type: ignore[dict-item]
    assert str(by_engine.value) == "\n".join(raised.value.problems)


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(QuestionSetError) as raised:
        check_questions({f"q{i}": question for i, (question, _) in enumerate(BAD)})
    assert len(raised.value.problems) == len(BAD)
    for i, (_, problem) in enumerate(BAD):
        assert any(text.startswith(f"question 'q{i}': ") and problem in text for text in raised.value.problems)


@pytest.mark.parametrize("question_id", ["", "  ", "*", 3, None, "x" * 101, "\ud800", "a\x00"])
def test_an_id_that_cannot_be_a_key_is_refused(question_id: object) -> None:
    with pytest.raises(QuestionSetError, match="question "):
        check_questions({question_id: GOOD["urgent"]})
    with pytest.raises(laya.QuestionError, match="question "):
        check_for_engine({question_id: GOOD["urgent"]})  # type: ignore[dict-item]


def test_a_job_asks_a_bounded_number_of_questions() -> None:
    with pytest.raises(QuestionSetError, match="there are 1001 questions; a job asks at most 1000"):
        check_questions({f"q{i}": NOUL for i in range(1001)})


def test_what_python_writes_otherwise_is_kept_as_json() -> None:
    class Colour(enum.StrEnum):
        RED = "red"

    checked = check_questions(
        MappingProxyType(
            {
                "tuples": {
                    "type": "choice",
                    "instructions": (1, 2.5),
                    "criteria": (Colour.RED, "b"),
                    "option_order": (1, 0),
                },
                "numpy": {**CHOICE, "instructions": {np.int64(3): np.float64(0.5), 7: np.bool_(True)}},
                "labels": {**CHOICE, "criteria": [np.int64(3), 1.5, True]},
                "sides": {**NOUL, "criteria": {True: "it does"}, "labels": {True: 1, "FALSE": " no "}},
                "emoji": {**CHOICE, "criteria": {"\ud83d\ude00 happy": "\ud83d\ude00"}},
            }
        )
    )
    assert checked == {
        "tuples": {"type": "choice", "instructions": [1, 2.5], "criteria": ["red", "b"], "option_order": [1, 0]},
        "numpy": {**CHOICE, "instructions": {"3": 0.5, "7": True}},
        "labels": {**CHOICE, "criteria": ["3", "1.5", "True"]},
        "sides": {**NOUL, "criteria": {"true": "it does"}, "labels": {"true": "1", "false": "no"}},
        "emoji": {**CHOICE, "criteria": {"😀 happy": "😀"}},
    }
    assert json.loads(json.dumps(checked)) == checked == check_questions(checked)


SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.floats(), st.text(max_size=3), st.dates())
VALUES = st.recursive(
    SCALARS,
    lambda parts: st.one_of(
        st.lists(parts, max_size=3),
        st.lists(parts, max_size=2).map(tuple),
        st.dictionaries(st.one_of(SCALARS, st.sampled_from(["true", "false"])), parts, max_size=3),
    ),
    max_leaves=6,
)
ASKED = st.fixed_dictionaries(
    {"type": st.sampled_from(["choice", "score", "noul"]), "instructions": VALUES},
    optional={
        "criteria": VALUES,
        "labels": st.one_of(VALUES, st.fixed_dictionaries({"true": SCALARS, "false": SCALARS})),
        "option_order": st.one_of(VALUES, st.permutations([0, 1])),
    },
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(question=ASKED)
@example(question={**NOUL, "labels": {"true": "a", "false": ""}})
@example(question={**CHOICE, "criteria": {"": None}})
@example(question={**CHOICE, "criteria": ["a", "a "], "option_order": [1, 0]})
def test_whatever_jobs_accept_the_engine_accepts_with_the_same_words(question: dict[str, Any]) -> None:
    try:
        checked = check_questions({"q": question})
    except QuestionSetError as refused:
        with pytest.raises(laya.QuestionError) as by_engine:
            check_for_engine({"q": question})
        assert str(by_engine.value) == "\n".join(refused.problems)
        return
    assert json.loads(json.dumps(checked)) == checked == check_questions(checked)
    (stored,), (given_as_is,) = check_for_engine(checked), check_for_engine({"q": question})
    assert stored.texts == given_as_is.texts
    assert [str(option) for option in given_as_is.options] == list(stored.options)
    assert len(set(stored.options)) == len(stored.options) == len(stored.option_texts)
    "".join(stored.texts).encode()


@pytest.mark.parametrize("questions", [{}, [], None, "text"])
def test_no_questions_are_refused(questions: object) -> None:
    with pytest.raises(QuestionSetError, match="at least one"):
        check_questions(questions)
