"""Tokens and rows per second of the engine by backend, beside the public package and the device's own ceiling.

    python benchmarks/bench_engine.py CHECKPOINT [--backends eager tilelang compile] [--peer .cache/peer] [--out FILE]

Three workloads: `bulk`, texts of long-tailed length with three questions each, once tokenised before the clock starts
(encoded) and once within it (predict_batch); and `grid`, some number of rows of one length. Every line has the share of
the matrix-product rate measured in the same run, and the peak memory. CHECKPOINT is a folder, a name or a Hub id; for
speed alone random weights of the same shape serve as well.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import (
    QUESTIONS,
    best_seconds,
    bulk_states,
    describe_run,
    flop_per_token,
    matmul_flop_per_s,
    publish,
    text_of,
)

import laya

COLUMNS = ["backend", "workload", "rows", "row_tokens", "tokens_per_s", "rows_per_s", "matmul_share", "ms", "peak_gb"]
GRID_ROWS, GRID_WORDS = (1, 8, 64, 512), (16, 96, 224, 480, 992)

PEER = """
import json, sys, time, warnings
import laya, torch
warnings.simplefilter("ignore")
asked = json.load(open(sys.argv[1]))
for backend in asked["backends"]:
    agent = laya.load(asked["checkpoint"], backend=backend)
    ask = lambda states: agent.predict_batch(states, asked["questions"], batch_size=64, sort_by_length=True)
    ask(asked["states"][:256])
    torch.cuda.is_available() and torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(2):
        started = time.perf_counter(); replies = ask(asked["states"]); times.append(time.perf_counter() - started)
    tokens = sum(reply["usage"]["input_tokens"] for reply in replies)
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    print(json.dumps({"backend": agent.backend, "seconds": min(times), "tokens": tokens, "peak": peak}), flush=True)
"""


def measure_backend(agent: laya.Agent, states: list[str], grid: bool) -> Iterator[dict[str, Any]]:
    """Every workload on the active backend."""
    prepared = agent.prepare(QUESTIONS)
    yield measure(agent, "bulk, encoded", agent.encode(states, prepared))
    encoded = agent.encode(states, prepared)
    _reset_peak(agent)
    seconds = best_seconds(lambda: agent.predict_batch(states, QUESTIONS), agent.device)
    yield rates(agent, "bulk, predict_batch", encoded, seconds)
    random = np.random.default_rng(1)
    for words in GRID_WORDS if grid else ():
        for rows in GRID_ROWS:
            one = {"churn": QUESTIONS["churn"]}
            texts = [text_of(words, random) for _ in range(rows)]
            yield measure(agent, "grid", agent.encode(texts, agent.prepare(one)))


def measure(agent: laya.Agent, workload: str, encoded: laya.EncodedSequences) -> dict[str, Any]:
    batches = agent.pack(encoded)
    _reset_peak(agent)
    repeats = 2 if len(encoded) > 64 else 10
    seconds = best_seconds(lambda: list(agent.forward_each(encoded, batches)), agent.device, repeats)
    return rates(agent, workload, encoded, seconds)


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


def measure_peer(peer: Path, checkpoint: str, states: list[str], backends: list[str]) -> Iterator[dict[str, Any]]:
    """The public package on the bulk workload, in a process of its own: it has our import name."""
    with tempfile.TemporaryDirectory() as folder:
        request = Path(folder) / "request.json"
        asked = {"checkpoint": checkpoint, "states": states, "questions": QUESTIONS, "backends": backends}
        request.write_text(json.dumps(asked))
        ours = Path(laya.__file__).parents[1]
        paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and Path(path) != ours]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(peer.resolve()), *paths])}
        command = [sys.executable, "-c", PEER, str(request)]
        done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, check=True)
    rows = len(states) * len(QUESTIONS)
    for line in done.stdout.splitlines():
        found = json.loads(line)
        yield {
            "backend": f"public package, {found['backend']}",
            "workload": "bulk, predict_batch",
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
    for name in options.backends:
        started = time.perf_counter()
        agent.set_backend(name, strict=True)
        agent.warmup()
        boot_s = round(time.perf_counter() - started, 2)
        for line in measure_backend(agent, states, not options.bulk_only):
            yield line | {"matmul_share": round(line["tokens_per_s"] * work / ceiling, 4), "boot_s": boot_s} | about
    agent.deaccelerate()
    del agent
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if options.peer and options.peer.is_dir():
        for line in measure_peer(options.peer, options.checkpoint, states, options.peer_backends):
            yield line | {"matmul_share": round(line["tokens_per_s"] * work / ceiling, 4)} | about


def _reset_peak(agent: laya.Agent) -> None:
    if agent.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(agent.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--backends", nargs="+", default=["eager"])
    parser.add_argument("--states", type=int, default=1024)
    parser.add_argument("--bulk-only", action="store_true", help="leave the grid of rows and lengths out")
    parser.add_argument("--peer", type=Path, help="folder with the public package")
    parser.add_argument("--peer-backends", nargs="+", default=["eager"])
    parser.add_argument("--commit", help="for the result, where there is no git")
    parser.add_argument("--out", type=Path, help="append the JSON lines here")
    options = parser.parse_args()
    if Path(options.checkpoint).is_dir():
        options.checkpoint = str(Path(options.checkpoint).resolve())
    publish("Engine", measure_all(options), COLUMNS, options.out)


if __name__ == "__main__":
    main()
