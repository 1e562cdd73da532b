"""Submit, deliver, claim, save, crash, expire, cancel, retry and finish, in any order: the store does as the model."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from jobs.store import suspects
from jobs.store.database import Database
from tests.faults.databases import emptied, sqlite_copies
from tests.faults.machine import StoreMachine
from tests.faults.model import MAX_ATTEMPTS, MAX_DEATHS


@pytest.fixture(autouse=True)
def few_deaths(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a shard that dies without progress ends within the steps of a test."""
    monkeypatch.setattr(suspects, "DEATHS_PER_ATTEMPT", MAX_DEATHS // MAX_ATTEMPTS)


def run_machine(open_database: Callable[[], Database], examples: int, steps: int) -> None:
    machine = type("Machine", (StoreMachine,), {"open_database": staticmethod(open_database)})
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    asked = settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=checks, database=None
    )
    run_state_machine_as_test(machine, settings=asked)


def test_any_order_of_events_leads_where_the_model_says_on_sqlite(tmp_path: Path) -> None:
    run_machine(sqlite_copies(tmp_path), examples=40, steps=50)


def test_any_order_of_events_leads_where_the_model_says_on_postgresql(postgres_url: str) -> None:
    run_machine(emptied(postgres_url), examples=10, steps=40)


@pytest.mark.faults
@pytest.mark.timeout(1200)
def test_many_orders_of_events_lead_where_the_model_says(tmp_path: Path, postgres_url: str) -> None:
    run_machine(sqlite_copies(tmp_path), examples=400, steps=60)
    run_machine(emptied(postgres_url), examples=40, steps=50)
