"""Checkpoints, calibrations and options of every kind: where the public package answers, we answer the same or refuse.

Each case changes one thing. The package runs once, in a process of its own, over all of them.
"""

import hashlib
import json
import random
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import laya
from tests.checkpoints import SPECIAL, CheckpointSpec, make_checkpoint, write_json
from tests.parity.test_public_package import ROUNDING, flatten, jsonable

AGENT, ENCODER = "rl_agent_config.json", "encoder/config.json"
TOKENIZER, SPECIAL_MAP = "tokenizer/tokenizer_config.json", "tokenizer/special_tokens_map.json"
ABSENT = object()
STATES = [
    "The customer was billed twice in March and wants the charge refunded. " * 12,
    {"a": "退款", "b": [1]},
    "short",
]
QUESTIONS: dict[str, Any] = {
    "department": {
        "type": "choice",
        "instructions": "Which?",
        "criteria": {"billing": "invoices", "bugs": None, "c": ""},
    },
    "topic": {"type": "choice", "instructions": "Which of many?", "criteria": [f"t{i}" for i in range(12)]},
    "urgency": {"type": "score", "instructions": "How urgent?", "criteria": ["low", "middle", "high", "now"]},
    "holds": {"type": "noul", "instructions": "Is a refund wanted?"},
}


@dataclass(frozen=True)
class Case:
    """One load: keys of files that are changed, `laya.load`'s options, the calibration, the environment."""

    changes: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    calibration: Any = None
    environment: dict[str, str] = field(default_factory=dict)
    spec: CheckpointSpec | None = None


def agent_key(key: str, value: Any) -> Case:
    return Case({AGENT: {key: value}})


def encoder_key(key: str, value: Any) -> Case:
    return Case({ENCODER: {key: value}})


def calibrated(**keys: Any) -> Case:
    return Case(calibration={"temperature": [1.6, 1.25, 2.0], "temperature_by_options": {"choice:3-5": 1.75}, **keys})


def rope(**kinds: Any) -> Case:
    thetas = {"full_attention": 160_000.0, "sliding_attention": 10_000.0}
    usual = {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in thetas.items()}
    return encoder_key("rope_parameters", {**usual, **kinds})


BUCKETS = ("choice:3-5", "choice:11+", "score:3-5", "noul:2")
FINE = {bucket: {"bins": 5000, "values": [1 - i / 5000 for i in range(5000)]} for bucket in BUCKETS}
CONFIG = {"encoder": "tests/tiny", "head_layers": 2, "act_costs": {"escalate": 0.5}, "max_len": 144}
CONFIG |= {"head_max_len": 110, "amp_dtype": "bf16"}
IDENTITY = {"version": 2, "model_id_or_path": "{checkpoint}", "subfolder": None, "config": CONFIG}

