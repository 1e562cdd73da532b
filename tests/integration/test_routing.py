"""A routed job, with real worker processes on both stores: each row to the checkpoint of its language."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sqlalchemy as sa

import jobs
import laya
from jobs.store.database import Database
from schemas.tables import batches, job_checkpoints, results
from tests.checkpoints import CheckpointSpec, make_checkpoint
from tests.conftest import empty_database
from tests.integration.service import QUESTIONS, Service, serve

TEXTS = [
    "I was charged twice, please refund the second payment.",
    "El pedido llegó roto y nadie responde cuando escribo al soporte",
    "Der Kunde wurde zweimal belastet und möchte sein Geld zurück.",
    "The invoice shows the wrong amount and nobody answers the phone.",
    "我这个月被重复扣款了两次，退款一直没有到账。",
    None,
    "12345",
    "Клиент требует вернуть деньги сегодня же",
]
LANGUAGES = ["en", "es", "de", "en", "zh", None, None, "ru"]
COPIES = 20
COMMAND = str(Path(sys.executable).with_name("laya-batch"))


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("routes")
    encoder = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2}
    names = ("english", "multilingual")
    return {
        name: make_checkpoint(folder / name, CheckpointSpec(max_len=96, seed=seed, encoder=encoder))
        for seed, name in enumerate(names)
    }


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def routing_service(
    request: pytest.FixtureRequest,
    redis_url: str,
    tmp_path_factory: pytest.TempPathFactory,
    checkpoints: dict[str, Path],
) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp(request.param)
    with ExitStack() as stack:
        if request.param == "sqlite":
            url = f"sqlite:///{folder / 'test.db'}"
        else:
            url = stack.enter_context(empty_database(request.getfixturevalue("postgres_admin")))
        one = stack.enter_context(serve(url, redis_url, folder, checkpoint=str(checkpoints["english"])))
        one.start_worker()
        yield one


def write_rows(path: Path) -> Path:
    """Each text some times, in turn, with a language that contradicts what is written in every eighth row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    claimed = ["fr" if i == 0 else None for i in range(len(TEXTS))]
    columns = {"text": pa.array(TEXTS * COPIES, pa.string()), "lang": pa.array(claimed * COPIES, pa.string())}
    pq.write_table(pa.table(columns), path, row_group_size=50)
    return path


def submit(service: Service, path: Path, checkpoints: dict[str, Path], **asked: Any) -> jobs.JobInfo:
    routed = {"checkpoint": "router", "routes": checkpoints, "backend": "eager", "settings": service.settings, **asked}
    return jobs.submit(path, questions=QUESTIONS, state="text", **routed)


def wait(service: Service, job: jobs.JobInfo) -> jobs.JobInfo:
    try:
        return jobs.wait(job.id, timeout_s=120, settings=service.settings)
    except TimeoutError:
        pytest.fail(service.log[-4000:])


def answered_rows(service: Service, job: jobs.JobInfo) -> list[dict[str, Any]]:
    return list(jobs.results(job.id, settings=service.settings).read_all().to_pylist())


def test_each_row_is_answered_by_the_checkpoint_of_its_language(
    routing_service: Service, checkpoints: dict[str, Path]
) -> None:
    path = write_rows(routing_service.folder / "detected" / "a.parquet")
    job = wait(routing_service, submit(routing_service, path, checkpoints))
    answered = len([text for text in TEXTS if text is not None]) * COPIES
    assert (job.status, job.answers, job.row_errors) == (jobs.JobStatus.SUCCEEDED, answered * 3, COPIES)
    agents = {name: laya.load(folder) for name, folder in checkpoints.items()}
    expected = {}
    for row in answered_rows(routing_service, job):
        place = row["row_number"] % len(TEXTS)
        text, language = TEXTS[place], LANGUAGES[place]
        name = "english" if language == "en" else "multilingual"
        assert (row["checkpoint"], row["language"]) == (name, language)
        assert row["route_reason"].startswith(f"detected {language} (" if language else "no text")
        if text not in expected:
            expected[text] = agents[name].predict(text, QUESTIONS)["answers"]
        answer = expected[text][row["question"]]
        assert row["confidence"] == pytest.approx(answer["confidence"], abs=2e-4)
        assert row[answer["type"]] == pytest.approx(answer[answer["type"]], abs=2e-4)


def test_a_batch_holds_rows_of_one_checkpoint_and_the_job_is_held_to_the_weights_of_both(
    routing_service: Service, checkpoints: dict[str, Path]
) -> None:
    path = write_rows(routing_service.folder / "batches" / "a.parquet")
    job = wait(routing_service, submit(routing_service, path, checkpoints))
    mixed = (
        sa.select(results.c.language, batches.c.checkpoint, sa.func.count())
        .join(batches)
        .where(results.c.job_id == job.id)
        .group_by(results.c.language, batches.c.checkpoint)
    )
    pairs = {(language, checkpoint) for language, checkpoint, _ in routing_service.query(mixed)}
    assert pairs == {
        (language, "english" if language == "en" else "multilingual")
        for language, text in zip(LANGUAGES, TEXTS, strict=True)
        if text is not None
    }
    held = routing_service.query(sa.select(job_checkpoints).where(job_checkpoints.c.job_id == job.id))
    fingerprints = {name: laya.load(folder).checkpoint.fingerprint for name, folder in checkpoints.items()}
    assert {row.checkpoint: row.fingerprint for row in held} == fingerprints
    seen = sa.text("SELECT DISTINCT checkpoint, checkpoint_fingerprint FROM answers WHERE job_id = :job")
    assert {tuple(row) for row in routing_service.query(seen.bindparams(job=job.id))} == set(fingerprints.items())
    spent = routing_service.query(sa.select(batches).where(batches.c.job_id == job.id))
    assert all(min(row.read_ms, row.tokenise_ms, row.forward_ms, row.decode_ms) > 0 for row in spent)


