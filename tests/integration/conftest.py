import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.checkpoints import CheckpointSpec, make_checkpoint
from tests.integration.service import Service, serve


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint small enough that a worker boots in seconds."""
    spec = CheckpointSpec(max_len=96, encoder={"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2})
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny", spec)


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
    if request.param == "sqlite":
        with serve(f"sqlite:///{folder / 'test.db'}", redis_url, folder, checkpoint=str(tiny_checkpoint)) as one:
            one.start_worker()
            yield one
        return
    admin: sa.Engine = request.getfixturevalue("postgres_admin")
    name = f"laya_batch_{uuid.uuid4().hex[:12]}"
    with admin.connect() as connection:
        connection.execute(sa.text(f"CREATE DATABASE {name}"))
    url = admin.url.set(database=name).render_as_string(hide_password=False)
    with serve(url, redis_url, folder, checkpoint=str(tiny_checkpoint)) as one:
        one.start_worker()
        yield one
    with admin.connect() as connection:
        connection.execute(sa.text(f"DROP DATABASE {name} WITH (FORCE)"))
