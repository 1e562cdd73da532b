"""The whole path, with real worker processes: jobs.submit, Redis, Celery, the engine, and answers in SQL."""

import base64
import json
import os
import pickle
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import redis
import sqlalchemy as sa

import jobs
import laya
from jobs.engine_options import EngineOptions
from jobs.planning import plan_job
from jobs.queue import SCORE_SHARD, app, configure_app, count_messages
from jobs.store import lifecycle
from jobs.store.database import Database
from jobs.store.lifecycle import JobOptions
from jobs.submission import build_spec, send_job
from schemas.tables import batches, results, row_errors, shards, workers
from tests.integration.service import QUESTIONS, WAIT_S, Service, make_texts, write_tickets

TIMEOUT_S = 180.0


def submit(service: Service, path: Path, **asked: Any) -> jobs.JobInfo:
    checkpoint = asked.pop("checkpoint", service.settings.checkpoint)
    return jobs.submit(
        path,
        questions=QUESTIONS,
        state="text",
        row_id="ticket",
        checkpoint=checkpoint,
        settings=service.settings,
        **asked,
    )


def wait(service: Service, job: jobs.JobInfo) -> jobs.JobInfo:
    try:
        return jobs.wait(job.id, timeout_s=TIMEOUT_S, settings=service.settings)
    except TimeoutError:
        pytest.fail(service.log[-4000:])


def make_envelope(service: Service, client: redis.Redis, **message: Any) -> dict[str, Any]:
    """What Celery puts into Redis for a message, taken from a queue that no worker reads."""
    configure_app(service.settings)
    spare = f"{service.settings.queue}-spare"
    app.send_task(SCORE_SHARD, kwargs=message, queue=spare)
    return dict(json.loads(client.rpop(spare)))


def answered_rows(service: Service, job: jobs.JobInfo) -> list[dict[str, Any]]:
    return list(jobs.results(job.id, settings=service.settings).read_all().to_pylist())


def test_every_row_gets_the_answers_that_the_engine_gives(warm_service: Service, tiny_checkpoint: Path) -> None:
    texts: list[str | None] = [*make_texts(240), "[SEP] [MASK] 🎉", "", "word " * 500]
    texts[17] = None
    path = write_tickets(warm_service.folder / "parity" / "a.parquet", texts)
    job = wait(warm_service, submit(warm_service, path))
    assert (job.status, job.rows, job.row_errors, job.answers) == (jobs.JobStatus.SUCCEEDED, 243, 1, 242 * 3)
    expected = laya.load(tiny_checkpoint).predict_batch([text for text in texts if text is not None], QUESTIONS)
    found = iter(answered_rows(warm_service, job))
    for i, text in enumerate(texts):
        if text is None:
            continue
        answers = expected.pop(0)["answers"]
        for question in sorted(QUESTIONS):
            row, answer = next(found), answers[question]
            assert (row["row_number"], row["row_id"], row["question"]) == (i, f"t{i}", question)
            kind = answer["type"]
            if kind == "choice":
                assert row["choice"] == answer["choice"]
            else:
                assert row[kind] == pytest.approx(answer[kind], abs=2e-4)
            assert row["confidence"] == pytest.approx(answer["confidence"], abs=2e-4)
            assert [row[other] for other in ("choice", "score", "noul") if other != kind] == [None, None]
            assert sum(json.loads(row["probabilities"]).values()) == pytest.approx(1)
    assert next(found, None) is None
    (error,) = warm_service.query(sa.select(row_errors).where(row_errors.c.job_id == job.id))
    assert (error.row_number, error.row_id, error.code) == (17, "t17", "null_state")


def test_each_answer_leads_to_the_batch_and_the_worker_that_made_it(warm_service: Service) -> None:
    path = write_tickets(warm_service.folder / "trace" / "a.parquet", make_texts(150))
    job = wait(warm_service, submit(warm_service, path))
    joined = sa.select(batches, workers.c.versions, workers.c.warmup_s, workers.c.status).join(workers)
    found = warm_service.query(joined.where(batches.c.job_id == job.id))
    assert sum(row.sequences for row in found) == 150 * 3
    for row in found:
        assert (row.backend, row.device, row.dtype) == ("eager", "cpu", "float32")
        assert row.tokens <= row.padded_tokens == row.sequences * row.bucket_length <= 2048
        assert min(row.read_ms, row.tokenise_ms, row.forward_ms, row.decode_ms, row.write_ms) > 0
        assert row.versions["torch"]
        assert row.warmup_s > 0
        assert row.status == "ready"
    counted = warm_service.query(
        sa.select(sa.func.count()).select_from(results.join(batches)).where(batches.c.job_id == job.id)
    )
    assert counted[0][0] == 450
    assert count_messages(warm_service.settings) == 0


