import hashlib
import json
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

import laya
from laya.packing import bucket_length
from tests.checkpoints import CheckpointSpec, spoil_weights

QUESTIONS: dict[str, Any] = {
    "topic": {"type": "choice", "instructions": "Which?", "criteria": {"a": "x", "b": None, 3: "z"}},
    "level": {"type": "score", "instructions": "How?", "criteria": ["low", {"mid": 1}, "high"]},
    "holds": {"type": "noul", "instructions": "Is it?"},
}
STATES: list[Any] = [
    "one",
    {"two": 2},
    ["three", "four"],
    "",
    "long " * 300,
    "日本語 😀",
    *(f"state {i}" for i in range(20)),
]


def test_a_reply_has_the_published_form(agent: laya.Agent) -> None:
    reply = agent.predict("long " * 300, QUESTIONS)
    assert list(reply) == ["model", "answers", "usage"]
    assert reply["model"] == "laya-rl-agent"
    answers, usage = reply["answers"], reply["usage"]
    assert list(answers) == ["topic", "level", "holds"]
    common = ["confidence", "answer_confidence", "action"]
    assert list(answers["topic"]) == ["type", "choice", "probabilities", *common]
    assert list(answers["topic"]["probabilities"]) == ["a", "b", 3]
    assert list(answers["level"]) == ["type", "score", "legend", "probabilities", *common]
    assert answers["level"]["legend"] == {"0": "low", "1": '{"mid": 1}', "2": "high"}
    assert list(answers["holds"]) == ["type", "noul", *common]
    assert usage["input_tokens"] == 3 * agent.checkpoint.max_len
    assert usage["output_tokens"] == 0
    assert usage["truncated"] is True
    assert usage["truncated_questions"] == ["topic", "level", "holds"]
    assert usage["state_tokens"] > usage["state_tokens_dropped"] > 0
    numbers = [answers["holds"]["noul"], answers["level"]["score"], *answers["topic"]["probabilities"].values()]
    assert all(type(number) is float and round(number, 4) == number for number in numbers)
    json.dumps(reply)


@pytest.mark.parametrize(("batch_size", "sort_by_length"), [(None, False), (1, True), (3, True), (4, False)])
def test_batching_changes_no_answer_and_keeps_the_order(
    agent: laya.Agent, batch_size: int | None, sort_by_length: bool
) -> None:
    expected = [agent.predict(state, QUESTIONS) for state in STATES]
    found = agent.predict_batch(STATES, QUESTIONS, batch_size=batch_size, sort_by_length=sort_by_length)
    for ours, alone in zip(found, expected, strict=True):
        assert ours["usage"] == alone["usage"]
        for name, answer in alone["answers"].items():
            for key in ("noul", "score", "confidence", "answer_confidence"):
                if key in answer:
                    assert ours["answers"][name][key] == pytest.approx(answer[key], abs=2e-4)


def test_no_states_give_no_replies(agent: laya.Agent) -> None:
    assert agent.predict_batch([], QUESTIONS) == []


def test_the_stages_give_columns_at_full_precision(agent: laya.Agent) -> None:
    prepared = agent.prepare(QUESTIONS)
    wanted = np.zeros((len(STATES), 3), dtype=bool)
    wanted[2, 1] = wanted[5, 2] = True
    encoded = agent.encode(STATES, prepared, wanted)
    (batch,) = agent.pack(encoded)
    assert batch.bucket_length == bucket_length(int(encoded.lengths.max()), agent.checkpoint.max_len)
    answers = agent.decode(prepared, encoded, batch, agent.forward(encoded, batch))
    order = np.argsort(answers.state_index)
    assert answers.state_index[order].tolist() == [2, 5]
    assert answers.question_index[order].tolist() == [1, 2]
    reply = agent.predict(STATES[5], QUESTIONS)["answers"]["holds"]
    assert answers.noul[order][1] == pytest.approx(reply["noul"], abs=1e-4)
    assert answers.probabilities.dtype == np.float64


def test_a_bad_state_or_question_is_refused_by_place(agent: laya.Agent) -> None:
    with pytest.raises(laya.StateError, match="state 1: the state is null"):
        agent.predict_batch(["a", None], QUESTIONS)
    with pytest.raises(laya.QuestionError, match="question 'q'"):
        agent.predict("a", {"q": {"type": "noul"}})