# Both answer, the same to the last place that is reported, and both warn or neither does.
SAME: dict[str, Case] = {
    "as it is": Case(),
    "no max_len": agent_key("max_len", ABSENT),
    "no head_max_len": agent_key("head_max_len", ABSENT),
    "no amp_dtype": agent_key("amp_dtype", ABSENT),
    "no temperature": agent_key("temperature", ABSENT),
    "no temperature_by_options": agent_key("temperature_by_options", ABSENT),
    "amp_dtype spelled out": agent_key("amp_dtype", "bfloat16"),
    "another model_name": agent_key("model_name", "mine"),
    "a sequential layout": agent_key("option_layout", "sequential"),
    "a key that nobody reads": agent_key("pooling", "mean"),
    "no head layers": Case(spec=CheckpointSpec(seed=5, max_len=144, head_max_len=110, agent={"head_layers": 0})),
    "a small head_max_len": agent_key("head_max_len", 4),
    "temperatures as text": agent_key("temperature", ["1.6", "1.25", " 2 "]),
    "a finer temperature as text": agent_key("temperature_by_options", {"choice:3-5": "1.75"}),
    "temperatures that are no numbers": agent_key("temperature", [True, "x", None]),
    "temperatures outside the limits": agent_key("temperature", [0.1, 9, 1]),
    "no local_attention": encoder_key("local_attention", ABSENT),
    "local_attention of 1": encoder_key("local_attention", 1),
    "an odd local_attention": encoder_key("local_attention", 31),
    "a sliding_window": encoder_key("sliding_window", 5),
    "all layers full": encoder_key("layer_types", ["full_attention"] * 4),
    "every second layer full": encoder_key("global_attn_every_n_layers", 2),
    "another theta": rope(full_attention={"rope_theta": 500.0}),
    "one theta the older way": Case({ENCODER: {"rope_parameters": {}, "local_rope_theta": 500.0}}),
    "both thetas the older way": Case(
        {ENCODER: {"rope_parameters": ABSENT, "global_rope_theta": 500, "local_rope_theta": 100}}
    ),
    "another norm_eps": encoder_key("norm_eps", 1e-3),
    "four heads": encoder_key("num_attention_heads", 4),
    "special tokens in their own file": Case({TOKENIZER: None, SPECIAL_MAP: dict(SPECIAL)}),
    "a tokenizer of a class of transformers 5": Case({TOKENIZER: {"tokenizer_class": "TokenizersBackend"}}),
    "a calibration": calibrated(),
    "a calibration that is clamped": calibrated(temperature=[9, "x", 0.1]),
    "a calibration without version": calibrated(version=None),
    "bins": calibrated(binning_map={"noul:2": {"bins": 4, "values": [0.9, 0.1, 0.5, 0.61]}}),
    "fine bins": calibrated(binning_map=FINE),
    "no bins": calibrated(binning_map={}),
    "a calibration of this checkpoint": calibrated(**IDENTITY),
    "of another place": calibrated(**{**IDENTITY, "model_id_or_path": "/elsewhere"}),
    "of another subfolder": calibrated(**{**IDENTITY, "subfolder": "other"}),
    "of another configuration": calibrated(**{**IDENTITY, "config": {**CONFIG, "max_len": 99}}),
    "of no checkpoint": calibrated(version=2),
    "of another, before it was recorded": calibrated(**{**IDENTITY, "version": 1, "model_id_or_path": "/elsewhere"}),
    "a pinned revision": Case(environment={"LAYA_REVISION": "main"}),
    "reviewed revisions, of a folder": Case(environment={"LAYA_REVISION": "reviewed"}),
    "a digest": Case(environment={"LAYA_SHA256_DIGESTS": '{"rl_agent_config.json": "{digest}"}'}),
    "no digests asked for": Case(
        options={"expected_sha256": {}}, environment={"LAYA_SHA256_DIGESTS": '{"model.safetensors": "00"}'}
    ),
}


def combine(names: list[str]) -> Case:
    """Return one case with the changed keys of several."""
    changes: dict[str, dict[str, Any] | None] = {}
    for name in names:
        for file, keys in SAME[name].changes.items():
            changes[file] = (changes.get(file) or {}) | (keys or {})
    return Case(changes)


