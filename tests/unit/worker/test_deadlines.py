"""What works on a row's own data has a deadline, after which the parent ends the process."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.settings import load_settings
from jobs.store import lifecycle
from jobs.store.database import Database
from jobs.store.leases import claim_shard
from jobs.store.lifecycle import JobOptions
from jobs.store.recovery import list_queued
from schemas.job import JobSpec, Suspects
from schemas.message import ShardMessage
from tests.plans import plan_job
from worker import suspects, windows
from worker.session import Session
from worker.vitals import Vitals


class ReachedError(Exception):
    """The step ran, and did not end in time."""


@pytest.mark.parametrize(
    ("module", "step"), [(windows, "divide_window"), (suspects, "read_row_id")], ids=["languages", "id"]
)
def test_a_step_that_hangs_is_overdue(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, step: str
) -> None:
    pq.write_table(pa.table({"text": ["a"], "id": ["x"]}), tmp_path / "a.parquet")
    questions = {"q": {"type": "noul", "instructions": "x"}}
    spec = JobSpec(inputs=[str(tmp_path)], questions=questions, state=["text"], row_id="id")
    job_id = lifecycle.create_job(db, spec, JobOptions(), plan_job(spec, 10, []))
    (queued,) = list_queued(db, job_id)
    claim = claim_shard(db, ShardMessage(job_id=job_id, shard_id=queued.shard_id), "w", 60)
    assert claim is not None
    session = Session(load_settings(batch_timeout_s=1e-9), db, "w", 1, Vitals())

    def hang(*_: Any) -> None:
        assert session.vitals.overdue() == "prepare"
        raise ReachedError

    monkeypatch.setattr(module, step, hang)
    with pytest.raises(ReachedError):
        if module is windows:
            next(windows.prepare_windows(session, claim, {}))
        else:
            suspects._errors_of(session, claim, Suspects(0, 0, 3, "killed"))
    assert session.vitals.overdue() is None
