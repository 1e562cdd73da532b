"""What every test stands on: a clean environment, real servers, and a tiny checkpoint."""

import os
import signal
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
import sqlalchemy as sa

from jobs.settings import PREFIX
from jobs.store.database import Database

POSTGRES_URL = os.environ.get("TEST_POSTGRES_URL", "postgresql+psycopg://postgres@127.0.0.1:5432/test")
REDIS_URL = os.environ.get("TEST_REDIS_URL", "redis://127.0.0.1:6379/15")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No setting of the developer's reaches a test, and no test writes outside its folder."""
    for variable in list(os.environ):
        if variable.startswith(PREFIX):
            monkeypatch.delenv(variable)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "xdg"))


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> Iterator[None]:
    """Let what a test starts heed Ctrl-C and a closed terminal, also under nohup, whose ignoring is inherited."""
    heeded = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in heeded.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def missing_service(what: str) -> None:
    """Skip on a developer's machine, fail in CI: there a missing server is a broken set-up."""
    if os.environ.get("CI"):
        pytest.fail(f"{what} does not answer")
    pytest.skip(f"{what} does not answer")


@pytest.fixture(scope="session")
def redis_url() -> str:
    """A Redis that answers. Tests share it: each uses a queue name of its own."""
    try:
        with redis.Redis.from_url(REDIS_URL) as client:
            client.ping()
    except redis.RedisError:
        missing_service(f"Redis at {REDIS_URL}")
    return REDIS_URL


@pytest.fixture(scope="session")
def postgres_admin() -> Iterator[sa.Engine]:
    """A connection that may create databases."""
    engine = sa.create_engine(POSTGRES_URL, isolation_level="AUTOCOMMIT")
    try:
        with engine.connect():
            pass
    except sa.exc.OperationalError:
        missing_service(f"PostgreSQL at {POSTGRES_URL}")
    yield engine
    engine.dispose()


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint small enough that a worker boots in seconds."""
    from tests.checkpoints import CheckpointSpec, make_checkpoint  # noqa: PLC0415 - torch is slow to import

    spec = CheckpointSpec(max_len=96, encoder={"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2})
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny", spec)


@contextmanager
def empty_database(admin: sa.Engine) -> Iterator[str]:
    """The URL of a new PostgreSQL database that is dropped at the end of the block."""
    name = f"laya_batch_{uuid.uuid4().hex[:12]}"
    with admin.connect() as connection:
        connection.execute(sa.text(f"CREATE DATABASE {name}"))
    yield admin.url.set(database=name).render_as_string(hide_password=False)
    with admin.connect() as connection:
        connection.execute(sa.text(f"DROP DATABASE {name} WITH (FORCE)"))


@pytest.fixture
def postgres_url(postgres_admin: sa.Engine) -> Iterator[str]:
    """A PostgreSQL database of the test's own, empty."""
    with empty_database(postgres_admin) as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The test runs once on each store."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'test.db'}"
    return str(request.getfixturevalue("postgres_url"))


@pytest.fixture
def db(database_url: str) -> Iterator[Database]:
    """A migrated database, which several threads may use at once as several workers would."""
    database = Database(database_url, connections=16)
    database.migrate()
    yield database
    database.close()
