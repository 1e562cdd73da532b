"""What each backend costs at boot: seconds to the first answer, cold and restarted, memory, graphs and cache entries.

    python benchmarks/bench_compile_defaults.py CHECKPOINT [--configurations eager compile …] [--out FILE]

Each configuration runs twice in processes of its own, first with empty caches, then with what the first left there.
Of torch.compile's share, `trace_s` is reading the model, which no cache spares, and `backend_s` what its cache may.
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

import torch
from measuring import describe_run, existing_folder, publish, results_file

COLUMNS = [
    *("configuration", "start", "first_answer_s", "load_s", "trace_s", "backend_s", "second_answer_ms", "graphs"),
    *("cache_hits", "cache_files", "cache_mb", "weights_gb", "peak_gb_32x1024"),
]
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "eager": {"backend": "eager"},
    "compile=True": {"compile": True, "compile_cache": True},
    "compile=True, reduce-overhead": {"compile": True, "compile_cache": True, "compile_mode": "reduce-overhead"},
    "compile": {"backend": "compile", "strict": True},
    "tilelang": {"backend": "tilelang", "strict": True},
    "aot": {"backend": "aot", "strict": True},
    "onnx": {"backend": "onnx", "strict": True},
}

CHILD = """
import json, os, sys, time
started = float(sys.argv[1]); checkpoint = sys.argv[2]; options = json.loads(sys.argv[3])
import torch, laya
from laya.inputs import synthetic_inputs
question = {"q": {"type": "noul", "instructions": "w1 w2 w3"}}
loading = time.time(); agent = laya.load(checkpoint, **options); load_s = time.time() - loading
agent.predict("w4 w5 w6", question); first_s = time.time() - started
again = time.perf_counter(); agent.predict("w7 w8 w9", question); second_ms = (time.perf_counter() - again) * 1000
cuda = agent.device.type == "cuda"
weights = torch.cuda.memory_allocated() / 1e9 if cuda else None
rows, length = (32, 1024) if cuda else (4, 128)
length = min(length, agent.checkpoint.max_len)
inputs = synthetic_inputs((rows, length, 2), agent.device)
cuda and torch.cuda.reset_peak_memory_stats()
agent.backend_object.forward(inputs)[0].cpu()
peak = torch.cuda.max_memory_allocated() / 1e9 if cuda else None
graphs = hits = trace_s = backend_s = None
if "torch._dynamo" in sys.modules:
    from torch._dynamo.utils import compilation_time_metrics as spent, counters
    trace_s, backend_s = (sum(spent.get(step, ())) for step in ("bytecode_tracing", "OutputGraph.call_user_compiler"))
    graphs, hits = counters["stats"]["unique_graphs"], counters["inductor"]["fxgraph_cache_hit"]
print(json.dumps({"first_answer_s": first_s, "load_s": load_s, "trace_s": trace_s, "backend_s": backend_s,
                  "second_answer_ms": second_ms, "graphs": graphs, "cache_hits": hits, "weights_gb": weights,
                  "peak_gb_32x1024": peak, "backend": agent.backend}))
"""

CACHES = ("HOME", "XDG_CACHE_HOME", "TILELANG_CACHE_DIR", "TRITON_CACHE_DIR")
PREPARE = {
    "aot": "import sys, laya; laya.export_aot(sys.argv[1])",
    "onnx": "import sys, laya; laya.export_onnx(sys.argv[1])",
}


def measure(name: str, checkpoint: str) -> Iterator[dict[str, Any]]:
    """A cold start and a restart, and before them whatever the configuration must have exported."""
    with tempfile.TemporaryDirectory() as folder:
        places = {variable: f"{folder}/{variable}" for variable in CACHES}
        environment = {**os.environ, **places}
        for variable in ("TORCHINDUCTOR_CACHE_DIR", "LAYA_INDUCTOR_CACHE_DIR"):
            environment.pop(variable, None)
        for place in places.values():
            Path(place).mkdir()
        if name in PREPARE:
            line = {"configuration": name, "start": "export"}
            started = time.time()
            command = [sys.executable, "-c", PREPARE[name], checkpoint]
            done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False)
            if done.returncode:
                yield line | {"error": done.returncode}
                return
            yield line | {"first_answer_s": time.time() - started} | _cache(Path(folder))
        for start in ("cold", "restart"):
            command = [sys.executable, "-c", CHILD, str(time.time()), checkpoint, json.dumps(CONFIGURATIONS[name])]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=False)
            found = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"error": done.returncode}
            yield {"configuration": name, "start": start} | found | _cache(Path(folder))


def _cache(folder: Path) -> dict[str, Any]:
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return {"cache_files": len(sizes), "cache_mb": round(sum(sizes) / 1e6, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=existing_folder, help="a folder")
    parser.add_argument(
        "--configurations",
        nargs="+",
        choices=CONFIGURATIONS,
        default=["eager", "compile=True"],
        help="which to start (eager, compile=True)",
    )
    parser.add_argument("--commit", help="for the result, where there is no git")
    parser.add_argument("--out", type=results_file, help="append the JSON lines here")
    options = parser.parse_args()
    about = describe_run(options.commit, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    failed: list[str] = []

    def lines() -> Iterator[dict[str, Any]]:
        for name in options.configurations:
            for line in measure(name, str(options.checkpoint)):
                if "error" in line:
                    failed.append(f"{name} ({line['start']})")
                yield line | about

    publish("Boot", lines(), COLUMNS, options.out)
    if failed:
        parser.exit(1, f"no answer, for the reasons above, from: {', '.join(failed)}\n")


if __name__ == "__main__":
    main()
