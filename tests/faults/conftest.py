"""The fault suite: private servers that a test may break, a service on them, and the report of what it cost.

`pytest tests/faults` runs the quick part; `make faults` runs everything and writes the table into
`docs/reliability.md`.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from tests.faults.proxy import CommitProxy
from tests.faults.report import FaultReport
from tests.faults.scenes import QUICK, Scene, start_workers
from tests.faults.servers import PrivatePostgres, PrivateRedis
from tests.integration.service import serve

REPORT = pytest.StashKey[FaultReport]()
TABLE_WIDTH = 120


@pytest.fixture(scope="session")
def report(request: pytest.FixtureRequest) -> FaultReport:
    """Where a test notes what its fault cost: `report.record(fault, times=…, rows=…, lost=…, …)`."""
    return request.config.stash.setdefault(REPORT, FaultReport())


def pytest_terminal_summary(config: pytest.Config) -> None:
    """Print the table; with FAULT_REPORT=page.md in the environment, put it into that page, too."""
    report = config.stash.get(REPORT, None)
    if report is None or not report.records:
        return
    Console(width=TABLE_WIDTH, markup=False, emoji=False).print(report.draw())
    if page := os.environ.get("FAULT_REPORT"):
        report.write_into(Path(page))


@pytest.fixture
def private_redis() -> Iterator[PrivateRedis]:
    """A Redis of the test's own, to be stopped, frozen and filled."""
    with PrivateRedis() as server:
        yield server


@pytest.fixture
def private_postgres() -> Iterator[PrivatePostgres]:
    """A PostgreSQL of the test's own, to be stopped, frozen and filled."""
    with PrivatePostgres() as server:
        yield server


@pytest.fixture(scope="session")
def postgres_scene(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> Iterator[Scene]:
    """Two warm workers on PostgreSQL and Redis, all of which a test may break, if it leaves them well."""
    folder = tmp_path_factory.mktemp("postgres-scene")
    with PrivateRedis() as broker, PrivatePostgres() as postgres, CommitProxy(postgres.port) as proxy:
        url = postgres.url.replace(str(postgres.port), str(proxy.port))
        with serve(url, broker.url, folder, checkpoint=str(tiny_checkpoint), **QUICK) as service:
            yield Scene(service, broker, start_workers(service, 2), postgres, proxy)


@pytest.fixture(scope="session")
def sqlite_scene(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> Iterator[Scene]:
    """The same on SQLite."""
    folder = tmp_path_factory.mktemp("sqlite-scene")
    with (
        PrivateRedis() as broker,
        serve(
            f"sqlite:///{folder / 'test.db'}", broker.url, folder, checkpoint=str(tiny_checkpoint), **QUICK
        ) as service,
    ):
        yield Scene(service, broker, start_workers(service, 2))


@pytest.fixture(params=["postgresql", "sqlite"])
def scene(request: pytest.FixtureRequest) -> Scene:
    """The test runs once on each store."""
    return request.getfixturevalue("postgres_scene" if request.param == "postgresql" else "sqlite_scene")
