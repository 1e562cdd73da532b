"""Question files: YAML or JSON read as the values that `check_questions` takes. Owns what a scalar of a file means.

What looks like text stays as typed. In YAML a plain scalar is a number only where it is written as JSON writes that
number (12, 1.5; not 01067, 1.10, 12:30, 0x1F), and true, false, null and ~ are the only other
values. Keys and labels are always text.
"""

import codecs
import json
import re
from pathlib import Path
from typing import Any

import yaml

from schemas.json_values import MAX_DEPTH, MAX_VALUES, JsonValueError
from schemas.question import QuestionSet, QuestionSetError, check_questions

MAX_FILE_BYTES = 2**19
MAX_DIGITS = 300  # of a number; Python reads none of more than 4300
_JSON_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_PLAIN, _TEXT = "plain", "tag:yaml.org,2002:str"  # tags: of a scalar without quotes, of one with


def read_questions(path: str | Path) -> QuestionSet:
    """Read and check a question set from a file; JSON by its ending, or by its content.

    Raises:
        QuestionSetError: the file is missing, is neither YAML nor JSON, or holds questions that cannot be asked.
    """
    source = str(path)
    try:
        text = _read_text(Path(path))
        if Path(path).suffix.lower() == ".json":
            return check_questions(_read_json(text), source)
        if text.lstrip().startswith("{"):
            try:
                return check_questions(_read_json(text), source)
            except json.JSONDecodeError:
                pass  # YAML writes mappings so, too
        return check_questions(_read_yaml(text), source)
    except OSError as error:
        raise QuestionSetError([f"cannot be read: {error.strerror or error}"], source) from error
    except JsonValueError as error:
        raise QuestionSetError([str(error)], source) from error
    except json.JSONDecodeError as error:
        problem = f"line {error.lineno}, column {error.colno}: is not valid JSON: {error.msg}"
        raise QuestionSetError([problem], source) from error
    except yaml.MarkedYAMLError as error:
        raise QuestionSetError([_say(error)], source) from error
    except yaml.YAMLError as error:  # a character that YAML does not allow, which names its place
        raise QuestionSetError([f"is not valid YAML: {error}"], source) from error


def _read_text(path: Path) -> str:
    with path.open("rb") as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise OSError(f"it has more than {MAX_FILE_BYTES} bytes, which is far more than questions take")
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in content[:4]:
        raise OSError("it is UTF-16 or UTF-32; save it as UTF-8")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise OSError(f"line {line}: byte 0x{content[error.start]:02x} is not UTF-8; save the file as UTF-8") from error


class _WrittenFloat(float):
    """A number of a JSON file, which as a label is written as it was typed."""

    def __new__(cls, written: str) -> "_WrittenFloat":
        number = super().__new__(cls, written)
        number.written = written
        return number

    written: str

    def __str__(self) -> str:
        return self.written


class _Pairs(list[tuple[str, Any]]):
    """A JSON object as it is written: with the keys that it may have twice."""


def _read_json(text: str) -> Any:
    try:
        tree = json.loads(text, parse_int=_integer, parse_float=_WrittenFloat, object_pairs_hook=_Pairs)
        read = _as_dicts(tree, "")
    except RecursionError as error:
        raise json.JSONDecodeError(f"nested more than {MAX_DEPTH} levels deep", text, 0) from error
    for question in read.values() if isinstance(read, dict) else ():
        if (
            isinstance(question, dict)
            and question.get("type") == "choice"
            and isinstance(question.get("criteria"), list)
        ):
            question["criteria"] = [str(x).lower() if isinstance(x, bool) else x for x in question["criteria"]]
    return read


def _integer(written: str) -> int | str:
    return int(written) if len(written) <= MAX_DIGITS else written


def _as_dicts(value: Any, place: str) -> Any:
    if isinstance(value, _Pairs):
        named: dict[str, Any] = {}
        for key, item in value:
            if key in named:
                raise JsonValueError(f"{place or 'the file'}: key {key!r} is repeated")
            named[key] = _as_dicts(item, f"{place}.{key[:40]}" if place else key[:40])
        return named
    if isinstance(value, list):
        return [_as_dicts(item, f"{place}[{index}]") for index, item in enumerate(value)]
    return value


