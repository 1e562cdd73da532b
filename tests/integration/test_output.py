"""Exports: what they refuse, and that nothing is left of one that fails."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sqlalchemy as sa

import jobs
from jobs.output import open_output, write_parquet
from jobs.settings import Settings, load_settings
from jobs.store import leases, lifecycle
from jobs.store.database import Database
from jobs.store.lifecycle import JobOptions
from schemas.job import JobSpec, JobStatus
from schemas.tables import jobs as jobs_table
from tests.integration.service import write_tickets
from tests.integration.test_store import LEASE_S, answers, must_claim, record
from tests.plans import even_plan

COMMAND = str(Path(sys.executable).with_name("laya-batch"))


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Of a data folder whose job 1 has succeeded, with `in.parquet` as its input; the current folder is above it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LAYA_BATCH_DATA_DIR", str(tmp_path / "data"))
    settings = load_settings()
    path = write_tickets(tmp_path / "in.parquet", ["a"] * 10)
    db = Database(settings.resolved_database_url)
    db.migrate()
    spec = JobSpec(inputs=["x"], questions={"q": {"type": "noul", "instructions": "x"}}, state=["text"])
    job_id = lifecycle.create_job(db, spec, JobOptions(), even_plan(1, 10, str(path)))
    leases.save_batch(db, claim := must_claim(db, job_id), LEASE_S, record(db), answers(0, 10))
    leases.finish_shard(db, claim)
    db.close()
    return settings


def set_status(settings: Settings, status: JobStatus) -> None:
    db = Database(settings.resolved_database_url)
    with db.write() as connection:
        connection.execute(sa.update(jobs_table).values(status=status))
    db.close()


def test_an_input_of_the_job_is_refused_under_every_name(settings: Settings, tmp_path: Path) -> None:
    before = (tmp_path / "in.parquet").read_bytes()
    (tmp_path / "folder").mkdir()
    (tmp_path / "link.parquet").symlink_to("in.parquet")
    (tmp_path / "hard.parquet").hardlink_to("in.parquet")
    (tmp_path / "linked").symlink_to(".")
    names = ["in.parquet", "folder/../in.parquet", "link.parquet", "hard.parquet", "linked/in.parquet"]
    for name in [*names, str(tmp_path / "in.parquet"), (tmp_path / "in.parquet").as_uri()]:
        with pytest.raises(jobs.OutputError, match="is an input of this job"):
            jobs.export(1, name, overwrite=True, partial=True)
    assert (tmp_path / "in.parquet").read_bytes() == before
    assert jobs.export(1, "out.parquet") == 10


def test_a_file_that_is_there_is_replaced_only_when_asked(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "real.pq").write_text("precious")
    (tmp_path / "out.PQ").symlink_to("real.pq")
    with pytest.raises(jobs.OutputError, match="exists; name another file, or replace"):
        jobs.export(1, "out.PQ")
    assert (tmp_path / "real.pq").read_text() == "precious"
    assert jobs.export(1, "out.PQ", overwrite=True) == 10
    assert (tmp_path / "out.PQ").is_symlink()
    table = pq.read_table(tmp_path / "real.pq")
    assert table["answer"].to_pylist() == ["false"] * 10


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("x.csv", r"x.csv: answers are written as Parquet; end the name in .parquet or .pq"),
        ("x", "end the name in"),
        ("x.parquet.gz", "end the name in"),
        ("none/x.parquet", "there is no folder .*none; make it first"),
        ("folder.parquet", "is a folder"),
        ("in.parquet/x.parquet", "cannot be reached: Not a directory|there is no folder"),
        ("pipe.parquet", "is no file that could be replaced"),
        ("gopher://host/x.parquet", "cannot be opened"),
        ("~nobody-of-this-name/x.parquet", "home directory"),
    ],
)
def test_what_cannot_be_written_is_said_before_anything_is_read(settings: Settings, name: str, problem: str) -> None:
    Path("folder.parquet").mkdir()
    os.mkfifo("pipe.parquet")
    with pytest.raises(jobs.OutputError, match=problem):
        jobs.export(1, name)


@pytest.mark.parametrize("status", [JobStatus.QUEUED, JobStatus.RUNNING, JobStatus.FAILED, JobStatus.CANCELLED])
def test_a_job_that_has_not_succeeded_is_exported_only_as_a_part(settings: Settings, status: JobStatus) -> None:
    set_status(settings, status)
    done = subprocess.run([COMMAND, "export", "1", "x.parquet"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"job 1 is {status}, with 10 of 10 rows done" in done.stderr
    assert "--partial" in done.stderr
    assert not Path("x.parquet").exists()
    assert jobs.export(1, "x.parquet", partial=True) == 10


def batches(count: int) -> Iterator[pa.RecordBatch]:
    for number in range(count):
        yield pa.record_batch({"x": pa.array([number] * 1000)})


def left_over(folder: Path) -> list[str]:
    return [file.name for file in folder.iterdir() if file.suffix == ".partial"]


def test_exports_to_one_path_do_not_disturb_each_other(tmp_path: Path) -> None:
    path = str(tmp_path / "out.parquet")
    schema = next(batches(1)).schema

    def export(count: int) -> int:
        return write_parquet(open_output(path, [], True), schema, batches(count), True)

    with ThreadPoolExecutor(4) as threads:
        counts = list(threads.map(export, [50, 60, 70, 80]))
    assert counts == [50_000, 60_000, 70_000, 80_000]
    assert pq.read_table(path).num_rows in counts
    assert left_over(tmp_path) == []


def test_an_export_that_finds_another_at_its_end_leaves_that_alone(tmp_path: Path) -> None:
    file = open_output(str(tmp_path / "out.parquet"), [], False)
    Path(file.path).write_text("another's")
    with pytest.raises(jobs.OutputError, match="was made by someone else meanwhile"):
        write_parquet(file, next(batches(1)).schema, batches(1), False)
    assert Path(file.path).read_text() == "another's"
    assert left_over(tmp_path) == []


def test_of_exports_that_end_at_once_one_makes_the_file(tmp_path: Path) -> None:
    schema = next(batches(1)).schema
    for number in range(50):
        path, ends = tmp_path / f"{number}.parquet", Barrier(4)

        def export(count: int, path: Path = path, ends: Barrier = ends) -> int:
            def together() -> Iterator[pa.RecordBatch]:
                yield from batches(count)
                ends.wait(30)

            try:
                return write_parquet(open_output(str(path), [], False), schema, together(), False)
            except jobs.OutputError:
                return 0

        with ThreadPoolExecutor(4) as threads:
            counts = list(threads.map(export, range(1, 5)))
        assert [count for count in counts if count] == [pq.read_table(path).num_rows]
    assert left_over(tmp_path) == []


def test_an_input_that_cannot_be_reached_keeps_no_local_file_from_being_replaced(tmp_path: Path) -> None:
    path = tmp_path / "out.parquet"
    path.touch()
    assert open_output(str(path), ["hdfs://no-such-host:1/texts.parquet"], True).path == str(path)


def test_nothing_is_left_of_an_export_that_fails(tmp_path: Path) -> None:
    def failing() -> Iterator[pa.RecordBatch]:
        yield from batches(1)
        raise jobs.DatabaseError("the database went away")

    with pytest.raises(jobs.DatabaseError):
        write_parquet(open_output(str(tmp_path / "x.parquet"), [], False), next(batches(1)).schema, failing(), False)
    assert list(tmp_path.iterdir()) == []


SLOW_EXPORT = """
import sys, time
from jobs import cli, client
real = client.write_parquet
def slow(file, schema, batches, overwrite):
    def slowly():
        for batch in batches:
            yield batch
            print("writing", flush=True)
            time.sleep(60)
    return real(file, schema, slowly(), overwrite)
client.write_parquet = slow
sys.argv = ["laya-batch", "export", "1", "x.parquet"]
cli.main()
"""


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_nothing_is_left_of_an_export_that_is_stopped(settings: Settings, tmp_path: Path, stop: signal.Signals) -> None:
    process = subprocess.Popen([sys.executable, "-c", SLOW_EXPORT], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    assert len(left_over(tmp_path)) == 1
    process.send_signal(stop)
    assert process.wait(30) == 130
    process.stdout.close()
    assert left_over(tmp_path) == []
    assert not (tmp_path / "x.parquet").exists()
