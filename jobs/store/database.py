"""Connecting to the database, its clock, and its migrations. Owns no statement about jobs."""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement
from tenacity import retry, retry_if_exception_message, stop_after_delay, wait_fixed

from jobs.errors import (
    DatabaseAwayError,
    DatabaseBusyError,
    DatabaseConflictError,
    DatabaseError,
    DatabaseRefusedError,
)
from jobs.urls import hide_secrets, shown_url
from schemas.tables import UtcTime

LOCK_TIMEOUT_S = 30  # how long a writer waits for another before it gives up
CONNECT_TIMEOUT_S = 5
SILENCE_S = 30
SESSION_NAME_BYTES = 63
REASON_CHARS = 300
# A worker that is frozen, or cut off, between two statements keeps its rows locked until the server ends its session.
IDLE_IN_TRANSACTION_S = 10
RETRY_S = 5.0  # for what waits in a person's sight; workers are more patient

# SQLSTATE classes and codes of what passes: in conflict with another transaction, no resources (a full disk), cancelled
# by an operator, a broken system, locked, and a server that has become a standby.
_BUSY_SQLSTATES = ("40", "53", "57", "58", "55P03", "25006")
_AWAY_SQLSTATES = ("57P0", "08", "25P03")  # the server is stopping, or ended this connection
_BUSY_SQLITE = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
NOT_A_URL = "LAYA_BATCH_DATABASE_URL is not a database URL; write postgresql://user:password@host/name or sqlite:////folder/file.db"


class _NotJsonError(ValueError):
    """A value that is no JSON."""


UNSENDABLE = (_NotJsonError, UnicodeEncodeError, OverflowError)  # what drivers raise of a value that they cannot send


def _dump_json(value: object) -> str:
    """JSON, which has no numbers that are not finite; nor is one an answer."""
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError as error:
        raise _NotJsonError(str(error)) from error


class seconds_from_now(FunctionElement[Any]):  # noqa: N801 - reads as the SQL function it is
    """The database's own clock, moved by some seconds: hosts' clocks differ, and leases are compared across hosts."""

    type = UtcTime()
    inherit_cache = True

    def __init__(self, seconds: "float | sa.ColumnElement[float]" = 0.0) -> None:
        super().__init__(seconds if isinstance(seconds, sa.ColumnElement) else sa.literal(seconds, sa.Float))


@compiles(seconds_from_now, "postgresql")
def _postgresql_clock(element: Any, compiler: Any, **kw: Any) -> str:
    return f"(clock_timestamp() + make_interval(secs => {compiler.process(element.clauses, **kw)}))"


@compiles(seconds_from_now, "sqlite")
def _sqlite_clock(element: Any, compiler: Any, **kw: Any) -> str:
    # SQLAlchemy reads six decimals, SQLite writes three.
    shift = f"({compiler.process(element.clauses, **kw)}) || ' seconds'"
    return f"(strftime('%Y-%m-%d %H:%M:%f', 'now', {shift}) || '000')"


