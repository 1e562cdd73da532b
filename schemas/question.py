"""Question sets: what may be asked, checked before any work is queued. Owns no files, no tokens and no model.

A question set maps a question id to one typed question. `check_questions` returns it as plain JSON with labels as text,
or raises one error that lists every problem of every question. It is the only validator: jobs and the engine use it.
"""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, StrictInt, TypeAdapter, ValidationError, field_validator
from pydantic import model_validator as checks_model

from schemas.json_values import JsonBudget, JsonValueError, as_json

QuestionSet = dict[str, dict[str, Any]]

MAX_ID_LENGTH = 100  # characters; the id is a key column of the results table
MAX_QUESTIONS = 1_000
MAX_OPTIONS = 1_000  # of one question
WHOLE_ROW = "*"  # what `row_errors.question` holds when the whole row failed, so no question may be called so
SIDES = ("false", "true")  # of a noul, in the order in which the model reads them


class QuestionSetError(ValueError):
    """A question set cannot be asked as it stands."""

    def __init__(self, problems: list[str], source: str = "questions") -> None:
        self.problems = problems
        super().__init__(
            "\n".join([f"{source}: {len(problems)} problem(s)", *(f"  - {problem}" for problem in problems)])
        )


def label_text(label: object) -> str:
    """Return a label as the text that is asked and stored: scalars only, as Python writes them."""
    if isinstance(label, np.generic):
        label = label.item()
    if label is None:
        raise ValueError("a label is null; give it a name (in JSON, quote it)")
    if isinstance(label, float) and not math.isfinite(label):
        raise ValueError(f"label {label} is no number; quote it")
    if isinstance(label, str | bool | int | float):
        return str.__str__(label) if isinstance(label, str) else str(label)
    raise ValueError(f"label {label!r} is a {type(label).__name__}; labels are text, numbers or booleans")


