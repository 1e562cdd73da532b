"""A tiny random checkpoint and an agent on it, made once."""

from collections.abc import Callable
from pathlib import Path

import pytest

import laya
from tests.checkpoints import CheckpointSpec, make_checkpoint


@pytest.fixture(autouse=True)
def clear_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LAYA_CUDA_AMP", "LAYA_CPU_AMP", "LAYA_COMPILE_WARMUP", "LAYA_INDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def checkpoint_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("laya") / "tiny")


@pytest.fixture(scope="session")
def agent(checkpoint_path: Path) -> laya.Agent:
    return laya.load(checkpoint_path, device="cpu")


@pytest.fixture
def make(tmp_path: Path) -> Callable[[CheckpointSpec], Path]:
    """A checkpoint of one's own, to vary or to break."""
    return lambda spec: make_checkpoint(tmp_path / "own", spec)
