"""What a submitter can tell of lengths, calibrations, revisions and digests before anything is queued."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from jobs.engine_options import EngineOptions, check_engine_options
from jobs.errors import InputError
from jobs.submission import build_spec
from schemas.calibration import MAX_FILE_BYTES
from schemas.job import JobSpec

CONTENT = {"temperature": [2, 2, 2], "temperature_by_options": {}}
DIGEST = "ab" * 32
ROUTES = {"english": "english", "multilingual": "multilingual"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The two files of a checkpoint that a submitter reads."""
    (tmp_path / "encoder").mkdir()
    (tmp_path / "encoder" / "config.json").write_text('{"max_position_embeddings": 8192}')
    (tmp_path / "rl_agent_config.json").write_text('{"max_len": 512}')
    return tmp_path


def check(checkpoint: str = "english", routes: dict[str, str] | None = None, **options: Any) -> dict[str, Any]:
    return check_engine_options(EngineOptions(**options), checkpoint, routes)


def make_spec(**options: Any) -> JobSpec:
    question = {"q": {"type": "noul", "instructions": "Is it?"}}
    checkpoint = options.pop("checkpoint", "english")
    return build_spec(
        inputs="a", state="text", questions=question, checkpoint=checkpoint, engine_options=EngineOptions(**options)
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_len": 0}, "max_len: expected a positive whole number of tokens, found 0"),
        ({"max_len": "64"}, "max_len: expected a positive whole number of tokens, found '64'"),
        ({"head_max_len": True}, "head_max_len: expected a positive whole number"),
        ({"max_len": 8193}, "max_len 8193: the encoder of .* reads 8192 tokens at most"),
        ({"head_max_len": 512}, "head_max_len 512 leaves no room for a text in max_len 512; lower it, or raise"),
        ({"max_len": 64, "head_max_len": 64}, "head_max_len 64 leaves no room for a text in max_len 64"),
        ({"revision": "v1.0"}, "revision 'v1.0': .* is a folder, which has none"),
        ({"default_route": "english"}, "a default route is taken only with checkpoint 'router'"),
        (
            {"expected_sha256": {"model.safetensors": "ab"}},
            "'model.safetensors': expected 64 hexadecimal digits, found",
        ),
        ({"expected_sha256": {"/etc/passwd": DIGEST}}, "'/etc/passwd': expected a file's path relative to"),
        ({"expected_sha256": {"a/../../b": DIGEST}}, "expected a file's path relative to"),
        ({"expected_sha256": [DIGEST]}, "expected_sha256: expected digests by file"),
        ({"calibration": "nowhere.json"}, "calibration nowhere.json: .*No such file"),
        ({"calibration": {"version": 1}}, "calibration: expected an object with temperature"),
        ({"calibration": {"temperature": [1]}}, "calibration: temperature: expected a list of 3 numbers"),
        ({"calibration": {"temperature": [1, 2, float("nan")]}}, "calibration: .*not JSON compliant"),
        ({"calibration": 5}, "calibration: expected a file, or the content of one, found 5"),
    ],
)
def test_options_that_cannot_hold_are_refused_with_what_to_change(
    folder: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        check(str(folder), **options)


@pytest.mark.parametrize("text", ["{", "[]", "", "[" * 100_000, '{"temperature": [1, 2, 1e999]}', "x" * 2_000_000])
def test_a_file_that_is_no_calibration_is_refused_by_name(tmp_path: Path, text: str) -> None:
    file = tmp_path / "cal[bold].json"
    file.write_text(text)
    with pytest.raises(InputError, match=r"calibration .*cal\[bold\]\.json: "):
        check(calibration=file)
    assert len(text) < MAX_FILE_BYTES or text[0] == "x"


def test_a_file_that_is_not_json_is_told_apart(tmp_path: Path) -> None:
    file = tmp_path / "cal.json"
    file.write_text("temperature: 2")
    with pytest.raises(InputError, match=r"calibration .*cal\.json: expected a JSON object: Expecting value"):
        check(calibration=file)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"calibration": CONTENT}, "with a router, give one for english or multilingual, by that name"),
        ({"calibration": "file.json"}, "with a router, give one for english or multilingual"),
        ({"calibration": {"klingon": CONTENT}}, "with a router, give one for english or multilingual"),
        ({"expected_sha256": {"model.safetensors": DIGEST}}, "with a router, begin it with english/ or multilingual/"),
    ],
)
def test_a_router_wants_to_know_which_checkpoint_is_meant(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check("router", ROUTES, **options)


def test_lengths_up_to_what_the_encoder_reads_are_taken(folder: Path) -> None:
    assert check(str(folder), max_len=8192, head_max_len=8191)["max_len"] == 8192
    assert check("OWNER/REPOSITORY", max_len=100_000)["max_len"] == 100_000  # the worker that loads it will say
    assert check(str(folder), head_max_len=511)["head_max_len"] == 511


def test_a_calibration_is_kept_with_its_content_and_its_digest(tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    file.write_text(json.dumps(CONTENT, indent=2))
    spec = make_spec(calibration=file)
    kept = spec.calibration_of(None)
    assert kept is not None
    assert (kept.content, kept.sha256) == (CONTENT, hashlib.sha256(file.read_bytes()).hexdigest())
    assert spec.engine_options["calibration_sha256"] == {"english": kept.sha256}
    assert JobSpec.model_validate(spec.model_dump(mode="json")) == spec
    assert make_spec(calibration=CONTENT) == spec  # the same temperatures, written otherwise
    assert make_spec(calibration={**CONTENT, "temperature": [3, 2, 2]}) != spec


def test_digests_and_calibrations_go_to_the_checkpoint_they_are_of() -> None:
    digests = {"english/model.safetensors": DIGEST.upper(), "multilingual/encoder/config.json": f" {DIGEST} "}
    spec = make_spec(checkpoint="router", expected_sha256=digests, calibration={"multilingual": CONTENT})
    assert spec.digests_of("english") == {"model.safetensors": DIGEST}
    assert spec.digests_of("multilingual") == {"encoder/config.json": DIGEST}
    assert spec.calibration_of("english") is None
    kept = spec.calibration_of("multilingual")
    assert kept is not None
    assert kept.content == CONTENT
    assert make_spec(expected_sha256={"model.safetensors": DIGEST}).digests_of(None) == {"model.safetensors": DIGEST}


def test_only_the_two_routes_are_a_default() -> None:
    assert make_spec(checkpoint="router", default_route="english").default_route == "english"
    with pytest.raises(InputError, match="default_route: Input should be 'english' or 'multilingual'"):
        make_spec(checkpoint="router", default_route="typed-decisions")