def test_threads_share_an_agent(agent: laya.Agent) -> None:
    expected = agent.predict_batch(STATES, QUESTIONS)
    found: list[Any] = [None] * 6

    def work(place: int) -> None:
        found[place] = agent.predict_batch(STATES, QUESTIONS)

    threads = [threading.Thread(target=work, args=(place,)) for place in range(len(found))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(replies == expected for replies in found)


def test_warm_up_runs_every_shape_that_packing_can_emit(agent: laya.Agent) -> None:
    shapes = agent.warmup_shapes()
    assert [length for _, length in shapes] == [128, 112, 96, 80, 64, 48, 32, 16]
    agent.warmup()
    agent.warmup([(2, 32, 5), (1, 16)])
    with pytest.raises(laya.LayaError, match=r"shape \(1, 4096\): expected sequences of 1 to 128 tokens"):
        agent.warmup([(1, 4096)])


def test_load_takes_limits_calibration_and_digests(checkpoint_path: Path, tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    file.write_text(json.dumps({"temperature": [5, 5, 5], "temperature_by_options": {}}))
    agent = laya.load(checkpoint_path, device="cpu", calibration=file, max_len=64, head_max_len=40)
    assert agent.temperatures.of("choice", 3) == 5.0
    assert (agent.checkpoint.max_len, agent.checkpoint.head_max_len) == (64, 40)
    assert agent.predict("long " * 100, QUESTIONS)["usage"]["input_tokens"] == 3 * 64
    with pytest.raises(laya.CheckpointError, match="sha256"):
        laya.load(checkpoint_path, expected_sha256={"model.safetensors": "00"})


def test_an_agent_with_other_options_shares_the_weights_and_answers_as_one_loaded_with_them(
    checkpoint_path: Path,
) -> None:
    calibration = {"temperature": [4, 4, 4], "temperature_by_options": {}}
    agent = laya.load(checkpoint_path, device="cpu")
    before = agent.predict("long " * 100, QUESTIONS)
    other = agent.with_options(max_len=64, head_max_len=30, calibration=calibration)
    assert other.model is agent.model
    loaded = laya.load(checkpoint_path, device="cpu", max_len=64, head_max_len=30, calibration=calibration)
    assert other.predict("long " * 100, QUESTIONS) == loaded.predict("long " * 100, QUESTIONS) != before
    assert agent.predict("long " * 100, QUESTIONS) == before
    longer = laya.load(checkpoint_path, device="cpu", max_len=200)
    assert longer.with_options().predict("long " * 100, QUESTIONS) == before


def test_every_digest_that_is_expected_is_compared_whole(make: Callable[[CheckpointSpec], Path]) -> None:
    path = make(CheckpointSpec())
    (path / "notes.txt").write_text("not a file that a checkpoint needs")
    digests = dict(laya.load(path, device="cpu").checkpoint.digests)
    digests["notes.txt"] = hashlib.sha256((path / "notes.txt").read_bytes()).hexdigest()
    laya.load(path, device="cpu", expected_sha256={file: f" {digest.upper()} " for file, digest in digests.items()})
    for file, digest in digests.items():
        for wrong in (digest[:-1] + ("0" if digest[-1] != "0" else "1"), digest[:2] + "0" * 62, digest[:2]):
            with pytest.raises(laya.CheckpointError, match=f"{file}: sha256: expected {wrong}, found {digest}"):
                laya.load(path, device="cpu", expected_sha256={file: wrong})


def test_a_question_fits_once_the_advice_of_its_error_is_followed(checkpoint_path: Path) -> None:
    agent = laya.load(checkpoint_path, device="cpu", max_len=512)
    many = {"q": {"type": "choice", "instructions": "Which one is it?", "criteria": [f"label {i}" for i in range(60)]}}
    refused = agent.with_options(max_len=64).prepare(many)
    needed = int(refused.unfit["q"].split("raise max_len to ")[1].split()[0])
    assert agent.with_options(max_len=needed - 1).prepare(many).unfit
    assert not agent.with_options(max_len=needed, head_max_len=20).prepare(many).unfit
    some = {"q": {**many["q"], "criteria": [f"a longer label {i}" for i in range(6)]}}
    assert "lower head_max_len, raise max_len" in agent.with_options(max_len=40).prepare(some).unfit["q"]
    assert not agent.with_options(max_len=40, head_max_len=20).prepare(some).unfit


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_len": 129}, "max_len: expected 1 to 128 tokens, found 129"),
        ({"max_len": 0}, "max_len: expected 1 to 128 tokens, found 0"),
        ({"head_max_len": 128}, "head_max_len: expected 1 to 127 tokens, fewer than max_len, found 128"),
        ({"max_len": 40, "head_max_len": 40}, "expected 1 to 39 tokens"),
        ({"expected_sha256": {"model.safetensors": "ab" * 32}}, "model.safetensors: sha256: expected abab"),
        ({"expected_sha256": {"encoder/../x": "ab" * 32}}, "'encoder/../x', which is no file of the checkpoint"),
        ({"calibration": {"version": 1}}, "calibration: expected an object with temperature"),
    ],
)
def test_options_that_the_loaded_agent_cannot_have_are_refused(
    agent: laya.Agent, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(laya.CheckpointError, match=message):
        agent.with_options(**options)


def test_shipped_temperatures_that_a_calibration_replaces_are_not_warned_about(
    make: Callable[[CheckpointSpec], Path], tmp_path: Path
) -> None:
    path = make(CheckpointSpec(agent={"temperature": [0.1, 1, 1]}))
    file = tmp_path / "calibration.json"
    file.write_text(json.dumps({"temperature": [2, 2, 2]}))
    with pytest.warns(RuntimeWarning, match="choice 0.1 -> 0.5"):
        laya.load(path, device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert laya.load(path, device="cpu", calibration=file).temperatures.of("choice", 3) == 2.0


@pytest.fixture(scope="module")
def spoilt(checkpoint_path: Path, tmp_path_factory: pytest.TempPathFactory) -> laya.Agent:
    """An agent to which one character is NaN."""
    return laya.load(spoil_weights(checkpoint_path, tmp_path_factory.mktemp("nan") / "spoilt", "☠"), device="cpu")


def test_a_state_whose_logits_are_not_finite_is_named_though_it_spoils_its_neighbours(spoilt: laya.Agent) -> None:
    prepared = spoilt.prepare(QUESTIONS)
    encoded = spoilt.encode([*STATES, "a ☠"], prepared)
    spoilt_rows = [len(batch) for batch in spoilt.pack(encoded) if not spoilt.forward(encoded, batch).finite]
    assert sum(spoilt_rows) > len(QUESTIONS)  # or else neighbours are not spoilt, and this test shows nothing
    for place in (0, 7, len(STATES)):
        states = [*STATES[:place], "a ☠", *STATES[place:]]
        with pytest.raises(laya.NotFiniteError, match=rf"state {place}, question '\w+': its logits are not finite"):
            spoilt.predict_batch(states, QUESTIONS)


def test_broken_weights_answer_nothing(checkpoint_path: Path, tmp_path: Path) -> None:
    broken = laya.load(spoil_weights(checkpoint_path, tmp_path / "broken", None), device="cpu")
    with pytest.raises(laya.NotFiniteError, match=r"state 0, question '\w+'"):
        broken.predict("one", QUESTIONS)


def test_bf16_on_a_cpu_is_opt_in(checkpoint_path: Path, agent: laya.Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    assert agent.dtype == torch.float32
    monkeypatch.setenv("LAYA_CPU_AMP", "bf16")
    low = laya.load(checkpoint_path, device="cpu")
    assert low.dtype == torch.bfloat16
    ours, theirs = (a.predict_batch(STATES, QUESTIONS) for a in (low, agent))
    differences = [
        abs(x["answers"]["holds"]["noul"] - y["answers"]["holds"]["noul"]) for x, y in zip(ours, theirs, strict=True)
    ]
    assert max(differences) < 0.1


def test_importing_laya_reads_no_environment_and_loads_no_transformers() -> None:
    program = "import sys, laya; print(sorted({'transformers', 'jobs', 'worker'} & set(sys.modules)))"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env={"LAYA_CPU_AMP": "x"}
    )
    assert run.stdout.strip() == "[]"


def test_the_public_names_are_these() -> None:
    assert sorted(laya.__all__) == laya.__all__
    assert {"Agent", "load", "PackingLimits", "LayaError", "Answers", "Logits", "Batch", "Checkpoint"} <= set(
        laya.__all__
    )
    assert all(hasattr(laya, name) for name in laya.__all__)


Make = Callable[[CheckpointSpec], Path]
NOUL = {"q": {"type": "noul", "instructions": "Is it?"}}


@pytest.mark.parametrize("states", ["hello", b"hello", {"a": "state"}, None, 5])
def test_one_state_in_the_place_of_a_list_is_a_type_error(agent: laya.Agent, states: Any) -> None:
    with pytest.raises(TypeError):
        agent.predict_batch(states, NOUL)
    with pytest.raises(TypeError):
        laya.Router().predict_batch(states, NOUL)


def test_states_may_come_in_anything_that_is_iterated(agent: laya.Agent) -> None:
    expected = agent.predict_batch(["a", "b"], NOUL)
    assert agent.predict_batch(("a", "b"), NOUL) == expected
    assert agent.predict_batch((state for state in "ab"), NOUL) == expected
    assert agent.predict_batch((), NOUL) == []


@pytest.mark.parametrize("questions", [None, [NOUL["q"]], "Is it?"])
def test_questions_that_are_no_object_are_a_type_error(agent: laya.Agent, questions: Any) -> None:
    with pytest.raises(TypeError, match="questions: expected an object"):
        agent.predict("a", questions)


@pytest.mark.parametrize("batch_size", [0, -1, 2.0, "2"])
def test_a_batch_size_that_is_none_is_named(agent: laya.Agent, batch_size: Any) -> None:
    with pytest.raises(ValueError, match="batch_size: expected a whole number of at least 1"):
        agent.predict_batch(["a"], NOUL, batch_size=batch_size)


@pytest.mark.parametrize("state", [None, {1}, object(), b"text", {"a": {1}}, {(1, 2): 3}, "\ud800"])
def test_a_state_without_text_is_a_type_error_that_says_which(agent: laya.Agent, state: Any) -> None:
    with pytest.raises(TypeError, match="state 1: the state"):
        agent.predict_batch(["a", state], NOUL)


def test_an_agent_is_made_of_what_load_takes(checkpoint_path: Path, tmp_path: Path) -> None:
    expected = laya.load(checkpoint_path, device="cpu").predict("a", NOUL)
    for agent in (
        laya.Agent(checkpoint_path, "cpu"),
        laya.Agent(str(checkpoint_path), device="cpu", backend="auto"),
        laya.load(str(checkpoint_path), "cpu", "token", ""),
        laya.load(checkpoint_path.parent, device="cpu", subfolder=checkpoint_path.name, token="token"),
    ):
        assert agent.predict("a", NOUL) == expected
    assert laya.Agent(checkpoint_path, "cpu", max_len=64, compile=True, compile_warmup=False).backend == "compile"
    assert laya.Agent(checkpoint_path, "cpu", max_len=64).checkpoint.max_len == 64
    if not torch.cuda.is_available():
        assert laya.load(checkpoint_path, device="auto").device.type == "cpu"
    for options, kind in (({"backend": "onnx"}, laya.BackendError), ({"nonsense": 1}, TypeError)):
        with pytest.raises(kind, match=r"onnx|nonsense"):
            laya.Agent(checkpoint_path, "cpu", **options)
    with pytest.raises(TypeError, match="max_len"):
        laya.Agent(laya.Agent(checkpoint_path, "cpu").checkpoint, "cpu", max_len=64)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        laya.Agent(tmp_path / "absent")


def test_the_environment_stands_in_for_digests_and_revision(
    checkpoint_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAYA_SHA256_DIGESTS", '{"model.safetensors": "00"}')
    with pytest.raises(ValueError, match=r"model\.safetensors: sha256: expected 00"):
        laya.Agent(checkpoint_path, "cpu")
    assert laya.load(checkpoint_path, "cpu", expected_sha256={}).backend == "eager"
    monkeypatch.setenv("LAYA_SHA256_DIGESTS", "")
    monkeypatch.setenv("LAYA_REVISION", "reviewed")
    with pytest.raises(ValueError, match="LAYA_REVISION is 'reviewed'"):
        laya.load("someone/other", "cpu")
    with pytest.raises(ValueError, match="expected_sha256: expected digests by path, found list"):
        laya.load(checkpoint_path, "cpu", expected_sha256=[])  # type: ignore[arg-type]


def test_a_backend_asked_for_strictly_is_a_runtime_error_where_it_cannot_run(agent: laya.Agent) -> None:
    assert agent.set_backend(" Eager ") == "eager"
    for name in ("fastest", ""):
        with pytest.raises(ValueError, match=f"unknown backend '{name}'"):
            agent.set_backend(name)
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="backend 'tilelang' cannot run"):
            agent.set_backend("tilelang", strict=True)
    assert agent.backend == "eager"


def test_a_token_that_the_model_lacks_is_an_error_of_its_text_alone(make: Make) -> None:
    path = make(CheckpointSpec())
    file = path / "tokenizer" / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.add_tokens(["zebra"])
    tokenizer.save(str(file))
    agent = laya.load(path, device="cpu")
    assert len(agent.predict_batch(["a", "b"], NOUL)) == 2
    with pytest.raises(laya.StateError, match="state 1: 'zebra' is token 512 of the tokenizer, but the model has 512"):
        agent.predict_batch(["a", "a zebra"], NOUL)
    encoded = agent.encode(["a", "a zebra", "b"], agent.prepare(NOUL))
    assert (list(encoded.unfit), encoded.state_index.tolist()) == ([1], [0, 2])
    with pytest.raises(laya.QuestionError, match="question 'q': 'zebra' is token 512"):
        agent.predict("a", {"q": {"type": "choice", "instructions": "Which?", "criteria": ["a", "zebra"]}})


def test_the_version_is_the_distributions() -> None:
    assert laya.__version__ == version("laya-batch")
