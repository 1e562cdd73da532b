"""Where states go, and what a router keeps in memory. The checkpoints are two tiny random ones."""

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import laya
from laya.agent import Agent
from laya.residents import Residents
from tests.checkpoints import CheckpointSpec, make_checkpoint, spoil_weights

QUESTIONS: dict[str, dict[str, Any]] = {
    "refund": {"type": "noul", "instructions": "Does the customer want a refund?"},
    "team": {"type": "choice", "instructions": "Who handles it?", "criteria": {"billing": None, "tech": None}},
}
STATES: list[Any] = [
    "I was charged twice, please refund.",
    "El pedido llegó roto y nadie responde cuando escribo al soporte",
    "",
    {"body": "The customer was charged twice and wants a refund for this invoice"},
    "二重に請求されました",
    [{"role": "user", "content": "ich habe mein paket noch nicht"}],
    "12345",
]
ROUTES = ["english", "multilingual", "multilingual", "english", "multilingual", "multilingual", "multilingual"]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("routes")
    names = ("english", "multilingual", "house")
    return {name: make_checkpoint(folder / name, CheckpointSpec(seed=seed)) for seed, name in enumerate(names)}


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, dict[str, Any]]]:
    """What the router has loaded, in order."""
    seen: list[tuple[Any, dict[str, Any]]] = []

    def load(checkpoint: Any, **options: Any) -> Agent:
        seen.append((checkpoint, options))
        return laya.load(checkpoint, **options)

    monkeypatch.setattr("laya.router.load", load)
    return seen


@pytest.fixture
def router(checkpoints: dict[str, Path], loads: list[Any]) -> laya.Router:
    return laya.Router(checkpoints)


def test_english_goes_to_english_and_all_else_to_multilingual(router: laya.Router) -> None:
    assert [router.route(state).checkpoint for state in STATES] == ROUTES


def test_a_route_says_why() -> None:
    english = laya.choose_route("The customer was charged twice and wants a refund for this invoice")
    assert (english.checkpoint, english.language) == ("english", "en")
    assert re.fullmatch(r"detected en \([01]\.\d\d\)", english.reason)
    mixed = laya.choose_route(
        ["We will look into it for you as soon as we can, thank you for waiting. " * 3, STATES[1]]
    )
    assert (mixed.checkpoint, mixed.language) == ("multilingual", "es")
    assert re.fullmatch(r"detected es \([01]\.\d\d\) in a part", mixed.reason)
    assert re.fullmatch(r"undecided \(0\.\d\d\): default multilingual", laya.choose_route("hi").reason)
    assert laya.choose_route("12") == laya.Route(
        "multilingual", None, "no text to detect a language in: default multilingual"
    )


def test_what_is_undecided_goes_to_the_default_and_the_reason_says_so(checkpoints: dict[str, Path]) -> None:
    assert laya.choose_route("12", default="english") == laya.Route(
        "english", None, "no text to detect a language in: default english"
    )
    router = laya.Router(checkpoints, default="house")
    assert re.fullmatch(r"undecided \(0\.\d\d\): default house", router.route("hi").reason)
    assert router.predict("12", QUESTIONS)["route"]["checkpoint"] == "house"
    assert router.route("El pedido llegó roto y nadie responde").checkpoint == "multilingual"
    assert router.route("12", language="en") == laya.Route("english", "en", "language given")
    assert laya.Router(checkpoints, default="EN").default == "english"
    with pytest.raises(laya.CheckpointError, match="no checkpoint is named 'klingon'"):
        laya.Router(checkpoints, default="klingon")


def test_a_language_that_is_given_comes_first() -> None:
    assert laya.choose_route(STATES[1], "en-GB") == laya.Route("english", "en", "language given")
    assert laya.choose_route(STATES[0], "fr") == laya.Route("multilingual", "fr", "language given")
    assert laya.choose_route(STATES[0], "und") == laya.choose_route(STATES[0])


def test_a_named_checkpoint_comes_before_any_language(router: laya.Router) -> None:
    assert router.route(STATES[1], checkpoint="house") == laya.Route("house", None, "checkpoint given")
    assert router.route(STATES[1], "de", checkpoint="ML") == laya.Route("multilingual", "de", "checkpoint given")
    assert router.route("x", checkpoint="typed").checkpoint == "typed-decisions"


def test_an_unknown_name_is_refused_with_those_there_are(router: laya.Router, loads: list[Any]) -> None:
    with pytest.raises(
        laya.CheckpointError, match=r"no checkpoint is named 'hose'; choose one of english, multi.*house"
    ):
        router.predict("x", QUESTIONS, checkpoint="hose")
    assert loads == []


def test_a_missing_folder_is_refused_clearly(tmp_path: Path) -> None:
    router = laya.Router({"english": tmp_path / "nowhere"})
    with pytest.raises(laya.CheckpointError, match="nowhere"):
        router.predict(STATES[0], QUESTIONS)


