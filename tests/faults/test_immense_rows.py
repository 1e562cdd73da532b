"""Small files that hold immense rows: a worker's memory stays bounded, and the neighbours are answered."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sqlalchemy as sa

import jobs
from schemas.tables import row_errors, workers
from tests.faults.poisoned import check_rows, submit
from tests.faults.report import FaultReport
from tests.integration.service import Service, make_texts, serve, write_tickets

MIB = 2**20


@pytest.fixture
def service(redis_url: str, tmp_path: Path, tiny_checkpoint: Path) -> Iterator[Service]:
    url = f"sqlite:///{tmp_path / 'test.db'}"
    with serve(url, redis_url, tmp_path, checkpoint=str(tiny_checkpoint), rows_per_window=2048) as one:
        yield one


def peak_bytes(service: Service) -> int:
    """The most memory that the scoring process ever had."""
    (pid,) = [row.pid for row in service.query(sa.select(workers.c.pid).where(workers.c.status == "ready"))]
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def test_a_text_of_a_hundred_megabytes_is_a_row_error_and_its_neighbours_are_answered(
    service: Service, report: FaultReport
) -> None:
    service.start_worker()
    before = peak_bytes(service)
    texts: list[str | None] = [*make_texts(40)]
    texts[7] = "refund please " * (100_000_000 // 14)
    path = write_tickets(service.folder / "in" / "a.parquet", texts)
    assert path.stat().st_size < 10 * MIB
    job = jobs.wait(submit(service, path).id, timeout_s=120, settings=service.settings)
    check_rows(service, job, {7: "too_large"})
    (error,) = service.query(sa.select(row_errors))
    assert error.message.startswith("the row has 10000000")
    assert error.message.endswith("more than the limit of 40000000")
    grown = peak_bytes(service) - before
    print(f"grown by {grown / MIB:.0f} MiB")
    assert grown < 600 * MIB
    report.record("a text of 100 MB", times=1, rows=job.rows, lost=0, doubled=0, rescored=0, recover_s=None)


READ = """
import re, sys
from pathlib import Path
from schemas.job import JobSpec
from tests.plans import planned_claims
from worker.reader import read_windows

spec = JobSpec(inputs=sys.argv[1:], questions={"q": {"type": "noul", "instructions": "x"}}, state=["text"])
(claim,) = planned_claims(spec, 4096)

def peak_kib():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

before, rows = peak_kib(), 0
for window in read_windows(claim, [], 2048):
    rows += len(window.states)
print(rows, (peak_kib() - before) * 1024)
"""


def test_a_kilobyte_that_inflates_to_a_gigabyte_is_read_a_little_at_a_time(tmp_path: Path, report: FaultReport) -> None:
    """One text of two megabytes, which a dictionary page repeats for each of 300 rows."""
    path = tmp_path / "a.parquet"
    table = pa.table({"text": ["please " * 300_000] * 300})
    pq.write_table(table, path, compression="zstd", dictionary_pagesize_limit=100 * MIB)
    assert path.stat().st_size < 20_000
    assert table.nbytes > 600_000_000
    del table
    done = subprocess.run([sys.executable, "-c", READ, path], capture_output=True, text=True, check=True, timeout=120)
    rows, grown = map(int, done.stdout.split())
    print(f"grown by {grown / MIB:.0f} MiB")
    assert rows == 300
    assert grown < 400 * MIB
    report.record(
        "a kilobyte of Parquet that holds 600 MB", times=1, rows=rows, lost=0, doubled=0, rescored=0, recover_s=None
    )
