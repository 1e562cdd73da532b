"""What reaches a terminal, a pipe or a script: help, odd texts, plain output, and names that are not UTF-8."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa
import typer
import yaml

from jobs.cli import cli
from jobs.store import leases, lifecycle, workers
from jobs.store.database import Database
from jobs.store.leases import BatchRecord, RowError
from jobs.store.lifecycle import JobOptions
from schemas.job import JobSpec
from schemas.message import ShardMessage
from schemas.tables import jobs as jobs_table
from schemas.tables import shards
from schemas.tables import workers as workers_table
from tests.commands import run_commands
from tests.integration.service import QUESTIONS, write_tickets
from tests.plans import even_plan

COMMAND = str(Path(sys.executable).with_name("laya-batch"))
CHECKPOINT = Path(__file__).resolve().parents[2] / "examples" / "demo" / "checkpoint"
COMMANDS = list(typer.main.get_command(cli).commands)  # type: ignore[attr-defined]

LITERAL = "[/x] [billing] :smile: 😀 مرحبا 退款 {0} %s [bold red]"
STEERING = "\x1b[31mred\x07\x9b\u202e\nforged line"
STEERING_SHOWN = "\\x1b[31mred\\x07\\x9b\\u202e\\nforged line"
ODD = LITERAL + STEERING
ODD_SHOWN = LITERAL + STEERING_SHOWN
COLOUR = re.compile(r"\x1b\[[0-9;]*m|\x1b\[\?25[hl]|\x1b\[2K|\x1b\[1A|\r")  # what Rich itself sends


@pytest.fixture
def odd_data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with a failed job and a dead worker, in which every text is odd."""
    folder = tmp_path / "data"
    monkeypatch.setenv("LAYA_BATCH_DATA_DIR", str(folder))
    db = Database(f"sqlite:///{folder / 'laya-batch.db'}")
    db.migrate()
    questions = {
        ODD[:90]: {"type": "choice", "instructions": "x", "criteria": {ODD: None, "tech": None}},
        "level": {"type": "score", "instructions": "x", "criteria": ["low", ODD]},
        "yes": {"type": "noul", "instructions": "x"},
    }
    spec = JobSpec(inputs=["/a"], questions=questions, state=["text"])
    plan = even_plan(1, 2, f"/{ODD}.parquet")
    job_id = lifecycle.create_job(db, spec, JobOptions(ODD), plan)
    worker_id = workers.start_worker(db, workers.WorkerStart(f"cpu-1@{ODD}-1", "h", 1, 1, "cpu", ODD, "auto"))
    with db.read() as connection:
        shard_id = connection.scalar(sa.select(shards.c.id)) or 0
    claim = leases.claim_shard(db, ShardMessage(job_id=job_id, shard_id=shard_id), "w", 60)
    assert claim is not None
    record = BatchRecord(worker_id, "eager", None, "cpu", "float32", 32, 3, 100, 160, 1.0, 2.0, 3.0, 4.0)
    sure = {"confidence": 0.6, "answer_confidence": 0.8, "act_probability": 1.0, "state_tokens_dropped": 7}
    rows = [
        {"question": ODD[:90], "type": "choice", "choice": ODD, "probabilities": {ODD: 0.8, "tech": 0.2}},
        {"question": "level", "type": "score", "score": 0.8, "probabilities": {"0": 0.2, "1": 0.8}},
        {"question": "yes", "type": "noul", "noul": 0.008, "probabilities": {"false": 0.992, "true": 0.008}},
    ]
    columns = ("choice", "score", "noul")
    leases.save_batch(
        db,
        claim,
        60,
        record,
        [{"row_number": 0, "row_id": ODD, **sure, **dict.fromkeys(columns), **row} for row in rows],
    )
    leases.save_row_errors(db, claim, 60, [RowError(1, "*", ODD, "null_state", ODD)])
    workers.mark_failed(db, worker_id, ODD)
    with db.write() as connection:
        connection.execute(sa.update(jobs_table).values(status="failed", error=ODD, finished_at=sa.func.now()))
    db.close()
    return folder


