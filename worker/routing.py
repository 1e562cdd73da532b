"""Which agent scores which rows: one agent for a whole job, or one for each checkpoint that a routed job's rows go to.

Owns dividing a window of rows among them. Where a row goes is `laya.choose_route`'s to say.
"""

from dataclasses import dataclass, field
from functools import cached_property

import laya
from jobs.store import leases
from laya.router import MULTILINGUAL_CHECKPOINT
from schemas.job import Claim, JobSpec
from worker.session import Session
from worker.states import Window

PLAIN_TEXTS = ["a", "0", "The customer asks for an answer."]
ONE_BY_ONE = laya.PackingLimits(max_sequences=1)


@dataclass(frozen=True)
class Scorer:
    """A warm agent with the job's questions laid out for it. `checkpoint` is what the job calls its checkpoint."""

    checkpoint: str
    agent: laya.Agent
    prepared: laya.PreparedQuestions

    @cached_property
    def has_finite_answers(self) -> bool:
        """Whether any question of the job, asked about some plain text, has logits that are finite."""
        encoded = self.agent.encode(PLAIN_TEXTS, self.prepared)
        one_by_one = (self.agent.forward(encoded, batch) for batch in self.agent.pack(encoded, ONE_BY_ONE))
        return any(logits.finite for logits in one_by_one)


@dataclass(frozen=True)
class Part:
    """Rows of a window that one agent scores. `routes` has one for each, None where the job names one checkpoint."""

    scorer: Scorer
    window: Window
    routes: list[laya.Route | None] = field(default_factory=list)


def load_scorers(session: Session, claim: Claim) -> dict[str, Scorer]:
    """By checkpoint, all that the job needs, before its first row: loading beside a running batch would disturb it."""
    spec = claim.spec
    if spec.routes is None:
        agents = {spec.checkpoint: session.agent_of(claim)}
    else:
        agents = {name: session.agent_of(claim, name) for name in spec.routes}
    return {name: Scorer(name, agent, agent.prepare(spec.questions)) for name, agent in agents.items()}


def check_fit(session: Session, claim: Claim, scorers: dict[str, Scorer]) -> None:
    """Keep with the job which options the model cannot tell apart. Raises QuestionError where one does not fit."""
    unfit, alike = [], []
    for name, scorer in scorers.items():
        where = "" if claim.spec.routes is None else f"checkpoint {name}: "
        unfit += [where + why for why in scorer.prepared.unfit.values()]
        alike += [where + why for why in scorer.prepared.alike.values()]
    if unfit:
        raise laya.QuestionError("\n".join(unfit))
    if alike:
        leases.note_warnings(session.db, claim, alike)


def divide_window(window: Window, scorers: dict[str, Scorer], spec: JobSpec) -> list[Part]:
    """The window's parts, at least one. The errors of rows that are no states come with the first."""
    if spec.routes is None:
        (scorer,) = scorers.values()
        return [Part(scorer, window, [None] * len(window.states))]
    default = spec.default_route or MULTILINGUAL_CHECKPOINT
    routes = [
        laya.choose_route(state, language, default)
        for state, language in zip(window.states, window.languages, strict=True)
    ]
    names = [name for name in scorers if any(route.checkpoint == name for route in routes)] or list(scorers)[:1]
    parts = []
    for name in names:
        rows = [row for row, route in enumerate(routes) if route.checkpoint == name]
        errors = window.errors if name == names[0] else []
        kept = Window(
            [window.row_numbers[row] for row in rows],
            [window.row_ids[row] for row in rows],
            [window.states[row] for row in rows],
            errors,
            [window.languages[row] for row in rows],
        )
        parts.append(Part(scorers[name], kept, [routes[row] for row in rows]))
    return parts
