"""What reaches a terminal or a script's pipe. Owns one rule: text is shown as it is.

It is never read as markup or emoji codes, and no character of it steers the terminal.

Tables and progress go through the consoles made here; what scripts read goes through `say` and `dump_json`, undecorated
whatever the terminal or FORCE_COLOR says.
"""

import io
import json
import re
import sys
from typing import Any

from rich.console import Console
from rich.text import Text

# Control characters (escape sequences, line breaks), marks that change the direction of writing, and lone surrogates,
# which stand for bytes of a name that are not UTF-8.
_STEERING = re.compile("[\\x00-\\x1f\\x7f-\\x9f\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069\\ud800-\\udfff]")


def printable(text: str) -> str:
    """Return the text with an escape such as `\\x1b` in place of each character that could steer a terminal."""
    return _STEERING.sub(lambda found: _escape(found[0]), text)


def _escape(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # a byte that was no UTF-8, as Python keeps it
        return f"\\x{code - 0xDC00:02x}"
    return {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(character) or (
        f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
    )


class LiteralConsole(Console):
    """A console for text that is not ours: every string is literal, in print, cells, titles and headers alike."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


def is_utf8(text: str) -> bool:
    """Return whether a text can be stored: Python reads bytes of a name that are not UTF-8 as lone surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def say(text: str) -> None:
    """Print a line to standard output, undecorated and unwrapped."""
    print(printable(text))


def warn(text: str) -> None:
    """Print a line to standard error, undecorated and unwrapped."""
    print(printable(text), file=sys.stderr, flush=True)


def show_error(message: str) -> None:
    """Print an error to standard error, named as ours. Its further lines are indented: none can pass for another's."""
    first, *others = message.split("\n")
    lines = [Text(printable(first)), *(Text(f"  {printable(line.strip())}") for line in others)]
    LiteralConsole(stderr=True).print(Text("laya-batch: ", "red") + Text("\n").join(lines), soft_wrap=True)


def dump_json(value: Any) -> str:
    """Return one line of JSON; what could steer a terminal, or what the output cannot encode, is escaped in it."""
    is_unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    text = json.dumps(value, ensure_ascii=not is_unicode)
    return _STEERING.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def never_fail_to_encode() -> None:
    """Have standard output and error write an escape for a character that their encoding lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
