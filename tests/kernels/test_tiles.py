"""The table of tile shapes, its alternatives, and what is kept of measuring them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from laya import tl_kernels as kernels
from laya.attention import rotary_table
from laya.model import ModelConfig
from laya.tl_kernels import attn_kernel, gemm_geglu_kernel, gemm_rope_kernel, reference, tune
from laya.tl_kernels.kernel import Kernel
from laya.tl_kernels.tiles import ALTERNATIVES, TABLE, kept_file, made_with, tiles_for, tuned_tiles
from laya.tl_kernels.tune import Timing, choose
from tests.kernels.kernel_checks import ROUNDING, error, gpu, needs_tilelang, random

EVERY = [(card, field, name) for card, fields in ALTERNATIVES.items() for field in fields for name in fields[field]]


def build(field: str, tile: Any) -> Kernel | None:
    if tile is None:
        return None
    if field.startswith("qkv"):
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


CARD = (9, 0)
CONFIG = ModelConfig(vocab_size=100, hidden_size=1024, intermediate_size=2624, heads=16, full_layers=(True,))


def keep(folder: Path, choices: Any, version: str | None = None) -> Path:
    path = kept_file(folder, "NVIDIA H200", CONFIG, "bfloat16")
    path.write_text(json.dumps({"made_with": version or made_with(CARD), "choices": choices}))
    return path


def test_without_measurements_the_table_s_shapes_are_taken(tmp_path: Path) -> None:
    assert tuned_tiles(CARD, tmp_path / "none.json") == tiles_for(CARD) == TABLE[CARD]


def test_a_file_is_for_one_card_model_and_dtype(tmp_path: Path) -> None:
    path = kept_file(tmp_path, "NVIDIA H200", CONFIG, "bfloat16")
    assert path == tmp_path / "NVIDIA-H200-1024-2624-16-64-bfloat16.json"
    others = [replace(CONFIG, hidden_size=768), replace(CONFIG, heads=8), replace(CONFIG, reach=32)]
    assert len({path, *(kept_file(tmp_path, "NVIDIA H200", one, "bfloat16") for one in others)}) == 4


@needs_tilelang
def test_what_was_kept_is_taken(tmp_path: Path) -> None:
    found = tuned_tiles(CARD, keep(tmp_path, {"qkv": "library", "geglu": "blocks"}))
    assert (found.qkv, found.geglu) == (None, ALTERNATIVES[CARD]["geglu"]["blocks"])
    assert (found.attn, found.gemm) == (TABLE[CARD].attn, TABLE[CARD].gemm)


@needs_tilelang
def test_measurements_of_another_tilelang_or_table_say_nothing(tmp_path: Path) -> None:
    assert tuned_tiles(CARD, keep(tmp_path, {"qkv": "library"}, "TileLang 0.1, shapes 0")) == TABLE[CARD]


@needs_tilelang
@pytest.mark.parametrize("choices", ["", 3, {"qkv": []}, {"qkv": "no such shape"}, {"other": "library"}], ids=str)
def test_a_file_of_something_else_is_named_and_the_table_serves(tmp_path: Path, choices: Any) -> None:
    path = keep(tmp_path, choices)
    with pytest.warns(RuntimeWarning, match=rf"{path.name} is not what laya\.tl_kernels\.tune writes"):
        assert tuned_tiles(CARD, path) == TABLE[CARD]


@pytest.mark.parametrize("content", ["", "{", "[]", "{}"])
def test_a_file_that_is_cut_short_is_named_and_the_table_serves(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.warns(RuntimeWarning, match=r"a\.json is not what laya\.tl_kernels\.tune writes"):
        assert tuned_tiles(CARD, path) == TABLE[CARD]


def test_an_alternative_must_be_clearly_faster_than_the_table_s() -> None:
    own, near, far = Timing("attn", "a", 1.0), Timing("attn", "b", 0.985), Timing("attn", "c", 0.95)
    assert choose([own, near]) is own
    assert choose([own, near, far]) is far


def test_tuning_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["tune", "anything"])
    with pytest.raises(SystemExit, match="2"):
        tune.main()
    assert "there is no CUDA device to measure" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize(("card", "field", "name"), EVERY, ids=str)
def test_gpu_every_alternative_answers_as_the_reference(card: tuple[int, int], field: str, name: str) -> None:
    device, half = gpu(), torch.bfloat16
    tile = ALTERNATIVES[card][field][name]
    if torch.cuda.get_device_capability(device) != card or tile is None:
        pytest.skip("not of this card, or the library's")
    x = random(1000, 256, dtype=half, device=device)
    weight = random(768, 256, dtype=half, device=device, scale=0.06)
    table, positions = rotary_table(250, 64, 1e4).to(device), (torch.arange(1000, device=device) % 250).int()
    offsets = torch.arange(0, 1001, 250, device=device).int()
    wide = (x.double(), weight.double())
    if field.startswith("qkv"):
        found = kernels.gemm_rope(x, weight, positions, table, 250, tile)
        want = reference.gemm_rope(*wide, positions, table.double(), 250)
    elif field.startswith("geglu"):
        found = kernels.gemm_geglu(x, weight, tile=tile)
        want = reference.gemm_geglu(*wide)
    else:
        qkv = random(1000, 3, 4, 64, dtype=half, device=device)
        reach = 64 if field == "attn_window" else None
        found = kernels.attn(qkv, offsets, 250, reach, tiles=replace(TABLE[card], attn=tile, attn_window=tile))
        want = reference.attn(qkv.double(), offsets, 250, reach)
    assert error(found, want) < (2.5 if field.startswith("attn") else 1) * ROUNDING[half]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_gpu_measures_every_alternative_and_keeps_the_fastest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.checkpoints import make_checkpoint  # noqa: PLC0415 - with what a checkpoint is made of

    fields = ALTERNATIVES.get(torch.cuda.get_device_capability())
    if fields is None:
        pytest.skip("this card has one set of shapes")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["tune", str(make_checkpoint(tmp_path / "tiny"))])
    tune.main()
    (path,) = (tmp_path / "laya" / "tiles").iterdir()
    kept = json.loads(path.read_text())["choices"]
    assert kept.keys() == fields.keys()
    assert tuned_tiles(torch.cuda.get_device_capability(), path)  # without a warning
    said = capsys.readouterr().out
    assert all(name in said for named in fields.values() for name in named)
    assert f"kept in {path.parent}" in said.replace("\n", "")
