"""The agents kept in memory: the last few used. Owns which one goes when another comes, and loads each once."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from laya.agent import Agent
from laya.errors import ArgumentError

Key = TypeVar("Key", bound=Hashable)

MOST_RESIDENT = 2  # English and multilingual; a checkpoint takes 0.6 to 1.6 GB in fp32


class Residents(Generic[Key]):
    """Agents by key, at most `most` of them. Safe to share between threads."""

    def __init__(
        self,
        load: Callable[[Key], Agent],
        most: int = MOST_RESIDENT,
        is_usable: Callable[[Key, Agent], bool] = lambda _key, _agent: True,
    ) -> None:
        """`load` makes the agent of a key; `most` below 1 is refused with ArgumentError.

        A resident agent that `is_usable` refuses for an equal key is replaced.
        """
        if most < 1:
            raise ArgumentError(f"{most} resident agents: expected 1 or more")
        self._load = load
        self._is_usable = is_usable
        self._most = most
        self._agents: OrderedDict[Key, Agent] = OrderedDict()
        self._lock = threading.Lock()  # held for moments, so that a resident agent is there while another loads
        self._loading = threading.Lock()

    def get(self, key: Key) -> Agent:
        """The agent of `key`, loaded when it is not resident; whatever `load` raises propagates.

        The agent used longest ago goes first, before the new one is loaded: memory need not hold both.
        """
        with self._lock:
            if (agent := self._used(key)) is not None:
                return agent
        with self._loading:
            with self._lock:
                if (agent := self._used(key)) is not None:  # another thread loaded it meanwhile
                    return agent
                self._agents.pop(key, None)
                while len(self._agents) >= self._most:
                    self._agents.popitem(last=False)
            agent = self._load(key)
            with self._lock:
                self._agents[key] = agent
            return agent

    def _used(self, key: Key) -> Agent | None:
        agent = self._agents.get(key)
        if agent is None or not self._is_usable(key, agent):
            return None
        self._agents.move_to_end(key)
        return agent