class Database:
    """One database: transactions that write, transactions that only read, and the schema's version."""

    def __init__(self, url: str, retry_s: float = RETRY_S, owner: str | None = None, connections: int = 1) -> None:
        """One database.

        Args:
            url: `postgresql://…` or `sqlite:///…`.
            retry_s: for how long a call tries again what the database refuses for the moment.
            owner: the worker that holds leases through it; PostgreSQL knows its transactions by this name.
            connections: the most that are open at once; a thread that finds none free waits for one. One will do for
                threads whose transactions are short, and is all that a server has for each of many workers.
        """
        self.retry_s = retry_s
        self._owner = owner
        try:
            self.url = sa.make_url(url)
        except (sa.exc.ArgumentError, ValueError) as error:
            raise DatabaseError(NOT_A_URL) from error
        if self.url.get_backend_name() not in ("postgresql", "sqlite"):
            raise DatabaseError(NOT_A_URL)
        if not self.is_sqlite:
            self.url = self.url.set(drivername="postgresql+psycopg")
        self._engine = sa.create_engine(
            self.url,
            poolclass=sa.QueuePool,
            pool_size=connections,
            max_overflow=0,
            pool_pre_ping=True,
            pool_timeout=LOCK_TIMEOUT_S,
            connect_args=self._connect_args(),
            hide_parameters=True,  # no row belongs into an error or a log
            json_serializer=_dump_json,
        )
        if self.is_sqlite:
            sa.event.listen(self._engine, "connect", _prepare_sqlite)
            sa.event.listen(self._engine, "begin", _begin_sqlite)
        else:
            sa.event.listen(self._engine, "begin", self._begin_postgresql)
        self._reading = self._engine.execution_options(laya_batch_reads=True)

    @property
    def is_sqlite(self) -> bool:
        return self.url.get_backend_name() == "sqlite"

    @property
    def shown_url(self) -> str:
        """The URL as a person may see it: without its password."""
        return shown_url(self.url.render_as_string(hide_password=True))

    @contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """A transaction that writes; committed at the end of the block, rolled back when it raises."""
        with self._translate_errors(), self._engine.begin() as connection:
            yield connection

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """A transaction that only reads; in SQLite it never waits for a writer."""
        with self._translate_errors(), self._reading.connect() as connection:
            yield connection

    def close(self) -> None:
        """Close every connection."""
        self._engine.dispose()

    def migrate(self) -> None:
        """Bring the tables to this version's shape; safe to run twice, and by two programs at once."""
        if self.is_sqlite and self.url.database:
            folder = Path(self.url.database).parent
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise DatabaseError(f"the folder {folder} cannot be made: {error.strerror}") from error
        current = self._revision()
        if current == _head_revision():
            return  # without a writer's lock: the embedded database is opened so by every call
        if current is not None and current not in _known_revisions():
            raise DatabaseError(
                f"the database {self.shown_url} has schema {current}, which this version does not know: another "
                "version made it; use that one, or another database (--data-dir, LAYA_BATCH_DATABASE_URL)"
            )
        with self.write() as connection:
            if not self.is_sqlite:
                self._check_encoding(connection)
                connection.execute(sa.text("SELECT pg_advisory_xact_lock(hashtext('laya-batch migrations'))"))
            config = _alembic_config()
            config.attributes["connection"] = connection
            command.upgrade(config, "head")

    def check_schema(self) -> None:
        """Raise DatabaseError unless the tables have this version's shape."""
        current, head = self._revision(), _head_revision()
        if current != head:
            raise DatabaseError(
                f"the database {self.shown_url} has schema {current or 'none'}, this version needs {head}; "
                "run `laya-batch migrate`"
            )

    def _check_encoding(self, connection: sa.Connection) -> None:
        encoding = connection.scalar(sa.select(sa.func.current_setting("server_encoding")))
        if encoding != "UTF8":
            raise DatabaseError(
                f"the database {self.shown_url} has the encoding {encoding}, which cannot hold every text; "
                "make one with CREATE DATABASE … ENCODING 'UTF8' TEMPLATE template0"
            )

    def _revision(self) -> str | None:
        with self.read() as connection:
            return MigrationContext.configure(connection).get_current_revision()

    def _connect_args(self) -> dict[str, Any]:
        if self.is_sqlite:
            return {"timeout": LOCK_TIMEOUT_S}
        return {
            "connect_timeout": CONNECT_TIMEOUT_S,
            # A server that vanished without a word is noticed in half a minute, not in the kernel's quarter of an hour.
            "keepalives_idle": SILENCE_S,
            "tcp_user_timeout": SILENCE_S * 1000,
            # A pooler in transaction mode gives each transaction another session, which knows no statement by its name.
            "prepare_threshold": None,
        }

    def _begin_postgresql(self, connection: sa.Connection) -> None:
        """Set what the transaction needs, for itself alone: a pooler gives the next one in this session to another."""
        reads = connection.get_execution_options().get("laya_batch_reads", False)
        # Who reads locks no row, and may take its time between two chunks of an export.
        idle_s = 0 if reads else IDLE_IN_TRANSACTION_S
        options = {
            "application_name": session_name(self._owner or "laya-batch"),
            "idle_in_transaction_session_timeout": f"{idle_s}s",
            "lock_timeout": f"{LOCK_TIMEOUT_S}s",
        }
        local = ", ".join(f"set_config('{name}', %({name})s, true)" for name in options)
        connection.exec_driver_sql(f"SELECT {local}", options)

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except (sa.exc.StatementError, sa.exc.TimeoutError, *UNSENDABLE) as error:
            # From the driver's error, which holds neither the statement nor its parameters as SQLAlchemy's does.
            cause = getattr(error, "orig", None) or error
            reason = hide_secrets(_first_line(cause))
            raise _kind_of(error)(f"the database {self.shown_url} cannot be used: {reason}") from cause


