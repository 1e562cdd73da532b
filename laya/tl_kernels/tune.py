"""Measures which tile shapes a card is fastest with, and keeps the answer: `python -m laya.tl_kernels.tune CHECKPOINT`.

For every kernel that `tiles.ALTERNATIVES` knows more than one shape of, they run by turns at the checkpoint's widths,
the library's way among them where it is one. What is fastest is kept under the cache folder, and taken from then on for
models of those widths on any card of that name. Without it kernels take the shapes of the table.
"""

import argparse
import functools
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name every reader of PyTorch knows
from rich.console import Console
from rich.table import Table

from laya import tl_kernels as kernels
from laya.attention import rotary_table
from laya.errors import BackendError, LayaError
from laya.model import ModelConfig
from laya.opening import LoadOptions, open_named
from laya.operations import geglu
from laya.settings import read_settings
from laya.tl_kernels.arguments import HALVES, capability
from laya.tl_kernels.kernel import tilelang
from laya.tl_kernels.product import launch
from laya.tl_kernels.tiles import ALTERNATIVES, kept_file, made_with

LARGE, SMALL = 32_768, 128  # tokens of a batch
ROUNDS, CALLS = 7, 20
GAIN = 0.98  # of the table's time: what an alternative must stay under, since two runs differ by a percent or two


@dataclass(frozen=True)
class Timing:
    field: str
    name: str
    median_ms: float


def tune(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Iterator[list[Timing]]:
    """The alternatives of each field of `Tiles` that such a model uses, the table's own first, in milliseconds.

    One that this card cannot run is told and left out, and a field with no two that run as well.
    """
    unused = {"qkv", "qkv_small"} if config.attention_bias else set()
    unused |= {"geglu", "geglu_small"} if config.mlp_bias else set()
    for field, alternatives in ALTERNATIVES.get(capability(device), {}).items():
        if field in unused:
            continue
        work = Work(config, dtype, device, SMALL if field.endswith("_small") else LARGE)
        runs = {}
        for name, tile in alternatives.items():
            try:
                run = work.run(field, tile)
                runs[name] = recorded(run)
                torch.cuda.synchronize(device)
            except (BackendError, RuntimeError, ValueError) as error:
                print(f"{field}, {name}: left out, since it does not run here: {error}")
        if len(runs) > 1 and next(iter(alternatives)) in runs:
            medians = recorded_medians_ms([*runs.values()])
            yield [Timing(field, name, median) for name, median in zip(runs, medians, strict=True)]


class Work:
    """What each kernel does in a forward pass over `tokens` tokens of random values."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device, tokens: int) -> None:
        self._config = config
        width = config.hidden_size
        self._x = torch.randn(tokens, width, device=device).to(dtype)
        rows = max(2 * config.intermediate_size, 3 * width)
        self._weight = (torch.randn(rows, width, device=device) * 0.03).to(dtype)
        self._length = length = 256 if tokens == LARGE else 64  # of each sequence
        self._table = rotary_table(length, width // config.heads, 10_000.0).to(device)
        self._positions = (torch.arange(tokens, device=device) % length).int()
        self._offsets = torch.arange(0, tokens + 1, length, device=device).int()

    def run(self, field: str, tile: Any) -> Callable[[], object]:
        """The work of that field of `Tiles`, in that shape; None stands for the library."""
        config, x, dtype = self._config, self._x, HALVES[self._x.dtype]
        inner, width = config.intermediate_size, config.hidden_size
        if field.startswith("geglu"):
            weight, out = self._weight[: 2 * inner], x.new_empty(len(x), inner)
            if tile is None:
                return lambda: geglu(F.linear(x, weight))
            kernel = kernels.gemm_geglu_kernel(inner, width, dtype, tile)
            return lambda: launch("gemm_geglu", kernel, tile, [x, weight], out)
        weight = self._weight[: 3 * width]
        if field.startswith("qkv") and tile is not None:
            return lambda: kernels.gemm_rope(x, weight, self._positions, self._table, self._length, tile)
        qkv = F.linear(x, weight).view(len(x), 3, config.heads, -1)
        if field.startswith("qkv"):
            return lambda: kernels.rope(F.linear(x, weight).view_as(qkv), self._positions, self._table, self._length)
        reach = config.reach if field == "attn_window" else None
        attention = kernels.attn_kernel(config.heads, width // config.heads, dtype, reach, tile)
        flat, out = qkv.view(len(x), -1), torch.empty_like(x)
        return lambda: attention(flat, self._offsets, self._length, out, device=x.device)


def recorded(run: Callable[[], object]) -> Callable[[], object]:
    """Some calls of it as one CUDA graph, so that the card is measured and not how fast it is told what to do."""
    run()  # what is compiled or loaded at a first call cannot be recorded
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            run()
    return functools.partial(_replay, graph, run)


def _replay(graph: torch.cuda.CUDAGraph, _run: Callable[[], object]) -> None:
    """With the call that was recorded held beside it, since the graph reads its tensors."""
    graph.replay()


def recorded_medians_ms(replays: list[Callable[[], object]]) -> list[float]:
    """`medians_ms` of what `recorded` gave, for one call of each."""
    return [median / CALLS for median in medians_ms(replays, calls=1)]


def medians_ms(runs: list[Callable[[], object]], rounds: int = ROUNDS, calls: int = CALLS) -> list[float]:
    """The medians of some calls of each, which take turns, so that a card that slows down slows all of them."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for run, found in zip(runs, times, strict=True):
            run()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            for _ in range(calls):
                run()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) / calls)
    return [sorted(found)[len(found) // 2] for found in times]


def choose(timings: list[Timing]) -> Timing:
    """The fastest, unless the table's own is as good."""
    best = min(timings, key=lambda timing: timing.median_ms)
    return best if best.median_ms < GAIN * timings[0].median_ms else timings[0]


def main() -> None:
    """Measure, print, and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="a folder, a name or a Hub id; only its sizes are read")
    parser.add_argument("--fp16", action="store_true", help="measure fp16 instead of bf16")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device to measure")
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        tilelang()
        keep_fastest(options.checkpoint, torch.float16 if options.fp16 else torch.bfloat16, device)
    except LayaError as error:
        parser.error(str(error))


def keep_fastest(checkpoint: str, dtype: torch.dtype, device: torch.device) -> None:
    """Measure, print, and keep. Raises LayaError when there is no such checkpoint or the card is too old."""
    config = open_named(checkpoint, LoadOptions(), read_settings())[0].model_config
    card, choices = torch.cuda.get_device_name(device), {}
    table = Table("kernel", "shape", "ms", "chosen", title=card)
    for timings in tune(config, dtype, device):
        chosen = choose(timings)
        choices[chosen.field] = chosen.name
        for timing in timings:
            table.add_row(timing.field, timing.name, f"{timing.median_ms:.3f}", "yes" if timing is chosen else "")
    if not choices:
        print(f"there is nothing to choose for a {card}")
        return
    Console(markup=False, emoji=False).print(table)
    path = kept_file(read_settings().cache_dir / "tiles", card, config, HALVES[dtype])
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    found = {"made_with": made_with(capability(device)), "choices": choices}
    unfinished.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)
    print(f"kept in {path}")


if __name__ == "__main__":
    main()
