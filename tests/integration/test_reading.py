"""The commands that read: which database, whether anybody works, how fast it was, and in which zone the times are."""

import re
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

import jobs
from jobs.progress import show_progress
from jobs.settings import follow_up, load_settings
from jobs.store import leases, lifecycle, reports, workers
from jobs.store.database import Database, seconds_from_now
from jobs.store.lifecycle import JobOptions
from schemas.job import JobSpec, JobStatus
from schemas.tables import batches
from schemas.tables import jobs as jobs_table
from schemas.tables import workers as workers_table
from tests.commands import run_commands
from tests.integration.test_store import LEASE_S, answers, claim, make_job, must_claim, record
from tests.plans import even_plan

COMMAND = str(Path(sys.executable).with_name("laya-batch"))


def start_worker(db: Database, status: str = "ready", silent_s: float = 0.0) -> None:
    worker_id = workers.start_worker(db, workers.WorkerStart("w", "h", 1, 1, "cpu", "english", "auto"))
    seen = {"status": status, "heartbeat_at": seconds_from_now(-silent_s)}
    with db.write() as connection:
        connection.execute(sa.update(workers_table).where(workers_table.c.id == worker_id).values(seen))


@pytest.fixture
def embedded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Database:
    """The database in the data folder, which has one queued job and no worker."""
    monkeypatch.setenv("LAYA_BATCH_DATA_DIR", str(tmp_path / "data"))
    db = Database(load_settings().resolved_database_url)
    db.migrate()
    make_job(db)
    return db


@pytest.mark.parametrize("terminal", [False, True])
def test_watch_says_that_no_worker_is_alive_and_leaves_after_its_time(embedded: Database, terminal: bool) -> None:
    never, stale, alive = "no worker has ever started", "no worker is alive since 20", "no worker"
    (shown,) = run_commands([["watch", "1", "--timeout", "0.2"]], terminal=terminal)
    assert shown.code == "124"
    assert never in shown.text
    assert "job 1 is still queued" in shown.text
    assert "go on with: laya-batch run --resume 1" in " ".join(shown.text.split())
    start_worker(embedded, "stopped", 7200)
    start_worker(embedded, "ready", 3600)
    (shown,) = run_commands([["watch", "1", "--timeout", "0"]], terminal=terminal, columns=200)
    assert stale in shown.text
    assert "(60 min ago)" in shown.text
    start_worker(embedded, "starting", 600)  # it loads its model, and its heart stands still meanwhile
    (shown,) = run_commands([["watch", "1", "--timeout", "0"]], terminal=terminal)
    assert shown.code == "124"
    assert alive not in shown.text
    embedded.close()


