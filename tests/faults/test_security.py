"""What an attacker may try: other people's files, messages, names, checkpoints; and where passwords show."""

import base64
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import redis
import sqlalchemy as sa

import jobs
from jobs.locations import check_root
from jobs.queue import SCORE_SHARD, app, configure_app
from jobs.settings import environment_of
from jobs.store.database import Database
from schemas.tables import metadata, results, workers
from tests.conftest import empty_database
from tests.faults.servers import PrivateRedis, wait_until
from tests.faults.tls import PASSWORD, TlsPostgres, make_certificate, tls_redis
from tests.integration.service import QUESTIONS, Service, make_texts, serve, write_tickets

EVIL = "'; DROP TABLE results; --\"$(touch pwned)`touch pwned`\n{{7*7}} %s \\"


class Trap:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.fixture
def service(redis_url: str, tmp_path: Path, tiny_checkpoint: Path) -> Iterator[Service]:
    with serve(f"sqlite:///{tmp_path / 'test.db'}", redis_url, tmp_path, checkpoint=str(tiny_checkpoint)) as one:
        yield one


@pytest.fixture(scope="module", params=["sqlite", pytest.param("postgresql", marks=pytest.mark.faults)])
def warm_service(
    request: pytest.FixtureRequest, redis_url: str, tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path
) -> Iterator[Service]:
    """One warm worker for several tests, which beats every two seconds."""
    folder = tmp_path_factory.mktemp("security")
    with ExitStack() as stack:
        url = f"sqlite:///{folder / 'test.db'}"
        if request.param == "postgresql":
            url = stack.enter_context(empty_database(request.getfixturevalue("postgres_admin")))
        one = stack.enter_context(serve(url, redis_url, folder, checkpoint=str(tiny_checkpoint), lease_s=8.0))
        one.start_worker()
        yield one


def submit(service: Service, path: Path, **asked: Any) -> jobs.JobInfo:
    questions, state = asked.pop("questions", QUESTIONS), asked.pop("state", "text")
    return jobs.submit(
        path,
        questions=questions,
        state=state,
        checkpoint=service.settings.checkpoint,
        settings=service.settings,
        **asked,
    )


def test_messages_that_are_more_than_two_ids_are_refused_counted_and_shown(warm_service: Service) -> None:
    service = warm_service
    trap = service.folder / "sprung"
    spare = f"{service.settings.queue}-spare"
    configure_app(service.settings)
    with redis.Redis.from_url(service.settings.require_broker_url()) as client:
        for kwargs in (
            {"job_id": 1, "shard_id": 1, "file": "/etc/passwd"},
            {"job_id": "1 OR 1=1", "shard_id": 1},
            {"job_id": 1},
            {"job_id": -1, "shard_id": 2**70},
        ):
            app.send_task(SCORE_SHARD, kwargs=kwargs)
        app.send_task("os.system", args=[f"touch {trap}"])
        app.send_task(SCORE_SHARD, kwargs={"job_id": 1, "shard_id": 1}, queue=spare)
        envelope = json.loads(client.rpop(spare))
        pickled = base64.b64encode(pickle.dumps(Trap(trap))).decode()
        evil = {**envelope, "content-type": "application/x-python-serialize", "body": pickled}
        client.lpush(service.settings.queue, json.dumps(evil))
        client.lpush(service.settings.queue, json.dumps({**envelope, "headers": {}}))
    path = write_tickets(service.folder / "a.parquet", make_texts(10))
    job = jobs.wait(submit(service, path).id, timeout_s=90, settings=service.settings)
    assert job.answers == 30
    refused = sa.select(workers.c.refused_messages)
    wait_until(lambda: [row[0] for row in service.query(refused)] == [7], 60)
    command = [Path(sys.executable).parent / "laya-batch", "workers"]
    environment = {**environment_of(service.settings), "COLUMNS": "200"}
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert "7 messages refused" in shown.stdout
    assert not trap.exists()


