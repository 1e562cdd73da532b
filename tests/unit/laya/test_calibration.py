import json
import math
import warnings
from pathlib import Path

import pytest

from laya.calibration import read_calibration, read_temperatures
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
        "temperature_by_options": {"choice:11+": "1", "noul:2": 1.5, "score:2": -math.inf},
    }
    with pytest.warns(RuntimeWarning, match="the file: temperatures outside") as caught:
        temperatures = read_temperatures(config, "the file")
    assert len(caught) == 1
    message = str(caught[0].message)
    for name in (
        "choice 0.1 -> 0.5",
        "score nan -> 1.0",
        "noul 9 -> 5.0",
        "choice:11+ '1' -> 1.0",
        "score:2 -inf -> 1.0",
    ):
        assert name in message
    assert "noul:2" not in message
    assert temperatures.by_type == {"choice": 0.5, "score": 1.0, "noul": 5.0}


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
    "content", ["{", "[]", '{"version": 1}', '{"temperature": [1]}', '{"temperature_by_options": [1]}']
)
def test_a_broken_calibration_file_is_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "calibration.json"
    file.write_text(content)
    with pytest.raises(CheckpointError, match=r"calibration\.json"):
        read_calibration(file)
