"""`laya-batch run` stopped in every way: its workers drain, and neither its server nor its folder stays behind."""

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa
import yaml

from jobs.lifeline import LOCK, PREFIX, remove_stale_folders
from schemas.tables import results, shards
from tests.integration.service import QUESTIONS, make_texts, write_tickets
from tests.processes import is_running, kill, parent_of

COMMAND = str(Path(sys.executable).with_name("laya-batch"))
DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo" / "checkpoint"
WAIT_S = 60.0
HOLD_A_SERVER = """
import time
from jobs.embedded import embedded_servers
from jobs.settings import load_settings
with embedded_servers(load_settings()):
    print("up", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "t"  # short: a socket's path has a limit
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setenv("LAYA_BATCH_DATA_DIR", str(tmp_path / "data"))
    return folder


@pytest.fixture
def arguments(tmp_path: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A job that takes long enough to be stopped."""
    monkeypatch.setenv("LAYA_BATCH_MAX_BATCH_TOKENS", "1024")
    monkeypatch.setenv("LAYA_BATCH_ROWS_PER_SHARD", "500")
    questions = tmp_path / "triage.yaml"
    questions.write_text(yaml.safe_dump(QUESTIONS, sort_keys=False))
    path = write_tickets(tmp_path / "tickets.parquet", make_texts(6000))
    return ["run", str(path), "--questions", str(questions), "--state", "text", "--checkpoint", str(tiny_checkpoint)]


def test_a_closed_terminal_drains_the_job_and_leaves_nothing(
    temporary: Path, arguments: list[str], tmp_path: Path
) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(["setsid", "--ctty", COMMAND, *arguments], stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    try:
        wait_for(lambda: count(tmp_path, sa.select(sa.func.count()).select_from(results)) > 0)
    finally:
        os.close(ours)
    assert process.wait(WAIT_S) == 130
    assert_nothing_stays(temporary, tmp_path)


def test_a_killed_run_drains_the_job_and_leaves_nothing(temporary: Path, arguments: list[str], tmp_path: Path) -> None:
    process = subprocess.Popen([COMMAND, *arguments], stderr=subprocess.DEVNULL)
    wait_for(lambda: count(tmp_path, sa.select(sa.func.count()).select_from(results)) > 0)
    (server,) = servers_in(temporary)
    process.kill()
    process.wait(WAIT_S)
    wait_for(lambda: not is_running(server))
    wait_for(lambda: not list(temporary.glob(f"{PREFIX}*")))
    assert_nothing_stays(temporary, tmp_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_signal_before_the_job_begins_leaves_no_server(temporary: Path, tmp_path: Path, number: int) -> None:
    os.mkfifo(tmp_path / "triage.yaml")  # whoever reads the questions waits here
    command = [
        COMMAND,
        "run",
        "a.parquet",
        "--questions",
        str(tmp_path / "triage.yaml"),
        "--state",
        "text",
        "--checkpoint",
        str(DEMO),
    ]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    wait_for(lambda: servers_in(temporary))
    (server,) = servers_in(temporary)
    process.send_signal(number)
    process.wait(WAIT_S)
    wait_for(lambda: not is_running(server))
    wait_for(lambda: not list(temporary.glob(f"{PREFIX}*")))


def test_what_was_killed_with_its_watchdog_is_removed_by_the_next_run_and_no_other(temporary: Path) -> None:
    holders = [
        subprocess.Popen(
            [sys.executable, "-c", HOLD_A_SERVER], stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        for _ in range(2)
    ]
    for holder in holders:
        assert holder.stdout is not None
        with holder.stdout as said:
            assert said.readline() == "up\n"
    killed, living = holders
    folders = {pid: folder for folder in temporary.glob(f"{PREFIX}*") for pid in servers_in(folder)}
    (server,) = [pid for pid in folders if parent_of(pid) == killed.pid]
    (watchdog,) = [pid for pid in processes() if parent_of(pid) == killed.pid and pid != server]
    kill(watchdog)
    killed.kill()
    killed.wait(WAIT_S)
    assert is_running(server)
    remove_stale_folders()
    wait_for(lambda: not is_running(server))
    assert not folders.pop(server).exists()
    ((other, kept),) = folders.items()
    assert is_running(other)
    assert (kept / LOCK).is_file()
    living.send_signal(signal.SIGINT)
    living.wait(WAIT_S)
    wait_for(lambda: not kept.exists())


def assert_nothing_stays(temporary: Path, home: Path) -> None:
    assert not list(temporary.glob(f"{PREFIX}*"))
    assert not servers_in(temporary)
    wait_for(lambda: count(home, sa.select(sa.func.count()).where(shards.c.status == "running")) == 0)
    assert count(home, sa.select(sa.func.count()).where(shards.c.status == "queued")) > 0


def servers_in(folder: Path) -> list[int]:
    """Process ids of the Valkey servers whose configuration lies under the folder."""
    found = [pid for pid in processes() if f"{folder}/" in command_of(pid) and "valkey" in command_of(pid)]
    return [pid for pid in found if not command_of(pid).startswith("/bin/sh")]


def processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
    except OSError:
        return ""


def count(home: Path, statement: "sa.Select[tuple[int]]") -> int:
    engine = sa.create_engine(f"sqlite:///{home / 'data' / 'laya-batch.db'}")
    try:
        with engine.connect() as connection:
            return connection.scalar(statement) or 0
    except sa.exc.OperationalError:
        return 0
    finally:
        engine.dispose()


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