def test_a_worker_reads_nothing_outside_its_roots_however_it_is_named(tmp_path: Path) -> None:
    root, secret = tmp_path / "in", tmp_path / "out" / "secret.parquet"
    inside = write_tickets(root / "a.parquet", make_texts(3))
    write_tickets(secret, make_texts(3))
    (root / "link.parquet").symlink_to(secret)
    (root / "folder").symlink_to(secret.parent)
    for roots in ([str(root)], [f"file://{root}"]):
        for name in (str(inside), f"file://{inside}"):
            check_root(name, roots)
        for path in ("../out/secret.parquet", "link.parquet", "folder/secret.parquet", "../in-2/a.parquet"):
            for name in (f"{root}/{path}", f"file://{root}/{path}"):
                with pytest.raises(jobs.InputError, match="not under an input root"):
                    check_root(name, roots)
        for dots in ("%2e%2e", "%2E.", ".%2e"):
            with pytest.raises(jobs.InputError, match="not under an input root"):
                check_root(f"file://{root}/{dots}/out/secret.parquet", roots)
    for name in ("s3://bucket/in/%2e%2e/x", "s3://bucket/in/../x", "s3://bucket-2/in/x", "s3://bucket/in-2/x"):
        with pytest.raises(jobs.InputError, match="not under an input root"):
            check_root(name, ["s3://bucket/in"])


def test_a_symlink_that_is_turned_after_the_job_was_made_is_not_followed(warm_service: Service, tmp_path: Path) -> None:
    service = warm_service
    path = write_tickets(service.folder / "turned" / "a.parquet", make_texts(10))
    with service.holding_messages():
        job = submit(service, path)
        path.rename(tmp_path / "secret.parquet")  # of the same size and time: all that a worker could tell it by
        path.symlink_to(tmp_path / "secret.parquet")
    with pytest.raises(jobs.JobFailedError, match="not under an input root"):
        jobs.wait(job.id, timeout_s=90, settings=service.settings)
    assert service.query(sa.select(results).where(results.c.job_id == job.id)) == []


def test_names_are_text_whatever_they_hold(warm_service: Service) -> None:
    service = warm_service
    folder = service.folder / "$(touch pwned)'; --"
    path = folder / "a`touch pwned`.parquet"
    folder.mkdir()
    texts = make_texts(20)
    pq.write_table(pa.table({EVIL: texts, f"id{EVIL}": [f"{i}{EVIL}" for i in range(20)]}), path)
    questions = {
        f"question {EVIL}": {"type": "noul", "instructions": EVIL},
        "team": {"type": "choice", "instructions": "?", "criteria": {f"a{EVIL}": EVIL, f"b{EVIL}": None}},
    }
    names = {"name": EVIL, "idempotency_key": EVIL, "row_id": f"id{EVIL}"}
    job = submit(service, path, questions=questions, state=EVIL, **names)
    assert submit(service, path, questions=questions, state=EVIL, **names).id == job.id
    job = jobs.wait(job.id, timeout_s=90, settings=service.settings)
    assert (job.name, job.answers, job.row_errors) == (EVIL, 40, 0)
    rows = jobs.results(job.id, settings=service.settings).read_all().to_pylist()
    assert {row["question"] for row in rows} == set(questions)
    assert [row["row_id"] for row in rows[::2]] == [f"{i}{EVIL}" for i in range(20)]
    assert {row["choice"] for row in rows if row["choice"]} <= {f"a{EVIL}", f"b{EVIL}"}
    program = Path(sys.executable).parent / "laya-batch"
    for command in (["status", str(job.id)], ["list"], ["results", str(job.id)]):
        environment = environment_of(service.settings)
        subprocess.run([program, *command], env=environment, cwd=service.folder, check=True, timeout=60)
    assert {name for (name,) in service.query(table_names(service))} >= set(metadata.tables)
    assert list(service.folder.rglob("pwned")) == list(Path.cwd().glob("pwned")) == []


def table_names(service: Service) -> Any:
    if service.settings.resolved_database_url.startswith("sqlite"):
        return sa.text("SELECT name FROM sqlite_master")
    return sa.text("SELECT table_name FROM information_schema.tables WHERE table_schema = 'public'")


