"""Inputs as they really are, through the command line and a service: no rows, odd parts, odd values, other formats."""

import datetime
import json
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sqlalchemy as sa
import yaml

import jobs
from schemas.job import JobStatus
from tests.integration.service import QUESTIONS, Service

COMMAND = str(Path(sys.executable).with_name("laya-batch"))
Cli = Callable[..., "subprocess.CompletedProcess[str]"]
NOTHING = pa.table({"text": pa.array([], pa.string()), "id": pa.array([], pa.string())})


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    (tmp_path / "q.yaml").write_text(yaml.safe_dump(QUESTIONS, sort_keys=False))
    for variable, value in {"LAYA_BATCH_DATA_DIR": str(tmp_path / "data"), "COLUMNS": "80"}.items():
        monkeypatch.setenv(variable, value)

    def call(*arguments: object, code: int = 0) -> "subprocess.CompletedProcess[str]":
        command = [COMMAND, *map(str, arguments)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False)
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done

    return call


def test_a_quiet_night_is_a_job_of_no_rows_that_succeeds_at_once(
    cli: Cli, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    pq.write_table(NOTHING, tmp_path / "night.parquet")
    asked = ("run", "night.parquet", "--questions", "q.yaml", "--state", "text", "--row-id", "id")
    assert "job 1 succeeded" in cli(*asked, "--checkpoint", tiny_checkpoint).stdout
    status = json.loads(cli("status", 1, "--json").stdout)
    assert (status["status"], status["rows"], status["shards"], status["answers"]) == ("succeeded", 0, 0, 0)
    assert "succeeded" in cli("status", 1).stdout
    assert "job 1 succeeded" in cli("watch", 1).stdout
    assert "succeeded" in cli("list").stdout
    assert "there are no answers of job 1" in cli("results", 1).stderr
    assert cli("results", 1, "--json").stdout == ""
    assert "0 answers written" in cli("export", 1, "out.parquet").stdout
    assert pq.read_table(tmp_path / "out.parquet").num_rows == 0
    assert "nothing to resume" in cli("run", "--resume", 1, code=1).stderr
    assert "cannot go from succeeded" in cli("cancel", 1, code=1).stderr


def test_a_service_ends_a_job_of_no_rows_without_a_worker(service: Service) -> None:
    path = service.folder / "night.parquet"
    pq.write_table(NOTHING, path)
    for _ in range(2):
        job = jobs.submit(
            path,
            questions=QUESTIONS,
            state="text",
            checkpoint=service.settings.checkpoint,
            idempotency_key="night",
            settings=service.settings,
        )
        assert (job.id, job.status) == (1, JobStatus.SUCCEEDED)
    assert jobs.wait(1, timeout_s=1, settings=service.settings).finished_at is not None
    (progress,) = service.query(sa.text("SELECT percent_done, shards_done FROM job_progress"))
    assert (progress.percent_done, progress.shards_done) == (100, 0)


def test_odd_parts_of_one_table_are_answered_whole(cli: Cli, tmp_path: Path, tiny_checkpoint: Path) -> None:
    folder = tmp_path / "in" / "lang=de"
    folder.mkdir(parents=True)
    end = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)
    times = pa.array([0, 10**9 + 1, None], pa.timestamp("ns", "Europe/Berlin"))
    odd = pa.array([[("seen", 1)], [("a", 1), ("a", 2)], []], pa.map_(pa.string(), pa.int8()))
    parts = {
        "a.parquet": {
            "text": ["refund please", "why", "🎉"],
            "id": pa.array([1, 2, 3], pa.int32()),
            "at": times,
            "odd": odd,
        },
        "b.PARQUET": {
            "text": pa.array([], pa.large_string()),
            "id": pa.nulls(0),
            "at": pa.nulls(0),
            "odd": pa.nulls(0),
        },
        "part-00000": {
            "text": pa.array(["the invoice"], pa.large_string()),
            "id": pa.array([4], pa.int64()),
            "at": pa.array([end], pa.timestamp("us", "Europe/Berlin")),
            "odd": pa.nulls(1),
        },
    }
    for name, columns in parts.items():
        pq.write_table(pa.table(columns), folder / name)
    states = [part for column in ("text", "at", "odd", "lang") for part in ("--state", column)]
    asked = ("run", "in", "--questions", "q.yaml", *states, "--row-id", "id", "--checkpoint", tiny_checkpoint)
    assert "job 1 succeeded" in cli(*asked).stdout
    rows = [json.loads(line) for line in cli("results", 1, "--limit", 100, "--json").stdout.splitlines()]
    assert [row["row_id"] for row in rows[::3]] == ["1", "3", "4"]
    (error,) = [json.loads(line) for line in cli("errors", 1, "--json").stdout.splitlines()]
    assert (error["row_id"], error["code"]) == ("2", "not_text")


