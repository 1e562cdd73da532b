"""Small batches replayed from recordings, on a GPU: what they answer, when they are made, what they hold."""

import gc
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import laya
from laya.backends import graphs
from laya.inputs import ModelInputs
from laya.packing import GRAPH_TOKENS
from laya.runner import Degradations
from tests.sequences import bare_inputs

QUESTIONS: dict[str, Any] = {
    "topic": {"type": "choice", "instructions": "Which?", "criteria": ["a", "b", "c"]},
    "holds": {"type": "noul", "instructions": "Is it?"},
}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.parametrize("backend", ["tilelang", "compile"]),
]


def load(path: Path, backend: str) -> laya.Agent:
    return laya.load(path, device="cuda", backend=backend, strict=True)


def inputs_of(agent: laya.Agent, lengths: Sequence[int], seed: int = 0) -> ModelInputs:
    bare = bare_inputs(lengths, agent.checkpoint.model_config.vocab_size, agent.device, seed)
    return replace(bare, marker_counts=torch.full_like(bare.marker_counts, 3))  # no logit of an absent option


def assert_near(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    """To within 5% of the largest, for logits and for those of acting."""
    for one, two in zip(found, expected, strict=True):
        assert (one - two).abs().max() < 0.05 * two.abs().max()


def test_kept_outputs_survive_replays_by_two_agents_in_threads(checkpoint_path: Path, backend: str) -> None:
    agents = [load(checkpoint_path, backend) for _ in range(2)]
    states = [f"state {i}" for i in range(30)]
    expected = [agent.predict_batch(states, QUESTIONS) for agent in agents]
    found: list[Any] = [[]] * 8

    def work(place: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):  # each its own, as threads may have
            found[place] = [agents[place % 2].predict_batch(states, QUESTIONS) for _ in range(5)]

    threads = [threading.Thread(target=work, args=(place,)) for place in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for place, replies in enumerate(found):
        assert len(replies) == 5
        assert all(reply == expected[place % 2] for reply in replies)


def test_a_replay_answers_as_the_launches_it_stands_for(checkpoint_path: Path, backend: str) -> None:
    """Twice over every shape with other tokens, so that a replay of what was recorded would show."""
    agent = load(checkpoint_path, backend)
    graphed, seen = agent.backend_object, []
    for seed, lengths in enumerate(((1,), (64,), (20, 3, 17), (24,) * 40, (128, 1, 127), (40,) * 100) * 2):
        inputs = inputs_of(agent, lengths, seed)
        found = graphed.forward(inputs)
        with torch.inference_mode(backend == "tilelang"), torch.no_grad():
            expected = graphed._run._forward(inputs)  # type: ignore[attr-defined]
        assert_near(found, expected)
        seen.append(expected[0])
    assert all((one - two).abs().max() > 0.1 * one.abs().max() for one, two in zip(seen[:6], seen[6:], strict=True))


def test_a_caller_in_inference_mode_spoils_nothing(checkpoint_path: Path, backend: str) -> None:
    agent = load(checkpoint_path, backend)
    with torch.inference_mode():
        first = agent.predict_batch(["a state"], QUESTIONS)
    assert agent.predict_batch(["a state"], QUESTIONS) == first


def test_without_room_for_a_recording_batches_are_launched(
    checkpoint_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    expected = load(checkpoint_path, backend).predict_batch(["a state"] * 3, QUESTIONS)
    monkeypatch.setattr(graphs, "Recording", full)
    agent = load(checkpoint_path, backend)
    found = agent.predict_batch(["a state"] * 3, QUESTIONS)
    assert [reply["answers"].keys() for reply in found] == [reply["answers"].keys() for reply in expected]
    assert agent.degradations == Degradations()
    assert not agent.backend_object._run._room  # type: ignore[attr-defined]


def test_recordings_are_made_when_warmed_and_given_back_when_closed(checkpoint_path: Path, backend: str) -> None:
    agent = load(checkpoint_path, backend)
    agent.warmup()
    assert len(agent.backend_object._run._recordings) == len(GRAPH_TOKENS)  # type: ignore[attr-defined]
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved()
    agent.deaccelerate()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < held


def test_an_agent_that_is_dropped_is_freed(checkpoint_path: Path, backend: str) -> None:
    agent = load(checkpoint_path, backend)
    agent.warmup()
    graphed = weakref.ref(agent.backend_object._run)  # type: ignore[attr-defined]
    gc.collect()
    gc.disable()
    try:
        del agent
        assert graphed() is None
    finally:
        gc.enable()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
def test_every_device_records_its_own(checkpoint_path: Path, backend: str) -> None:
    for index in range(2):
        agent = laya.load(checkpoint_path, device=f"cuda:{index}", backend=backend, strict=True)
        agent.warmup()
        inputs = inputs_of(agent, (20, 3, 17))
        found = agent.backend_object.forward(inputs)
        agent.deaccelerate()
        assert_near(found, agent.backend_object.forward(inputs))
