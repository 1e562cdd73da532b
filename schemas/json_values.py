"""Python values as JSON can hold them: converted, bounded, or refused with their place. Owns no meaning of them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

MAX_DEPTH = 32  # lists and objects within each other
MAX_VALUES = 20_000
MAX_CHARACTERS = 2**19  # of all keys and texts together
MAX_INTEGER_BITS = 1024  # Python writes no integer of more than 4300 digits


class JsonValueError(ValueError):
    """A value that JSON cannot hold, or too large a one; the message begins with its place."""


@dataclass
class JsonBudget:
    """What may still be converted: one budget for all parts of one document."""

    values: int = MAX_VALUES
    characters: int = MAX_CHARACTERS


def as_json(value: object, budget: JsonBudget, place: str = "", depth: int = 0) -> Any:
    """Return the value made of dict, list, str, int, float, bool and None alone, with keys that are text.

    Tuples become lists, NumPy's scalars Python's, keys what JSON writes for them. Two halves of a surrogate pair become
    the character that they mean.

    Raises:
        JsonValueError: with its place, for anything else, what is nested too deeply or in itself, and for too much.
    """
    budget.values -= 1
    if budget.values < 0:
        raise JsonValueError(_at(place, f"there are more than {MAX_VALUES} values in all (an alias counts each time)"))
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return _scalar(value, budget, place)
    if depth >= MAX_DEPTH:
        raise JsonValueError(_at(place, f"is nested more than {MAX_DEPTH} levels deep, or holds itself"))
    if isinstance(value, list | tuple):
        return [as_json(item, budget, f"{place}[{index}]", depth + 1) for index, item in enumerate(value)]
    if not isinstance(value, Mapping):
        raise JsonValueError(_at(place, f"is a {type(value).__name__}, which JSON cannot hold; write it as text"))
    converted: dict[str, Any] = {}
    for key, item in value.items():
        text = _key(key, budget, place)
        if text in converted:
            raise JsonValueError(_at(place, f"key {text[:40]!r} is repeated (keys are text)"))
        converted[text] = as_json(item, budget, f"{place}.{text[:40]}" if place else text[:40], depth + 1)
    return converted


def _scalar(value: bool | float | str | None, budget: JsonBudget, place: str) -> Any:
    if isinstance(value, str):
        return _text(value, budget, place)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return _integer(value, place)
    if not math.isfinite(value):
        raise JsonValueError(_at(place, f"is {float(value)}, which JSON cannot hold"))
    return float(value)


def _key(key: object, budget: JsonBudget, place: str) -> str:
    if isinstance(key, np.generic):
        key = key.item()
    match key:
        case str():
            return _text(key, budget, place)
        case None:
            return "null"
        case bool():
            return str(key).lower()
        case int():
            return str(_integer(key, place))
        case float() if math.isfinite(key):
            return str(key)
    raise JsonValueError(_at(place, f"key {str(key)[:40]!r} is a {type(key).__name__}; keys are text"))


def _integer(number: int, place: str) -> int:
    if number.bit_length() > MAX_INTEGER_BITS:
        raise JsonValueError(_at(place, f"is an integer of more than {MAX_INTEGER_BITS} bits; write it as text"))
    return int(number)


def _text(text: str, budget: JsonBudget, place: str) -> str:
    budget.characters -= len(text)
    if budget.characters < 0:
        raise JsonValueError(_at(place, f"there are more than {MAX_CHARACTERS} characters in all"))
    if "\x00" in text:
        raise JsonValueError(_at(place, "holds a NUL character; remove it"))
    text = str.__str__(text)
    try:
        text.encode()
    except UnicodeEncodeError:
        try:
            return text.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError as error:
            raise JsonValueError(_at(place, "holds half a surrogate pair, which is no text")) from error
    return text


def _at(place: str, problem: str) -> str:
    return f"{place} {problem}" if place else problem