def test_a_mixed_batch_loads_each_checkpoint_once_and_answers_in_input_order(
    router: laya.Router, checkpoints: dict[str, Path], loads: list[Any]
) -> None:
    replies = router.predict_batch(STATES * 2, QUESTIONS)
    assert [checkpoint for checkpoint, _ in loads] == [checkpoints["english"], checkpoints["multilingual"]]
    assert [reply["route"]["checkpoint"] for reply in replies] == ROUTES * 2
    alone = {name: laya.load(checkpoints[name]) for name in ("english", "multilingual")}
    for state, reply in zip(STATES * 2, replies, strict=True):
        route = reply.pop("route")
        expected = alone[route["checkpoint"]].predict(state, QUESTIONS)
        assert reply["usage"] == expected["usage"]
        for question, answer in expected["answers"].items():
            for number in ("noul", "confidence"):
                assert reply["answers"][question].get(number, 0) == pytest.approx(answer.get(number, 0), abs=2e-4)
    assert replies[0]["answers"] != alone["multilingual"].predict(STATES[0], QUESTIONS)["answers"]


def test_languages_go_with_their_states(router: laya.Router) -> None:
    replies = router.predict_batch(STATES[:3], QUESTIONS, ["de", None, "en"])
    assert [(reply["route"]["checkpoint"], reply["route"]["language"]) for reply in replies] == [
        ("multilingual", "de"),
        ("multilingual", "es"),
        ("english", "en"),
    ]
    with pytest.raises(laya.LayaError, match="expected one for each state, or None, found the text 'en'"):
        router.predict_batch(["a", "b"], QUESTIONS, "en")
    with pytest.raises(laya.LayaError, match="2 languages for 1 states"):
        router.predict_batch(["x"], QUESTIONS, ["en", "de"])


def test_nothing_is_passed_to_an_agent_but_what_the_caller_gives(
    checkpoints: dict[str, Path], loads: list[Any]
) -> None:
    laya.Router(checkpoints).predict(STATES[0], QUESTIONS)
    laya.Router(checkpoints, agent_kwargs={"backend": "auto", "device": "cpu"}).predict(STATES[0], QUESTIONS)
    assert [options for _, options in loads] == [{}, {"backend": "auto", "device": "cpu"}]


def test_the_agents_used_last_stay(router: laya.Router, checkpoints: dict[str, Path], loads: list[Any]) -> None:
    for name in ("english", "house", "english", "multilingual", "english", "house"):
        router.predict("x", QUESTIONS, checkpoint=name)
    expected = ("english", "house", "multilingual", "house")
    assert [checkpoint for checkpoint, _ in loads] == [checkpoints[name] for name in expected]


def test_what_cannot_be_asked_is_refused_before_a_checkpoint_is_loaded(router: laya.Router, loads: list[Any]) -> None:
    with pytest.raises(laya.QuestionError, match="refund"):
        router.predict_batch(STATES, {"refund": {"type": "noul"}})
    with pytest.raises(laya.StateError, match="state 2: the state is null"):
        router.predict_batch([STATES[0], STATES[1], None], QUESTIONS)
    assert loads == []


def test_threads_share_a_router(router: laya.Router, loads: list[Any]) -> None:
    replies: list[list[dict[str, Any]]] = []
    threads = [
        threading.Thread(target=lambda: replies.append(router.predict_batch(STATES, QUESTIONS))) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(replies) == 6
    assert all(reply == replies[0] for reply in replies)
    assert len(loads) == 2


def test_a_resident_agent_is_there_while_another_loads(agent: Agent) -> None:
    loading, go_on = threading.Event(), threading.Event()

    def load(key: str) -> Agent:
        if key == "slow":
            loading.set()
            assert go_on.wait(30)
        return agent

    residents = Residents(load, most=2)
    residents.get("quick")
    thread = threading.Thread(target=residents.get, args=("slow",))
    thread.start()
    assert loading.wait(30)
    assert residents.get("quick") is agent
    go_on.set()
    thread.join()


def test_a_load_that_fails_leaves_the_next_to_try_again(agent: Agent) -> None:
    answers = iter([laya.CheckpointError("not yet"), agent])

    def load(_: str) -> Agent:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    residents: Residents[str] = Residents(load)
    with pytest.raises(laya.CheckpointError, match="not yet"):
        residents.get("a")
    assert residents.get("a") is agent


def test_a_router_keeps_at_least_one_agent(make: Callable[[CheckpointSpec], Path]) -> None:
    with pytest.raises(laya.LayaError, match="0 resident agents: expected 1 or more"):
        laya.Router(resident_agents=0)


def test_a_state_that_is_not_finite_is_named_by_its_place_among_all(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    spoilt = spoil_weights(checkpoints["multilingual"], tmp_path / "spoilt", "☠")
    router = laya.Router(checkpoints={**checkpoints, "multilingual": spoilt})
    with pytest.raises(laya.NotFiniteError, match=r"state 2, question '\w+'"):
        router.predict_batch([STATES[0], STATES[1], "☠ こんにちは、元気ですか", STATES[0]], QUESTIONS)