def test_ping_is_answered_while_a_shard_is_scored(warm_service: Service) -> None:
    # Far more than is scored before the reply; what is left then is cancelled.
    path = write_tickets(warm_service.folder / "ping" / "a.parquet", make_texts(10_000))
    job = submit(warm_service, path)
    warm_service.wait_for(lambda: jobs.get(job.id, settings=warm_service.settings).answers > 0)
    configure_app(warm_service.settings)
    (reply,) = app.control.ping(timeout=30.0, limit=1)
    assert list(reply.values()) == [{"ok": "pong"}]
    assert not jobs.get(job.id, settings=warm_service.settings).is_finished
    jobs.cancel(job.id, settings=warm_service.settings)
    warm_service.wait_for(lambda: jobs.get(job.id, settings=warm_service.settings).is_finished)


def test_the_parent_of_the_scoring_process_never_loads_the_engine(warm_service: Service) -> None:
    (child,) = [row.pid for row in warm_service.query(sa.select(workers.c.pid).where(workers.c.status == "ready"))]
    status = Path(f"/proc/{child}/status").read_text()
    (parent,) = [line.split()[1] for line in status.splitlines() if line.startswith("PPid:")]
    assert "torch" in Path(f"/proc/{child}/maps").read_text()
    for library in ("torch", "tokenizers", "libcuda"):
        assert library not in Path(f"/proc/{parent}/maps").read_text()


def test_cancel_stops_at_the_next_batch_and_keeps_what_is_saved(warm_service: Service) -> None:
    path = write_tickets(warm_service.folder / "cancel" / "a.parquet", make_texts(1500))
    job = submit(warm_service, path)
    warm_service.wait_for(lambda: jobs.get(job.id, settings=warm_service.settings).answers > 0)
    with warm_service.holding_messages():  # so that the job cannot end before it is cancelled
        jobs.cancel(job.id, settings=warm_service.settings)
        warm_service.wait_for(lambda: jobs.get(job.id, settings=warm_service.settings).is_finished)
    stopped = jobs.get(job.id, settings=warm_service.settings)
    assert stopped.status is jobs.JobStatus.CANCELLED
    assert 0 < stopped.answers < 4500
    assert len(answered_rows(warm_service, job)) == stopped.answers
    jobs.retry(job.id, settings=warm_service.settings)
    assert wait(warm_service, job).answers == 4500
    assert len(answered_rows(warm_service, job)) == 4500


def test_an_urgent_job_overtakes_one_that_waits(warm_service: Service) -> None:
    path = write_tickets(warm_service.folder / "priority" / "a.parquet", make_texts(400))
    with warm_service.holding_messages():
        nightly = submit(warm_service, path, priority=0)
        urgent = submit(warm_service, path, priority=9)
    for job in (urgent, nightly):
        wait(warm_service, job)
    found = warm_service.query(
        sa.select(shards.c.job_id).where(shards.c.job_id.in_([nightly.id, urgent.id])).order_by(shards.c.started_at)
    )
    order = [row.job_id for row in found]
    # The worker may have had one message in its hands before the urgent ones came.
    late = order[1:] if order[0] == nightly.id else order
    assert late == [urgent.id] * 4 + [nightly.id] * (len(late) - 4)


def test_a_file_that_changes_before_it_is_read_fails_the_job_and_names_it(warm_service: Service) -> None:
    path = write_tickets(warm_service.folder / "changed" / "a.parquet", make_texts(100))
    with warm_service.holding_messages():
        job = submit(warm_service, path)
        write_tickets(path, make_texts(101))
    with pytest.raises(jobs.JobFailedError, match=r"changed/a\.parquet: has changed since the job was submitted"):
        jobs.wait(job.id, timeout_s=TIMEOUT_S, settings=warm_service.settings)