def test_a_language_column_comes_first_and_null_in_it_is_detected(
    routing_service: Service, checkpoints: dict[str, Path]
) -> None:
    path = write_rows(routing_service.folder / "given" / "a.parquet")
    job = wait(routing_service, submit(routing_service, path, checkpoints, language_column="lang"))
    rows = answered_rows(routing_service, job)
    given = [row for row in rows if row["row_number"] % len(TEXTS) == 0]
    assert {(row["checkpoint"], row["language"], row["route_reason"]) for row in given} == {
        ("multilingual", "fr", "language given")
    }
    assert all(row["route_reason"] != "language given" for row in rows if row["row_number"] % len(TEXTS) != 0)


def test_each_route_has_its_calibration_and_undecided_rows_go_where_the_job_says(
    routing_service: Service, checkpoints: dict[str, Path]
) -> None:
    path = write_rows(routing_service.folder / "options" / "a.parquet")
    calibration = {"temperature": [4, 4, 4], "temperature_by_options": {}}
    digests = {
        f"{name}/model.safetensors": laya.load(folder).checkpoint.digests["model.safetensors"]
        for name, folder in checkpoints.items()
    }
    options = {"calibration": {"english": calibration}, "expected_sha256": digests, "default_route": "english"}
    job = wait(routing_service, submit(routing_service, path, checkpoints, **options))
    assert job.status is jobs.JobStatus.SUCCEEDED
    agents = {
        "english": laya.load(checkpoints["english"], calibration=calibration),
        "multilingual": laya.load(checkpoints["multilingual"]),
    }
    for row in (row for row in answered_rows(routing_service, job) if row["row_number"] < len(TEXTS)):
        text, language = TEXTS[row["row_number"]], LANGUAGES[row["row_number"]]
        name = "english" if language in ("en", None) else "multilingual"
        assert row["checkpoint"] == name
        assert row["route_reason"].endswith("default english") == (language is None)
        answer = agents[name].predict(text, QUESTIONS)["answers"][row["question"]]
        assert row["answer_confidence"] == pytest.approx(answer["answer_confidence"], abs=2e-4)
    mixed_up = {
        "english/model.safetensors": digests["multilingual/model.safetensors"],
        "multilingual/model.safetensors": digests["multilingual/model.safetensors"],
    }
    job = submit(routing_service, path, checkpoints, expected_sha256=mixed_up)
    with pytest.raises(jobs.JobFailedError, match=r"english/model\.safetensors: sha256: expected"):
        wait(routing_service, job)


def test_a_job_of_one_checkpoint_has_no_routes(routing_service: Service, checkpoints: dict[str, Path]) -> None:
    path = write_rows(routing_service.folder / "plain" / "a.parquet")
    plain = {"checkpoint": checkpoints["english"], "routes": None}
    job = wait(routing_service, submit(routing_service, path, checkpoints, **plain))
    rows = answered_rows(routing_service, job)
    assert {(row["checkpoint"], row["language"], row["route_reason"]) for row in rows} == {
        (str(checkpoints["english"]), None, None)
    }


def test_a_routed_job_fails_when_a_route_has_other_weights_than_it_began_with(
    service: Service, checkpoints: dict[str, Path]
) -> None:
    job = submit(service, write_rows(service.folder / "a.parquet"), checkpoints)
    db = Database(service.settings.resolved_database_url)
    with db.write() as connection:
        held = {"job_id": job.id, "checkpoint": "multilingual", "fingerprint": "another", "revision": None}
        connection.execute(sa.insert(job_checkpoints).values(held))
    db.close()
    service.start_worker()
    with pytest.raises(jobs.JobFailedError, match=r"checkpoint .*multilingual has fingerprint .* began with another"):
        wait(service, job)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"routes": {"multilingual": "/nowhere"}}, "checkpoint /nowhere: no such folder"),
        ({"routes": {"klingon": "english"}}, "route 'klingon': rows go to english or multilingual"),
        ({"language_column": "tongue"}, "no column 'tongue'"),
        ({"language_column": "number"}, "language column 'number' is int64; a language is text"),
        ({"checkpoint": "english", "routes": {"english": "english"}}, "routes are taken only with checkpoint 'router'"),
        (
            {"checkpoint": "english", "language_column": "text"},
            "a language column is read only with checkpoint 'router'",
        ),
    ],
)
def test_a_route_that_cannot_be_taken_is_refused(
    service: Service, checkpoints: dict[str, Path], asked: dict[str, Any], message: str
) -> None:
    path = service.folder / "a.parquet"
    pq.write_table(pa.table({"text": ["a"], "number": [1]}), path)
    given = {"routes": checkpoints if asked.get("checkpoint") != "english" else None, **asked}
    with pytest.raises(jobs.InputError, match=message):
        submit(service, path, **{"checkpoints": checkpoints, **given})
    assert jobs.list_jobs(settings=service.settings) == []


def test_run_routes_on_one_machine(tmp_path: Path, checkpoints: dict[str, Path]) -> None:
    path = write_rows(tmp_path / "a.parquet")
    (tmp_path / "q.json").write_text(json.dumps(QUESTIONS))
    routes = [f"--route={name}={folder}" for name, folder in checkpoints.items()]
    command = [COMMAND, "run", str(path), "--questions", str(tmp_path / "q.json")]
    options = ["--state", "text", "--checkpoint", "router", *routes, "--language-column", "lang", "--backend", "eager"]
    command = [*command, *options, "--data-dir", str(tmp_path / "data")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "job 1 succeeded" in done.stdout
