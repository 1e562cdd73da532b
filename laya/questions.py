"""What is asked. Owns the validation of questions and their wording as text; their tokens are `sequence`'s."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from laya.errors import QuestionError
from schemas.calibration import TYPE_NAMES

KEYS = {"type", "instructions", "criteria", "labels", "option_order"}
NOUL_KEYS = ("false", "true")
NOUL_DESCRIPTIONS = {"false": "no, the statement does not hold", "true": "yes, the statement holds"}
Label = str | int | float | bool


@dataclass(frozen=True)
class Question:
    """A checked question. `options` are the answer's keys, `option_texts` what the model reads, in the same order."""

    id: str
    type: str
    instructions: str
    options: tuple[Label, ...]
    option_texts: tuple[str, ...]
    legend: tuple[str, ...] = ()  # of a score: its levels' descriptions
    order: tuple[int, ...] | None = None  # the model reads option order[j] in place j

    @property
    def type_index(self) -> int:
        return TYPE_NAMES.index(self.type)

    @property
    def text(self) -> str:
        """What the model reads before the options."""
        return f"{self.type} question: {self.instructions}"


def check_questions(questions: Mapping[str, Mapping[str, Any]]) -> tuple[Question, ...]:
    """The questions, checked, in their order. Raises QuestionError, naming the question and what to change."""
    if not isinstance(questions, Mapping) or not questions:
        raise QuestionError("questions: expected an object of at least one {id: question}")
    return tuple(_check(name, question) for name, question in questions.items())


def json_line(value: Any) -> str:
    """Text as it is; anything else as JSON on one line, non-ASCII kept. Raises ValueError when it has no JSON."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from error


def _check(name: str, question: Mapping[str, Any]) -> Question:
    if not isinstance(name, str) or not name:
        raise QuestionError(f"question {name!r}: its id must be text that is not empty")
    if not isinstance(question, Mapping):
        raise QuestionError(f"question {name!r}: expected an object, found {type(question).__name__}")
    unknown = sorted(str(key) for key in question.keys() - KEYS)
    if unknown:
        raise QuestionError(f"question {name!r}: unknown key {unknown[0]!r}; the keys are {', '.join(sorted(KEYS))}")
    kind = question.get("type")
    if kind not in TYPE_NAMES:
        raise QuestionError(f"question {name!r}: type must be one of {', '.join(TYPE_NAMES)}, found {kind!r}")
    if "labels" in question and kind != "noul":
        raise QuestionError(
            f"question {name!r}: labels belong to a noul question; a {kind} takes them from its criteria"
        )
    instructions = question.get("instructions")
    try:
        text = "" if instructions is None else json_line(instructions)
        if not text.strip():
            raise QuestionError(f"question {name!r}: instructions must hold what the model should answer")
        read = {"choice": _choice, "score": _score, "noul": _noul}[kind]
        options, option_texts, legend = read(name, question)
        checked = Question(name, kind, text, options, option_texts, legend, _order(name, question, len(options)))
        _check_text(name, (text, *option_texts))
    except ValueError as error:
        raise QuestionError(f"question {name!r}: a text that has no JSON: {error}") from error
    return checked


Options = tuple[tuple[Label, ...], tuple[str, ...], tuple[str, ...]]


def _choice(name: str, question: Mapping[str, Any]) -> Options:
    criteria = question.get("criteria")
    if isinstance(criteria, Mapping):
        labels, descriptions = list(criteria), list(criteria.values())
    elif isinstance(criteria, list | tuple):
        labels, descriptions = list(criteria), [None] * len(criteria)
    else:
        raise QuestionError(f"question {name!r}: criteria must be {{label: description or null}} or a list of labels")
    if not labels:
        raise QuestionError(f"question {name!r}: criteria must hold at least one option")
    seen: set[Label] = set()
    for label in labels:
        if label is None or not isinstance(label, Label):
            raise QuestionError(
                f"question {name!r}: criteria: a label must be text, a number or a boolean, found {label!r}"
            )
        if label in seen:
            raise QuestionError(
                f"question {name!r}: criteria: the label {label!r} is there twice (1, 1.0 and true are equal)"
            )
        seen.add(label)
    texts = (
        str(label) if described is None or described == "" else f"{label}: {json_line(described)}"
        for label, described in zip(labels, descriptions, strict=True)
    )
    return tuple(labels), tuple(texts), ()


def _score(name: str, question: Mapping[str, Any]) -> Options:
    criteria = question.get("criteria")
    if not isinstance(criteria, list | tuple) or not criteria:
        raise QuestionError(f"question {name!r}: criteria must be a list of level descriptions, lowest first")
    if any(level is None for level in criteria):
        raise QuestionError(f"question {name!r}: criteria: level {criteria.index(None)} must not be null")
    legend = tuple(json_line(level) for level in criteria)
    texts = tuple(f"level {index}: {level}" for index, level in enumerate(legend))
    return tuple(str(index) for index in range(len(legend))), texts, legend


def _noul(name: str, question: Mapping[str, Any]) -> Options:
    criteria = question.get("criteria") or {}
    if not isinstance(criteria, Mapping) or not set(criteria) <= set(NOUL_KEYS):
        raise QuestionError(
            f"question {name!r}: criteria of a noul are keyed by 'true' and 'false' only, found {criteria!r}"
        )
    labels = question.get("labels")
    if labels is None:
        labels = {key: key for key in NOUL_KEYS}
    texts = list(labels.values()) if isinstance(labels, Mapping) and set(labels) == set(NOUL_KEYS) else []
    if not all(isinstance(text, str) and text for text in texts) or len(set(texts)) != len(NOUL_KEYS):
        raise QuestionError(
            f"question {name!r}: labels must give 'true' and 'false' two different texts, found {labels!r}"
        )
    described = {key: NOUL_DESCRIPTIONS[key] if criteria.get(key) in (None, "") else criteria[key] for key in NOUL_KEYS}
    return NOUL_KEYS, tuple(f"{labels[key]}: {json_line(described[key])}" for key in NOUL_KEYS), ()


def _order(name: str, question: Mapping[str, Any], options: int) -> tuple[int, ...] | None:
    order = question.get("option_order")
    if order is None:
        return None
    if question["type"] == "noul":
        raise QuestionError(
            f"question {name!r}: option_order: a noul's options are always read in the order false, true"
        )
    places = list(order) if isinstance(order, list | tuple) else []
    if any(isinstance(place, bool) for place in places) or sorted(places, key=str) != sorted(range(options), key=str):
        raise QuestionError(
            f"question {name!r}: option_order must hold each of 0 to {options - 1} once, found {order!r}"
        )
    return tuple(places)


def _check_text(name: str, texts: Sequence[str]) -> None:
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise QuestionError(f"question {name!r}: {text!r} holds half a surrogate pair, which is no text") from error
