import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import laya
from laya.questions import check_questions
from laya.sequence import EncodedSequences, encode_sequences, prepare_questions, ragged_ranges
from laya.tokenizer import TextTokenizer
from schemas.calibration import TYPE_NAMES
from schemas.question_text import SequenceLimits

texts = st.text(st.characters(codec="utf-8"), max_size=60)
asked_texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=60)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts
states_of_any_kind = texts | st.lists(scalars, max_size=8) | st.dictionaries(texts, scalars, max_size=5)
descriptions = st.none() | asked_texts | st.lists(st.integers(), max_size=3)
choices = st.dictionaries(asked_texts, descriptions, min_size=1, max_size=8)
instructions = st.text(st.characters(codec="utf-8", categories=("L", "N")), min_size=1, max_size=80)


@st.composite
def questions(draw: st.DrawFn) -> dict[str, Any]:
    asked: dict[str, Any] = {
        "choice": {"type": "choice", "instructions": draw(instructions), "criteria": draw(choices)}
    }
    order = draw(st.none() | st.permutations(range(len(asked["choice"]["criteria"]))))
    if order is not None:
        asked["choice"]["option_order"] = order
    levels = draw(st.lists(asked_texts, min_size=1, max_size=5))
    asked["score"] = {"type": "score", "instructions": draw(instructions), "criteria": levels}
    asked["noul"] = {"type": "noul", "instructions": draw(instructions)}
    return asked


def lay_out_one(
    state: Any, question: Any, tokenizer: TextTokenizer, limits: SequenceLimits
) -> tuple[list[int], list[int]]:
    """The layout written out for one pair, step by step: its token ids and markers."""
    special = tokenizer.special
    order = question.order or range(len(question.option_texts))
    options = [[special.mask, *tokens(tokenizer, " " + question.option_texts[place])[:48]] for place in order]
    budget = limits.head_max_len - sum(len(option) for option in options)
    if budget < 16:
        most = max(4, (limits.head_max_len - 16) // len(options))
        options = [option[:most] for option in options]
        budget = limits.head_max_len - sum(len(option) for option in options)
    ids = [special.cls, *tokens(tokenizer, question.text)[: max(8, budget)], special.sep]
    markers = []
    for option in options:
        markers.append(len(ids))
        ids += option
    ids.append(special.sep)
    room = max(0, limits.max_len - len(ids) - 1)
    whole = tokens(tokenizer, state if isinstance(state, str) else json.dumps(state, ensure_ascii=False))
    kept = whole[max(0, len(whole) - room) :] if isinstance(state, list) else whole[:room]
    return [*ids, *kept, special.sep][: limits.max_len], markers


def tokens(tokenizer: TextTokenizer, text: str) -> list[int]:
    return tokenizer.tokenise([text]).flat.tolist()


def one_by_one(encoded: EncodedSequences) -> list[tuple[list[int], list[int]]]:
    ids = [encoded.token_ids[start:stop].tolist() for start, stop in itertools.pairwise(encoded.offsets)]
    markers = [encoded.markers[start:stop].tolist() for start, stop in itertools.pairwise(encoded.marker_offsets)]
    return list(zip(ids, markers, strict=True))


@settings(deadline=None, max_examples=60)
@given(
    asked=questions(),
    states=st.lists(states_of_any_kind, max_size=5),
    limits=st.builds(SequenceLimits, max_len=st.integers(8, 128), head_max_len=st.integers(1, 100)),
    data=st.data(),
)
def test_array_layout_equals_the_layout_written_out(
    agent: laya.Agent, asked: dict[str, Any], states: list[Any], limits: SequenceLimits, data: st.DataObject
) -> None:
    checked = check_questions(asked)
    prepared = prepare_questions(checked, agent.tokenizer, limits)
    pairs = len(states) * len(checked)
    wanted = np.array(data.draw(st.lists(st.booleans(), min_size=pairs, max_size=pairs)), dtype=bool)
    wanted = wanted.reshape(len(states), len(checked))
    encoded = encode_sequences(states, prepared, agent.tokenizer, limits.max_len, wanted)

    expected, places, refused = [], [], set()
    for (s, state), (q, question) in itertools.product(enumerate(states), enumerate(checked)):
        ids, markers = lay_out_one(state, question, agent.tokenizer, limits)
        if any(marker >= limits.max_len for marker in markers):
            refused.add(question.id)
        elif wanted[s, q]:
            expected.append((ids, markers))
            places.append((s, q))
    assert one_by_one(encoded) == expected
    assert list(zip(encoded.state_index.tolist(), encoded.question_index.tolist(), strict=True)) == places
    assert set(prepared.unfit) >= refused
    assert encoded.lengths.max(initial=0) <= limits.max_len
    for index, (s, q) in enumerate(places):
        whole = len(tokens(agent.tokenizer, laya.state_text(states[s])))
        head = int(np.diff(prepared.offsets)[q])
        assert encoded.state_tokens[index] == whole
        assert encoded.state_tokens_dropped[index] == whole - min(whole, max(0, limits.max_len - head - 1))
        assert encoded.types[index] == TYPE_NAMES.index(checked[q].type)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 6)), max_size=20))