def test_a_file_outside_the_workers_roots_is_refused_by_the_worker_too(warm_service: Service, tmp_path: Path) -> None:
    path = write_tickets(tmp_path / "secret.parquet", make_texts(10))
    careless = warm_service.settings.model_copy(update={"input_roots": []})
    job = jobs.submit(
        path, questions=QUESTIONS, state="text", checkpoint=warm_service.settings.checkpoint, settings=careless
    )
    with pytest.raises(jobs.JobFailedError, match="not under an input root"):
        jobs.wait(job.id, timeout_s=TIMEOUT_S, settings=warm_service.settings)


WIDE = {"type": "choice", "instructions": "Which?", "criteria": [f"option {i}" for i in range(77)]}
ALIKE = {"type": "choice", "instructions": "Which?", "criteria": [f"a common prefix {i}" for i in range(12)]}


def submit_unchecked(service: Service, path: Path, questions: dict[str, Any]) -> jobs.JobInfo:
    """As from a machine that has no tokenizer: only the workers can tell what fits."""
    spec = build_spec(
        inputs=path,
        questions=questions,
        state="text",
        checkpoint=service.settings.checkpoint,
        engine_options=EngineOptions(),
    )
    configure_app(service.settings)
    db = Database(service.settings.resolved_database_url)
    try:
        plan = plan_job(spec, service.settings.rows_per_shard, service.settings.input_roots)
        job_id = lifecycle.create_job(db, spec, JobOptions(idempotency_key=str(path)), plan)
        send_job(db, service.settings, job_id)
    finally:
        db.close()
    return jobs.get(job_id, settings=service.settings)


def test_a_question_that_does_not_fit_is_refused_before_it_is_queued(warm_service: Service) -> None:
    path = write_tickets(warm_service.folder / "unfit" / "a.parquet", make_texts(20))
    with pytest.raises(jobs.QuestionSetError, match=r"'wide': \d+ of its 77 options fit in max_len 96.*raise max_len"):
        jobs.submit(
            path,
            questions={"wide": WIDE, **QUESTIONS},
            state="text",
            checkpoint=warm_service.settings.checkpoint,
            settings=warm_service.settings,
        )


def test_a_question_that_a_worker_finds_not_to_fit_fails_its_job_at_once(warm_service: Service) -> None:
    path = write_tickets(warm_service.folder / "unfit_here" / "a.parquet", make_texts(250))
    job = submit_unchecked(warm_service, path, {"wide": WIDE, **QUESTIONS})
    with pytest.raises(jobs.JobFailedError, match=r"'wide'.*77 options fit in max_len 96"):
        jobs.wait(job.id, timeout_s=TIMEOUT_S, settings=warm_service.settings)
    job = jobs.get(job.id, settings=warm_service.settings)
    assert (job.answers, job.row_errors, job.shards_done) == (0, 0, 0)
    attempts = warm_service.query(sa.select(shards.c.attempt).where(shards.c.job_id == job.id))
    assert sorted(row.attempt for row in attempts)[:2] == [0, 0]


def test_options_that_the_model_cannot_tell_apart_are_told_and_kept(warm_service: Service) -> None:
    path = write_tickets(warm_service.folder / "alike" / "a.parquet", make_texts(10))
    unchecked = submit_unchecked(warm_service, path, {"alike": ALIKE, **QUESTIONS})
    asked = jobs.submit(
        path,
        questions={"alike": ALIKE, **QUESTIONS},
        state="text",
        checkpoint=warm_service.settings.checkpoint,
        settings=warm_service.settings,
    )
    (warning,) = asked.warnings
    assert "question 'alike': its 12 options, cut to 4 tokens each, leave 1 that the model can tell apart" in warning
    assert "head_max_len" in warning
    for job in (unchecked, asked):
        assert wait(warm_service, job).warnings == (warning,)
        rows = answered_rows(warm_service, job)
        assert {(row["question"], row["options_cut"]) for row in rows} == {
            ("alike", True),
            *((question, False) for question in QUESTIONS),
        }


def test_a_backend_that_cannot_run_is_recorded_as_the_one_that_ran(warm_service: Service) -> None:
    path = write_tickets(warm_service.folder / "backend" / "a.parquet", make_texts(10))
    job = wait(warm_service, submit(warm_service, path, backend="tilelang"))
    assert {row.backend for row in warm_service.query(sa.select(batches).where(batches.c.job_id == job.id))} == {
        "eager"
    }


