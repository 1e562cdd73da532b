"""Published reference results beside the checkout, where there are any: wording, layout and decoding."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import laya
from laya.calibration import read_temperatures
from laya.decode import Logits, decode
from laya.errors import QuestionError
from laya.packing import Batch
from laya.questions import check_questions
from laya.replies import render_replies
from laya.sequence import encode_sequences, prepare_questions
from laya.states import state_text
from laya.tokenizer import TextTokenizer
from schemas.question_text import SequenceLimits

SHARED = Path(__file__).resolve().parents[4] / "shared"
GOLDENS, TOKENIZER = SHARED / "goldens", SHARED / "data" / "tokenizer"
ENGLISH_LIMITS = {"english": SequenceLimits(512, 192), "typed-decisions": SequenceLimits(1024, 256)}

if not (GOLDENS.is_dir() and TOKENIZER.is_dir()):
    pytest.skip("no reference results beside the checkout", allow_module_level=True)


def read(file: str | Path) -> Any:
    return json.loads((GOLDENS / file).read_text(encoding="utf-8"))


def as_question(case: dict[str, Any]) -> dict[str, Any]:
    short = case["question"]
    names = {"t": "type", "ins": "instructions", "crit": "criteria", "labels": "labels"}
    question = {names[key]: value for key, value in short.items() if value is not None}
    return question | ({"option_order": case["option_order"]} if case["option_order"] else {})


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer(TOKENIZER, 50_368)


SEQUENCES = read("thread3d-java/sequences.json")["english"]["cases"] if GOLDENS.is_dir() else {}
CASES = sorted(path.relative_to(GOLDENS) for name in ENGLISH_LIMITS for path in GOLDENS.glob(f"*/{name}/case_*.json"))


@pytest.mark.parametrize("name", SEQUENCES)
def test_sequences_have_the_published_ids_and_markers(tokenizer: TextTokenizer, name: str) -> None:
    case = SEQUENCES[name]
    prepared = prepare_questions(
        check_questions({"q": as_question(case)}), tokenizer, SequenceLimits(case["max_len"], case["head_max_len"])
    )
    state = case["state"]
    if case["truncate_left"] and isinstance(state, str):
        pytest.skip("a text never keeps its end here")
    encoded = encode_sequences([state], prepared, tokenizer, case["max_len"])
    assert encoded.token_ids.tolist() == case["ids"]
    assert encoded.markers.tolist() == case["markers"]
    assert encoded.state_tokens.tolist() == [case["truncation"]["state_tokens"]]
    assert encoded.state_tokens_dropped.tolist() == [case["truncation"]["state_tokens_dropped"]]
    distinct = case["stats"]["options_distinct"] == case["stats"]["options"]
    assert encoded.options_cut.tolist() == [not distinct]


@pytest.mark.parametrize("checkpoint", ["english", "multilingual"])
def test_decoding_gives_the_published_answers(agent: laya.Agent, checkpoint: str) -> None:
    block = read("thread3d-java/decode.json")[checkpoint]
    temperatures = read_temperatures(block["config"], "reference")
    for name, case in block["cases"].items():
        if case["lang"] is not None:
            continue
        prepared = prepare_questions(
            check_questions({"q": as_question(case)}), agent.tokenizer, SequenceLimits(1000, 1000)
        )
        encoded = encode_sequences(["state"], prepared, agent.tokenizer, 1000)
        logits = np.full((1, case["logits_block_width"]), 99.0, dtype=np.float32)
        logits[0, : len(case["logits"])] = case["logits"]
        found = Logits(logits, np.zeros((1, 2), dtype=np.float32))
        answers = decode(prepared, encoded, Batch(np.array([0]), 64, 1, 64), found, temperatures)
        answers = replace(answers, act_probability=np.array(case["act"][:1]))
        reply = render_replies("m", 1, prepared, encoded, [answers])[0]["answers"]["q"]
        assert_close(reply, case["answer"], name)


@pytest.mark.parametrize("file", CASES, ids=str)
def test_cases_have_the_published_texts_ids_and_answers(tokenizer: TextTokenizer, file: Path) -> None:
    case = read(file)
    limits = ENGLISH_LIMITS[file.parent.name]
    prepared = prepare_questions(check_questions(case.get("reduced_questions", case["questions"])), tokenizer, limits)
    if "error_message" in case:
        assert list(prepared.unfit) == list(case["questions"])
        assert "126 of its 300" in case["error_message"] or limits.max_len != 512
        return
    assert prepared.unfit == {}
    assert state_text(case["state"]) == case["serialized_state"]
    encoded = encode_sequences([case["state"]], prepared, tokenizer, limits.max_len)
    expected = case["per_question"]
    expected = list(expected.values()) if isinstance(expected, dict) else expected
    for index, question in enumerate(prepared.questions):
        assert question.text == expected[index]["head_text"]
        assert list(question.option_texts) == expected[index]["options"]
        start, stop = encoded.offsets[index : index + 2]
        assert encoded.token_ids[start:stop].tolist() == expected[index]["input_ids"]
        start, stop = encoded.marker_offsets[index : index + 2]
        assert encoded.markers[start:stop].tolist() == expected[index]["markers"]
    meta = read(file.parent / "meta.json")
    found = Logits(np.array(case["logits"], dtype=np.float32), np.array(case["act_logits"], dtype=np.float32))
    batch = Batch(np.arange(len(encoded)), 64, 1, 64)
    answers = decode(prepared, encoded, batch, found, read_temperatures(meta, "reference"))
    reply = render_replies("laya-rl-agent", 1, prepared, encoded, [answers])[0]
    shortened = {key: value for key, value in case["result"].items() if key in reply}
    assert_close(reply, shortened, str(file))


def test_json_values_have_the_published_texts() -> None:
    for probe in read("thread3d-dotnet/english/json_probe.json"):
        if probe["value"] is None:
            continue
        assert state_text(probe["value"]) == probe["state_dialect"]


def test_texts_have_the_published_ids(tokenizer: TextTokenizer) -> None:
    special = ("[SEP]", "[CLS]", "[PAD]", "[UNK]", "[MASK]", "<|")
    probes = read("thread3d-dotnet/english/tokenizer_probe.json")
    plain = [probe for probe in probes if not any(token in probe["text"] for token in special)]
    assert len(plain) > len(probes) // 2
    for probe in plain:
        assert tokenizer.tokenise([probe["text"]]).flat.tolist() == probe["input_ids"], probe["text"]


def test_a_question_too_wide_is_refused_with_its_numbers(tokenizer: TextTokenizer) -> None:
    case = read("thread3d-dotnet/english/case_options_exceed_head.json")
    prepared = prepare_questions(check_questions(case["questions"]), tokenizer, ENGLISH_LIMITS["english"])
    assert "126 of its 300 options fit in max_len 512" in prepared.unfit["too_wide"]
    with pytest.raises(QuestionError):
        raise QuestionError(prepared.unfit["too_wide"])


def assert_close(ours: Any, theirs: Any, where: str) -> None:
    if isinstance(theirs, dict):
        ours = {str(key): value for key, value in ours.items()}
        assert set(ours) == set(theirs), where
        for key, value in theirs.items():
            assert_close(ours[key], value, f"{where}/{key}")
    elif isinstance(theirs, float):
        assert ours == pytest.approx(theirs, abs=1.01e-4), where
    else:
        assert ours == theirs, where
