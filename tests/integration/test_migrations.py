"""Databases that earlier versions made are brought to this one's shape, with what is in them."""

from typing import Any

import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from jobs.store import leases, reports
from jobs.store.database import Database, _alembic_config
from schemas.job import JobStatus
from schemas.message import ShardMessage
from schemas.tables import metadata

NOW = "2026-01-02 03:04:05.000000"
JOB = {
    "id": 1,
    "status": "queued",
    "spec": '{"inputs": ["/a"], "questions": {"q": {}}, "state": ["text"]}',
    "priority": 0,
    "rows": 3,
    "shards": 1,
    "questions": 1,
    "row_errors": 0,
    "created_at": NOW,
}
SHARD = {
    "id": 1,
    "job_id": 1,
    "number": 0,
    "file": "/a",
    "file_size": 1,
    "file_modified": "m",
    "row_groups": "[0]",
    "row_offset": 0,
    "rows": 3,
    "first_row_number": 0,
    "status": "queued",
    "attempt": 0,
    "failures": 0,
    "sent_at": NOW,
    "answers": 0,
    "unanswered": 0,
    "row_errors": 0,
}
WORKER = {
    "id": 1,
    "name": "w",
    "host": "h",
    "pid": 1,
    "device": "cpu",
    "status": "ready",
    "checkpoint": "english",
    "backend_asked": "auto",
    "started_at": NOW,
    "heartbeat_at": NOW,
}


def insert(connection: sa.Connection, table: str, row: dict[str, Any]) -> None:
    columns = ", ".join(row)
    connection.execute(
        sa.text(f"INSERT INTO {table} ({columns}) VALUES ({', '.join(f':{name}' for name in row)})"), row
    )


def test_a_database_of_the_first_version_is_migrated_and_its_job_goes_on(database_url: str) -> None:
    db = Database(database_url)
    with db.write() as connection:
        config = _alembic_config()
        config.attributes["connection"] = connection
        command.upgrade(config, "0001")
        for table, row in (("jobs", JOB), ("shards", SHARD), ("workers", WORKER)):
            insert(connection, table, row)
    db.migrate()
    db.check_schema()
    with db.read() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
        shard = connection.execute(sa.select(metadata.tables["shards"])).one()
        assert (shard.deaths, shard.suspect_deaths, shard.suspect_first_row, shard.suspect_attempt) == (
            0,
            0,
            None,
            None,
        )
    (worker,) = reports.list_workers(db, 10)
    assert worker["refused_messages"] == 0
    claim = leases.claim_shard(db, ShardMessage(job_id=1, shard_id=1), "w", 60)
    assert claim is not None
    assert claim.suspects is None
    assert reports.get_job(db, 1).status is JobStatus.RUNNING
    db.close()


def test_a_migration_can_be_undone(database_url: str) -> None:
    db = Database(database_url)
    db.migrate()
    for revision in ("0001", "head"):
        with db.write() as connection:
            config = _alembic_config()
            config.attributes["connection"] = connection
            (command.downgrade if revision == "0001" else command.upgrade)(config, revision)
    db.check_schema()
    db.close()
