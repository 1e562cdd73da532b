"""What the engine's benchmarks share: the workload, the ceiling beside every speed, and the form of a result."""

import argparse
import json
import platform
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from laya.errors import LayaError
from laya.model import ModelConfig

QUESTIONS: dict[str, Any] = {
    "department": {
        "type": "choice",
        "instructions": " ".join(f"w{i}" for i in range(10, 20)),
        "criteria": {f"w{100 + i}": " ".join(f"w{200 + 8 * i + j}" for j in range(6)) for i in range(5)},
    },
    "urgency": {
        "type": "score",
        "instructions": " ".join(f"w{i}" for i in range(30, 37)),
        "criteria": ["w300 w301", "w302", "w303 w304 w305"],
    },
    "churn": {"type": "noul", "instructions": " ".join(f"w{i}" for i in range(50, 58))},
}
MEDIAN_WORDS, SPREAD, MOST_WORDS = 90, 0.9, 950


def bulk_states(count: int, seed: int = 0) -> list[str]:
    """Texts of made-up words, log-normal in length: many short, a few very long."""
    random = np.random.default_rng(seed)
    lengths = np.clip(np.exp(random.normal(np.log(MEDIAN_WORDS), SPREAD, count)), 4, MOST_WORDS).astype(int)
    return [text_of(length, random) for length in lengths]


def text_of(words: int, random: np.random.Generator) -> str:
    return " ".join(f"w{word}" for word in random.integers(400, 50_000, words))


def flop_per_token(config: ModelConfig) -> float:
    """Of the matrix products; attention and the scoring tail are left out."""
    d, inner = config.hidden_size, config.intermediate_size
    encoder = len(config.full_layers) * (3 * d * d + d * d + 2 * inner * d + inner * d)
    head = config.head_layers * (3 * d * d + d * d + 8 * d * d)
    return 2.0 * (encoder + head)


def matmul_flop_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """The rate of one large product on random data."""
    size, repeats = (8192, 20) if device.type == "cuda" else (1024, 5)
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2.0 * size**3 / best_seconds(lambda: [left @ right for _ in range(repeats)], device) * repeats


def best_seconds(work: Callable[[], object], device: torch.device, repeats: int = 2) -> float:
    """The fastest of `repeats` runs after one that warms up, the device's queue included."""
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return min(times[1:])


def describe_run(commit: str | None, device: torch.device) -> dict[str, Any]:
    """What every line of a result carries."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    found = commit or subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu"
    packages = {package: _version(package) for package in ("torch", "transformers", "tilelang")}
    return {"commit": found, "device": name, "python": platform.python_version(), **packages}


def existing_folder(value: str) -> Path:
    """The type of an argument that names a folder."""
    path = Path(value)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {value}")
    return path


def package_folder(value: str) -> Path:
    """The type of an argument that names a folder with the public package, which has our import name."""
    path = existing_folder(value)
    if not (path / "laya" / "__init__.py").is_file():
        raise argparse.ArgumentTypeError(f"{value} has no package laya")
    return path


def results_file(value: str) -> Path:
    """The type of an argument that names a file to append to: found to be impossible before anything is measured."""
    path = Path(value)
    try:
        path.open("a", encoding="utf-8").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{value} cannot be written: {error.strerror}") from error
    return path


def at_least_one(value: str) -> int:
    """The type of an argument that counts something."""
    if not value.isdecimal() or not int(value):
        raise argparse.ArgumentTypeError(f"expected a number from 1, found {value!r}")
    return int(value)


@contextmanager
def told(parser: argparse.ArgumentParser) -> Iterator[None]:
    """What the engine refuses, as a wrong argument."""
    try:
        yield
    except LayaError as error:
        parser.error(str(error))


def publish(title: str, lines: Iterable[dict[str, Any]], columns: list[str], out: Path | None) -> None:
    """JSON lines to standard output or a file, and a table of `columns` for people."""
    table = Table(*columns, title=title)
    for line in lines:
        print(json.dumps(line), flush=True)
        if out is not None:
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        table.add_row(*(_cell(line.get(column)) for column in columns))
    Console(stderr=True, width=140, markup=False, emoji=False).print(table)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return (
        f"{value:,.0f}"
        if isinstance(value, float) and value >= 1000
        else f"{value:,.4g}"
        if isinstance(value, float)
        else str(value)
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
