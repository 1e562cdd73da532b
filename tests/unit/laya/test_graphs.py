"""Small batches replayed from recordings, on a GPU: what they answer, when they are made, what they hold."""

import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import laya
from laya.inputs import synthetic_inputs
from laya.packing import GRAPH_TOKENS

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
    graphed = load(checkpoint_path, backend).backend_object
    for rows, length in ((1, 1), (1, 64), (3, 20), (40, 24), (100, 40), (2, 128)):
        inputs = synthetic_inputs((rows, length, 3), graphed.device)
        found = [graphed.forward(inputs) for _ in range(2)]  # recorded and replayed, replayed
        with torch.inference_mode(backend == "tilelang"), torch.no_grad():
            expected = graphed._run._forward(inputs)  # type: ignore[attr-defined]
        for logits, act in found:
            assert (logits - expected[0]).abs().max() < 0.05
            assert (act - expected[1]).abs().max() < 0.05


def test_recordings_share_their_memory_and_give_it_back(checkpoint_path: Path, backend: str) -> None:
    agent = load(checkpoint_path, backend)
    agent.warmup()
    assert len(agent.backend_object._run._recordings) == len(GRAPH_TOKENS)  # type: ignore[attr-defined]
    torch.cuda.synchronize()
    held = torch.cuda.memory_reserved()
    agent.deaccelerate()
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < held
