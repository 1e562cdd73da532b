"""Which checkpoint answers: English states go to `english`, all others to `multilingual`, or where the caller says.

Owns that rule and the grouping of a batch. Detecting is `language`'s, keeping agents in memory `residents`'.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from laya.agent import Agent, Questions, load
from laya.errors import ArgumentError, CheckpointError, NotFiniteError, StateError
from laya.language import ENGLISH, detect_language, read_language
from laya.questions import check_questions
from laya.residents import MOST_RESIDENT, Residents
from laya.states import list_states, state_text
from schemas.checkpoints import NAMES, known_name

ENGLISH_CHECKPOINT, MULTILINGUAL_CHECKPOINT = "english", "multilingual"


@dataclass(frozen=True)
class Route:
    """Where a state goes and why. `language` is an ISO 639 code as given or detected, None when neither is known."""

    checkpoint: str
    language: str | None
    reason: str


def choose_route(state: Any, language: str | None = None, default: str = MULTILINGUAL_CHECKPOINT) -> Route:
    """The route of a state by its language: `language` where it says one, else what is detected.

    What is undecided or has no text goes to `default`: `multilingual` reads English, but `english` reads nothing else.
    """
    if (given := read_language(language)) is not None:
        return Route(_checkpoint_for(given), given, "language given")
    found = detect_language(state)
    if found.language is None:
        why = f"undecided ({found.confidence:.2f})" if found.confidence else "no text to detect a language in"
        return Route(default, None, f"{why}: default {default}")
    reason = f"detected {found.language} ({found.confidence:.2f})" + (" in a part" if found.in_part else "")
    return Route(_checkpoint_for(found.language), found.language, reason)


class Router:
    """Answers with the checkpoint that suits each state. Safe to share between threads.

    At most `resident_agents` checkpoints are in memory, those used last. Each is loaded when a state first needs it.
    """

    def __init__(
        self,
        checkpoints: Mapping[str, str | Path] | None = None,
        *,
        agent_kwargs: Mapping[str, Any] | None = None,
        resident_agents: int = MOST_RESIDENT,
        default: str = MULTILINGUAL_CHECKPOINT,
    ) -> None:
        """`checkpoints` maps names to folders or Hub ids, and adds to or replaces `english`, `multilingual` and
        `typed-decisions`. `agent_kwargs` goes to `laya.load` for each of them; nothing is passed by default. `default`
        is the checkpoint of states whose language is undecided. Raises CheckpointError when it has no such name.
        """
        self.checkpoints: dict[str, str | Path] = {**{name: name for name in NAMES}, **(checkpoints or {})}
        self._agent_kwargs = dict(agent_kwargs or {})
        self.default = self._name_of(default)
        self._residents = Residents(self._load, resident_agents)

    def route(self, state: Any, language: str | None = None, checkpoint: str | None = None) -> Route:
        """Where a state goes: to `checkpoint` if it is given (a name or alias), else by its language.

        Raises CheckpointError for a name that this router does not have.
        """
        if checkpoint is None:
            return choose_route(state, language, self.default)
        return Route(self._name_of(checkpoint), read_language(language), "checkpoint given")

    def agent(self, checkpoint: str) -> Agent:
        """The agent of a named checkpoint, loaded when it is not in memory."""
        return self._residents.get(self._name_of(checkpoint))

    def predict(
        self, state: Any, questions: Questions, language: str | None = None, checkpoint: str | None = None
    ) -> dict[str, Any]:
        """Answer the questions about one state, as `predict_batch` does."""
        return self.predict_batch([state], questions, [language], checkpoint=checkpoint)[0]

    def predict_batch(
        self,
        states: Sequence[Any],
        questions: Questions,
        languages: Sequence[str | None] | None = None,
        *,
        checkpoint: str | None = None,
        **options: Any,
    ) -> list[dict[str, Any]]:
        """`Agent.predict_batch` for each checkpoint's states; replies in input order, each with its `route`.

        `languages` has one language or None for each state, None: all are detected. `options` are those of
        `Agent.predict_batch`. Raises LayaError as that does, before any checkpoint is loaded where it can.
        """
        if isinstance(languages, str):
            raise ArgumentError(f"languages: expected one for each state, or None, found the text {languages!r}")
        states = list_states(states)
        if languages is None:
            languages = [None] * len(states)
        if len(languages) != len(states):
            raise ArgumentError(f"{len(languages)} languages for {len(states)} states: expected one for each, or None")
        check_questions(questions)
        for index, state in enumerate(states):
            _check_state(index, state)
        routes = [self.route(state, language, checkpoint) for state, language in zip(states, languages, strict=True)]
        replies: list[dict[str, Any]] = [{} for _ in states]
        for name in dict.fromkeys(route.checkpoint for route in routes):
            group = [index for index, route in enumerate(routes) if route.checkpoint == name]
            try:
                answered = self.agent(name).predict_batch([states[index] for index in group], questions, **options)
            except NotFiniteError as error:
                raise NotFiniteError(group[error.state], error.question, error.dtype) from error
            for index, reply in zip(group, answered, strict=True):
                replies[index] = {**reply, "route": asdict(routes[index])}
        return replies

    def _load(self, name: str) -> Agent:
        return load(self.checkpoints[name], **self._agent_kwargs)

    def _name_of(self, checkpoint: str) -> str:
        for name in (checkpoint, checkpoint.strip().lower(), known_name(checkpoint)):
            if name in self.checkpoints:
                return name
        raise CheckpointError(
            f"no checkpoint is named {checkpoint!r}; choose one of {', '.join(self.checkpoints)}, "
            "or give its location to Router(checkpoints={name: location})"
        )


def _checkpoint_for(language: str) -> str:
    return ENGLISH_CHECKPOINT if language == ENGLISH else MULTILINGUAL_CHECKPOINT


def _check_state(index: int, state: Any) -> None:
    """A state's place in the whole batch, where an agent would tell its place in a group."""
    try:
        state_text(state)
    except StateError as error:
        raise StateError(f"state {index}: {error}") from error
