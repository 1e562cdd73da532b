"""Jobs that cannot be scored or saved, on each store: what fails, at once and with which words, and what goes on."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

import jobs
from jobs.store.database import Database
from schemas.tables import results, row_errors, shards
from tests.checkpoints import spoil_weights
from tests.conftest import empty_database
from tests.integration.service import QUESTIONS, Service, make_texts, serve, write_tickets
from tests.integration.test_worker import submit, wait

ROWS = 250  # three shards
LONGEST_LINE = 2000


def execute(url: str, *statements: str) -> None:
    with closing(Database(url)) as db, db.write() as connection:
        for statement in statements:
            connection.execute(sa.text(statement))


def await_failure(service: Service, job: jobs.JobInfo) -> jobs.JobInfo:
    """The job, which must fail, with no row blamed for it."""
    with pytest.raises(jobs.JobFailedError):
        wait(service, job)
    job = jobs.get(job.id, settings=service.settings)
    assert (job.status, job.row_errors, job.unanswered) == (jobs.JobStatus.FAILED, 0, 0)
    assert service.query(sa.select(row_errors).where(row_errors.c.job_id == job.id)) == []
    assert "[SQL" not in service.log
    assert "INSERT INTO" not in service.log
    assert max(map(len, service.log.splitlines())) < LONGEST_LINE
    return job


def attempts_of(service: Service, job: jobs.JobInfo) -> list[int]:
    return [row.attempt for row in service.query(sa.select(shards.c.attempt).where(shards.c.job_id == job.id))]


def write(service: Service, name: str, texts: list[str] | None = None) -> Path:
    return write_tickets(service.folder / name / "a.parquet", list(texts or make_texts(ROWS)))


def test_rows_that_are_not_finite_are_their_own_errors_and_their_neighbours_are_answered(
    warm_service: Service, tiny_checkpoint: Path
) -> None:
    texts, bad = make_texts(ROWS), [0, 3, 4, 120]
    for row in bad:
        texts[row] = f"☠ {texts[row]}"
    spoilt = spoil_weights(tiny_checkpoint, warm_service.folder / "spoilt", "☠")
    job = wait(warm_service, submit(warm_service, write(warm_service, "not-finite", texts), checkpoint=spoilt))
    assert (job.status, job.row_errors) == (jobs.JobStatus.SUCCEEDED, len(bad))
    errors = warm_service.query(sa.select(row_errors).where(row_errors.c.job_id == job.id))
    assert {(row.row_number, row.question) for row in errors} == {(row, name) for row in bad for name in QUESTIONS}
    assert {(row.code, row.message) for row in errors} == {("not_finite", "its logits are not finite numbers")}
    answered = warm_service.query(sa.select(results.c.row_number).where(results.c.job_id == job.id).distinct())
    assert {row.row_number for row in answered} == set(range(ROWS)) - set(bad)
    assert job.answers == (ROWS - len(bad)) * len(QUESTIONS)
    assert attempts_of(warm_service, job) == [1, 1, 1]


def test_a_checkpoint_with_broken_weights_fails_its_job_at_once(warm_service: Service, tiny_checkpoint: Path) -> None:
    broken = spoil_weights(tiny_checkpoint, warm_service.folder / "broken", None)
    job = submit(warm_service, write(warm_service, "broken-weights"), checkpoint=broken)
    job = await_failure(warm_service, job)
    assert f"checkpoint {broken}: its logits are not finite numbers, not even of plain texts" in (job.error or "")
    assert sorted(attempts_of(warm_service, job)) == [0, 0, 1]


def test_what_the_database_refuses_for_good_fails_the_job_at_once_and_a_retry_ends_it(warm_service: Service) -> None:
    url = warm_service.settings.resolved_database_url
    execute(url, "ALTER TABLE results RENAME COLUMN act_probability TO gone")
    try:
        job = await_failure(warm_service, submit(warm_service, write(warm_service, "refused")))
    finally:
        execute(url, "ALTER TABLE results RENAME COLUMN gone TO act_probability")
    assert "DatabaseRefusedError: the database" in (job.error or "")
    assert "act_probability" in (job.error or "")
    assert len(job.error or "") < 500
    assert sorted(attempts_of(warm_service, job)) == [0, 0, 1]
    jobs.retry(job.id, settings=warm_service.settings)
    assert wait(warm_service, job).answers == ROWS * len(QUESTIONS)


def test_a_constraint_that_is_not_ours_fails_the_shard_at_once_and_no_row_is_quoted(warm_service: Service) -> None:
    url = warm_service.settings.resolved_database_url
    if url.startswith("sqlite"):
        make = "CREATE TRIGGER strange BEFORE INSERT ON results BEGIN SELECT RAISE(ABORT, 'not to our taste'); END"
        drop, words = "DROP TRIGGER strange", "not to our taste"
    else:
        make = "ALTER TABLE results ADD CONSTRAINT strange CHECK (row_id = '') NOT VALID"
        drop, words = (
            "ALTER TABLE results DROP CONSTRAINT strange",
            'violates check constraint "strange" (SQLSTATE 23514)',
        )
    execute(url, make)
    try:
        job = await_failure(warm_service, submit(warm_service, write(warm_service, "constraint")))
    finally:
        execute(url, drop)
    assert "3 of 3 shards" in (job.error or "")
    assert words in (job.error or "")
    assert attempts_of(warm_service, job) == [1, 1, 1]


@pytest.fixture
def role_service(
    postgres_admin: sa.Engine, redis_url: str, tmp_path: Path, tiny_checkpoint: Path
) -> Iterator[tuple[Service, str]]:
    """A service whose worker has a role of its own in PostgreSQL, and the URL of one who may change that role."""
    with empty_database(postgres_admin) as url:
        role = str(sa.make_url(url).database)
        execute(url, f"CREATE ROLE {role} LOGIN")
        of_role = sa.make_url(url).set(username=role).render_as_string(hide_password=False)
        with closing(Database(url)) as db:
            db.migrate()
        execute(url, *(f"GRANT ALL ON ALL {things} IN SCHEMA public TO {role}" for things in ("TABLES", "SEQUENCES")))
        quick: dict[str, Any] = {"lease_s": 8.0, "resend_s": 1.0}
        with serve(of_role, redis_url, tmp_path, checkpoint=str(tiny_checkpoint), **quick) as service:
            yield service, url
        execute(url, f"DROP OWNED BY {role}", f"DROP ROLE {role}")


def test_a_worker_without_rights_blames_no_row_and_goes_on_once_it_has_them(role_service: tuple[Service, str]) -> None:
    service, admin = role_service
    role = sa.make_url(admin).database
    # It may not record its start: it does not boot, and is started again.
    execute(admin, f"REVOKE INSERT ON workers FROM {role}")
    service.launch()
    service.wait_for(lambda: "cannot boot: the database" in service.log)
    execute(admin, f"GRANT INSERT ON workers TO {role}")
    service.wait_for(service.ready_workers)
    # It may not insert: the job fails at once, in the database's words.
    execute(admin, f"REVOKE INSERT ON results FROM {role}")
    job = await_failure(service, submit(service, write(service, "no-insert")))
    assert "cannot be used: permission denied for table results (SQLSTATE 42501)" in (job.error or "")
    assert sorted(attempts_of(service, job)) == [0, 0, 1]
    # Nor may it say so: it waits, and tells the log.
    execute(
        admin,
        f"REVOKE UPDATE ON jobs FROM {role}",
        f"GRANT UPDATE (status, row_errors, started_at, finished_at) ON jobs TO {role}",
    )
    unsaid = submit(service, write(service, "no-word"))
    service.wait_for(lambda: "left until the database can be used: the database" in service.log)
    # Nor claim: the messages are not used up in vain.
    execute(admin, f"REVOKE UPDATE ON shards FROM {role}")
    unclaimed = submit(service, write(service, "no-claim"))
    service.wait_for(lambda: "cannot be used: permission denied for table shards (SQLSTATE 42501)" in service.log)
    execute(admin, f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {role}")
    for one in (unsaid, unclaimed):
        done = wait(service, one)
        assert (done.status, done.row_errors) == (jobs.JobStatus.SUCCEEDED, 0)
    assert service.query(sa.select(row_errors)) == []
    assert "Traceback" not in service.log