def session_name(owner: str) -> str:
    """An owner's name as PostgreSQL keeps it with a session: ASCII, and not longer than its identifiers."""
    return owner.encode("ascii", "replace")[:SESSION_NAME_BYTES].decode()


def _first_line(error: BaseException) -> str:
    """Return what a driver says first, at most REASON_CHARS of it, with its SQLSTATE: the lines after it quote rows."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    sqlstate = getattr(error, "sqlstate", None)
    return lines[0][:REASON_CHARS] + (f" (SQLSTATE {sqlstate})" if sqlstate else "")


def _kind_of(error: Exception) -> type[DatabaseError]:
    """Whether what failed may succeed later, and whether it is sure to have been undone."""
    if isinstance(error, sa.exc.TimeoutError):  # no connection was free
        return DatabaseBusyError
    if isinstance(error, sa.exc.IntegrityError):
        return DatabaseConflictError
    return _kind_of_refusal(error) if isinstance(error, sa.exc.DBAPIError) else DatabaseRefusedError


def _kind_of_refusal(error: sa.exc.DBAPIError) -> type[DatabaseError]:
    if isinstance(error.orig, sqlite3.Error):
        primary_code = getattr(error.orig, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
        return DatabaseBusyError if primary_code in _BUSY_SQLITE else DatabaseRefusedError
    sqlstate = getattr(error.orig, "sqlstate", None)
    if sqlstate is None and isinstance(error, sa.exc.OperationalError):
        return DatabaseAwayError
    if error.connection_invalidated or str(sqlstate).startswith(_AWAY_SQLSTATES):
        return DatabaseAwayError
    return DatabaseBusyError if str(sqlstate).startswith(_BUSY_SQLSTATES) else DatabaseRefusedError


# Changing to WAL takes a lock that SQLite does not wait for by itself, and two programs may open a new file at once.
@retry(
    retry=retry_if_exception_message(match=".*locked"),
    wait=wait_fixed(0.05),
    stop=stop_after_delay(LOCK_TIMEOUT_S),
    reraise=True,
)
def _prepare_sqlite(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # the driver must not begin transactions of its own
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}")


def _begin_sqlite(connection: sa.Connection) -> None:
    reads = connection.get_execution_options().get("laya_batch_reads", False)
    # A writer takes its lock at once: two that both read first and then write would deadlock.
    connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")


def _head_revision() -> str | None:
    return ScriptDirectory.from_config(_alembic_config()).get_current_head()


def _known_revisions() -> set[str]:
    return {script.revision for script in ScriptDirectory.from_config(_alembic_config()).walk_revisions()}


def _alembic_config() -> Config:
    config = Config()
    config.set_main_option("script_location", "schemas:migrations")
    config.set_main_option("path_separator", "os")
    return config
