import json
from pathlib import Path

import pytest

from schemas.question import QuestionSetError, check_questions, read_questions

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

BAD = [
    ({"type": "rank", "instructions": "x"}, "unknown type 'rank'; use choice, score or noul"),
    ({"instructions": "x"}, "no type"),
    ({"type": "noul"}, "no instructions"),
    ({"type": "noul", "instructions": "  "}, "instructions is empty"),
    ({"type": "noul", "instructions": None}, "instructions is empty"),
    ({"type": "choice", "instructions": "x"}, "no criteria"),
    ({"type": "choice", "instructions": "x", "criteria": {}}, "needs at least one"),
    ({"type": "choice", "instructions": "x", "criteria": ["a", "a"]}, "label 'a' is repeated"),
    ({"type": "choice", "instructions": "x", "criteria": {1: None, "1": None}}, "label '1' is repeated"),
    ({"type": "choice", "instructions": "x", "criteria": ["a", None]}, "a label is null"),
    ({"type": "choice", "instructions": "x", "criteria": ["a", ["b"]]}, "is a list; labels are text or numbers"),
    ({"type": "score", "instructions": "x", "criteria": []}, "needs at least one"),
    ({"type": "score", "instructions": "x", "criteria": ["low", None]}, "level 1 is null"),
    ({"type": "score", "instructions": "x", "criteria": {"a": 1}}, "must list the levels"),
    ({"type": "noul", "instructions": "x", "criteria": {"yes": "a"}}, "key 'yes' is not allowed"),
    ({"type": "noul", "instructions": "x", "labels": {"true": "a"}}, "must name both"),
    ({"type": "noul", "instructions": "x", "option_order": [1, 1]}, "must name each of 0 to 1 once"),
    ({"type": "noul", "instructions": "x", "option_order": [1, 0]}, "option_order is not for a noul"),
    ({"type": "choice", "instructions": "x", "criteria": ["a"], "option_order": [1]}, "must name each of 0 to 0 once"),
    ({"type": "noul", "instructions": "x", "answers": 2}, "unknown key 'answers'"),
    ({"type": "noul", "instructions": "a\x00b"}, "holds a NUL character"),
    ("text", "must be a mapping"),
]


def test_good_questions_pass_in_their_order_with_labels_as_text() -> None:
    checked = check_questions(GOOD)
    assert list(checked) == list(GOOD)
    assert checked["route"]["criteria"] == {"billing": None, "tech": "bugs", "3": ""}
    assert checked["severity"] == GOOD["severity"]
    assert json.loads(json.dumps(checked)) == checked


@pytest.mark.parametrize(("question", "problem"), BAD)
def test_a_bad_question_is_refused_with_its_name_and_what_to_change(question: object, problem: str) -> None:
    with pytest.raises(QuestionSetError) as raised:
        check_questions({"triage": question, **GOOD})
    assert problem in str(raised.value)
    assert all(text.startswith("question 'triage': ") for text in raised.value.problems)


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(QuestionSetError) as raised:
        check_questions({f"q{i}": question for i, (question, _) in enumerate(BAD)})
    assert len(raised.value.problems) == len(BAD)
    for i, (_, problem) in enumerate(BAD):
        assert any(text.startswith(f"question 'q{i}': ") and problem in text for text in raised.value.problems)


@pytest.mark.parametrize("question_id", ["", "  ", "*", 3, "x" * 101])
def test_an_id_that_cannot_be_a_key_is_refused(question_id: object) -> None:
    with pytest.raises(QuestionSetError, match="question id"):
        check_questions({question_id: GOOD["urgent"]})


@pytest.mark.parametrize("questions", [{}, [], None, "text"])
def test_no_questions_are_refused(questions: object) -> None:
    with pytest.raises(QuestionSetError, match="at least one"):
        check_questions(questions)


def test_yes_and_no_are_labels_in_yaml_and_true_and_false_are_sides(tmp_path: Path) -> None:
    file = tmp_path / "q.yaml"
    file.write_text(
        "agree: {type: choice, instructions: Agree, criteria: [yes, no, on, off]}\n"
        "holds: {type: noul, instructions: Holds, criteria: {true: it does, false: it does not}}\n"
    )
    questions = read_questions(file)
    assert questions["agree"]["criteria"] == ["yes", "no", "on", "off"]
    assert questions["holds"]["criteria"] == {"true": "it does", "false": "it does not"}


def test_json_and_yaml_read_alike(tmp_path: Path) -> None:
    file = tmp_path / "q.json"
    file.write_text(json.dumps(check_questions(GOOD)))
    assert read_questions(file) == check_questions(GOOD)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: {type: noul, instructions: x}\na: {type: noul, instructions: y}", "'a' is repeated"),
        ("a: {type: choice, instructions: x, criteria: {b: c, b: d}}", "'b' is repeated"),
        ("a: [", "is not valid YAML or JSON"),
        ("a: !!python/object/apply:os.system ['true']", "is not valid YAML or JSON"),
    ],
)
def test_a_bad_file_is_refused_with_its_name(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "q.yaml"
    file.write_text(text)
    with pytest.raises(QuestionSetError, match=r"q\.yaml") as raised:
        read_questions(file)
    assert problem in str(raised.value)


def test_a_missing_or_binary_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(QuestionSetError, match="cannot be read"):
        read_questions(tmp_path / "none.yaml")
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(QuestionSetError, match="cannot be read"):
        read_questions(tmp_path / "b.yaml")
