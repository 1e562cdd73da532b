"""Token sequences: `[CLS] question [SEP] [MASK] option … [SEP] state [SEP]`, one for each (state, question) pair.

Owns the layout; what is cut of a question is `schemas.question_text`'s. A question's part is laid out once for all
states, a state is tokenised once for all questions, and the pairs are joined by array operations, never one by one.
Batches are `packing`'s.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from laya.errors import StateError
from laya.states import keeps_end, state_text
from laya.tokenizer import SpecialTokens, TextTokenizer, TokenisedTexts
from schemas.calibration import TYPE_NAMES
from schemas.question_text import HeadCuts, Question, SequenceLimits, count_distinct, cut_head, why_alike, why_unfit

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class PreparedQuestions:
    """Questions laid out. Question q's head is `tokens[offsets[q]:offsets[q + 1]]` (int32), ending in [SEP].

    `unfit` gives the reason by question id where an option's marker does not fit; such a question gets no sequences.
    `alike` says by question id what is lost where options have the same tokens left.
    """

    questions: tuple[Question, ...]
    unfit: Mapping[str, str]
    alike: Mapping[str, str]
    tokens: NDArray[np.int32]
    offsets: Ints
    markers: (
        Ints  # flat; the options' mask positions of question q are markers[marker_offsets[q]:marker_offsets[q + 1]]
    )
    marker_offsets: Ints
    options_distinct: Ints  # (questions): how many different token spans the options have left
    option_tokens: Ints  # (questions): what each option was cut to, mask token included; 0 where the budget cut none
    types: Ints  # (questions)

    @property
    def fits(self) -> NDArray[np.bool_]:
        return np.array([question.id not in self.unfit for question in self.questions], dtype=bool)


@dataclass(frozen=True)
class EncodedSequences:
    """n sequences, columnar. Sequence i is `token_ids[offsets[i]:offsets[i + 1]]`, its options' mask positions
    `markers[marker_offsets[i]:marker_offsets[i + 1]]`. `unfit` has the reason by state index where a state has no text.
    """

    token_ids: NDArray[np.int32]
    offsets: Ints
    state_index: Ints
    question_index: Ints
    markers: Ints
    marker_offsets: Ints
    state_tokens: Ints  # of the whole state
    state_tokens_dropped: Ints
    options_cut: NDArray[np.bool_]  # whether options lost the difference between their tokens
    types: Ints  # choice 0, score 1, noul 2
    unfit: Mapping[int, str]

    def __len__(self) -> int:
        return len(self.state_index)

    @property
    def lengths(self) -> Ints:
        """Tokens of each sequence."""
        return np.diff(self.offsets)

    @property
    def option_counts(self) -> Ints:
        return np.diff(self.marker_offsets)


def prepare_questions(
    questions: tuple[Question, ...], tokenizer: TextTokenizer, limits: SequenceLimits
) -> PreparedQuestions:
    """Lay out the questions' heads with one call of the tokenizer."""
    tokenised = tokenizer.tokenise([text for question in questions for text in question.texts])
    unknown = tokenizer.unknown_to_model(tokenised)
    asked = [question.id for question in questions for _ in question.texts]
    pieces = iter(np.split(tokenised.flat, tokenised.offsets[1:-1]))
    heads, markers, distinct, option_tokens = [], [], [], []
    unfit = {asked[text]: f"question {asked[text]!r}: {why}" for text, why in unknown.items()}
    alike: dict[str, str] = {}
    for question in questions:
        instructions, *options = [next(pieces) for _ in range(1 + len(question.options))]
        cuts = cut_head(len(instructions), list(map(len, options)), limits.head_max_len)
        distinct.append(count_distinct([option.tolist() for option in options], cuts))
        if (why := why_unfit(question.id, cuts, limits)) is not None:
            unfit[question.id] = why
        if (why := why_alike(question.id, cuts, distinct[-1])) is not None:
            alike[question.id] = why
        heads.append(_lay_out(instructions, options, tokenizer.special, cuts))
        markers.append(np.array(cuts.markers, dtype=np.int64))
        option_tokens.append(cuts.option_limit)
    return PreparedQuestions(
        questions=questions,
        unfit=unfit,
        alike=alike,
        tokens=np.concatenate(heads),
        offsets=_offsets([len(head) for head in heads]),
        markers=np.concatenate(markers),
        marker_offsets=_offsets([len(marks) for marks in markers]),
        options_distinct=np.array(distinct, dtype=np.int64),
        option_tokens=np.array(option_tokens, dtype=np.int64),
        types=np.array([TYPE_NAMES.index(question.type) for question in questions], dtype=np.int64),
    )