def test_ids_in_their_documented_form_and_what_is_amiss_with_them_told(
    cli: Cli, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    some = [uuid.UUID(int=number).bytes for number in (7, 8, 7, 9)]
    ids = pa.ExtensionArray.from_storage(pa.uuid(), pa.array([*some, None], pa.binary(16)))
    pq.write_table(pa.table({"text": ["refund", None, "why", "a", "b"], "id": ids}), tmp_path / "a.parquet")
    asked = ("run", "a.parquet", "--questions", "q.yaml", "--state", "text", "--row-id", "id")
    refused = cli(*asked, "--checkpoint", tiny_checkpoint, "--unique-ids", code=1).stderr
    assert "1 rows have no id, the first is row 4 of" in refused
    assert "1 ids come more than once, as '00000000-0000-0000-0000-000000000007' in row 0 of" in refused
    shown = cli(*asked, "--checkpoint", tiny_checkpoint).stdout
    assert "1 of 5 rows have no 'id'" in shown
    assert "2 of 5 rows share with another row their 'id'" in shown
    status = json.loads(cli("status", 1, "--json").stdout)
    assert (status["null_ids"], status["repeated_ids"]) == (1, 2)
    rows = [json.loads(line) for line in cli("results", 1, "--json").stdout.splitlines()]
    assert rows[0]["row_id"] == "00000000-0000-0000-0000-000000000007"


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("tickets.csv", b"id,text\n1,refund\n", "is text or CSV, and laya-batch reads Parquet; convert it: python -c"),
        (
            "tickets.jsonl",
            b'{"id": 1, "text": "refund"}\n',
            "is JSON, and laya-batch reads Parquet; convert it: pyth",
        ),
        ("tickets.parquet.gz", b"\x1f\x8b\x08\x00", "is compressed with gzip"),
        ("tickets.parquet", b"PAR1 and no more", "is Parquet that is cut off or damaged"),
        ("tickets.xlsx", b"PK\x03\x04rest", "is a zip archive or an Excel sheet"),
        ("empty.parquet", b"", "is an empty file"),
    ],
)
def test_a_file_of_another_format_is_named_with_what_to_do(
    cli: Cli, tmp_path: Path, tiny_checkpoint: Path, name: str, content: bytes, problem: str
) -> None:
    (tmp_path / name).write_bytes(content)
    asked = ("--questions", "q.yaml", "--state", "text", "--checkpoint", tiny_checkpoint)
    error = cli("run", name, *asked, code=1).stderr
    assert name in error
    assert problem in error
    if "python -c" in error:  # the line converts it
        command = error[error.index("python -c") :].strip()
        subprocess.run(command.replace("python", sys.executable, 1), shell=True, cwd=tmp_path, check=True)
        assert pq.read_table(tmp_path / "tickets.parquet").column("text").to_pylist() == ["refund"]


def test_a_folder_without_parquet_says_what_is_there(cli: Cli, tmp_path: Path, tiny_checkpoint: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(10):
        (folder / f"{number}.csv").write_text("a")
    (folder / "notes").write_text("a")
    (folder / "_SUCCESS").touch()
    asked = ("--questions", "q.yaml", "--state", "text", "--checkpoint", tiny_checkpoint)
    assert "(11 files: 10 .csv, 1 without an ending)" in cli("run", "in", *asked, code=1).stderr