KEYED = [name for name, case in SAME.items() if case.changes and None not in case.changes.values()]
PICKS = [random.Random(seed).sample(KEYED, 3) for seed in range(24)]
SAME |= {" + ".join(names): combine(names) for names in PICKS}
# The package answers, without a warning; we answer the same and warn.
WARNED: dict[str, Case] = {
    "max_len beyond the positions": encoder_key("max_position_embeddings", 100),
    "a bucket that no question has": agent_key("temperature_by_options", {"choice:12": 2.0}),
}
# Neither answers; the second is a class that our error must have, too.
REFUSED: dict[str, tuple[Case, type[Exception]]] = {
    "an unknown layout": (agent_key("option_layout", "nonsense"), ValueError),
    "no head_layers": (agent_key("head_layers", ABSENT), ValueError),
    "fewer head layers than weights": (agent_key("head_layers", 1), ValueError),
    "no act_costs": (agent_key("act_costs", ABSENT), ValueError),
    "two temperatures": (agent_key("temperature", [1, 1]), ValueError),
    "another encoder": (encoder_key("model_type", "bert"), ValueError),
    "a key of another shape": (encoder_key("intermediate_size", ABSENT), ValueError),
    "no rope for a kind": (rope(full_attention=None), ValueError),
    "an eps that is text": (encoder_key("norm_eps", "1e-3"), ValueError),
    "a missing file": (Case({AGENT: None}), FileNotFoundError),
    "a calibration with another version": (calibrated(version="new"), ValueError),
    "bins beyond 1": (calibrated(binning_map={"noul:2": {"bins": 1, "values": [1.5]}}), ValueError),
    "too few bins": (calibrated(binning_map={"noul:2": {"bins": 2, "values": [0.5]}}), ValueError),
    "a wrong digest": (Case(options={"expected_sha256": {"model.safetensors": "00"}}), ValueError),
    "a wrong digest asked for": (
        Case(environment={"LAYA_SHA256_DIGESTS": '{"encoder/config.json": "00"}'}),
        ValueError,
    ),
    "a digest of no file": (Case(options={"expected_sha256": {"absent": "00"}}), ValueError),
    "digests that are no object": (Case(environment={"LAYA_SHA256_DIGESTS": "[1]"}), ValueError),
    "a missing subfolder": (Case(options={"subfolder": "absent"}), FileNotFoundError),
    "an unknown backend": (Case(options={"backend": "fastest"}), ValueError),
    "an unknown compile_mode": (Case(options={"compile": True, "compile_mode": "x"}), ValueError),
}
# The package answers in a way that this engine does not follow: refused, and the error says what.
REFUSED_HERE: dict[str, tuple[Case, str]] = {
    "a parallel layout": (agent_key("option_layout", "parallel"), "option_layout: expected 'sequential'"),
    "another activation": (encoder_key("hidden_activation", "relu"), "hidden_activation: expected 'gelu'"),
    "scaled rope": (rope(full_attention={"rope_type": "linear", "factor": 4.0, "rope_theta": 5e2}), "found 'linear'"),
    "rope scaled the older way": (encoder_key("rope_scaling", {"rope_type": "linear", "factor": 4.0}), "rope_scaling"),
    "an unknown amp_dtype": (agent_key("amp_dtype", "int8"), "amp_dtype: expected one of"),
    "a key of a calibration that is not known": (calibrated(lang_temperatures={}), "unknown key 'lang_temperatures'"),
    "two mask tokens": (Case({SPECIAL_MAP: {**SPECIAL, "mask_token": "[UNK]"}}), "which one was meant is not known"),
}
HOLDS = {"holds": QUESTIONS["holds"]}
# States and questions that neither takes, and the class that both errors have.
CALLS: dict[str, tuple[Any, Any, type[Exception]]] = {
    "text for states": ("hello", HOLDS, TypeError),
    "an object for states": ({"a": 1}, HOLDS, TypeError),
    "nothing for states": (None, HOLDS, TypeError),
    "a number for states": (5, HOLDS, TypeError),
    "a state that is null": (["a", None], HOLDS, TypeError),
    "nothing for questions": (["a"], None, TypeError),
    "a list for questions": (["a"], [QUESTIONS["holds"]], TypeError),
    "a question that is null": (["a"], {"q": None}, ValueError),
    "an unknown type": (["a"], {"q": {"type": "essay", "instructions": "i"}}, ValueError),
    "no instructions": (["a"], {"q": {"type": "noul"}}, ValueError),
    "no criteria": (["a"], {"q": {"type": "choice", "instructions": "i"}}, ValueError),
    "no options": (["a"], {"q": {"type": "choice", "instructions": "i", "criteria": {}}}, ValueError),
    "the same label twice": (["a"], {"q": {"type": "choice", "instructions": "i", "criteria": ["a", "a"]}}, ValueError),
    "a label that is a list": (["a"], {"q": {"type": "choice", "instructions": "i", "criteria": [["a"]]}}, ValueError),
    "a level that is null": (["a"], {"q": {"type": "score", "instructions": "i", "criteria": [None]}}, ValueError),
    "a side of a noul": (["a"], {"q": {"type": "noul", "instructions": "i", "criteria": {"yes": "y"}}}, ValueError),
    "options that do not fit": (
        ["a"],
        {"q": {**QUESTIONS["topic"], "criteria": [f"t{i}" for i in range(300)]}},
        ValueError,
    ),
}
ALL = {**SAME, **WARNED} | {name: case for name, (case, _) in (REFUSED | REFUSED_HERE).items()}

