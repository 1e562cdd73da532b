"""What a process does before its first shard. The agent is a stand-in with little memory."""

from typing import Any, cast

import pytest
import torch

import laya
from worker.session import warm_what_fits


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