class _Loader(yaml.SafeLoader):
    """Composes nodes, and constructs nothing: what a plain scalar means is said below."""

    yaml_implicit_resolvers = {None: [(_PLAIN, re.compile(""))]}  # noqa: RUF012 - as in PyYAML

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._nodes = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self._depth += 1
        self._nodes += 1
        if self._depth > MAX_DEPTH:
            raise _Problem(f"nested more than {MAX_DEPTH} levels deep", self.get_mark())
        if self._nodes > MAX_VALUES:
            raise _Problem(f"more than {MAX_VALUES} values", self.get_mark())
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


class _Problem(yaml.MarkedYAMLError):
    """Something that YAML allows and a question file does not."""

    def __init__(self, problem: str, mark: Any) -> None:
        super().__init__(problem=problem, problem_mark=mark)


def _say(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    where = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
    said = "; ".join(part for part in (error.context, error.problem) if part)
    return f"{where}{said if isinstance(error, _Problem) else f'is not valid YAML: {said}'}"


def _read_yaml(text: str) -> Any:
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
    finally:
        loader.dispose()
    return None if root is None else _Reading().question_set(root)


class _Reading:
    """One file's nodes on their way to Python values. An alias counts each time, so that few bytes stay few values."""

    def __init__(self) -> None:
        self._values = 0

    def question_set(self, root: yaml.Node) -> Any:
        if not isinstance(root, yaml.MappingNode):
            return self._value(root, 0)
        return {name: self._question(node) for name, node in self._pairs(root)}

    def _question(self, node: yaml.Node) -> Any:
        if not isinstance(node, yaml.MappingNode):
            return self._value(node, 1)
        pairs = dict(self._pairs(node))
        is_choice = "type" in pairs and pairs["type"].value == "choice"
        question: dict[str, Any] = {}
        for key, part in pairs.items():
            if key == "criteria" and is_choice and isinstance(part, yaml.SequenceNode):
                question[key] = [self._label(item) for item in part.value]
            elif key == "labels" and isinstance(part, yaml.MappingNode):
                question[key] = {side: self._label(item) for side, item in self._pairs(part)}
            else:
                question[key] = self._value(part, 2)
        return question

    def _label(self, node: yaml.Node) -> Any:
        """A label as it is typed, whatever it looks like; nothing at all is null."""
        is_typed = isinstance(node, yaml.ScalarNode) and node.tag == _PLAIN and node.value
        return node.value if is_typed else self._value(node, 3)

    def _value(self, node: yaml.Node, depth: int) -> Any:
        self._values += 1
        if self._values > MAX_VALUES:
            raise _Problem(f"more than {MAX_VALUES} values (an alias counts each time)", node.start_mark)
        if depth > MAX_DEPTH:
            raise _Problem(f"nested more than {MAX_DEPTH} levels deep, or holds itself", node.start_mark)
        if isinstance(node, yaml.ScalarNode):
            return _scalar(node)
        if node.tag not in ("tag:yaml.org,2002:seq", "tag:yaml.org,2002:map"):
            raise _Problem(f"the tag {node.tag} is not read; remove it", node.start_mark)
        if isinstance(node, yaml.SequenceNode):
            return [self._value(item, depth + 1) for item in node.value]
        return {key: self._value(item, depth + 1) for key, item in self._pairs(node)}

    def _pairs(self, node: yaml.Node) -> list[tuple[str, yaml.Node]]:
        """Keys as typed, each of them once."""
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _Problem(f"a {key.id} cannot be a key; keys are text", key.start_mark)
            if key.tag == _PLAIN and key.value == "<<":
                raise _Problem("merge keys (<<) are not read; give an alias as a whole value", key.start_mark)
            if key.value in seen:
                raise _Problem(f"{key.value!r} is repeated", key.start_mark)
            seen.add(key.value)
        return [(key.value, item) for key, item in node.value]


def _scalar(node: yaml.ScalarNode) -> Any:
    if node.tag == _TEXT:
        return node.value
    if node.tag != _PLAIN:
        raise _Problem(f"the tag {node.tag} is not read; write text in quotes", node.start_mark)
    match node.value:
        case "" | "~" | "null":
            return None
        case "true" | "false":
            return node.value == "true"
    if len(node.value) <= MAX_DIGITS and _JSON_NUMBER.fullmatch(node.value):
        number = float(node.value) if set(node.value) & set(".eE") else int(node.value)
        if str(number) == node.value:
            return number
    return str(node.value)