def encode_sequences(
    states: Sequence[Any],
    prepared: PreparedQuestions,
    tokenizer: TextTokenizer,
    max_len: int,
    wanted: NDArray[np.bool_] | None = None,
) -> EncodedSequences:
    """Every (state, question) pair that fits and is `wanted` (states, questions), states outermost."""
    pairs = np.broadcast_to(prepared.fits, (len(states), len(prepared.questions))).copy()
    if wanted is not None:
        if wanted.shape != pairs.shape:
            raise ValueError(f"wanted: expected shape {pairs.shape}, found {wanted.shape}")
        pairs &= wanted
    texts, unfit = _state_texts(states, np.logical_or.reduce(pairs, axis=1))
    ends = np.array([keeps_end(state) for state in states], dtype=bool)
    tokenised = tokenizer.tokenise(texts, keep=max_len, keep_end=ends.tolist())
    unfit |= tokenizer.unknown_to_model(tokenised)
    pairs[list(unfit)] = False
    state, question = np.nonzero(pairs)
    head = np.diff(prepared.offsets)[question]
    used = np.minimum(tokenised.lengths[state], np.maximum(max_len - head - 1, 0))
    counts = np.diff(prepared.marker_offsets)[question]
    token_ids, offsets = _join(
        prepared, tokenised, tokenizer.special.sep, _Parts(state, question, head, used, ends, max_len)
    )
    return EncodedSequences(
        token_ids=token_ids,
        offsets=offsets,
        state_index=state,
        question_index=question,
        markers=prepared.markers[ragged_ranges(prepared.marker_offsets[question], counts)],
        marker_offsets=_offsets(counts),
        state_tokens=tokenised.lengths[state],
        state_tokens_dropped=tokenised.lengths[state] - used,
        options_cut=(prepared.options_distinct < np.diff(prepared.marker_offsets))[question],
        types=prepared.types[question],
        unfit=unfit,
    )


def ragged_ranges(starts: Ints, lengths: Ints) -> Ints:
    """start, start + 1, … for `length` places, of each (start, length) in turn, as one flat index array."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    places: Ints = np.arange(total, dtype=np.int64) + np.repeat(starts - (ends - lengths), lengths)
    return places


@dataclass(frozen=True)
class _Parts:
    """Of each pair: its state and question, the tokens its head has, those it takes of the state."""

    state: Ints
    question: Ints
    head: Ints
    used: Ints
    ends: NDArray[np.bool_]  # (states)
    max_len: int


def _join(
    prepared: PreparedQuestions, states: TokenisedTexts, sep: int, parts: _Parts
) -> tuple[NDArray[np.int32], Ints]:
    """The sequences' flat tokens and offsets: gathered in one step out of [heads, states, sep]."""
    pool = np.concatenate((prepared.tokens, states.flat, np.array([sep], dtype=np.int32)))
    first = len(prepared.tokens)
    at_end = parts.ends[parts.state]
    state_start = np.where(at_end, states.offsets[parts.state + 1] - parts.used, states.offsets[parts.state])
    lengths = np.stack((np.minimum(parts.head, parts.max_len), parts.used, np.zeros_like(parts.used)), axis=1)
    lengths[:, 2] = np.minimum(parts.max_len - lengths.sum(axis=1), 1)
    starts = np.stack(
        (prepared.offsets[parts.question], first + state_start, np.full_like(parts.used, len(pool) - 1)), axis=1
    )
    return pool[ragged_ranges(starts.ravel(), lengths.ravel())], _offsets(lengths.sum(axis=1))


def _lay_out(
    instructions: NDArray[np.int32], options: list[NDArray[np.int32]], special: SpecialTokens, cuts: HeadCuts
) -> NDArray[np.int32]:
    """One question's head."""
    parts: list[Sequence[int] | NDArray[np.int32]] = [[special.cls], instructions[: cuts.instructions], [special.sep]]
    for option, kept in zip(options, cuts.options, strict=True):
        parts += [[special.mask], option[:kept]]
    return np.concatenate((*parts, [special.sep])).astype(np.int32)


def _state_texts(states: Sequence[Any], needed: NDArray[np.bool_]) -> tuple[list[str], dict[int, str]]:
    """A text for each state, empty where none is needed or there is none; and the reasons by state index."""
    texts, unfit = [], {}
    for index, state in enumerate(states):
        text = ""
        if needed[index]:
            try:
                text = state_text(state)
            except StateError as error:
                unfit[index] = str(error)
        texts.append(text)
    return texts, unfit


def _offsets(lengths: Sequence[int] | Ints) -> Ints:
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
