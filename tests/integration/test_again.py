"""The same idempotency key again: over files that changed, after a failure, and while the first call gives up."""

import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import yaml

import jobs
from jobs.errors import IdempotencyError, SettingsError
from jobs.settings import Settings, environment_of
from jobs.store import lifecycle
from jobs.store.database import Database
from schemas.job import JobStatus
from schemas.tables import jobs as jobs_table
from schemas.tables import shards
from tests.integration.service import QUESTIONS, Service, make_texts, write_tickets

COMMAND = str(Path(sys.executable).with_name("laya-batch"))
Submit = Callable[..., jobs.JobInfo]


@pytest.fixture
def submit(service: Service) -> Submit:
    def call(**asked: Any) -> jobs.JobInfo:
        settings = service.settings
        fixed = {"questions": QUESTIONS, "state": "text", "checkpoint": settings.checkpoint, "settings": settings}
        return jobs.submit(service.folder / "in", **{**fixed, **asked})

    return call


def test_a_key_over_files_that_changed_is_an_error_that_names_them(service: Service, submit: Submit) -> None:
    folder = service.folder / "in"
    for name in ("a", "b", "c"):
        write_tickets(folder / f"{name}.parquet", make_texts(5))
    first = submit(idempotency_key="nightly")
    assert submit(idempotency_key="nightly").id == first.id
    (folder / "a.parquet").unlink()
    write_tickets(folder / "b.parquet", make_texts(6))
    for number in range(5):
        write_tickets(folder / f"new{number}.parquet", make_texts(5))
    with pytest.raises(IdempotencyError, match=f"already made job {first.id}, but its input files have") as raised:
        submit(idempotency_key="nightly")
    said = str(raised.value)
    assert f"added {folder}/new0.parquet, {folder}/new1.parquet, {folder}/new2.parquet and 2 more" in said
    assert f"removed {folder}/a.parquet" in said
    assert f"changed {folder}/b.parquet" in said
    assert "c.parquet" not in said
    assert submit(idempotency_key="nightly", return_existing=True).id == first.id
    assert submit(idempotency_key="other").id != first.id
    with pytest.raises(IdempotencyError, match=f"already made job {first.id}, which differs in state"):
        submit(idempotency_key="nightly", state="ticket")
    assert submit(idempotency_key="nightly", return_existing=True, max_row_errors=9).id == first.id
    with pytest.raises(SettingsError, match="want an idempotency key"):
        submit(return_existing=True)


