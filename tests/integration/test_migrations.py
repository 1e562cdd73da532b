"""The migrations make the tables that the code expects, and can be undone."""

import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

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