def test_wait_logs_that_no_worker_is_alive(embedded: Database, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(TimeoutError, match="job 1 is still queued"):
        jobs.wait(1, timeout_s=0)
    assert "job 1 waits: no worker has ever started on this database" in caplog.text
    embedded.close()


def test_without_a_terminal_watch_writes_a_line_for_each_state_and_one_a_minute(
    embedded: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    def states() -> Any:
        yield reports.get_job(embedded, 1)
        claimed = must_claim(embedded, 1)
        for first in range(0, 10, 2):
            leases.save_batch(embedded, claimed, LEASE_S, record(embedded), answers(first, 2))
            yield reports.get_job(embedded, 1)
            time.sleep(0.05)
        lifecycle.request_cancel(embedded, 1)
        leases.stop_shard(embedded, claimed)
        yield reports.get_job(embedded, 1)

    assert show_progress(states()).status is JobStatus.CANCELLED
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "job 1 queued: 0 of 20 rows, 0 row errors"
    assert lines[1] == "job 1 running: 2 of 20 rows, 0 row errors"
    assert re.fullmatch(r"job 1 cancelled: 10 of 20 rows, \d+ rows/s, 0 row errors", lines[2]), lines
    assert len(lines) == 3
    embedded.close()


def test_without_a_terminal_the_lines_between_have_speed_and_time_left(
    embedded: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    claimed = must_claim(embedded, 1)

    def states() -> Any:
        for first in range(0, 10, 2):
            leases.save_batch(embedded, claimed, LEASE_S, record(embedded), answers(first, 2))
            yield reports.get_job(embedded, 1)
            time.sleep(0.05)

    show_progress(states(), line_every_s=0)
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(r"job 1 running: 10 of 20 rows, \d+ rows/s, ETA 0:00:\d\d, 0 row errors", last), last
    embedded.close()


def test_one_rule_says_which_database_is_read(embedded: Database, tmp_path: Path, postgres_url: str) -> None:
    with embedded.write() as connection:
        connection.execute(sa.update(jobs_table).values(name="of run"))
    embedded.close()
    service = Database(postgres_url)
    service.migrate()
    make_job(service)
    with service.write() as connection:
        connection.execute(sa.update(jobs_table).values(name="of the service"))
    service.close()
    data_dir = str(tmp_path / "data")
    named = [
        ["list"],
        ["status", "1"],
        ["watch", "1", "--timeout", "0"],
        ["results", "1"],
        ["errors", "1"],
        ["workers"],
        ["export", "1", str(tmp_path / "x.parquet"), "--partial"],
    ]
    url = {"LAYA_BATCH_DATABASE_URL": postgres_url}
    watched = run_commands(named, **url)
    assert "start one with: laya-batch worker" in watched[2].text
    for shown in watched:
        assert f"for the jobs of `laya-batch run` add --data-dir {data_dir}" in shown.text, shown
    for arguments in (named, [[*one, "--data-dir", data_dir] for one in named[:-1]]):
        wanted = "of the service" if arguments is named else "of run"
        listed, status, *_ = shown = run_commands(arguments, **url)
        assert wanted in listed.text
        assert wanted in status.text
        if arguments is not named:
            assert not [one for one in shown if "for the jobs of" in one.text]
    (plain,) = run_commands([["list"]])
    assert "of run" in plain.text
    assert "--data-dir" not in plain.text
    (absent,) = run_commands([["list", "--data-dir", str(tmp_path / "none")]])
    assert absent.code == "1"
    assert "holds no database of `laya-batch run`" in absent.text
    assert not (tmp_path / "none").exists()


def test_times_are_utc_whatever_the_sessions_zone(postgres_url: str) -> None:
    separator = "&" if "?" in postgres_url else "?"
    db = Database(f"{postgres_url}{separator}options=-c%20timezone%3DAsia/Kathmandu")
    db.migrate()
    make_job(db)
    with db.write() as connection:
        assert connection.scalar(sa.text("SHOW timezone")) == "Asia/Kathmandu"
        connection.execute(sa.text("UPDATE jobs SET created_at = '2026-01-02 23:04:05+00'"))
    created = reports.get_job(db, 1).created_at
    assert created.isoformat() == "2026-01-02T23:04:05+00:00"
    db.close()
    zone = {"PGTZ": "Asia/Kathmandu", "TZ": "Asia/Kathmandu", "LAYA_BATCH_DATABASE_URL": postgres_url}
    listed, status = run_commands([["list"], ["status", "1", "--json"]], **zone)
    assert "2026-01-02 23:04" in listed.text
    assert '"created_at": "2026-01-02T23:04:05+00:00"' in status.text


def test_the_speed_counts_no_pause(db: Database) -> None:
    job_id = make_job(db, 3)
    for number in range(3):
        claimed = must_claim(db, job_id, number)
        leases.save_batch(db, claimed, LEASE_S, record(db), answers(number * 10, 5))
        leases.save_batch(db, claimed, LEASE_S, record(db), answers(number * 10 + 5, 5))
    with db.read() as connection:
        start = connection.scalar(sa.select(sa.func.min(batches.c.created_at)))
        ids = list(connection.scalars(sa.select(batches.c.id).order_by(batches.c.id)))
    assert start is not None
    # Two shards at a time, from 0 to 20 s, then a night, then one of 5 s. Each first batch took 8 s, decoded.
    ends_s = [8, 20, 10, 18, 50_000, 50_005]
    with db.write() as connection:
        for batch_id, end_s in zip(ids, ends_s, strict=True):
            connection.execute(
                sa.update(batches)
                .where(batches.c.id == batch_id)
                .values(
                    created_at=start + timedelta(seconds=end_s), forward_ms=8000, read_ms=0, tokenise_ms=0, decode_ms=0
                )
            )
    assert reports.measure_scoring_s(db, job_id) == pytest.approx(20 + 13, abs=0.01)
    assert reports.measure_scoring_s(db, job_id + 1) == 0


def test_a_scores_answer_is_its_nearest_level_on_both_stores(db: Database) -> None:
    levels = ["same", {"text": 'a "quoted" level'}, "same", "تماما"]
    question = {"type": "score", "instructions": "x", "criteria": levels}
    spec = JobSpec(inputs=["/a"], questions={'q["$.x"]': question}, state=["text"])
    job_id = lifecycle.create_job(db, spec, JobOptions(), even_plan(1, 10))
    claimed = claim(db, job_id)
    assert claimed is not None
    scores = [0.0, 0.49, 0.5, 1.5, 2.5, 2.999, 3.0, 0.9999999]
    rows = [
        {**row, "question": 'q["$.x"]', "type": "score", "noul": None, "score": score, "probabilities": {}}
        for row, score in zip(answers(0, 8), scores, strict=True)
    ]
    leases.save_batch(db, claimed, LEASE_S, record(db), rows)
    (batch,) = reports.read_results(db, job_id)
    quoted = '{"text": "a \\"quoted\\" level"}'
    assert batch["answer"].to_pylist() == ["same", "same", quoted, "same", "تماما", "تماما", "تماما", quoted]
    counted = {row["level"]: row["count"] for row in reports.count_answers(db, job_id)}
    assert counted == {0: 2, 1: 2, 2: 1, 3: 3}


def test_row_errors_are_read_as_results_are(db: Database) -> None:
    job_id = make_job(db, 1)
    errors = [leases.RowError(number, "*", None, "null_state", "is null") for number in (3, 1)]
    leases.save_row_errors(db, must_claim(db, job_id), LEASE_S, errors)
    settings = load_settings(database_url=db.url.render_as_string(hide_password=False))
    rows = jobs.row_errors(job_id, settings=settings).read_all().to_pylist()
    assert [row["row_number"] for row in rows] == [1, 3]
    assert jobs.row_errors(job_id, limit=1, settings=settings).read_all().num_rows == 1
    with pytest.raises(jobs.JobNotFoundError):
        jobs.row_errors(job_id + 1, settings=settings)


def test_what_run_prints_is_right_to_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAYA_BATCH_DATA_DIR", str(tmp_path))
    assert follow_up("results 1", load_settings()) == "laya-batch results 1"
    other = load_settings(data_dir=tmp_path / "o'ther dir")
    assert follow_up("results 1", other) == f"""laya-batch results 1 --data-dir '{tmp_path}/o'"'"'ther dir'"""
    monkeypatch.setenv("LAYA_BATCH_DATABASE_URL", "postgresql://h/d")
    assert follow_up("results 1", load_settings()) == f"laya-batch results 1 --data-dir {tmp_path}"
