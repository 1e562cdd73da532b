"""The table of tile shapes, its alternatives, and what is kept of measuring them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from laya.errors import BackendError
from laya.tl_kernels import attn_kernel, gemm_geglu_kernel, gemm_rope_kernel, tiles, tune
from laya.tl_kernels.kernel import Kernel
from laya.tl_kernels.tiles import ALTERNATIVES, TABLE, choices_file, read_choices, tiles_on
from laya.tl_kernels.tune import Timing, choose
from tests.kernels.kernel_checks import needs_tilelang

VERSION = "1.2"
EVERY = [(card, field, name) for card, fields in ALTERNATIVES.items() for field in fields for name in fields[field]]


def build(field: str, tile: Any) -> Kernel | None:
    if tile is None:
        return None
    if field == "qkv":
        return gemm_rope_kernel(1024, 1024, 64, "bfloat16", tile)
    if field.startswith("geglu"):
        return gemm_geglu_kernel(2624, 1024, tile=tile)
    return attn_kernel(16, 64, reach=64 if field == "attn_window" else None, tile=tile)


@needs_tilelang
@pytest.mark.parametrize(("card", "field", "name"), EVERY, ids=str)
def test_every_alternative_lowers_for_its_card(card: tuple[int, int], field: str, name: str) -> None:
    kernel = build(field, ALTERNATIVES[card][field][name])
    arch = f"sm_{card[0]}{card[1]}"
    assert kernel is None or ("wgmma" if arch == "sm_90" else "mma_sync") in kernel.cuda_source(arch)


def test_the_first_alternative_is_the_table_s() -> None:
    for card, fields in ALTERNATIVES.items():
        for field, named in fields.items():
            assert next(iter(named.values())) == getattr(TABLE[card], field), (card, field)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A card of the table, with an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tiles, "capability", lambda _: (9, 0))
    monkeypatch.setattr(tiles, "tilelang_version", lambda: VERSION)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    tiles_on.cache_clear()
    yield "NVIDIA H200"
    tiles_on.cache_clear()


def keep(card: str, version: str, choices: Any) -> Path:
    path = choices_file(card)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"tilelang": version, "choices": choices}))
    return path


DEVICE = torch.device("cuda", 0)


def test_without_measurements_the_table_s_shapes_are_taken(card: str) -> None:
    assert tiles_on(DEVICE) == TABLE[9, 0]


def test_what_was_kept_for_the_card_is_taken(card: str, tmp_path: Path) -> None:
    path = keep(card, VERSION, {"qkv": "library", "geglu": "blocks", "attn": "no such shape", "other": "x"})
    assert path == tmp_path / "laya" / "tiles" / "NVIDIA-H200.json"
    found = tiles_on(DEVICE)
    assert (found.qkv, found.geglu) == (None, ALTERNATIVES[9, 0]["geglu"]["blocks"])
    assert (found.attn, found.gemm) == (TABLE[9, 0].attn, TABLE[9, 0].gemm)


def test_measurements_of_another_tilelang_say_nothing(card: str) -> None:
    keep(card, "1.1", {"qkv": "library"})
    assert tiles_on(DEVICE) == TABLE[9, 0]


@pytest.mark.parametrize("content", ["{", "[]", '{"tilelang": "1.2"}', '{"tilelang": "1.2", "choices": 3}'])
def test_a_file_of_something_else_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(BackendError, match=r"a\.json: expected what laya\.tl_kernels\.tune writes"):
        read_choices(path, VERSION)


def test_an_alternative_must_be_clearly_faster_than_the_table_s() -> None:
    own, near, far = Timing("attn", "a", 1.0), Timing("attn", "b", 0.985), Timing("attn", "c", 0.95)
    assert choose([own, near]) is own
    assert choose([own, near, far]) is far


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_gpu_measures_every_alternative_and_keeps_the_fastest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.checkpoints import make_checkpoint  # noqa: PLC0415 - with what a checkpoint is made of

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["tune", str(make_checkpoint(tmp_path / "tiny"))])
    tune.main()
    kept = json.loads(choices_file(torch.cuda.get_device_name()).read_text())
    fields = ALTERNATIVES.get(torch.cuda.get_device_capability(), {})
    assert kept["choices"].keys() == fields.keys()
    assert all(name in fields[field] for field, name in kept["choices"].items())
    assert "kept in" in capsys.readouterr().out
