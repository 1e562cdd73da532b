"""The command line as a user types it, on the embedded defaults: no server is configured."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import sqlalchemy as sa
import yaml

from jobs.store import lifecycle, recovery, reports
from jobs.store.database import Database
from jobs.store.lifecycle import JobOptions
from schemas.job import JobSpec, JobStatus
from schemas.tables import jobs as jobs_table
from schemas.tables import results, shards
from tests.integration.service import QUESTIONS, make_texts, write_tickets
from tests.plans import even_plan
from tests.traps import set_traps

COMMAND = str(Path(sys.executable).with_name("laya-batch"))
Cli = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A user's folder with tickets, questions, an empty data folder, and modules that nobody may import."""
    set_traps(tmp_path)
    (tmp_path / "triage.yaml").write_text(yaml.safe_dump(QUESTIONS, sort_keys=False))
    write_tickets(tmp_path / "tickets.parquet", [*make_texts(150), None])
    return tmp_path


@pytest.fixture
def cli(home: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    monkeypatch.setenv("LAYA_BATCH_DATA_DIR", str(home / "data"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("COLUMNS", "120")

    def call(*arguments: str, code: int = 0) -> "subprocess.CompletedProcess[str]":
        done = subprocess.run([COMMAND, *arguments], cwd=home, capture_output=True, text=True, timeout=180, check=False)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    return call


def run_arguments(checkpoint: Path) -> list[str]:
    asked = ("tickets.parquet", "--questions", "triage.yaml", "--state", "text", "--row-id", "ticket")
    return ["run", *asked, "--checkpoint", str(checkpoint), "--name", "try"]


def test_one_command_scores_a_file_and_the_others_show_what_came_out(
    cli: Cli, home: Path, tiny_checkpoint: Path
) -> None:
    shown = cli(*run_arguments(tiny_checkpoint)).stdout
    for expected in (
        "refund",
        "anger",
        "team",
        "billing",
        "annoyed",
        "null_state",
        "eager on cpu",
        "rows/s",
        "padding",
    ):
        assert expected in shown
    assert f"database: sqlite:///{home}/data/laya-batch.db" in shown
    assert "try" in cli("list").stdout
    status = json.loads(cli("status", "1", "--json").stdout)
    assert (status["status"], status["rows"], status["answers"], status["row_errors"]) == ("succeeded", 151, 450, 1)
    assert "succeeded" in cli("status", "1").stdout
    assert "t0" in cli("results", "1", "--limit", "3").stdout
    rows = [json.loads(line) for line in cli("results", "1", "--limit", "4", "--json").stdout.splitlines()]
    assert [row["row_id"] for row in rows] == ["t0", "t0", "t0", "t1"]
    assert set(rows[2]["probabilities"]) == {"billing", "tech"} or set(rows[1]["probabilities"])
    assert "450 answers written to scores.parquet" in cli("export", "1", "scores.parquet").stdout
    assert pq.read_table(home / "scores.parquet").num_rows == 450
    assert not list(home.glob("*.partial"))
    assert "Answers" in cli("watch", "1").stdout
    assert "stopped" in cli("workers").stdout
    assert f"there is no folder {home}/none" in cli("export", "1", "none/scores.parquet", code=1).stderr
    assert "null_state" in cli("errors", "1").stdout
    assert "cannot go from succeeded" in cli("cancel", "1", code=1).stderr


def test_ctrl_c_leaves_a_job_that_run_resumes(cli: Cli, home: Path, tiny_checkpoint: Path) -> None:
    write_tickets(home / "tickets.parquet", make_texts(3000))
    environment = {**os.environ, "LAYA_BATCH_MAX_BATCH_TOKENS": "1024", "LAYA_BATCH_ROWS_PER_SHARD": "500"}
    running = subprocess.Popen(
        [COMMAND, *run_arguments(tiny_checkpoint)], cwd=home, env=environment, stderr=subprocess.PIPE, text=True
    )
    engine = sa.create_engine(f"sqlite:///{home / 'data' / 'laya-batch.db'}")

    def count(statement: sa.Select[tuple[int]]) -> int:
        try:
            with engine.connect() as connection:
                return connection.scalar(statement) or 0
        except sa.exc.OperationalError:
            return 0

    deadline = time.monotonic() + 120
    saved = sa.select(sa.func.count()).select_from(results)
    while count(saved) == 0:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    _, error = running.communicate(timeout=120)
    assert running.returncode == 130
    assert "laya-batch run --resume 1" in error
    running_shards = sa.select(sa.func.count()).select_from(shards).where(shards.c.status == "running")
    assert count(running_shards) == 0
    before = count(saved)
    assert 0 < before < 9000
    refused = cli("run", "--resume", "1", "--max-row-errors", "3", code=1).stderr
    assert "max_row_errors changes only with a job that has ended" in refused
    shown = cli("run", "--resume", "1").stdout
    assert "job 1 succeeded" in shown
    assert count(saved) == 9000
    assert count(sa.select(sa.func.count()).select_from(jobs_table)) == 1
    assert "nothing to resume" in cli("run", "--resume", "1", code=1).stderr
    engine.dispose()


def test_run_leaves_a_services_servers_and_other_jobs_alone(
    cli: Cli, home: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAYA_BATCH_RESEND_S", "0.1")
    monkeypatch.setenv("LAYA_BATCH_SWEEP_S", "0.2")
    db = Database(f"sqlite:///{home / 'data' / 'laya-batch.db'}")
    db.migrate()
    spec = JobSpec(inputs=["/elsewhere/a.parquet"], questions=QUESTIONS, state=["text"])
    lifecycle.create_job(db, spec, JobOptions("other"), even_plan(1, 5, "/elsewhere/a.parquet"))
    monkeypatch.setenv("LAYA_BATCH_DATABASE_URL", "postgresql://nobody@127.0.0.1:1/none")
    monkeypatch.setenv("LAYA_BATCH_BROKER_URL", "redis://127.0.0.1:1/0")
    assert "job 2 succeeded" in cli(*run_arguments(tiny_checkpoint)).stdout
    assert reports.get_job(db, 1).status is JobStatus.QUEUED
    assert len(recovery.list_queued(db, 1)) == 1
    db.close()


def test_a_checkpoint_that_cannot_be_loaded_ends_the_run_with_the_reason(
    cli: Cli, home: Path, tiny_checkpoint: Path
) -> None:
    broken = Path(shutil.copytree(tiny_checkpoint, home / "broken"))
    (broken / "encoder" / "config.json").write_text("{}")
    error = cli(*run_arguments(broken), code=1).stderr
    assert "the worker ended" in error
    assert "encoder/config.json" in error
    assert "job 1 is cancelled, as each attempt would end so: mend the checkpoint, or name another" in error
    assert "--resume" not in error


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (
            ["run", "none.parquet", "--questions", "triage.yaml", "--state", "text"],
            "none.parquet: no such file or folder",
        ),
        (["run", "tickets.parquet", "--questions", "none.yaml", "--state", "text"], "none.yaml: 1 problem(s)"),
        (
            ["run", "tickets.parquet", "--questions", "triage.yaml", "--state", "body"],
            "no column 'body'; it has ticket, text",
        ),
        (
            ["run", "tickets.parquet", "--questions", "triage.yaml", "--state", "text", "--backend", "fast"],
            "backend: Input should be 'auto', 'eager'",
        ),
        (
            ["run", "tickets.parquet", "--questions", "triage.yaml", "--state", "text", "--checkpoint", "./none"],
            "checkpoint ./none: no such folder",
        ),
        (["submit", "tickets.parquet", "--questions", "triage.yaml", "--state", "text"], "LAYA_BATCH_BROKER_URL"),
        (["worker"], "LAYA_BATCH_BROKER_URL"),
        (["status", "7"], "there is no job 7; `laya-batch list` shows the jobs"),
        (["export", "7", "x.parquet"], "there is no job 7"),
        (["status", "99999999999999999999"], "there is no job 99999999999999999999"),
    ],
)
def test_a_mistake_is_one_clear_message_and_queues_nothing(cli: Cli, arguments: list[str], problem: str) -> None:
    error = cli(*arguments, code=1).stderr
    assert problem in error
    assert "Traceback" not in error
    assert cli("list").stdout == ""


@pytest.mark.parametrize(
    ("variable", "value", "problem"),
    [
        ("LAYA_BATCH_DATABASE_URL", "mysql://h/db", "write postgresql://"),
        ("LAYA_BATCH_BROKER_URL", "redis://h:x/0", "is not a Redis URL"),
        ("LAYA_BATCH_BROKER_URL", "redis://h/notdb", "is not a Redis URL"),
        ("LAYA_BATCH_DATA_DIR", "/proc/none", "cannot be made"),
    ],
)
def test_a_wrong_setting_is_one_clear_message(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, problem: str
) -> None:
    monkeypatch.setenv(variable, value)
    error = cli("list", code=1).stderr
    assert problem in error
    assert "Traceback" not in error


def test_files_behind_links_and_in_folders_with_commas_are_read(cli: Cli, home: Path, tiny_checkpoint: Path) -> None:
    real = home / "a, b" / "real.parquet"
    real.parent.mkdir()
    (home / "tickets.parquet").rename(real)
    (home / "tickets.parquet").symlink_to(real)
    assert "job 1 succeeded" in cli(*run_arguments(tiny_checkpoint)).stdout


def test_submitting_imports_no_model_code() -> None:
    check = (
        "import sys, jobs, jobs.cli; sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'tokenizers')))"
    )
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