Found = dict[str, Any]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The checkpoint, options and environment of each case, as files."""
    folder = tmp_path_factory.mktemp("cases")
    plain = make_checkpoint(folder / "plain", CheckpointSpec(seed=1, max_len=144, head_max_len=110))
    return {name: write_case(plain, folder / str(number), case) for number, (name, case) in enumerate(ALL.items())}


def write_case(plain: Path, folder: Path, case: Case) -> dict[str, Any]:
    if case.spec is None:
        shutil.copytree(plain, folder)
    else:
        make_checkpoint(folder, case.spec)
    for file, changes in case.changes.items():
        if changes is None:
            (folder / file).unlink()
            continue
        content = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
        write_json(folder / file, {key: value for key, value in (content | changes).items() if value is not ABSENT})
    options, digest = dict(case.options), hashlib.sha256((plain / AGENT).read_bytes()).hexdigest()
    if case.calibration is not None:
        file = folder.with_suffix(".json")
        file.write_text(json.dumps(case.calibration).replace("{checkpoint}", str(folder)))
        options["calibration"] = str(file)
    environment = {name: value.replace("{digest}", digest) for name, value in case.environment.items()}
    return {"checkpoint": str(folder), "options": options, "environment": environment}


@pytest.fixture(scope="module")
def peer_found(cases: dict[str, dict[str, Any]], ask_peer: Callable[..., Found]) -> Found:
    calls = {
        name: cases["as it is"] | {"states": states, "questions": questions}
        for name, (states, questions, _) in CALLS.items()
    }
    return ask_peer("peer_loads.py", {"loads": cases | calls, "states": STATES, "questions": QUESTIONS})


@pytest.fixture
def ours(cases: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Found]:
    def load(name: str) -> Found:
        for variable, value in cases[name]["environment"].items():
            monkeypatch.setenv(variable, value)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            agent = laya.load(cases[name]["checkpoint"], device="cpu", **cases[name]["options"])
        return {"replies": agent.predict_batch(STATES, QUESTIONS), "warned": bool(caught)}

    return load


def assert_same(found: Found, expected: Found) -> None:
    ours, theirs = flatten(jsonable(found["replies"])), flatten(expected["replies"])
    assert list(ours) == list(theirs)
    for key, value in theirs.items():
        assert ours[key] == (pytest.approx(value, abs=ROUNDING) if isinstance(value, float) else value), key


@pytest.mark.parametrize("name", SAME)
def test_what_both_read_gives_the_same_answers_and_warnings(
    name: str, peer_found: Found, ours: Callable[[str], Found]
) -> None:
    found = ours(name)
    assert_same(found, peer_found[name])
    assert found["warned"] == peer_found[name]["warned"]


@pytest.mark.parametrize("name", WARNED)
def test_what_the_package_takes_in_silence_gives_the_same_answers_and_a_warning(
    name: str, peer_found: Found, ours: Callable[[str], Found]
) -> None:
    found = ours(name)
    assert_same(found, peer_found[name])
    assert (found["warned"], peer_found[name]["warned"]) == (True, False)


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_package_refuses_is_refused_with_an_error_of_that_class(
    name: str, peer_found: Found, ours: Callable[[str], Found]
) -> None:
    assert "error" in peer_found[name]
    kind = REFUSED[name][1]
    if kind is FileNotFoundError:
        assert "FileNotFoundError" in peer_found[name]["error"]
    with pytest.raises(laya.LayaError) as error:
        ours(name)
    assert isinstance(error.value, kind)


@pytest.mark.parametrize("name", REFUSED_HERE)
def test_what_the_engine_does_not_follow_is_refused(name: str, peer_found: Found, ours: Callable[[str], Found]) -> None:
    assert "replies" in peer_found[name], peer_found[name]
    with pytest.raises(laya.LayaError) as error:
        ours(name)
    assert REFUSED_HERE[name][1] in str(error.value)


@pytest.mark.parametrize("name", CALLS)
def test_what_neither_answers_is_an_error_of_the_same_class(
    name: str, peer_found: Found, cases: dict[str, dict[str, Any]]
) -> None:
    states, questions, kind = CALLS[name]
    assert kind.__name__ in peer_found[name]["error"]
    with pytest.raises(kind):
        laya.load(cases["as it is"]["checkpoint"], device="cpu").predict_batch(states, questions)
