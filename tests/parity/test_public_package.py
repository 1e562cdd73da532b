"""Our engine against the public package, run in another process, on the same checkpoints and states."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import laya
from tests.parity.conftest import QUESTIONS, make_states

RELATIVE_TOLERANCE = 1e-4
ROUNDING = 1.01e-4  # a number rounded to 4 places on either side of a tie


@dataclass(frozen=True)
class Compared:
    encoded: laya.EncodedSequences
    replies: list[dict[str, Any]]
    logits: dict[int, list[float]]  # by sequence, without the padding
    act: dict[int, float]  # act_probability by sequence
    peer: dict[str, Any]


@pytest.fixture(scope="module")
def compared(checkpoint: Path, peer: Callable[..., dict[str, Any]]) -> Compared:
    agent = laya.load(checkpoint, device="cpu")
    unfit = agent.prepare(QUESTIONS).unfit
    questions = {name: question for name, question in QUESTIONS.items() if name not in unfit}
    states = make_states()
    logits: dict[int, list[float]] = {}
    act: dict[int, float] = {}
    decode = agent.decode

    def keep(prepared: Any, encoded: Any, batch: laya.Batch, found: laya.Logits) -> laya.Answers:
        answers = decode(prepared, encoded, batch, found)
        for row, index in enumerate(batch.index.tolist()):
            logits[index] = found.logits[row, : answers.option_count[row]].tolist()
            act[index] = float(answers.act_probability[row])
        return answers

    agent.decode = keep  # type: ignore[method-assign]
    replies = agent.predict_batch(states, questions)
    encoded = agent.encode(states, agent.prepare(questions))
    return Compared(encoded, replies, logits, act, peer(checkpoint, states, questions))


def test_token_ids_and_markers_are_identical(compared: Compared) -> None:
    encoded = compared.encoded
    assert len(encoded) == len(compared.peer["token_ids"]) >= 200 * 3
    ids = np.split(encoded.token_ids, encoded.offsets[1:-1])
    markers = np.split(encoded.markers, encoded.marker_offsets[1:-1])
    for index in range(len(encoded)):
        assert ids[index].tolist() == compared.peer["token_ids"][index], f"sequence {index}"
        assert markers[index].tolist() == compared.peer["markers"][index], f"sequence {index}"
    cut = int((encoded.state_tokens_dropped > 0).sum())
    print(f"\n{len(encoded)} sequences identical, {cut} truncated, {int(encoded.options_cut.sum())} with like options")
    assert cut > 50


def test_logits_agree_within_1e_4_relative(compared: Compared) -> None:
    worst = worst_act = 0.0
    for index, (expected, act) in enumerate(zip(compared.peer["logits"], compared.peer["act"], strict=True)):
        difference = np.abs(np.array(compared.logits[index]) - np.array(expected)).max()
        worst = max(worst, float(difference) / max(1.0, float(np.abs(expected).max())))
        worst_act = max(worst_act, abs(compared.act[index] - act[0]))
    print(f"\nlargest relative difference of logits {worst:.2e}, largest difference of act_probability {worst_act:.2e}")
    assert worst <= RELATIVE_TOLERANCE
    assert worst_act <= RELATIVE_TOLERANCE


def test_answers_are_identical(compared: Compared) -> None:
    ours, theirs = flatten(jsonable(compared.replies)), flatten(compared.peer["replies"])
    assert list(ours) == list(theirs)
    numbers = [key for key, value in theirs.items() if isinstance(value, float)]
    words = [key for key in theirs if key not in set(numbers)]
    assert [ours[key] for key in words] == [theirs[key] for key in words]
    differences = np.array([ours[key] - theirs[key] for key in numbers])
    share = float((differences != 0).mean())
    print(
        f"\n{len(words)} labels, texts and counts identical; of {len(numbers)} numbers of 4 places {share:.2%} differ, "
        f"by at most {np.abs(differences).max():.0e}"
    )
    assert np.abs(differences).max() <= ROUNDING
    assert share <= 0.03


def jsonable(value: Any) -> Any:
    """As JSON would give it back: keys are text."""
    if isinstance(value, dict):
        return {("true" if key is True else str(key)): jsonable(item) for key, item in value.items()}
    return [jsonable(item) for item in value] if isinstance(value, list) else value


def flatten(value: Any, path: str = "") -> dict[str, Any]:
    """Every leaf by its path, in order."""
    if not isinstance(value, dict | list) or not value:
        return {path: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {place: leaf for key, item in items for place, leaf in flatten(item, f"{path}/{key}").items()}
