"""Which leases a sweep ends: those of workers that had the time to renew them, or that are known to be gone."""

import subprocess
import sys
import time
from datetime import timedelta

import pytest
import sqlalchemy as sa

from jobs.queue import configure_app
from jobs.settings import Settings, load_settings
from jobs.store import leases, recovery, workers
from jobs.store.database import Database
from schemas.job import Claim
from schemas.tables import shards
from tests.integration.test_store import claim, make_job
from worker.sweep import Sweeper

LEASE_S = 2.0  # for which a sweep waits


@pytest.fixture
def settings(database_url: str, redis_url: str) -> Settings:
    settings = load_settings(
        database_url=database_url, broker_url=redis_url, queue="test-sweep", lease_s=LEASE_S, sweep_s=0.1
    )
    configure_app(settings)
    return settings


def take(db: Database, owner: str, lease_s: float) -> Claim:
    claimed = claim(db, make_job(db, 1), owner=owner, lease_s=lease_s)
    assert claimed is not None
    return claimed


def owners(db: Database) -> set[str]:
    """Of the leases that are left."""
    with db.read() as connection:
        return {name for name in connection.scalars(sa.select(shards.c.lease_owner)) if name}


def test_sweeps_that_have_just_begun_end_the_leases_of_dead_workers_of_their_own_host_alone(
    db: Database, settings: Settings
) -> None:
    import socket  # noqa: PLC0415

    alive = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)", "alive-1@here"])
    gone = subprocess.Popen([sys.executable, "-c", "", "gone-1@here"])
    gone.wait()
    try:
        # `reused`: its process is gone, and another has the number.
        for name, pid in {"alive-1@here": alive.pid, "gone-1@here": gone.pid, "reused-1@here": alive.pid}.items():
            start = workers.WorkerStart(name, socket.gethostname(), pid, 1, "cpu", "english", "auto")
            workers.start_worker(db, start)
            take(db, name, lease_s=-1)
        take(db, "elsewhere", lease_s=-1)
        take(db, "on-time", lease_s=60)
        sweeper = Sweeper(db, settings)
        sweeper.sweep()
        assert owners(db) == {"alive-1@here", "elsewhere", "on-time"}
        began = time.monotonic()
        while "elsewhere" in owners(db):
            time.sleep(0.1)
            sweeper.sweep()
        assert owners(db) == {"on-time"}
        assert time.monotonic() - began > LEASE_S / 2
    finally:
        alive.kill()
        alive.wait()


@pytest.mark.parametrize("jump", [timedelta(hours=1), timedelta(hours=-1)])
def test_a_jump_of_the_databases_clock_ends_no_lease_that_is_renewed(
    db: Database, settings: Settings, monkeypatch: pytest.MonkeyPatch, jump: timedelta
) -> None:
    living, dead = take(db, "living", lease_s=60), take(db, "dead", lease_s=60)
    sweeper = Sweeper(db, settings)

    def sweep_for_a_lease() -> None:
        until = time.monotonic() + 1.5 * LEASE_S
        while time.monotonic() < until:
            sweeper.sweep()
            time.sleep(0.1)

    sweep_for_a_lease()
    assert owners(db) == {"living", "dead"}
    # The clock itself belongs to the server: what it says is moved, here and in the leases that were taken before.
    read_clock = recovery.read_clock
    monkeypatch.setattr(recovery, "read_clock", lambda one: read_clock(one) + jump)
    sweeper.sweep()
    assert owners(db) == {"living", "dead"}
    later = (jump + timedelta(seconds=30)).total_seconds()
    leases.renew_lease(db, living, later)  # as it does four times in each lease
    if jump > timedelta(0):
        sweep_for_a_lease()
        assert owners(db) == {"living"}
    with db.read() as connection:
        state = connection.execute(sa.select(shards).where(shards.c.id == living.shard_id)).one()
        assert (state.status, state.deaths, state.failures, state.attempt) == ("running", 0, 0, living.attempt)
        left_s = connection.scalar(sa.select(shards.c.lease_expires_at).where(shards.c.id == dead.shard_id))
    if jump < timedelta(0):  # it would have lasted for an hour more
        assert left_s < read_clock(db) + timedelta(seconds=LEASE_S)


def test_a_pause_of_the_database_ends_no_lease_at_once(db: Database, settings: Settings) -> None:
    sweeper = Sweeper(db, settings)
    until = time.monotonic() + 1.2 * LEASE_S
    while time.monotonic() < until:
        sweeper.sweep()
        time.sleep(0.1)
    take(db, "paused", lease_s=0.1)
    time.sleep(LEASE_S)  # as a sweep does that waits for a server that stands still
    sweeper.sweep()
    assert owners(db) == {"paused"}