@pytest.mark.faults
@pytest.mark.parametrize("fault", ["pickled weights", "weights in a pickle file", "other weights under the job"])
def test_a_checkpoint_that_is_not_what_it_should_be_is_refused(
    service: Service, tiny_checkpoint: Path, fault: str
) -> None:
    checkpoint = Path(shutil.copytree(tiny_checkpoint, service.folder / "checkpoint"))
    service.settings = service.settings.model_copy(update={"checkpoint": str(checkpoint)})
    weights, trap = checkpoint / "model.safetensors", service.folder / "sprung"
    if fault == "other weights under the job":
        other = service.settings.model_copy(update={"checkpoint": str(tiny_checkpoint)})
        job = submit(service, write_tickets(service.folder / "a.parquet", make_texts(150)))
        # Another worker began the job with the weights as they were; these differ in one bit.
        with closing(Database(service.settings.resolved_database_url)) as db, db.write() as connection:
            connection.execute(sa.update(metadata.tables["jobs"]).values(checkpoint_fingerprint="0" * 64))
        service.start_worker(checkpoint=other.checkpoint)
        with pytest.raises(jobs.JobFailedError, match=r"has fingerprint .* but the job began with 000000000000"):
            jobs.wait(job.id, timeout_s=90, settings=service.settings)
        return
    if fault == "pickled weights":
        weights.write_bytes(pickle.dumps(Trap(trap)))
    else:
        weights.unlink()
        (checkpoint / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(trap)))
        with pytest.raises(jobs.InputError, match=r"has no model\.safetensors"):
            submit(service, write_tickets(service.folder / "a.parquet", make_texts(3)))
    assert service.launch("--no-restart").wait(90) != 0
    (row,) = service.query(sa.select(workers))
    assert row.status == "failed"
    assert "safetensors" in row.error
    assert not trap.exists()


@pytest.mark.faults
def test_servers_over_tls_with_passwords_which_show_nowhere(tmp_path: Path, tiny_checkpoint: Path) -> None:
    certificate = make_certificate(tmp_path / "tls")
    with TlsPostgres(certificate) as postgres, tls_redis(certificate) as broker_url:
        options = {"checkpoint": str(tiny_checkpoint), "log_level": "DEBUG"}
        with serve(postgres.url, broker_url, tmp_path / "service", **options) as service:
            service.start_worker()
            path = write_tickets(service.folder / "a.parquet", [*make_texts(30), None])
            job = jobs.wait(submit(service, path).id, timeout_s=90, settings=service.settings)
            assert job.answers == 90
            said = [service.log, *run_commands(service, job)]
            in_tls = sa.text(
                "SELECT bool_and(ssl) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) WHERE usename = 'laya'"
            )
            assert service.query(in_tls)[0][0] is True
            said += [str(row) for table in metadata.sorted_tables for row in service.query(sa.select(table))]
            said += [Path(f"/proc/{pid}/cmdline").read_text() for pid in processes_of(service)]
            other = make_certificate(tmp_path / "other")
            for strange in (broker_url.replace(str(certificate), str(other)), broker_url.partition("?")[0]):
                with pytest.raises(jobs.BrokerError, match="CERTIFICATE_VERIFY_FAILED") as refused:
                    submit(service_with(service, broker_url=strange), path)
                said.append(str(refused.value))
            for wrong in (postgres.url.replace(str(certificate), str(other)), postgres.url.replace("hunter2", "x")):
                with pytest.raises(jobs.DatabaseError) as denied:
                    jobs.list_jobs(settings=jobs.load_settings(database_url=wrong, database_retry_s=0.1))
                said.append(str(denied.value))
            said.append((postgres.folder / "log").read_text().replace(f"PASSWORD '{PASSWORD}'", ""))
    for secret in (PASSWORD, "hunter2"):
        assert [text for text in said if secret in text] == []


def service_with(service: Service, **changed: str) -> Service:
    asked = service.settings.model_dump(exclude_unset=True)
    return Service(jobs.load_settings(**{**asked, **changed}), service.folder)


def run_commands(service: Service, job: jobs.JobInfo) -> list[str]:
    """What the command line prints of this service."""
    said = []
    program, environment = Path(sys.executable).parent / "laya-batch", environment_of(service.settings)
    for command in (["status", str(job.id)], ["workers"], ["health"], ["migrate"], ["watch", str(job.id)]):
        done = subprocess.run(
            [program, *command], env=environment, capture_output=True, text=True, check=True, timeout=90
        )
        said.append(done.stdout + done.stderr)
    return said


def processes_of(service: Service) -> list[int]:
    found = [process.pid for process in service.processes]
    for pid in found:
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (task / "children").read_text().split()]
    assert len(found) >= 3  # the supervisor, its Celery worker, and that one's child
    return found


@pytest.mark.faults
def test_passwords_of_a_broker_that_is_away_show_nowhere(service: Service, private_redis: PrivateRedis) -> None:
    url = f"redis://:hunter2@127.0.0.1:{private_redis.port}/0"
    private_redis.stop()
    process = service.launch(broker_url=jobs.settings.SecretStr(url), log_level="DEBUG")
    assert process.wait(90) == 1
    assert "redis://***@127.0.0.1" in service.log
    assert "hunter2" not in service.log
    assert os.environ.get("LAYA_BATCH_BROKER_URL") is None
