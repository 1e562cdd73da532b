import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest

from laya.calibration import read_calibration, read_temperatures, warn_if_fitted_for_another
from laya.errors import CheckpointError


def test_the_finer_temperature_wins_by_option_range() -> None:
    by_options = {"choice:2": 1.1, "choice:3-5": 1.2, "choice:6-10": 1.3, "choice:11+": 1.4, "score:3-5": 1.5}
    temperatures = read_temperatures({"temperature": [2.0, 2.5, 3.0], "temperature_by_options": by_options}, "x")
    found = [temperatures.of("choice", options) for options in (1, 2, 3, 5, 6, 10, 11, 300)]
    assert found == [1.1, 1.1, 1.2, 1.2, 1.3, 1.3, 1.4, 1.4]
    assert temperatures.of("score", 2) == 2.5
    assert temperatures.of("score", 4) == 1.5
    assert temperatures.of("noul", 2) == 3.0


def test_one_warning_names_all_that_was_clamped() -> None:
    config = {
        "temperature": [0.1, math.nan, 9],
        "temperature_by_options": {"choice:11+": "one", "choice:2": True, "noul:2": "1.5", "score:2": -math.inf},
    }
    with pytest.warns(RuntimeWarning, match="the file: temperatures outside") as caught:
        temperatures = read_temperatures(config, "the file")
    assert len(caught) == 1
    message = str(caught[0].message)
    for name in (
        "choice 0.1 -> 0.5",
        "score nan -> 1.0",
        "noul 9 -> 5.0",
        "choice:11+ 'one' -> 1.0",
        "choice:2 True -> 1.0",
        "score:2 -inf -> 1.0",
    ):
        assert name in message
    assert "noul:2" not in message
    assert temperatures.by_type == {"choice": 0.5, "score": 1.0, "noul": 5.0}
    assert temperatures.of("noul", 2) == 1.5


def test_temperatures_within_the_limits_give_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_temperatures({}, "x").of("choice", 2) == 1.0


def test_an_integer_beyond_all_floats_is_not_finite() -> None:
    with pytest.warns(RuntimeWarning, match=r"choice 10{400} -> 1\.0"):
        assert read_temperatures({"temperature": [10**400, 1, 1]}, "x").of("choice", 2) == 1.0


def test_a_calibration_file_is_read_with_its_version(tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    file.write_text(json.dumps({"temperature": [1, 2, 3], "temperature_by_options": {"noul:2": 4}, "version": 7}))
    temperatures = read_calibration(file)
    assert (temperatures.of("noul", 2), temperatures.of("score", 2), temperatures.version) == (4.0, 2.0, "7")


@pytest.mark.parametrize(
    "content",
    [
        *("{", "[]", '{"version": 1}', '{"temperature": [1]}', '{"temperature_by_options": [1]}'),
        *('{"temperature": [1, 1, 1], "version": "x"}', '{"temperature": [1, 1, 1], "lang_temperatures": {}}'),
    ],
)
def test_a_broken_calibration_file_is_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "calibration.json"
    file.write_text(content)
    with pytest.raises(CheckpointError, match=r"calibration\.json"):
        read_calibration(file)


@pytest.mark.parametrize(
    "binning",
    [
        *([], {"choice:2": [0.5]}, {"choice:2": {"bins": 2}}, {"choice:2": {"bins": True, "values": [0.5]}}),
        *({"choice:2": {"bins": 2, "values": [0.5]}}, {"choice:2": {"bins": 1, "values": [1.5]}}),
        *({"choice:2": {"bins": 1, "values": [math.nan]}}, {"choice:2": {"bins": 1, "values": ["0.5"]}}),
    ],
)
def test_bins_of_another_shape_are_refused(binning: object) -> None:
    with pytest.raises(CheckpointError, match="binning_map"):
        read_calibration({"temperature": [1, 1, 1], "binning_map": binning})


def test_a_bucket_that_no_question_has_is_said() -> None:
    content = {"temperature": [1, 1, 1], "temperature_by_options": {"choice:12": 2}}
    with pytest.warns(RuntimeWarning, match="no question has the bucket 'choice:12'"):
        read_calibration(content)
    with pytest.warns(RuntimeWarning, match="no question has the bucket 'noul'"):
        read_calibration({"temperature": [1, 1, 1], "binning_map": {"noul": {"bins": 1, "values": [0.5]}}})


CONFIG = {"encoder": "some/encoder", "max_len": 512, "temperature": [1, 1, 1]}
FITTED = {"encoder": "some/encoder", "max_len": 512}


@pytest.mark.parametrize(
    ("recorded", "differs"),
    [
        ({"model_id_or_path": "convaiinnovations/laya", "subfolder": "multilingual", "config": FITTED}, None),
        ({"model_id_or_path": "ml", "subfolder": None, "config": FITTED}, None),
        ({"model_id_or_path": "{path}", "subfolder": None, "config": FITTED}, None),
        ({"model_id_or_path": "convaiinnovations/laya", "config": FITTED}, "it names convaiinnovations/laya;"),
        ({"model_id_or_path": "multilingual", "config": {**FITTED, "max_len": 8}}, "configuration differs in max_len;"),
        ({}, "it names no checkpoint and its configuration differs in encoder, max_len;"),
    ],
)
def test_a_calibration_of_another_checkpoint_is_said(tmp_path: Path, recorded: dict[str, Any], differs: str) -> None:
    if recorded.get("model_id_or_path") == "{path}":
        recorded = {**recorded, "model_id_or_path": str(tmp_path)}
    temperatures = read_calibration({"temperature": [2, 2, 2], "version": 2, **recorded})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_if_fitted_for_another(temperatures, "multilingual", tmp_path, CONFIG)
    assert [differs in str(warning.message) for warning in caught] == ([True] if differs else [])
    assert temperatures.of("noul", 2) == 2.0


def test_a_calibration_that_records_no_checkpoint_is_for_any(tmp_path: Path) -> None:
    temperatures = read_calibration({"temperature": [2, 2, 2], "version": 1, "model_id_or_path": "other/one"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_fitted_for_another(temperatures, "english", tmp_path, CONFIG)
