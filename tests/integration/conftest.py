from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.conftest import empty_database
from tests.integration.service import Service, serve
from tests.pgbouncer import PgBouncer


@pytest.fixture(scope="session")
def pgbouncer(postgres_admin: sa.Engine) -> Iterator[PgBouncer]:
    """A PgBouncer in transaction mode before the tests' PostgreSQL."""
    with PgBouncer(postgres_admin.url) as one:
        yield one


@pytest.fixture
def service(database_url: str, redis_url: str, tmp_path: Path, tiny_checkpoint: Path) -> Iterator[Service]:
    """A service of the test's own, on each store, without workers yet."""
    with serve(database_url, redis_url, tmp_path, checkpoint=str(tiny_checkpoint)) as one:
        yield one


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def warm_service(
    request: pytest.FixtureRequest, redis_url: str, tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path
) -> Iterator[Service]:
    """A service with one warm worker, on each store, shared by the tests of a file."""
    folder = tmp_path_factory.mktemp(request.param)
    with ExitStack() as stack:
        if request.param == "sqlite":
            url = f"sqlite:///{folder / 'test.db'}"
        else:
            url = stack.enter_context(empty_database(request.getfixturevalue("postgres_admin")))
        one = stack.enter_context(serve(url, redis_url, folder, checkpoint=str(tiny_checkpoint)))
        one.start_worker()
        yield one