@pytest.mark.parametrize("terminal", [False, True])
def test_the_help_of_every_command_is_plain_text_of_80_columns(terminal: bool) -> None:
    shown = run_commands([["--help"], *([command, "--help"] for command in COMMANDS)], terminal=terminal)
    assert len(COMMANDS) >= 14
    for command, help_text in zip(["", *COMMANDS], shown, strict=True):
        assert help_text.code == "0", help_text.text
        assert f"Usage: laya-batch {command}" in help_text.text
        assert max(map(len, help_text.text.splitlines())) <= 80
    for command in ("run", "submit"):
        words = " ".join(shown[1 + COMMANDS.index(command)].text.split())
        assert "OWNER/REPOSITORY[/SUBFOLDER] on the Hub" in words


READING = [
    *(["list"], ["status", "1"], ["watch", "1"], ["results", "1"], ["errors", "1"], ["workers"]),
]


@pytest.mark.parametrize("terminal", [False, True])
def test_names_labels_ids_and_errors_are_shown_as_they_are(odd_data_dir: Path, terminal: bool) -> None:
    (odd_data_dir / f"in {LITERAL.replace('/', '')}.txt").write_text("x")
    wrong = [
        ["status", f"{ODD}"],
        ["export", "1", f"/none/{ODD}.parquet"],
        ["run", f"/none/{ODD}", "--questions", f"{ODD}", "--state", "text"],
        [ODD],
    ]
    for columns in (80, 1500):
        shown = run_commands([*READING, *wrong], terminal=terminal, columns=columns)
        for arguments, one in zip([*READING, *wrong], shown, strict=True):
            failed = {"watch": "1", "export": "1", "run": "1", "status": "0"}.get(arguments[0], "0")
            if arguments in wrong:
                failed = "2" if arguments[0] in ("status", ODD) else "1"
            text = COLOUR.sub("", one.text)
            assert one.code == failed, text
            assert not re.search("[\x1b\x07\x9b\u202e]", text), (arguments, text)
            assert "\nforged" not in text
            if columns > 80 and one.code != "2":  # a usage error need not repeat what was typed
                in_error = ODD_SHOWN.replace("\\n", "\n  ")  # an error's own lines stay lines
                assert ODD_SHOWN in text or in_error in text or LITERAL in text, text


def test_what_is_odd_comes_back_whole_from_json(odd_data_dir: Path) -> None:
    commands = [["results", "1", "--json"], ["errors", "1", "--json"], ["status", "1", "--json"]]
    results, errors, status = run_commands(commands)
    rows = [json.loads(line) for line in results.text.splitlines()]
    assert {row["question"]: row["answer"] for row in rows} == {ODD[:90]: ODD, "level": ODD, "yes": "false"}
    (error,) = [json.loads(line) for line in errors.text.splitlines()]
    assert error == {"row_number": 1, "row_id": ODD, "question": "*", "code": "null_state", "message": ODD}
    assert json.loads(status.text)["name"] == ODD
    assert not re.search("[\x1b\x07\x9b\u202e]", results.text + errors.text + status.text)


def test_states_and_times_are_whole_at_80_columns(odd_data_dir: Path) -> None:
    db = Database(f"sqlite:///{odd_data_dir / 'laya-batch.db'}")
    with db.write() as connection:
        connection.execute(sa.update(jobs_table).values(rows=123_456_789, status="succeeded"))
        connection.execute(
            sa.update(workers_table).values(
                name="cuda-0-1a2b3c@a-very-long-host-name.example.org-12345", status="ready"
            )
        )
        connection.execute(sa.text("UPDATE workers SET heartbeat_at = '2026-01-01 00:00:00.000000'"))
        connection.execute(sa.text("UPDATE jobs SET created_at = '2026-01-02 03:04:05.000000', priority = 9"))
    db.close()
    listed, seen = run_commands([["list"], ["workers"]])
    for whole in ("succeeded", "123,456,789", "2026-01-02 03:04"):
        assert whole in listed.text
    assert "ready, silent" in seen.text
    (watched,) = run_commands([["watch", "1"]], terminal=True)
    assert "2/123,456,789 rows  – rows/s  ETA " in COLOUR.sub("", watched.text)
    assert max(map(len, [*listed.text.splitlines(), *seen.text.splitlines()])) <= 80


def test_the_summary_says_which_texts_were_cut_and_names_answers_as_people_do(odd_data_dir: Path) -> None:
    (shown,) = run_commands([["watch", "1"]], columns=1500)
    assert "1 rows (50.0%), 3 answers (100.0%) saw only a part of a text" in shown.text
    assert re.search(r"yes +noul +false", shown.text)
    (results,) = run_commands([["results", "1"]], columns=1500)
    assert re.search(r"yes +false +0\.992 +0\.600", results.text)
    (first,) = run_commands([["results", "1", "--limit", "1"]])
    assert "1 of 3 answers of job 1; --limit shows more" in first.text


