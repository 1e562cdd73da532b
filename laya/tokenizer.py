"""Text to token ids. Owns the checkpoint's tokenizer files and the rule that a text never becomes a special token.

Reads `tokenizer.json` with the `tokenizers` library alone: of `tokenizer_config.json` the sequence layout needs
only which tokens are special, whatever class it names.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from laya.errors import CheckpointError

# A checkpoint of a decoder's tokenizer names its first and last token by their older roles.
ROLES = {
    "cls": ("cls_token", "bos_token"),
    "sep": ("sep_token", "eos_token"),
    "mask": ("mask_token",),
    "pad": ("pad_token",),
}
# The Rust library holds about 100 bytes for each token of a batch call, so a call is bounded by the text it is given.
CALL_CHARACTERS = 4_000_000


@dataclass(frozen=True)
class SpecialTokens:
    """Token ids, and the mask token's literal text."""

    cls: int
    sep: int
    mask: int
    pad: int
    mask_text: str


@dataclass(frozen=True)
class TokenisedTexts:
    """Texts as one flat array: text i kept `flat[offsets[i]:offsets[i + 1]]` (int32) of its `lengths[i]` tokens."""

    flat: NDArray[np.int32]
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]


class TextTokenizer:
    """The tokenizer of one checkpoint. Calls run in parallel inside the Rust library and release the GIL."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        """Raises CheckpointError when the files cannot be read, or name special tokens that no model of `vocab_size`
        tokens has."""
        try:
            self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the Rust library raises no narrower class
            raise CheckpointError(f"{folder / 'tokenizer.json'}: not a readable tokenizer: {error}") from error
        self._vocab_size = vocab_size
        self._largest = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.encode_special_tokens = True  # their literal text is text
        self.special = self._read_special(folder)
        self._forbidden = np.zeros(max(vocab_size, self._largest + 1), dtype=bool)
        self._forbidden[[self.special.cls, self.special.sep, self.special.mask, self.special.pad]] = True
        self._substitute = self._ordinary_token(folder)

    def clean(self, text: str) -> str:
        """`text` with every literal mask token made a space."""
        return text.replace(self.special.mask_text, " ")

    def tokenise(self, texts: Sequence[str], keep: int | None = None, keep_end: Sequence[bool] = ()) -> TokenisedTexts:
        """All texts, without special tokens; of each at most `keep` tokens of its start (its end where `keep_end`)."""
        pieces: list[NDArray[np.int32]] = []
        lengths = np.zeros(len(texts), dtype=np.int64)
        for start, stop in _calls(texts):
            encodings = self._tokenizer.encode_batch_fast(
                [self.clean(t) for t in texts[start:stop]], add_special_tokens=False
            )
            for index, encoding in enumerate(encodings, start):
                ids = np.array(encoding.ids, dtype=np.int32)
                lengths[index] = len(ids)
                if keep is not None and len(ids) > keep:
                    # Copied, or the view would hold all the tokens of a long text.
                    ids = ids[len(ids) - keep :].copy() if keep_end and keep_end[index] else ids[:keep].copy()
                pieces.append(ids)
        flat = np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int32)
        # Some models spell a special token as one word of their vocabulary, which reading it as text would restore.
        flat[self._forbidden[flat]] = self._substitute
        offsets = np.zeros(len(texts) + 1, dtype=np.int64)
        np.cumsum([len(piece) for piece in pieces], out=offsets[1:])
        return TokenisedTexts(flat, offsets, lengths)

    def unknown_to_model(self, texts: TokenisedTexts) -> dict[int, str]:
        """Return why, by index, a text cannot be read: it kept a token whose id the model has no embedding of."""
        reasons = {}
        for place in np.flatnonzero(texts.flat >= self._vocab_size) if self._largest >= self._vocab_size else ():
            token = int(texts.flat[place])
            reasons[int(np.searchsorted(texts.offsets, place, side="right")) - 1] = (
                f"{self._tokenizer.id_to_token(token)!r} is token {token} of the tokenizer, but the model has "
                f"{self._vocab_size} tokens (vocab_size)"
            )
        return reasons

    def _read_special(self, folder: Path) -> SpecialTokens:
        names: dict[str, Any] = {}
        for file in ("special_tokens_map.json", "tokenizer_config.json"):
            if not (folder / file).is_file():
                continue
            try:
                found = json.loads((folder / file).read_text(encoding="utf-8"))
                named = {key: _content(found[key]) for keys in ROLES.values() for key in keys if found.get(key)}
            except (OSError, ValueError, TypeError, AttributeError, LookupError) as error:
                raise CheckpointError(f"{folder / file}: expected a readable JSON object: {error}") from error
            for key in named.keys() & names.keys():
                if named[key] != names[key]:
                    other = f"special_tokens_map.json says {names[key]!r}, and which one was meant is not known"
                    raise CheckpointError(f"{folder / file}: {key}: found {named[key]!r}, but {other}")
            names |= named
        texts = {role: next((names[key] for key in keys if key in names), None) for role, keys in ROLES.items()}
        ids = {}
        for role, text in texts.items():
            token = None if text is None else self._tokenizer.token_to_id(text)
            if token is None or token >= self._vocab_size:
                where = f"{folder / 'tokenizer_config.json'}: {ROLES[role][0]}"
                raise CheckpointError(f"{where}: no token {text!r} among the model's {self._vocab_size}")
            ids[role] = token
        return SpecialTokens(**ids, mask_text=str(texts["mask"]))

    def _ordinary_token(self, folder: Path) -> int:
        unknown = getattr(self._tokenizer.model, "unk_token", None)
        found = self._tokenizer.token_to_id(unknown) if unknown else None
        if found is None:
            ids = self._tokenizer.encode("?", add_special_tokens=False).ids
            found = ids[0] if ids else None
        if found is None or self._forbidden[found] or found >= self._vocab_size:
            raise CheckpointError(f"{folder / 'tokenizer.json'}: expected a token for unknown text, found none")
        return int(found)


def _calls(texts: Sequence[str]) -> list[tuple[int, int]]:
    """Ranges of texts of about CALL_CHARACTERS each; one larger text stands alone."""
    ranges: list[tuple[int, int]] = []
    start = characters = 0
    for index, text in enumerate(texts):
        if index > start and characters + len(text) > CALL_CHARACTERS:
            ranges.append((start, index))
            start, characters = index, 0
        characters += len(text)
    if start < len(texts):
        ranges.append((start, len(texts)))
    return ranges


def _content(token: object) -> str:
    """A token in either spelling: its text, or an object that holds it."""
    return str(token["content"]) if isinstance(token, dict) else str(token)