def test_ragged_ranges_are_the_ranges_in_turn(pieces: list[tuple[int, int]]) -> None:
    starts, lengths = (np.array([piece[i] for piece in pieces], dtype=np.int64) for i in (0, 1))
    assert ragged_ranges(starts, lengths).tolist() == [
        place for start, length in pieces for place in range(start, start + length)
    ]


def test_a_conversation_keeps_its_end_and_a_text_its_start(agent: laya.Agent) -> None:
    prepared = agent.prepare({"q": {"type": "noul", "instructions": "Is it?"}})
    turns = [f"turn {number}" for number in range(200)]
    encoded = agent.encode([turns, " ".join(turns), {"turns": turns}], prepared)
    tails = [encoded.token_ids[stop - 9 : stop - 1].tolist() for stop in encoded.offsets[1:]]
    assert encoded.state_tokens_dropped.min() > 0
    assert tails[0] == tokens(agent.tokenizer, json.dumps(turns))[-8:]
    for index, text in ((1, " ".join(turns)), (2, json.dumps({"turns": turns}))):
        used = int(encoded.state_tokens[index] - encoded.state_tokens_dropped[index])
        assert tails[index] == tokens(agent.tokenizer, text)[used - 8 : used]


def test_a_question_whose_options_do_not_fit_is_named_and_gets_no_sequence(agent: laya.Agent) -> None:
    wide = {"type": "choice", "instructions": "Which?", "criteria": [f"option {i}" for i in range(60)]}
    asked = {"wide": wide, "fine": {"type": "noul", "instructions": "Is it?"}}
    prepared = agent.prepare(asked)
    assert list(prepared.unfit) == ["wide"]
    assert "of its 60 options fit in max_len 128 with head_max_len 48" in prepared.unfit["wide"]
    encoded = agent.encode(["a", "b"], prepared)
    assert encoded.question_index.tolist() == [1, 1]
    with pytest.raises(laya.QuestionError, match="'wide'"):
        agent.predict("a", asked)


def test_options_that_lose_their_difference_are_reported(agent: laya.Agent) -> None:
    same = "the same beginning of both options and much more of it than is kept " * 3
    asked = {
        "like": {"type": "choice", "instructions": "Which?", "criteria": [same + "a", same + "b"]},
        "unlike": {"type": "choice", "instructions": "Which?", "criteria": ["a", "b"]},
    }
    prepared = agent.prepare(asked)
    assert agent.encode(["x"], prepared).options_cut.tolist() == [True, False]


def test_a_state_without_text_is_named_and_its_neighbours_are_encoded(agent: laya.Agent) -> None:
    prepared = agent.prepare({"q": {"type": "noul", "instructions": "Is it?"}})
    states = ["a", None, {"x": object()}, "half \ud800", "x" * 10_000_001, {1: "b"}, 3.5]
    encoded = agent.encode(states, prepared)
    assert encoded.state_index.tolist() == [0, 5, 6]
    assert list(encoded.unfit) == [1, 2, 3, 4]
    assert "null" in encoded.unfit[1]
    assert "no JSON" in encoded.unfit[2]
    assert "surrogate" in encoded.unfit[3]
    assert "10000001 characters" in encoded.unfit[4]


def test_wanted_must_have_a_place_for_every_pair(agent: laya.Agent) -> None:
    prepared = agent.prepare({"q": {"type": "noul", "instructions": "Is it?"}})
    with pytest.raises(ValueError, match="expected shape"):
        agent.encode(["a", "b"], prepared, np.ones((1, 1), dtype=bool))
