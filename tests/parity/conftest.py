"""The public package in another process, and what it and we are asked."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import SENTENCES, CheckpointSpec, make_checkpoint

ROOT = Path(__file__).resolve().parents[2]
PEER = ROOT / ".cache" / "peer"
DEMO_CHECKPOINT = ROOT / "examples" / "demo" / "checkpoint"

QUESTIONS: dict[str, dict[str, Any]] = {
    "department": {
        "type": "choice",
        "instructions": "Which department should handle this?",
        "criteria": {"billing": "invoices, refunds", "technical": "bugs", "account": None, "other": ""},
    },
    "labels": {"type": "choice", "instructions": "Pick a label.", "criteria": ["a", "b", 3, 2.5, True]},
    "only": {"type": "choice", "instructions": "One option.", "criteria": {"solo": "the only choice"}},
    "many": {
        "type": "choice",
        "instructions": "Pick the best of many topics, with an instruction that is too long to be kept whole. " * 3,
        "criteria": {f"t{i}": {"text": f"topic {i}", "n": [i, None, "ü"]} for i in range(20)},
    },
    "alike": {
        "type": "choice",
        "instructions": "Which of two that are alike where they are cut?",
        "criteria": {"long " * 60 + "a": None, "long " * 60 + "b": None},
    },
    "urgency": {
        "type": "score",
        "instructions": "How urgent is it?",
        "criteria": ["not urgent", {"this": "week"}, 3, "drop everything 🎉"],
    },
    "holds": {"type": "noul", "instructions": {"statement": "the customer is billed twice", "größe": 2.0}},
    "described": {
        "type": "noul",
        "instructions": "Needs a person [MASK] now?",
        "criteria": {"true": "a person must step in", "false": None},
        "labels": {"true": "ja", "false": "nein"},
    },
}


def make_states(count: int = 208) -> list[Any]:
    """Short, long, empty, other scripts, emoji, JSON, conversations, and texts around each truncation boundary."""
    random_source = random.Random(7)
    words = " ".join(SENTENCES).split()
    states: list[Any] = [
        "",
        " ",
        "👩‍👩‍👧‍👦🇳🇱",
        "mask [MASK] inside[MASK]",
        {},
        [],
        {"a": None, "b": [1.5, True]},
        "x" * 3000,
        5,
        True,
    ]
    while len(states) < count:
        text = " ".join(random_source.choices(words, k=random_source.choice((1, 3, 8, 20, 40, 90, 300))))
        kind = len(states) % 4
        if kind == 0:
            states.append({"subject": text[:20], "body": text, "n": random_source.random(), "tags": ["ü", "退款"]})
        elif kind == 1:
            states.append([{"role": "user", "content": part} for part in text.split(".")])
        else:
            states.append(text)
    return states


@pytest.fixture(scope="session")
def ask_peer(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, dict[str, Any]], dict[str, Any]]:
    """Run one of the scripts beside this file under the public package, with a request."""
    if not (PEER / "laya").is_dir():
        reason = f"the public package is not in {PEER.relative_to(ROOT)}: run `make .cache/peer` with a network"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)

    def ask(script: str, asked: dict[str, Any]) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("peer")
        request, answers = folder / "request.json", folder / "answers.json"
        request.write_text(json.dumps(asked), encoding="utf-8")
        environment = os.environ | {"PYTHONPATH": str(PEER), "HF_HUB_OFFLINE": "1"}
        run = subprocess.run(
            [sys.executable, str(Path(__file__).with_name(script)), str(request), str(answers)],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, run.stderr[-3000:]
        answered: dict[str, Any] = json.loads(answers.read_text(encoding="utf-8"))
        assert Path(answered["package"]).is_relative_to(PEER), "the peer's process imported our laya"
        return answered

    return ask


@pytest.fixture(scope="session")
def peer(
    ask_peer: Callable[[str, dict[str, Any]], dict[str, Any]],
) -> Callable[[Path, list[Any], dict[str, Any]], dict[str, Any]]:
    """Ask the public package about states and questions."""

    def ask(checkpoint: Path, states: list[Any], questions: dict[str, Any]) -> dict[str, Any]:
        asked = {"checkpoint": str(checkpoint), "states": states, "questions": questions, "batch_size": 16}
        return ask_peer("peer.py", asked)

    return ask


@pytest.fixture(scope="session", params=["random", "older", "demo"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint to compare on: random, random with the older RoPE keys, and the demo's when it is there."""
    if request.param == "demo":
        if not (DEMO_CHECKPOINT / "model.safetensors").is_file():
            pytest.skip("the demo has no checkpoint yet")
        return DEMO_CHECKPOINT
    spec = CheckpointSpec(seed=1, max_len=144, head_max_len=110, encoder={"num_hidden_layers": 3})
    if request.param == "older":
        narrow = {"hidden_size": 64, "intermediate_size": 48}
        spec = CheckpointSpec(seed=2, max_len=110, head_max_len=90, older_rope_keys=True, encoder=narrow)
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / request.param, spec)
