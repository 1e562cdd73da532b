"""Tokens and rows per second of the engine by backend, beside the public package and the device's own ceiling.

    python benchmarks/bench_engine.py CHECKPOINT [--backends eager tilelang compile] [--peer .cache/peer] [--out FILE]
    python benchmarks/bench_engine.py CHECKPOINT --backends tilelang --profile

Two workloads. `bulk`: texts of long-tailed length with three questions each, from encoded sequences to replies
(`encoded`), the same in the order they came (`encoded, unsorted`), and with tokenising (`predict_batch`). `grid`: from
one row of one length to as many as a batch takes, encoded. Every line has the share of the matrix-product rate that was
measured in the same run, and the peak memory. With `--profile` nothing is timed, which it would slow: each line is a
step's share of what the GPU does in `bulk`. CHECKPOINT is a folder, a name or a Hub id; for speed alone random weights
of the same shape serve as well.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import (
    QUESTIONS,
    at_least_one,
    best_seconds,
    bulk_states,
    describe_run,
    flop_per_token,
    matmul_flop_per_s,
    package_folder,
    publish,
    results_file,
    text_of,
    told,
)

import laya
from laya.packing import PackingLimits, default_limits

COLUMNS = ["backend", "workload", "rows", "row_tokens", "tokens_per_s", "rows_per_s", "matmul_share", "ms", "peak_gb"]
PROFILE_COLUMNS = ["backend", "step", "ms", "share", "busy"]
ONE_QUESTION = {"churn": QUESTIONS["churn"]}
BACKENDS = ("eager", "compile", "tilelang", "aot")
GRID_ROWS, GRID_WORDS = (1, 8, 64), (4, 96, 224, 480, 992)

# By what the name of a kernel has in it, the first that fits.
STEPS = {
    "gemm_geglu": ("gemm_geglu",),
    "gemm_rope": ("gemm_rope",),
    "add_ln": ("add_ln",),
    "attention": ("attn", "flash"),
    "rope": ("rope",),
    "cuBLAS": ("nvjet", "cublas", "cutlass", "gemm"),
}

PEER = """
import json, sys, time, warnings
import laya, torch
warnings.simplefilter("ignore")
asked = json.load(open(sys.argv[1]))
for backend in asked["backends"]:
    agent = laya.load(asked["checkpoint"], backend=backend)
    for states, questions in asked["workloads"]:
        ask = lambda states: agent.predict_batch(states, questions, batch_size=64, sort_by_length=True)
        ask(states[:256])
        torch.cuda.is_available() and torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(10 if len(states) * len(questions) <= 64 else 2):
            started = time.perf_counter(); replies = ask(states); times.append(time.perf_counter() - started)
        tokens = sum(reply["usage"]["input_tokens"] for reply in replies)
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
        print(json.dumps({"backend": agent.backend, "seconds": min(times), "tokens": tokens, "peak": peak}), flush=True)
"""


def grid(agent: laya.Agent) -> Iterator[list[str]]:
    """Texts of each length, as many as the grid's rows and as one batch takes."""
    random = np.random.default_rng(1)
    prepared, most = agent.prepare(ONE_QUESTION), default_limits(agent.device.type).max_tokens
    for words in GRID_WORDS:
        full = most // int(agent.encode([text_of(words, random)], prepared).lengths[0])
        for rows in sorted({*(rows for rows in GRID_ROWS if rows < full), full}):
            yield [text_of(words, random) for _ in range(rows)]


def measure_backend(agent: laya.Agent, states: list[str], texts: list[list[str]]) -> Iterator[dict[str, Any]]:
    """Every workload on the active backend; `texts` are the grid's."""
    limits = default_limits(agent.device.type)
    yield measure(agent, "bulk, encoded", states, QUESTIONS, limits)
    yield measure(agent, "bulk, encoded, unsorted", states, QUESTIONS, replace(limits, sort_by_length=False))
    encoded = agent.encode(states, agent.prepare(QUESTIONS))
    _reset_peak(agent)
    seconds = best_seconds(lambda: agent.predict_batch(states, QUESTIONS), agent.device)
    yield rates(agent, "bulk, predict_batch", encoded, seconds)
    for some in texts:
        yield measure(agent, "grid", some, ONE_QUESTION, limits)


def measure(
    agent: laya.Agent, workload: str, states: list[str], questions: dict[str, Any], limits: PackingLimits
) -> dict[str, Any]:
    """From encoded sequences to replies."""
    prepared = agent.prepare(questions)
    encoded = agent.encode(states, prepared)
    _reset_peak(agent)
    repeats = 2 if len(encoded) > 64 else 10
    seconds = best_seconds(lambda: agent.predict_encoded(len(states), prepared, encoded, limits), agent.device, repeats)
    return rates(agent, workload, encoded, seconds)


def profile(agent: laya.Agent, states: list[str]) -> Iterator[dict[str, Any]]:
    """Each step's share of the kernels' time over the bulk workload, and how much of the whole they fill."""
    encoded = agent.encode(states, agent.prepare(QUESTIONS))
    batches = agent.pack(encoded)
    for batch in batches:
        agent.forward(encoded, batch)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in agent.forward_each(encoded, batches):
            pass
        torch.cuda.synchronize(agent.device)
    cuda = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [event for event in cuda if not event.name.startswith("Mem")]  # copies, which overlap them
    spent: dict[str, float] = dict.fromkeys((*STEPS, "else"), 0.0)
    for event in kernels:
        found = (step for step, words in STEPS.items() if any(word in event.name for word in words))
        spent[next(found, "else")] += event.time_range.elapsed_us()
    total = sum(spent.values())
    whole = max(event.time_range.end for event in kernels) - min(event.time_range.start for event in kernels)
    for step, us in spent.items():
        line = {"backend": agent.backend, "workload": "bulk, profile", "step": step, "ms": round(us / 1000, 3)}
        yield line | {"share": round(us / total, 4), "busy": round(total / whole, 4)}


