"""Question files as people write them: what is read, and what is refused with its place."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from schemas.question import QuestionSetError, check_questions
from schemas.question_file import read_questions

AS_TYPED = [
    *("12:30", "09:30", "01067", "1.10", "0x1F", "0o17", "1e3", "1_000", "+1", "7", "-1.50", ".5", ".inf", ".nan"),
    *("2024-01-01", "2024-01-01T10:00:00Z", "~", "null", "Null", "true", "True", "FALSE"),
    *("yes", "no", "on", "off", "y", "n", "=", "<", "9" * 99, "🎉 нет"),
]


def write(tmp_path: Path, content: str | bytes, name: str = "q.yaml") -> Path:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def refused(path: Path) -> str:
    started = time.perf_counter()
    with pytest.raises(QuestionSetError, match=path.name) as raised:
        read_questions(path)
    assert time.perf_counter() - started < 1
    assert len(raised.value.problems) == 1
    return raised.value.problems[0]


@pytest.mark.parametrize("typed", AS_TYPED)
def test_what_is_typed_is_the_text_wherever_text_is_meant(tmp_path: Path, typed: str) -> None:
    path = write(
        tmp_path,
        f"{typed}: {{type: choice, instructions: x, criteria: [{typed}, other]}}\n"
        f"block:\n  type: choice\n  instructions: x\n  criteria:\n    - {typed}\n"
        f"described: {{type: choice, instructions: x, criteria: {{{typed}: null, other: ~, third: }}}}\n"
        f"nested: {{type: noul, instructions: {{{typed}: x}}}}\n"
        f"sides:\n  type: noul\n  instructions: x\n  labels: {{true: {typed}, false: other}}\n",
    )
    questions = read_questions(path)
    assert list(questions) == [typed, "block", "described", "nested", "sides"]
    assert questions[typed]["criteria"] == [typed, "other"]
    assert questions["block"]["criteria"] == [typed]
    assert questions["described"]["criteria"] == {typed: None, "other": None, "third": None}
    assert questions["nested"]["instructions"] == {typed: "x"}
    assert questions["sides"]["labels"] == {"true": typed, "false": "other"}


@pytest.mark.parametrize("typed", [text for text in AS_TYPED if text not in ("~", "null")])
def test_levels_descriptions_and_instructions_are_read_as_typed(tmp_path: Path, typed: str) -> None:
    from schemas.question_text import word_questions  # noqa: PLC0415

    path = write(
        tmp_path,
        f"s: {{type: score, instructions: {typed}, criteria: [{typed}]}}\n"
        f"c: {{type: choice, instructions: x, criteria: {{a: {typed}}}}}\n",
    )
    score, choice = word_questions(read_questions(path))
    assert score.texts == [f"score question: {typed}", f" level 0: {typed}"]
    assert choice.texts[1] == f" a: {typed}"


def test_values_of_objects_keep_their_type_where_it_is_written_as_json_writes_it(tmp_path: Path) -> None:
    path = write(tmp_path, "q: {type: noul, instructions: {a: 7.5, b: 12, c: true, d: null, e: 1.10, f: 012, g: '7'}}")
    assert read_questions(path)["q"]["instructions"] == {
        "a": 7.5,
        "b": 12,
        "c": True,
        "d": None,
        "e": "1.10",
        "f": "012",
        "g": "7",
    }


def test_true_and_false_are_sides_in_any_case(tmp_path: Path) -> None:
    path = write(tmp_path, "q: {type: noul, instructions: Holds, criteria: {true: it does, False: it does not}}")
    assert read_questions(path)["q"]["criteria"] == {"true": "it does", "false": "it does not"}


def test_an_alias_is_read_where_it_stands(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "a: {type: choice, instructions: x, criteria: &labels [12:30, b]}\n"
        "b: {type: choice, instructions: y, criteria: *labels}\n",
    )
    questions = read_questions(path)
    assert questions["a"]["criteria"] == questions["b"]["criteria"] == ["12:30", "b"]


def test_json_is_read_as_json(tmp_path: Path) -> None:
    asked = {
        "mood": {"type": "choice", "instructions": "Which\tmood?", "criteria": {"😀 happy": "glad", "sad": None}},
        "level": {"type": "score", "instructions": {"a": [1, 2.5, None]}, "criteria": ["low", "high"]},
    }
    for text in (json.dumps(asked), json.dumps(asked, indent="\t"), json.dumps(asked, ensure_ascii=False)):
        for name in ("q.json", "q.JSON", "q.yaml", "q"):
            assert read_questions(write(tmp_path, text, name)) == check_questions(asked) == asked
            assert read_questions(write(tmp_path, b"\xef\xbb\xbf" + text.encode(), name)) == asked


def test_numbers_as_labels_in_json_are_written_as_typed(tmp_path: Path) -> None:
    path = write(
        tmp_path, '{"q": {"type": "choice", "instructions": [1.10], "criteria": [1.10, 1e3, 2, true]}}', "q.json"
    )
    assert read_questions(path)["q"] == {
        "type": "choice",
        "instructions": [1.1],
        "criteria": ["1.10", "1e3", "2", "true"],
    }


def test_a_yaml_mapping_in_braces_is_no_json(tmp_path: Path) -> None:
    assert read_questions(write(tmp_path, "{q: {type: noul, instructions: x}}"))["q"]["type"] == "noul"


NOUL = "{type: noul, instructions: x}"
BOMB = "a0: &a0 [lol,lol,lol,lol,lol,lol,lol,lol,lol]\n" + "".join(
    f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10)
)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (f"a: {NOUL}\na: {NOUL}", "line 2, column 1: 'a' is repeated"),
        ("a: {type: choice, instructions: x, criteria: {b: c, b: d}}", "line 1, column 53: 'b' is repeated"),
        ("a: {type: choice, instructions: x, criteria: {1: c, '1': d}}", "'1' is repeated"),
        ("a: [", "line 1, column 5: is not valid YAML"),
        ("a:\n\t- b", "line 2, column 1: is not valid YAML"),
        ("a: !!python/object/apply:os.system ['true']", "line 1, column 4: the tag tag:yaml.org,2002:python"),
        ("a: {type: noul, instructions: !!timestamp 2024-01-01}", "line 1, column 31: the tag"),
        (f"? [a, b]\n: {NOUL}", "line 1, column 3: a sequence cannot be a key; keys are text"),
        (f"a:\n  ? {{b: c}}\n  : {NOUL}", "line 2, column 5: a mapping cannot be a key"),
        (f"a: &a {NOUL}\nb: {{<<: *a}}", "line 2, column 5: merge keys (<<) are not read"),
        ("a: &a {type: noul, instructions: *a}", "nested more than 32 levels deep, or holds itself"),
        ("a: &a [*a]", "nested more than 32 levels deep, or holds itself"),
        (f"{BOMB}q: {{type: noul, instructions: *a9}}", "more than 20000 values (an alias counts each time)"),
        ("a: " + "[" * 100_000, "nested more than 32 levels deep"),
        ("a: " + "{a: " * 100_000, "nested more than 32 levels deep"),
        ("- " * 100_000, "nested more than 32 levels deep"),
        (f"a: {NOUL}\n---\nb: {NOUL}", "line 2, column 1: is not valid YAML"),
        (f"a: {NOUL}\n# {'x' * 2**19}", "more than 524288 bytes"),
        ("a: \x07", "is not valid YAML"),
        ("", "must map at least one question id"),
        ("# nothing", "must map at least one question id"),
        ("- a", "must map at least one question id"),
    ],
)
def test_a_bad_yaml_file_is_refused_with_the_place(tmp_path: Path, text: str, problem: str) -> None:
    assert problem in refused(write(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"a": 1,\n "b": }', "line 2, column 7: is not valid JSON: Expecting value"),
        ("a: {type: noul, instructions: x}", "line 1, column 1: is not valid JSON"),
        ('{"q": {"type": "noul", "type": "noul"}}', "q: key 'type' is repeated"),
        ('{"q": 1, "q": 1}', "the file: key 'q' is repeated"),
        ('{"q": {"type": "noul", "instructions": {"a": NaN}}}', "question 'q': instructions.a is nan"),
        ('{"q": {"type": "noul", "instructions": 1e999}}', "question 'q': instructions is inf"),
        ('{"q": {"type": "noul", "instructions": "\\ud800"}}', "question 'q': instructions holds half a surrogate"),
        ('{"q": {"type": "noul", "instructions": "\\u0000"}}', "question 'q': instructions holds a NUL"),
        ('{"q": {"type": "noul", "instructions": ' + "[" * 100_000, "nested more than 32 levels deep"),
        ('{"q": {"type": "noul", "instructions": ' + "[" * 50 + "]" * 50 + "}}", "nested more than 32 levels deep"),
        ("[]", "must map at least one question id"),
    ],
)
def test_a_bad_json_file_is_refused_with_the_place(tmp_path: Path, text: str, problem: str) -> None:
    assert problem in refused(write(tmp_path, text, "q.json"))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("q: x".encode("utf-16"), "it is UTF-16 or UTF-32; save it as UTF-8"),
        ("q: x".encode("utf-16-le"), "it is UTF-16 or UTF-32; save it as UTF-8"),
        ("q: x".encode("utf-32"), "it is UTF-16 or UTF-32; save it as UTF-8"),
        (b"q: x\nr: caf\xe9", "line 2: byte 0xe9 is not UTF-8"),
    ],
)
def test_other_encodings_are_told(tmp_path: Path, content: bytes, problem: str) -> None:
    assert problem in refused(write(tmp_path, content))


def test_a_missing_file_or_a_folder_is_told(tmp_path: Path) -> None:
    assert "cannot be read: No such file" in refused(tmp_path / "none.yaml")
    (tmp_path / "q.yaml").mkdir()
    assert "cannot be read: Is a directory" in refused(tmp_path / "q.yaml")


def test_a_large_file_is_read_in_moderate_time(tmp_path: Path) -> None:
    questions: dict[str, Any] = {
        f"q{i}": {"type": "choice", "instructions": "Which one?", "criteria": [f"label {j}" for j in range(40)]}
        for i in range(400)
    }
    assert read_questions(write(tmp_path, json.dumps(questions), "q.json")) == questions
