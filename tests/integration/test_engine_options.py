"""Lengths, calibrations, digests and revisions of a job, through the command line, a real worker and the database."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import sqlalchemy as sa

import jobs
import laya
from jobs.settings import environment_of
from jobs.store.database import Database
from schemas.tables import shards
from tests.integration.service import QUESTIONS, Service, make_texts, serve, write_tickets

COMMAND = str(Path(sys.executable).with_name("laya-batch"))
CALIBRATION = {"temperature": [4, 4, 4], "temperature_by_options": {}}
TEXTS: list[str | None] = [*make_texts(60), "word " * 500]


class NoSuchRevision(BaseHTTPRequestHandler):
    """A Hub that has the repository, and not the revision."""

    def do_GET(self) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", "RevisionNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def hub_url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), NoSuchRevision) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def options_service(
    redis_url: str, tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path, hub_url: str
) -> Iterator[Service]:
    """One warm worker, which asks our Hub for what is no folder."""
    folder = tmp_path_factory.mktemp("options")
    url = f"sqlite:///{folder / 'test.db'}"
    with pytest.MonkeyPatch.context() as patch, serve(url, redis_url, folder, checkpoint=str(tiny_checkpoint)) as one:
        patch.setenv("HF_ENDPOINT", hub_url)
        patch.setenv("HF_HOME", str(folder / "hub"))
        patch.delenv("HF_HUB_OFFLINE", raising=False)
        one.start_worker(log_level="DEBUG")
        write_tickets(folder / "a.parquet", TEXTS)
        yield one


def submit(service: Service, **asked: Any) -> jobs.JobInfo:
    checkpoint = asked.pop("checkpoint", service.settings.checkpoint)
    options = {"questions": QUESTIONS, "state": "text", "settings": service.settings, **asked}
    return jobs.submit(service.folder / "a.parquet", checkpoint=checkpoint, **options)


def wait(service: Service, job: jobs.JobInfo) -> jobs.JobInfo:
    try:
        return jobs.wait(job.id, timeout_s=120, settings=service.settings)
    except TimeoutError:
        pytest.fail(service.log[-4000:])


def answered_rows(service: Service, job: jobs.JobInfo) -> list[dict[str, Any]]:
    wait(service, job)
    return list(jobs.results(job.id, settings=service.settings).read_all().to_pylist())


def dropped(rows: list[dict[str, Any]]) -> dict[int, int]:
    return {row["row_number"]: row["state_tokens_dropped"] for row in rows if row["question"] == "refund"}


def run_command(service: Service, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**environment_of(service.settings), "COLUMNS": "200"}
    return subprocess.run(
        [COMMAND, *arguments], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_a_job_s_lengths_are_those_of_an_agent_loaded_with_them(
    options_service: Service, tiny_checkpoint: Path
) -> None:
    service = options_service
    found = {}
    for lengths in ({}, {"max_len": 64}, {"max_len": 32, "head_max_len": 24}, {"max_len": 200}, {}):
        rows = answered_rows(service, submit(service, **lengths))
        agent = laya.load(tiny_checkpoint, **lengths)
        expected = agent.predict_batch(TEXTS, {"refund": QUESTIONS["refund"]})
        found[tuple(lengths.values())] = dropped(rows)
        assert dropped(rows) == {i: reply["usage"]["state_tokens_dropped"] for i, reply in enumerate(expected)}
        chosen = {row["row_number"]: row["noul"] for row in rows if row["question"] == "refund"}
        assert [chosen[i] for i in range(len(TEXTS))] == pytest.approx(
            [reply["answers"]["refund"]["noul"] for reply in expected], abs=2e-4
        )
    assert found[(32, 24)][60] > found[(64,)][60] > found[()][60] > found[(200,)][60] > 0


def test_a_calibration_changes_probabilities_and_no_worker_needs_its_file(
    options_service: Service, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    service, file = options_service, tmp_path / "calibration.json"
    file.write_text(json.dumps(CALIBRATION, indent=1))
    with service.holding_messages():
        job = submit(service, calibration=file)
        file.unlink()
    plain = submit(service)
    rows, others = answered_rows(service, job), answered_rows(service, plain)
    expected = laya.load(tiny_checkpoint, calibration=CALIBRATION).predict_batch(TEXTS, QUESTIONS)
    for row in rows:
        answer = expected[row["row_number"]]["answers"][row["question"]]
        assert row["answer_confidence"] == pytest.approx(answer["answer_confidence"], abs=2e-4)
    assert all(row["answer_confidence"] < other["answer_confidence"] for row, other in zip(rows, others, strict=True))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"expected_sha256": {"model.safetensors": "ab" * 32}}, r"model\.safetensors: sha256: expected abab.*, found "),
        ({"expected_sha256": {"notes.txt": "ab" * 32}}, r"a digest is expected of 'notes\.txt', which is no file"),
        ({"checkpoint": "owner/tiny", "revision": "v9"}, r"owner/tiny: the Hub has no revision 'v9'"),
    ],
)
def test_a_checkpoint_that_is_not_the_one_asked_for_fails_the_job_at_once(
    options_service: Service, asked: dict[str, Any], message: str
) -> None:
    service = options_service
    small = service.settings.model_copy(update={"rows_per_shard": 10})
    job = submit(service, settings=small, **asked)
    with pytest.raises(jobs.JobFailedError, match=message):
        wait(service, job)
    attempts = service.query(sa.select(shards.c.attempt).where(shards.c.job_id == job.id))
    assert sorted(row.attempt for row in attempts) == [0] * (len(attempts) - 1) + [1]


def test_the_right_digests_are_no_hindrance(options_service: Service, tiny_checkpoint: Path) -> None:
    digests = laya.load(tiny_checkpoint).checkpoint.digests
    job = submit(options_service, expected_sha256={file: digest.upper() for file, digest in digests.items()})
    assert wait(options_service, job).status is jobs.JobStatus.SUCCEEDED


def test_the_command_takes_the_options_and_status_shows_them(options_service: Service, tmp_path: Path) -> None:
    service, file = options_service, tmp_path / "calibration.json"
    file.write_text(json.dumps(CALIBRATION))
    questions = tmp_path / "questions.json"
    questions.write_text(json.dumps(QUESTIONS))
    digest = laya.load(service.settings.checkpoint).checkpoint.digests["rl_agent_config.json"]
    command = (
        *("submit", str(service.folder / "a.parquet"), "--questions", str(questions), "--state", "text"),
        *("--checkpoint", service.settings.checkpoint, "--max-len", "64", "--head-max-len", "40"),
        *("--calibration", str(file), "--expected-sha256", f"rl_agent_config.json={digest}"),
        *("--idempotency-key", "nightly"),
    )
    submitted = run_command(service, *command)
    assert submitted.returncode == 0, submitted.stderr
    file.write_text(json.dumps(CALIBRATION, indent=4))
    assert run_command(service, *command).stdout == submitted.stdout
    job_id = int(submitted.stdout)
    status = json.loads(run_command(service, "status", str(job_id), "--json").stdout)
    assert (status["max_len"], status["head_max_len"], status["revision"]) == (64, 40, None)
    assert status["expected_sha256"] == {"rl_agent_config.json": digest}
    (calibration_digest,) = status["calibration_sha256"].values()
    assert len(calibration_digest) == 64
    assert "max len" in run_command(service, "status", str(job_id)).stdout
    for other in (("--max-len", "65"), ("--head-max-len", "41"), ("--expected-sha256", f"model.safetensors={digest}")):
        refused = run_command(service, *command, *other)
        assert refused.returncode == 1
        assert f"which differs in {other[0][2:].replace('-', '_')}" in refused.stderr
    assert wait(service, jobs.get(job_id, settings=service.settings)).status is jobs.JobStatus.SUCCEEDED


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--max-len", "0"), "greater than or equal to 1"),
        (("--max-len", "9000"), "reads 1024 tokens at most"),
        (("--expected-sha256", "abc"), "write it as model.safetensors=DIGEST"),
        (("--calibration", "a", "--calibration", "b"), "a checkpoint has one; give it once"),
    ],
)
def test_an_option_that_cannot_hold_is_refused_by_the_command(
    options_service: Service, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    questions = tmp_path / "questions.json"
    questions.write_text(json.dumps(QUESTIONS))
    refused = run_command(
        options_service,
        *("submit", str(options_service.folder / "a.parquet"), "--questions", str(questions), "--state", "text"),
        *("--checkpoint", options_service.settings.checkpoint, *arguments),
    )
    assert refused.returncode in (1, 2)
    assert message in " ".join(refused.stderr.replace("│", " ").split())


def test_run_takes_the_options_and_goes_on_where_its_shell_ignores_ctrl_c(
    tmp_path: Path, tiny_checkpoint: Path
) -> None:
    path = write_tickets(tmp_path / "a.parquet", TEXTS[-3:])
    questions = tmp_path / "questions.json"
    questions.write_text(json.dumps(QUESTIONS))
    command = [
        *(COMMAND, "run", str(path), "--questions", str(questions), "--state", "text", "--max-len", "200"),
        *("--checkpoint", str(tiny_checkpoint), "--backend", "eager", "--data-dir", str(tmp_path / "data")),
    ]
    ignoring = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *command]
    running = subprocess.Popen(ignoring, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 180
    while running.poll() is None and time.monotonic() < deadline:
        time.sleep(0.5)  # at first it may be the shell, before its trap
        running.send_signal(signal.SIGINT)
    output, _ = running.communicate(timeout=10)
    assert running.returncode == 0, output
    db = Database(f"sqlite:///{tmp_path / 'data' / 'laya-batch.db'}")
    with db.read() as connection:
        rows = connection.execute(sa.text("SELECT row_number, state_tokens_dropped FROM results")).all()
    db.close()
    expected = laya.load(tiny_checkpoint, max_len=200).predict(TEXTS[-1], {"refund": QUESTIONS["refund"]})
    assert max(row.state_tokens_dropped for row in rows) >= expected["usage"]["state_tokens_dropped"] > 0