def rates(agent: laya.Agent, workload: str, encoded: laya.EncodedSequences, seconds: float) -> dict[str, Any]:
    tokens = int(encoded.lengths.sum())
    return {
        "backend": agent.backend,
        "dtype": str(agent.dtype).removeprefix("torch."),
        "workload": workload,
        "rows": len(encoded),
        "row_tokens": round(tokens / len(encoded)),
        "tokens_per_s": round(tokens / seconds, 1),
        "rows_per_s": round(len(encoded) / seconds, 1),
        "ms": round(seconds * 1000, 3),
        "peak_gb": round(torch.cuda.max_memory_allocated(agent.device) / 1e9, 3)
        if agent.device.type == "cuda"
        else None,
    }


def measure_peer(
    peer: Path, checkpoint: str, workloads: list[tuple[str, list[str], dict[str, Any]]], backends: list[str]
) -> Iterator[dict[str, Any]]:
    """The public package on (workload, states, questions), in a process of its own: it has our import name."""
    with tempfile.TemporaryDirectory() as folder:
        request = Path(folder) / "request.json"
        asked = [(states, questions) for _, states, questions in workloads]
        request.write_text(json.dumps({"checkpoint": checkpoint, "workloads": asked, "backends": backends}))
        ours = Path(laya.__file__).parents[1]
        paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and Path(path) != ours]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(peer.resolve()), *paths])}
        command = [sys.executable, "-c", PEER, str(request)]
        done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, check=True)
    for line, (workload, states, questions) in zip(done.stdout.splitlines(), cycle(workloads), strict=False):
        found, rows = json.loads(line), len(states) * len(questions)
        yield {
            "backend": f"public package, {found['backend']}",
            "workload": workload,
            "rows": rows,
            "row_tokens": round(found["tokens"] / rows),
            "tokens_per_s": round(found["tokens"] / found["seconds"], 1),
            "rows_per_s": round(rows / found["seconds"], 1),
            "ms": round(found["seconds"] * 1000, 3),
            "peak_gb": found["peak"] and round(found["peak"] / 1e9, 3),
        }


def measure_all(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    states = bulk_states(options.states)
    agent = laya.load(options.checkpoint)
    ceiling = matmul_flop_per_s(agent.device, agent.dtype)
    about = describe_run(options.commit, agent.device) | {"matmul_tflop_per_s": round(ceiling / 1e12, 3)}
    work = flop_per_token(agent.checkpoint.model_config)
    texts = [] if options.bulk_only else list(grid(agent))

    def complete(line: dict[str, Any]) -> dict[str, Any]:
        share = {"matmul_share": round(line["tokens_per_s"] * work / ceiling, 4)} if "tokens_per_s" in line else {}
        return line | share | about

    for name in options.backends:
        agent.deaccelerate()
        started, reserved = time.perf_counter(), _reserved(agent)
        agent.set_backend(name, strict=True)
        agent.warmup()
        boot_s = round(time.perf_counter() - started, 2)
        held = {"boot_s": boot_s, "warm_gb": round((_reserved(agent) - reserved) / 1e9, 3)}
        lines = profile(agent, states) if options.profile else measure_backend(agent, states, texts)
        for line in lines:
            yield complete(line | held)
    agent.deaccelerate()
    del agent
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if options.peer and not options.profile:
        workloads = [("bulk, predict_batch", states, QUESTIONS), *(("grid", some, ONE_QUESTION) for some in texts)]
        for line in measure_peer(options.peer, options.checkpoint, workloads, options.peer_backends):
            yield complete(line)


def _reserved(agent: laya.Agent) -> int:
    """Bytes that torch holds of the device's memory, beside what it could give back."""
    if agent.device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(agent.device)


def _reset_peak(agent: laya.Agent) -> None:
    if agent.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(agent.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="a folder, a name or a Hub id")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=["eager"], help="which to measure (eager)")
    parser.add_argument("--states", type=at_least_one, default=1024, help="texts of the bulk workload (1024)")
    parser.add_argument("--bulk-only", action="store_true", help="leave the grid of rows and lengths out")
    parser.add_argument("--profile", action="store_true", help="show where the GPU's time goes, instead of timing")
    parser.add_argument("--peer", type=package_folder, help="folder with the public package, to be measured too")
    parser.add_argument("--peer-backends", nargs="+", default=["eager"], help="which of its backends (eager)")
    parser.add_argument("--commit", help="for the result, where there is no git")
    parser.add_argument("--out", type=results_file, help="append the JSON lines here")
    options = parser.parse_args()
    if options.profile and not torch.cuda.is_available():
        parser.error("--profile is for a CUDA device, and torch finds none")
    if Path(options.checkpoint).is_dir():
        options.checkpoint = str(Path(options.checkpoint).resolve())
    with told(parser):
        publish("Engine", measure_all(options), PROFILE_COLUMNS if options.profile else COLUMNS, options.out)


if __name__ == "__main__":
    main()
