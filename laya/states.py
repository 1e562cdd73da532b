"""What is judged. Owns turning a state, text or JSON, into the text a tokenizer reads."""

from collections.abc import Iterable, Mapping
from typing import Any

from laya.errors import StateError
from schemas.question_text import json_line

# Far beyond any sequence. Tokenising takes about 100 bytes of memory a token for as long as it runs.
MAX_STATE_CHARACTERS = 10_000_000


def state_text(state: Any) -> str:
    """Text as it is, anything else as JSON. Raises StateError when a state has no text, or far too much of it."""
    if state is None:
        raise StateError("the state is null; expected text or JSON")
    try:
        text = json_line(state)
        text.encode()
    except UnicodeEncodeError as error:
        raise StateError("the state holds half a surrogate pair, which is no text") from error
    except ValueError as error:
        raise StateError(f"the state has no JSON: {error}") from error
    if len(text) > MAX_STATE_CHARACTERS:
        raise StateError(f"the state has {len(text)} characters, more than the limit of {MAX_STATE_CHARACTERS}")
    return text


def list_states(states: Iterable[Any]) -> list[Any]:
    """Return the states of a batch. Raises TypeError for one state in the place of a list of them."""
    if isinstance(states, str | bytes | Mapping):
        raise TypeError(f"expected a list of states, found one {type(states).__name__}; predict takes a single state")
    return list(states)


def keeps_end(state: Any) -> bool:
    """Whether a state that is too long keeps its end: a list is a conversation, and its last turns count."""
    return isinstance(state, list | tuple)
