"""The fault suite: private servers that a test may break, a service on them, and the report of what it cost.

`pytest tests/faults` runs the quick part; `make faults` runs everything and writes the table into
`docs/reliability.md`.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from tests.faults.report import FaultReport
from tests.faults.scenes import QUICK
from tests.faults.servers import PrivatePostgres, PrivateRedis
from tests.integration.service import Service, serve

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
    Console(width=TABLE_WIDTH).print(report.draw())
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


@pytest.fixture
def service(database_url: str, redis_url: str, tmp_path: Path, tiny_checkpoint: Path) -> Iterator[Service]:
    """A service on each store, whose faults heal in seconds. Its servers are shared, and must be left alone."""
    with serve(database_url, redis_url, tmp_path, checkpoint=str(tiny_checkpoint), **QUICK) as one:
        yield one


@pytest.fixture
def fragile_service(
    private_postgres: PrivatePostgres, private_redis: PrivateRedis, tmp_path: Path, tiny_checkpoint: Path
) -> Iterator[Service]:
    """A service on servers of its own, which a test may break."""
    url = private_postgres.url
    with serve(url, private_redis.url, tmp_path, checkpoint=str(tiny_checkpoint), **QUICK) as one:
        yield one
