"""Question sets: what may be asked, checked before any work is queued. Owns no tokens and no model.

A question set maps a question id to one typed question. `check_questions` returns the normalised plain dict that the
engine takes, or raises one error that lists every problem of every question.
"""

from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator, model_validator

QuestionSet = dict[str, dict[str, Any]]

MAX_ID_LENGTH = 100  # characters; the id is a key column of the results table
WHOLE_ROW = "*"  # what `row_errors.question` holds when the whole row failed, so no question may be called so


class QuestionSetError(ValueError):
    """A question set cannot be asked as it stands."""

    def __init__(self, problems: list[str], source: str = "questions") -> None:
        self.problems = problems
        super().__init__(
            "\n".join([f"{source}: {len(problems)} problem(s)", *(f"  - {problem}" for problem in problems)])
        )


def label_text(label: object) -> str:
    """A label as the text that is asked and stored: scalars only, as Python writes them."""
    if isinstance(label, str):
        return label
    if label is None:
        raise ValueError("a label is null; give it a name (in YAML, quote it)")
    if isinstance(label, bool | int | float):
        return str(label)
    raise ValueError(f"label {label!r} is a {type(label).__name__}; labels are text or numbers")


class _Question(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    instructions: Any
    option_order: list[int] | None = None

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

    @model_validator(mode="after")
    def _order_is_a_permutation(self) -> "_Question":
        count = self.option_count()
        if self.option_order is not None and sorted(self.option_order) != list(range(count)):
            raise ValueError(f"option_order {self.option_order} must name each of 0 to {count - 1} once")
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
        labels = [label_text(label) for label in criteria]
        if repeated := [label for label, count in Counter(labels).items() if count > 1]:
            raise ValueError(f"label {repeated[0]!r} is repeated; each label must be its own")
        return dict(zip(labels, criteria.values(), strict=True)) if isinstance(criteria, dict) else labels

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
        return criteria

    def option_count(self) -> int:
        return len(self.criteria)


class NoulQuestion(_Question):
    """Yes or no? `criteria` may describe, and `labels` rename, the two sides `true` and `false`."""

    type: Literal["noul"]
    criteria: dict[str, Any] | None = None
    labels: dict[str, str] | None = None

    @field_validator("criteria", "labels", mode="before")
    @classmethod
    def _keys_are_true_and_false(cls, sides: object) -> object:
        if sides is None:
            return None
        if not isinstance(sides, dict):
            raise ValueError("must map 'true' and 'false' to text")  # noqa: TRY004 - pydantic's protocol
        named = {label_text(side).lower(): text for side, text in sides.items()}
        if wrong := sorted(set(named) - {"true", "false"}):
            raise ValueError(f"key {wrong[0]!r} is not allowed; use only 'true' and 'false'")
        return named

    @model_validator(mode="after")
    def _order_is_fixed(self) -> "NoulQuestion":
        if self.option_order is not None:
            raise ValueError("option_order is not for a noul, whose sides are always read as false, true; remove it")
        return self

    @field_validator("labels")
    @classmethod
    def _both_sides_are_named(cls, labels: dict[str, str] | None) -> dict[str, str] | None:
        if labels is not None and (set(labels) != {"true", "false"} or labels["true"] == labels["false"]):
            raise ValueError("must name both 'true' and 'false', differently")
        return labels


Question = Annotated[ChoiceQuestion | ScoreQuestion | NoulQuestion, Field(discriminator="type")]
_QUESTION: TypeAdapter[ChoiceQuestion | ScoreQuestion | NoulQuestion] = TypeAdapter(Question)


def check_questions(questions: object, source: str = "questions") -> QuestionSet:
    """Normalise a question set; `source` names it in the error.

    Raises:
        QuestionSetError: with every problem found, each naming its question.
    """
    if not isinstance(questions, dict) or not questions:
        raise QuestionSetError(["must map at least one question id to a question"], source)
    problems: list[str] = []
    checked: QuestionSet = {}
    for question_id, question in questions.items():
        if not isinstance(question_id, str) or not question_id.strip() or question_id == WHOLE_ROW:
            problems.append(f"question id {question_id!r} must be text other than '{WHOLE_ROW}' (in YAML, quote it)")
        elif "\\x00" in repr((question_id, question)):
            problems.append(f"question {question_id!r}: holds a NUL character; remove it")
        elif len(question_id) > MAX_ID_LENGTH:
            problems.append(f"question id {question_id[:20]!r}… is longer than {MAX_ID_LENGTH} characters")
        else:
            try:
                checked[question_id] = _QUESTION.validate_python(question).model_dump(exclude_unset=True)
            except ValidationError as error:
                problems += [f"question {question_id!r}: {problem}" for problem in _describe(error)]
    if problems:
        raise QuestionSetError(problems, source)
    return checked


def _describe(error: ValidationError) -> list[str]:
    described = []
    for problem in error.errors():
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
            case "extra_forbidden":
                text = f"unknown key {where!r}; remove it"
            case _:
                message = problem["msg"].removeprefix("Value error, ")
                text = f"{where} {message}" if where else message
        described.append(text)
    return described


class _QuestionFileLoader(yaml.SafeLoader):
    """YAML whose only booleans are true and false (yes, no, on, off stay labels), and whose keys may not repeat."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - as in PyYAML
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool" or first in "tTfF"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is repeated", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_questions(path: str | Path) -> QuestionSet:
    """Read and check a question set from a YAML or JSON file (JSON is read as the YAML that it is).

    Raises:
        QuestionSetError: the file is missing, is not YAML or JSON, or holds questions that cannot be asked.
    """
    source = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise QuestionSetError([f"cannot be read: {error}"], source) from error
    try:
        questions = yaml.load(text, Loader=_QuestionFileLoader)  # noqa: S506 - a SafeLoader subclass
    except yaml.YAMLError as error:
        raise QuestionSetError([f"is not valid YAML or JSON: {error}"], source) from error
    return check_questions(questions, source)
