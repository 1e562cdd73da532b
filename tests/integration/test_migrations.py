"""The migrations make the tables that the code expects, and can be undone."""

from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from jobs.errors import DatabaseError
from jobs.store.database import Database, _alembic_config
from schemas.tables import metadata


def test_an_empty_database_gets_the_tables_that_the_code_expects(database_url: str) -> None:
    db = Database(database_url)
    db.migrate()
    db.check_schema()
    with db.read() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    db.close()


def test_a_migration_can_be_undone_and_done_again(database_url: str) -> None:
    db = Database(database_url)
    db.migrate()
    with db.write() as connection:
        config = _alembic_config()
        config.attributes["connection"] = connection
        command.downgrade(config, "base")
    with db.read() as connection:
        assert sa.inspect(connection).get_table_names() == ["alembic_version"]
        assert sa.inspect(connection).get_view_names() == []
    db.migrate()
    db.check_schema()
    db.close()


def test_sqlite_gives_no_id_twice(tmp_path: Path) -> None:
    """Without AUTOINCREMENT it gives the newest row's id again once that row is deleted."""
    db = Database(f"sqlite:///{tmp_path / 'test.db'}")
    db.migrate()
    counting = [table.name for table in metadata.sorted_tables if [c.name for c in table.primary_key] == ["id"]]
    assert {"jobs", "shards", "batches", "workers"} <= set(counting)
    with db.read() as connection:
        found = connection.execute(sa.text("SELECT name, sql FROM sqlite_master WHERE type = 'table'"))
        made = {row.name: row.sql for row in found}
    assert [name for name in counting if "AUTOINCREMENT" not in made[name]] == []
    db.close()


def test_every_reference_has_an_index() -> None:
    """Deleting what is referred to looks for the references: without an index, through the whole table."""
    for table in metadata.sorted_tables:
        unique = [c for c in table.constraints if isinstance(c, sa.UniqueConstraint | sa.PrimaryKeyConstraint)]
        first = {next(iter(index.columns)).name for index in [*table.indexes, *unique] if len(index.columns)}
        assert {column.name for column in table.columns if column.foreign_keys} <= first, table.name


def test_a_database_of_an_unknown_version_is_left_as_it_is(database_url: str) -> None:
    db = Database(database_url)
    db.migrate()
    with db.write() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = 'of tomorrow'"))
    for use in (db.migrate, db.check_schema):
        with pytest.raises(DatabaseError, match="has schema of tomorrow"):
            use()
    db.close()
