"""Empty databases, as fast as they can be had: for a test that needs hundreds."""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import sqlalchemy as sa

from jobs.store.database import Database
from schemas.tables import metadata


def sqlite_copies(folder: Path) -> Callable[[], Database]:
    """Each a copy of one that was migrated."""
    empty = Database(f"sqlite:///{folder / 'empty.db'}")
    empty.migrate()
    empty.close()

    def copy() -> Database:
        path = Path(tempfile.mkdtemp(dir=folder)) / "test.db"
        shutil.copy(folder / "empty.db", path)
        return Database(f"sqlite:///{path}")

    return copy


def emptied(url: str) -> Callable[[], Database]:
    """One PostgreSQL database, emptied each time."""
    first = Database(url)
    first.migrate()
    first.close()

    def empty() -> Database:
        database = Database(url)
        with database.write() as connection:
            for table in reversed(metadata.sorted_tables):
                connection.execute(sa.delete(table))
        return database

    return empty
