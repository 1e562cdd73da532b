"""Rows per second of a whole job, beside the public package's `predict_batch` on the same checkpoint and states.

    python benchmarks/bench_job.py [--rows 20000] [--busy 1] [--checkpoint examples/demo/checkpoint]
                                   [--peer .cache/peer]

The job is a real one: `laya-batch run` from Parquet to SQLite, timed from its first claim to its end, so with reading
and writing. The public package gets the states as a list and writes nothing; its loading is not counted. They run one
after the other in the same environment. `--busy N` runs N busy loops beside them. Prints one JSON line, with the CPU
seconds of each, loading included.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.settings import load_settings
from jobs.store import reports
from jobs.store.database import Database
from schemas.question_file import read_questions

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "examples" / "demo"

PEER = """
import json, sys, time
import laya
asked = json.load(open(sys.argv[1]))
agent = laya.load(asked["checkpoint"], device=asked["device"], backend="eager")
agent.predict_batch(asked["states"][:64], asked["questions"], batch_size=32, sort_by_length=True)
started = time.perf_counter()
agent.predict_batch(asked["states"], asked["questions"], batch_size=32, sort_by_length=True)
print(json.dumps({"version": laya.__version__, "seconds": time.perf_counter() - started}))
"""


def demo_texts(rows: int) -> list[str]:
    """Texts of the demo's three sources, repeated until there are enough."""
    files = [DEMO / "data" / "train.parquet", DEMO / "data" / "validation.parquet", DEMO / "held_out.parquet"]
    texts = [text for file in files for text in pq.read_table(file, columns=["text"])["text"].to_pylist()]
    return list(islice(cycle(texts), rows))


def run_job(folder: Path, texts: list[str], checkpoint: Path) -> dict[str, Any]:
    """Score the texts by `laya-batch run`; returns seconds, padding and the share of each stage."""
    pq.write_table(pa.table({"text": texts}), folder / "texts.parquet", row_group_size=5000)
    asked = ("--questions", str(DEMO / "questions.yaml"), "--state", "text", "--checkpoint", str(checkpoint))
    command = [str(Path(sys.executable).with_name("laya-batch")), "run", str(folder / "texts.parquet"), *asked]
    subprocess.run([*command, "--data-dir", str(folder / "data")], check=True, stdout=subprocess.DEVNULL)
    db = Database(load_settings(data_dir=folder / "data").resolved_database_url)
    job, (measured,) = reports.get_job(db, 1), reports.measure_backends(db, 1)
    db.close()
    if job.started_at is None or job.finished_at is None:
        raise RuntimeError("the job did not finish")
    stages_ms = {stage: measured[f"{stage}_ms"] for stage in ("read", "tokenise", "forward", "decode", "write")}
    return {
        "seconds": (job.finished_at - job.started_at).total_seconds(),
        "backend": measured["backend"],
        "device": measured["device"],
        "padding": round(1 - measured["tokens"] / measured["padded_tokens"], 4),
        "stage_shares": {stage: round(ms / sum(stages_ms.values()), 4) for stage, ms in stages_ms.items()},
    }


def run_peer(folder: Path, texts: list[str], checkpoint: Path, peer: Path, device: str) -> dict[str, Any]:
    """Score the texts by the public package in a process of its own; returns its version and seconds."""
    request = folder / "request.json"
    questions = read_questions(DEMO / "questions.yaml")
    asked = {"checkpoint": str(checkpoint), "states": texts, "questions": questions, "device": device}
    request.write_text(json.dumps(asked))
    # From a folder without our package of the same name.
    done = subprocess.run(
        [sys.executable, "-c", PEER, str(request)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(peer.resolve())},
        stdout=subprocess.PIPE,
        check=True,
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Run processes that each keep one CPU busy, until the block ends."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def cpu_seconds() -> float:
    """Return the CPU time of all processes that this one has started and waited for, with their own."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--checkpoint", type=Path, default=DEMO / "checkpoint")
    parser.add_argument("--peer", type=Path, default=ROOT / ".cache" / "peer")
    parser.add_argument("--busy", type=int, default=0, help="busy loops beside it")
    options = parser.parse_args()
    checkpoint, texts = options.checkpoint.resolve(), demo_texts(options.rows)
    with tempfile.TemporaryDirectory() as folder, busy_loops(options.busy):
        ours = run_job(Path(folder), texts, checkpoint)
        ours["cpu_seconds"] = round(cpu_seconds(), 1)
        device = "cpu" if ours["device"] == "cpu" else "cuda"
        theirs = run_peer(Path(folder), texts, checkpoint, options.peer, device) if options.peer.is_dir() else None
        if theirs is not None:
            theirs["cpu_seconds"] = round(cpu_seconds() - ours["cpu_seconds"], 1)
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False)
    report = {
        "benchmark": "job",
        "commit": commit.stdout.strip(),
        "python": platform.python_version(),
        **{package: version(package) for package in ("torch", "transformers", "laya-batch")},
        "rows": options.rows,
        "busy": options.busy,
        "job": ours,
        "job_rows_per_s": round(options.rows / ours["seconds"], 1),
    }
    if theirs is not None:
        report |= {"peer": theirs, "ratio": round(theirs["seconds"] / ours["seconds"], 2)}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