def test_a_scheduler_retries_what_failed_by_its_key(service: Service, submit: Submit) -> None:
    path = write_tickets(service.folder / "in" / "a.parquet", make_texts(5))
    questions = service.folder / "triage.yaml"
    questions.write_text(yaml.safe_dump(QUESTIONS, sort_keys=False))
    asked = ("--questions", str(questions), "--state", "text", "--checkpoint", str(service.settings.checkpoint))
    command = [COMMAND, "submit", str(path), *asked, "--idempotency-key", "k", "--retry-failed"]

    def run() -> int:
        done = subprocess.run(
            command, env=environment_of(service.settings), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    job_id = run()
    assert run() == job_id
    assert jobs.get(job_id, settings=service.settings).status is JobStatus.QUEUED
    jobs.cancel(job_id, settings=service.settings)
    command.remove("--retry-failed")
    assert run() == job_id
    assert jobs.get(job_id, settings=service.settings).status is JobStatus.CANCELLED
    command.append("--retry-failed")
    assert run() == job_id
    assert jobs.get(job_id, settings=service.settings).status is JobStatus.QUEUED


def test_why_a_shard_is_tried_again_is_told_while_the_job_goes_on(service: Service, submit: Submit) -> None:
    write_tickets(service.folder / "in" / "a.parquet", make_texts(5))
    job = submit()
    assert job.last_error is None
    db = Database(service.settings.resolved_database_url)
    with db.write() as connection:
        connection.execute(sa.update(shards).values(last_error="CheckpointError: [b]no[/b] network", failures=1))
    db.close()
    assert jobs.get(job.id, settings=service.settings).last_error == "CheckpointError: [b]no[/b] network"
    command = [COMMAND, "status", str(job.id)]
    shown = subprocess.run(command, env=environment_of(service.settings), capture_output=True, text=True, check=True)
    assert "[b]no[/b] network" in shown.stdout
    watched = [COMMAND, "watch", str(job.id), "--timeout", "1"]
    told = subprocess.run(watched, env=environment_of(service.settings), capture_output=True, text=True, check=False)
    assert "a shard is tried again: CheckpointError: [b]no[/b] network" in told.stderr


class Refusing:
    """A broker that answers, but loses the connection when a message comes; held back until it is told to."""

    def __init__(self, url: str) -> None:
        self.server = sa.make_url(url)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.asked, self.go_on = threading.Event(), threading.Event()
        self.url = str(self.server.set(host="127.0.0.1", port=self.listener.getsockname()[1]))

    def serve(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                threading.Thread(target=self._pass_on, args=(client,), daemon=True).start()

    def _pass_on(self, client: socket.socket) -> None:
        with client, socket.create_connection((self.server.host, self.server.port)) as server, suppress(OSError):
            threading.Thread(target=_copy, args=(server, client), daemon=True).start()
            while data := client.recv(65536):
                if b"LPUSH" in data:
                    self.asked.set()
                    self.go_on.wait(60)
                    break
                server.sendall(data)


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)


@contextmanager
def refusing_broker(settings: Settings) -> Iterator[Refusing]:
    broker = Refusing(settings.require_broker_url())
    threading.Thread(target=broker.serve, daemon=True).start()
    try:
        yield broker
    finally:
        broker.go_on.set()
        broker.listener.close()


@pytest.mark.parametrize("another_asks", [True, False])
def test_a_job_that_another_call_was_given_stays_when_its_maker_gives_up(
    service: Service, submit: Submit, another_asks: bool
) -> None:
    path = write_tickets(service.folder / "in" / "a.parquet", make_texts(5))
    questions = service.folder / "triage.yaml"
    questions.write_text(yaml.safe_dump(QUESTIONS, sort_keys=False))
    with refusing_broker(service.settings) as broker:
        environment = environment_of(service.settings) | {"LAYA_BATCH_BROKER_URL": broker.url}
        asked = ("--questions", str(questions), "--state", "text", "--checkpoint", str(service.settings.checkpoint))
        maker = subprocess.Popen(
            [COMMAND, "submit", str(path.parent), *asked, "--idempotency-key", "k"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert broker.asked.wait(60)
        given = submit(idempotency_key="k").id if another_asks else None
        broker.go_on.set()
        shown, error = maker.communicate(timeout=60)
    left = service.query(sa.select(jobs_table.c.id))
    if another_asks:
        assert (maker.returncode, shown.strip()) == (0, str(given)), error
        assert [row.id for row in left] == [given]
    else:  # nobody knows of it: the error says that nothing was queued, and nothing is
        assert maker.returncode == 1
        assert "cannot be used" in error
        assert left == []


def test_two_calls_that_retry_at_once_are_no_error(service: Service, submit: Submit) -> None:
    write_tickets(service.folder / "in" / "a.parquet", make_texts(5))
    job = submit(idempotency_key="k")
    jobs.cancel(job.id, settings=service.settings)
    errors: list[Exception] = []

    def retry() -> None:
        try:
            submit(idempotency_key="k", retry_failed=True)
        except Exception as error:  # noqa: BLE001 - whatever it is, the test shows it
            errors.append(error)

    threads = [threading.Thread(target=retry) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    db = Database(service.settings.resolved_database_url)
    assert lifecycle.find_status(db, job.id) is JobStatus.QUEUED
    db.close()