def test_pickled_and_strange_messages_are_refused_and_the_worker_lives_on(warm_service: Service) -> None:
    queue = warm_service.settings.queue
    with redis.Redis.from_url(warm_service.settings.require_broker_url()) as client:
        envelope = make_envelope(warm_service, client, job_id=1, shard_id=1, file="/etc/passwd")
        client.lpush(queue, json.dumps(envelope))
        pickled = base64.b64encode(pickle.dumps(print)).decode()
        evil = {**envelope, "content-type": "application/x-python-serialize", "body": pickled}
        client.lpush(queue, json.dumps(evil))
        app.send_task("os.system", args=["true"])
    path = write_tickets(warm_service.folder / "after" / "a.parquet", make_texts(10))
    assert wait(warm_service, submit(warm_service, path)).answers == 30
    assert "message dropped: it is not {job_id, shard_id}" in warm_service.log
    assert "Refusing to deserialize" in warm_service.log or "ContentDisallowed" in warm_service.log


def test_what_a_message_says_of_times_and_other_tasks_is_not_done(warm_service: Service) -> None:
    service, queue = warm_service, warm_service.settings.queue
    path = write_tickets(service.folder / "headers" / "a.parquet", make_texts(600))
    (child,) = [row.pid for row in service.query(sa.select(workers.c.pid).where(workers.c.status == "ready"))]
    with redis.Redis.from_url(service.settings.require_broker_url()) as client, service.holding_messages():
        job = submit(service, path, priority=9)
        waiting = [dict(json.loads(message)) for message in client.lrange(queue, 0, -1)]
        client.delete(queue)
        assert waiting
        for envelope, header in zip(
            waiting * 5,
            [
                *({"timelimit": [0.01, 0.005]}, {"eta": "2999-01-01T00:00:00+00:00"}, {"eta": "when I say so"}),
                *({"expires": "2000-01-01T00:00:00+00:00"}, {"retries": "many", "group": ["g"], "stamps": [1]}),
                *({"id": ["no", "text"]}, {"task": ["no", "text"]}),
            ],
            strict=False,
        ):
            client.lpush(queue, json.dumps({**envelope, "headers": {**envelope["headers"], **header}}))
        body = base64.b64encode(json.dumps([[], {"job_id": 1, "shard_id": 1}, {"callbacks": [{"task": "x"}]}]).encode())
        client.lpush(queue, json.dumps({**waiting[0], "body": body.decode()}))
        for envelope in waiting:
            client.lpush(
                queue, json.dumps({**envelope, "headers": {**envelope["headers"], "timelimit": [0.01, 0.005]}})
            )
    assert wait(service, job).answers == 1800
    service.wait_for(lambda: count_messages(service.settings) == 0)
    assert [row.pid for row in service.query(sa.select(workers.c.pid).where(workers.c.status == "ready"))] == [child]
    assert max(row.attempt for row in service.query(sa.select(shards.c.attempt).where(shards.c.job_id == job.id))) == 1


def test_a_message_that_kills_celery_itself_costs_one_restart(service: Service) -> None:
    service.start_worker()
    with redis.Redis.from_url(service.settings.require_broker_url()) as client:
        garbled = {**make_envelope(service, client, job_id=1, shard_id=1), "body": "not base64"}
        client.lpush(service.settings.queue, json.dumps(garbled))
    service.wait_for(lambda: "ended with code" in service.log)
    assert wait(service, submit(service, write_tickets(service.folder / "a.parquet", make_texts(10)))).answers == 30
    assert service.log.count("starting a worker") == 2


def test_sigterm_gives_the_shard_back_and_another_worker_finishes_it(service: Service) -> None:
    first = service.start_worker()
    job = submit(service, write_tickets(service.folder / "in" / "a.parquet", make_texts(1200)))
    service.wait_for(lambda: jobs.get(job.id, settings=service.settings).answers > 0)
    first.send_signal(signal.SIGTERM)
    assert first.wait(WAIT_S) == 0
    saved = jobs.get(job.id, settings=service.settings).answers
    assert 0 < saved < 3600
    states = {row.status for row in service.query(sa.select(shards.c.status).where(shards.c.job_id == job.id))}
    assert "running" not in states
    assert [row.status for row in service.query(sa.select(workers.c.status))] == ["stopped"]
    service.start_worker()
    assert wait(service, job).answers == 3600
    rows = answered_rows(service, job)
    assert len({(row["row_number"], row["question"]) for row in rows}) == len(rows) == 3600
    assert max(row.failures for row in service.query(sa.select(shards.c.failures))) == 0


