"""What a process does before its first shard. Where memory is short, the agent is a stand-in with little of it."""

import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import laya
from jobs.settings import load_settings
from jobs.store.database import Database
from worker.session import VERSIONED, AgentRequest, Session, installed_versions, warm_what_fits
from worker.vitals import Vitals


class SmallAgent:
    """Has room for `most` sequences at a time."""

    def __init__(self, most: int, error: Exception | None = None) -> None:
        self.most, self.error = most, error or torch.OutOfMemoryError("no room")
        self.tried: list[int] = []

    def warmup(self, shapes: list[tuple[int, ...]]) -> None:
        ((sequences, _),) = shapes
        self.tried.append(sequences)
        if sequences > self.most:
            raise self.error


@pytest.mark.parametrize(("most", "tried"), [(99, [16]), (3, [16, 8, 4, 2]), (0, [16, 8, 4, 2, 1])])
def test_as_many_are_warmed_as_there_is_room_for(most: int, tried: list[int]) -> None:
    agent = SmallAgent(most)
    warm_what_fits(cast(laya.Agent, agent), 16, 8)
    assert agent.tried == tried


def test_what_is_not_for_lack_of_memory_is_raised() -> None:
    agent: Any = SmallAgent(3, RuntimeError("no kernel image"))
    with pytest.raises(RuntimeError, match="no kernel image"):
        warm_what_fits(agent, 16, 8)
    assert agent.tried == [16]


def test_jobs_that_differ_in_lengths_digests_or_calibration_share_the_weights(
    db: Database, tiny_checkpoint: Path
) -> None:
    session = Session(load_settings(), db, "w", 1, Vitals())
    weights = (str(tiny_checkpoint), None, "eager")
    first = session.agent_for(AgentRequest(*weights))
    assert first.checkpoint.max_len == 96
    digests = {"encoder/config.json": first.checkpoint.digests["encoder/config.json"]}
    assert session.agent_for(AgentRequest(*weights, 64)) is first
    assert session.agent_for(AgentRequest(*weights, expected_sha256=digests)) is first
    longer = session.agent_for(AgentRequest(*weights, 128))
    assert longer.checkpoint.max_len == 128
    assert session.agent_for(AgentRequest(*weights)) is longer
    other = session.agent_for(AgentRequest(weights[0], None, "auto"))
    assert other is not longer
    assert session.agent_for(AgentRequest(*weights, 96)) is longer


def test_versions_are_of_all_that_is_installed_and_decides_answers() -> None:
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "list", "--format=freeze"], capture_output=True, text=True, check=True
    )
    installed = dict(line.lower().split("==") for line in listed.stdout.splitlines() if "==" in line)
    found = installed_versions()
    assert {"torch", "numpy", "transformers", "tokenizers", "safetensors", "onnxruntime"} <= set(VERSIONED)
    assert {package: found[package] for package in ("torch", "numpy")} == {
        "torch": torch.__version__,
        "numpy": installed["numpy"],
    }
    assert found.keys() - {"python"} == {package for package in VERSIONED if package in installed}
    assert {package: found.get(package) for package in ("tilelang", "onnxruntime")} == {
        package: installed.get(package) for package in ("tilelang", "onnxruntime")
    }