class _Question(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    instructions: Any
    option_order: list[StrictInt] | None = None

    @field_validator("instructions")
    @classmethod
    def _is_not_empty(cls, instructions: Any) -> Any:
        if isinstance(instructions, str) and not instructions.strip():
            raise ValueError("is empty; say in words what is asked")
        if instructions is None or instructions in ([], {}):
            raise ValueError("is empty; say in words what is asked")
        return instructions

    def option_count(self) -> int:
        return 2

    @checks_model(mode="after")
    def _order_is_a_permutation(self) -> "_Question":
        count = self.option_count()
        if self.option_order is not None and sorted(self.option_order) != list(range(count)):
            raise ValueError(f"option_order must hold each of 0 to {count - 1} once, found {self.option_order}")
        return self


class ChoiceQuestion(_Question):
    """Which label? `criteria` maps each label to a description or null, or lists the labels."""

    type: Literal["choice"]
    criteria: dict[str, Any] | list[str]

    @field_validator("criteria", mode="before")
    @classmethod
    def _labels_are_distinct(cls, criteria: object) -> object:
        if not isinstance(criteria, dict | list) or not criteria:
            raise ValueError("must map each label to a description, or list the labels; it needs at least one")
        _check_count(len(criteria))
        return criteria

    def option_count(self) -> int:
        return len(self.criteria)


class ScoreQuestion(_Question):
    """How much? `criteria` lists the descriptions of the levels, lowest first."""

    type: Literal["score"]
    criteria: list[Any]

    @field_validator("criteria", mode="before")
    @classmethod
    def _levels_are_described(cls, criteria: object) -> object:
        if not isinstance(criteria, list) or not criteria:
            raise ValueError("must list the levels' descriptions, lowest first; it needs at least one")
        if None in criteria:
            raise ValueError(f"level {criteria.index(None)} is null; describe it")
        _check_count(len(criteria))
        return criteria

    def option_count(self) -> int:
        return len(self.criteria)


class NoulQuestion(_Question):
    """Yes or no? `criteria` may describe, and `labels` rename, the two sides `true` and `false`."""

    type: Literal["noul"]
    criteria: dict[str, Any] | None = None
    labels: dict[str, str] | None = None

    @field_validator("criteria", mode="before")
    @classmethod
    def _keys_are_sides(cls, criteria: object) -> object:
        return None if criteria is None else _by_side(criteria)

    @field_validator("labels", mode="before")
    @classmethod
    def _both_sides_are_named(cls, labels: object) -> object:
        if labels is None:
            return None
        named = {side: label_text(label).strip() for side, label in _by_side(labels).items()}
        if set(named) != set(SIDES) or not all(named.values()) or named["true"] == named["false"]:
            raise ValueError("must give 'true' and 'false' two different texts, neither of them empty")
        return named

    @checks_model(mode="after")
    def _order_is_fixed(self) -> "NoulQuestion":
        if self.option_order is not None:
            raise ValueError("option_order is not for a noul, whose sides are always read as false, true; remove it")
        return self


Question = Annotated[ChoiceQuestion | ScoreQuestion | NoulQuestion, Field(discriminator="type")]
_QUESTION: TypeAdapter[ChoiceQuestion | ScoreQuestion | NoulQuestion] = TypeAdapter(Question)


def check_questions(questions: object, source: str = "questions") -> QuestionSet:
    """Return a question set as plain JSON, labels as text; `source` names it in the error.

    Raises:
        QuestionSetError: with every problem found, each naming its question.
    """
    if not isinstance(questions, Mapping) or not questions:
        raise QuestionSetError(["must map at least one question id to a question"], source)
    if len(questions) > MAX_QUESTIONS:
        raise QuestionSetError([f"there are {len(questions)} questions; a job asks at most {MAX_QUESTIONS}"], source)
    problems: list[str] = []
    checked: QuestionSet = {}
    budget = JsonBudget()
    for question_id, question in questions.items():
        try:
            name = _check_id(question_id, budget)
            if name in checked:
                raise JsonValueError("is there twice")  # noqa: TRY301 - one place says what is wrong with a question
            checked[name] = _check_question(question, budget)
        except JsonValueError as error:
            problems.append(f"question {_shown(question_id)}: {error}")
            if budget.values < 0 or budget.characters < 0:
                break
        except ValidationError as error:
            problems += [f"question {_shown(question_id)}: {problem}" for problem in _describe(error)]
    if problems:
        raise QuestionSetError(problems, source)
    return checked


def _check_id(question_id: object, budget: JsonBudget) -> str:
    if not isinstance(question_id, str) or not question_id.strip() or question_id == WHOLE_ROW:
        raise JsonValueError(f"its id must be text that is not empty, other than '{WHOLE_ROW}'")
    if len(question_id) > MAX_ID_LENGTH:
        raise JsonValueError(f"its id is longer than {MAX_ID_LENGTH} characters")
    return str(as_json(question_id, budget))


def _check_question(question: object, budget: JsonBudget) -> dict[str, Any]:
    if isinstance(question, Mapping) and question.get("type") == "choice" and "criteria" in question:
        question = {**question, "criteria": _with_text_labels(question["criteria"])}
    return _QUESTION.validate_python(as_json(question, budget)).model_dump(exclude_unset=True)


def _with_text_labels(criteria: object) -> object:
    """Criteria of a choice with each label as text. They are told apart as values (1 and 1.0 are equal) and as text."""
    if not isinstance(criteria, Mapping | list | tuple):
        return criteria
    try:
        labels = [as_json(label_text(label), JsonBudget()) for label in criteria]
    except ValueError as error:
        raise JsonValueError(f"criteria: {error}") from error
    for seen in (Counter(labels), Counter(list(criteria))):
        if repeated := [label for label, count in seen.items() if count > 1]:
            raise JsonValueError(f"criteria: label {repeated[0]!r} is repeated; each label must be its own")
    return dict(zip(labels, criteria.values(), strict=True)) if isinstance(criteria, Mapping) else labels


def _by_side(sides: object) -> dict[str, Any]:
    if not isinstance(sides, dict):
        raise ValueError("must map 'true' and 'false' to text")  # noqa: TRY004 - pydantic's protocol
    if wrong := sorted(side for side in sides if side.lower() not in SIDES):
        raise ValueError(f"key {wrong[0]!r} is not allowed; use only 'true' and 'false'")
    named = {side.lower(): text for side, text in sides.items()}
    if len(named) < len(sides):
        raise ValueError(f"names a side twice: {', '.join(sides)}")
    return named


def _check_count(options: int) -> None:
    if options > MAX_OPTIONS:
        raise ValueError(f"has {options} options; a question has at most {MAX_OPTIONS}")


def _shown(question_id: object) -> str:
    shown = repr(question_id)
    return shown if len(shown) <= MAX_ID_LENGTH else f"{shown[:40]}…"


def _describe(error: ValidationError) -> list[str]:
    described = []
    for problem in error.errors(include_input=False, include_url=False):
        where = ".".join(str(part) for part in problem["loc"] if part not in ("choice", "score", "noul"))
        match problem["type"]:
            case "union_tag_not_found":
                text = "no type; add 'type: choice', 'score' or 'noul'"
            case "union_tag_invalid":
                text = f"unknown type {problem['ctx']['tag']!r}; use choice, score or noul"
            case "model_attributes_type" | "dict_type" | "model_type":
                text = "must be a mapping with type, instructions and criteria"
            case "missing":
                text = f"no {where}; add it"
            case "extra_forbidden" if where == "labels":
                text = "labels belong to a noul; a choice takes its labels from its criteria"
            case "extra_forbidden":
                text = f"unknown key {where!r}; remove it"
            case "int_type" | "list_type" if where.startswith("option_order"):
                text = "option_order must list whole numbers, each of the options' places from 0 on once"
            case _:
                message = problem["msg"].removeprefix("Value error, ")
                text = f"{where} {message}" if where else message
        described.append(text)
    return list(dict.fromkeys(described))