def test_a_killed_workers_shard_is_finished_by_its_successor_at_once(service: Service) -> None:
    service.settings = service.settings.model_copy(update={"lease_s": 600.0})
    service.start_worker()
    job = submit(service, write_tickets(service.folder / "in" / "a.parquet", make_texts(1200)))
    service.wait_for(lambda: jobs.get(job.id, settings=service.settings).answers > 0)
    (pid,) = [row.pid for row in service.query(sa.select(workers.c.pid))]
    os.kill(pid, signal.SIGKILL)
    assert wait(service, job).answers == 3600  # within TIMEOUT_S, long before the lease ends
    rows = answered_rows(service, job)
    assert len({(row["row_number"], row["question"]) for row in rows}) == len(rows) == 3600


def test_a_successor_that_cannot_boot_takes_no_message_and_the_supervisor_starts_again(
    service: Service, tiny_checkpoint: Path
) -> None:
    checkpoint = Path(shutil.copytree(tiny_checkpoint, service.folder / "checkpoint"))
    service.settings = service.settings.model_copy(update={"checkpoint": str(checkpoint)})
    service.start_worker()
    (pid,) = [row.pid for row in service.query(sa.select(workers.c.pid))]
    checkpoint.rename(service.folder / "away")
    os.kill(pid, signal.SIGKILL)
    service.wait_for(lambda: "ended with code 3" in service.log)
    (service.folder / "away").rename(checkpoint)
    job = submit(service, write_tickets(service.folder / "in" / "a.parquet", make_texts(150)))
    assert wait(service, job).answers == 450
    assert "failed" in {row.status for row in service.query(sa.select(workers.c.status))}


def test_shards_whose_messages_were_lost_are_sent_again(service: Service) -> None:
    job = submit(service, write_tickets(service.folder / "in" / "a.parquet", make_texts(250)))
    with redis.Redis.from_url(service.settings.require_broker_url()) as client:
        lists = [key for key in client.keys(f"{service.settings.queue}*") if client.type(key) == b"list"]
        assert sum(client.llen(key) for key in lists) == 3
        client.delete(*lists)
    service.start_worker(resend_s=1.0)
    assert wait(service, job).answers == 750


def test_a_submit_without_a_broker_leaves_nothing_and_succeeds_when_repeated(service: Service) -> None:
    path = write_tickets(service.folder / "in" / "a.parquet", make_texts(10))
    down = jobs.load_settings(
        **{**service.settings.model_dump(exclude_unset=True), "broker_url": "redis://:hunter2@127.0.0.1:1/0"}
    )
    asked: dict[str, Any] = {
        "questions": QUESTIONS,
        "state": "text",
        "checkpoint": service.settings.checkpoint,
        "idempotency_key": "nightly-1",
    }
    with pytest.raises(jobs.BrokerError, match=r"redis://\*\*\*@127.0.0.1:1/0 cannot be used") as raised:
        jobs.submit(path, settings=down, **asked)
    assert "hunter2" not in str(raised.value)
    assert jobs.list_jobs(settings=service.settings) == []
    job = jobs.submit(path, settings=service.settings, **asked)
    assert jobs.submit(path, settings=service.settings, **asked).id == job.id
    assert count_messages(service.settings) == 1


def test_a_worker_that_cannot_boot_says_why_and_takes_no_message(service: Service) -> None:
    job = submit(service, write_tickets(service.folder / "in" / "a.parquet", make_texts(10)))
    process = service.launch("--no-restart", checkpoint=str(service.folder / "nothing"))
    assert process.wait(WAIT_S) != 0
    (row,) = service.query(sa.select(workers))
    assert row.status == "failed"
    assert "nothing" in row.error
    assert count_messages(service.settings) == 1
    assert jobs.get(job.id, settings=service.settings).status is jobs.JobStatus.QUEUED


def test_a_worker_without_input_roots_does_not_start(service: Service) -> None:
    process = service.launch(input_roots=[])
    assert process.wait(WAIT_S) == 1
    assert "set LAYA_BATCH_INPUT_ROOTS" in service.log