def test_what_scripts_read_is_never_decorated(
    redis_url: str, odd_data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAYA_BATCH_BROKER_URL", redis_url)
    monkeypatch.setenv("LAYA_BATCH_QUEUE", f"test-{os.getpid()}-plain")
    folder = odd_data_dir.parent
    (folder / "q.yaml").write_text(yaml.safe_dump(QUESTIONS))
    write_tickets(folder / "t.parquet", ["a"])
    write_tickets(folder / "folder" / "t.parquet", ["a"])
    submit = ["submit", "t.parquet", "--questions", "q.yaml", "--state", "text", "--checkpoint", str(CHECKPOINT)]
    for terminal in (False, True):
        asked = [
            *(["status", "1", "--json"], ["results", "1", "--json"], ["errors", "1", "--json"]),
            *(["export", "1", "o.parquet", "--partial", "--overwrite"], ["cancel", "1"], submit),
        ]
        *found, export, cancel, submitted = run_commands(asked, terminal=terminal, cwd=folder, FORCE_COLOR="1")
        for one in found:
            for line in one.text.splitlines():
                json.loads(line)
        assert export.text.splitlines()[-1].endswith("3 answers written to o.parquet")
        assert re.fullmatch(r"\d+\n?", submitted.text), submitted.text
        assert cancel.code == "1"


def test_a_name_that_is_not_utf8_is_one_clear_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAYA_BATCH_DATA_DIR", str(tmp_path / "data"))
    (tmp_path / "q.yaml").write_text(yaml.safe_dump(QUESTIONS))
    write_tickets(tmp_path / "t.parquet", ["a"])
    folder = tmp_path / "folder"
    folder.mkdir()
    latin = "caf\udce9"  # how Python reads the bytes of a Latin-1 name
    (tmp_path / "t.parquet").rename(folder / f"{latin}.parquet")
    run = ["run", "--questions", "q.yaml", "--state", "text"]
    asked = [
        *([*run, "folder"], [*run, "folder/*.parquet"], [*run, f"folder/{latin}.parquet"]),
        *(
            [*run, "folder", "--name", latin],
            [*run, "folder", "--checkpoint", latin],
            [*run, "folder", "--row-id", latin],
        ),
        *([*run, "folder", "--data-dir", latin], ["list", "--data-dir", latin], ["export", "1", f"{latin}.parquet"]),
        *(
            ["submit", latin, "--questions", latin, "--state", latin],
            [latin],
            ["status", latin],
            ["list", f"--{latin}"],
        ),
    ]
    for one in run_commands(asked, cwd=tmp_path):
        assert one.code == "1", one.text
        assert "caf\\xe9" in one.text
        assert "UTF-8" in one.text
    # A name in the environment, or of the folder that all is in.
    (tmp_path / "here" / latin).mkdir(parents=True)
    write_tickets(tmp_path / "t.parquet", ["a"])
    monkeypatch.chdir(tmp_path / "here" / latin)
    there = run_commands([[*run, "../../t.parquet"], ["list"]], LAYA_BATCH_DATA_DIR=latin)
    relative = run_commands([[*run, "../../t.parquet"], ["list"]], LAYA_BATCH_DATA_DIR="data")
    for shown in (*there, *relative):
        assert shown.code == "1", shown.text
        assert "not UTF-8" in shown.text


@pytest.mark.parametrize(
    "variables", [{"PYTHONIOENCODING": "ascii"}, {"LANG": "C", "LC_ALL": "C"}, {"PYTHONUTF8": "0", "LC_ALL": "POSIX"}]
)
def test_an_output_that_cannot_encode_is_no_traceback(odd_data_dir: Path, variables: dict[str, str]) -> None:
    asked = [*READING, ["results", "1", "--json"], ["--help"], ["run", "--help"]]
    for arguments, one in zip(asked, run_commands(asked, **variables), strict=True):
        assert one.code == ("1" if arguments[0] == "watch" else "0"), one.text
        if "--json" in arguments:
            assert [json.loads(line)["row_id"] for line in one.text.splitlines()] == [ODD] * 3


def test_a_closed_pipe_is_no_traceback(odd_data_dir: Path) -> None:
    done = subprocess.run(
        f"{COMMAND} results 1 --json | true", shell=True, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr == ""
