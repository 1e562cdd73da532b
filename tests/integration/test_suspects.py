"""How the rows that kill are narrowed down, on each store: which group is tried next, and who is set aside."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from jobs.settings import Settings
from jobs.store import leases, lifecycle, recovery, reports
from jobs.store.database import Database
from jobs.store.leases import RowError
from jobs.store.lifecycle import JobOptions
from jobs.store.suspects import DEATHS_PER_ATTEMPT
from schemas.job import Claim, JobFile, JobPlan, JobSpec, JobStatus, ShardPlan
from schemas.message import ShardMessage
from schemas.tables import jobs, row_errors
from tests.integration.service import write_tickets
from tests.integration.test_store import LEASE_S, answers, record
from worker.session import Session
from worker.suspects import suspect_groups
from worker.vitals import Vitals

ATTEMPTS = 2


@dataclass
class Bench:
    """One shard, scored as a worker would by a process that some rows kill."""

    db: Database
    session: Session
    job_id: int
    killers: set[int]
    tried: list[int] = field(default_factory=list)  # the size of each group whose trial killed
    deaths: int = 0

    def claim(self) -> Claim | None:
        (shard,) = [one.shard_id for one in recovery.list_queued(self.db, self.job_id)] or [0]
        message = ShardMessage(job_id=self.job_id, shard_id=shard or 1)
        return leases.claim_shard(self.db, message, "w", LEASE_S)

    def attempt(self, claim: Claim) -> JobStatus | None:
        """Score what is left; dies at a killer, as the process would."""
        for group in suspect_groups(self.session, claim):
            if not self.score(group):
                self.tried.append(group.plan.rows)
                return None
        if self.score(claim):
            return leases.finish_shard(self.db, claim)
        return None

    def score(self, claim: Claim) -> bool:
        """False when it died."""
        saved = leases.saved_pairs(self.db, claim)
        first = claim.plan.first_row_number
        rows = [row for row in range(first, first + claim.plan.rows) if not {(row, "q"), (row, "*")} & saved]
        if self.killers & set(rows):
            self.deaths += 1
            recovery.release_leases(self.db, "w", ATTEMPTS, "killed by SIGKILL")
            return False
        if rows:
            saving = [answer for row in rows for answer in answers(row, 1)]
            leases.save_batch(self.db, claim, LEASE_S, record(self.db), saving)
        return True

    def run(self) -> JobStatus | None:
        while (claim := self.claim()) is not None:
            if (ended := self.attempt(claim)) is not None:
                return ended
        return None


def make_bench(db: Database, folder: Path, rows: int, killers: set[int]) -> Bench:
    path = write_tickets(folder / "a.parquet", ["text"] * rows)
    stat = path.stat()
    asked = {"inputs": [str(path)], "questions": {"q": {"type": "noul", "instructions": "x"}}, "state": ["text"]}
    plan = JobPlan([JobFile(str(path), stat.st_size, str(stat.st_mtime_ns), rows, 0)], [ShardPlan(0, rows)])
    job_id = lifecycle.create_job(db, JobSpec(**asked, row_id="ticket"), JobOptions(), plan)
    session = Session(Settings(max_attempts=ATTEMPTS), db, "w", 1, Vitals())
    return Bench(db, session, job_id, killers)


def set_aside(db: Database, job_id: int) -> list[RowError]:
    with db.read() as connection:
        return [
            RowError(row.row_number, row.question, row.row_id, row.code, row.message)
            for row in connection.execute(row_errors.select().where(row_errors.c.job_id == job_id))
        ]


@pytest.mark.parametrize("killer", [0, 63, 64, 700, 999])
def test_all_rows_then_64_then_8_then_one(db: Database, tmp_path: Path, killer: int) -> None:
    bench = make_bench(db, tmp_path, 1000, {killer})
    assert bench.run() is JobStatus.SUCCEEDED
    assert bench.tried == [64 if killer < 960 else 40, 8 if killer < 960 else 5, 1, 1]
    assert bench.deaths == 5
    (error,) = set_aside(db, bench.job_id)
    assert (error.row_number, error.row_id, error.code) == (killer, f"t{killer}", "killed_worker")
    message = "2 processes died of scoring this row alone, the last: the worker process died: killed by SIGKILL"
    assert error.message == message
    everything = Claim(bench.job_id, 1, 1, "w", 0, JobSpec.model_construct(), ShardPlan(0, 1000))
    assert {row for row, _ in leases.saved_pairs(db, everything)} == set(range(1000))


def test_neighbours_that_both_kill_are_both_set_aside(db: Database, tmp_path: Path) -> None:
    bench = make_bench(db, tmp_path, 100, {40, 41, 99})
    assert bench.run() is JobStatus.SUCCEEDED
    assert sorted(error.row_number for error in set_aside(db, bench.job_id)) == [40, 41, 99]


def test_only_the_questions_without_an_answer_are_set_aside(db: Database, tmp_path: Path) -> None:
    bench = make_bench(db, tmp_path, 1, {0})
    with db.write() as connection:
        two = {name: {"type": "noul", "instructions": "x"} for name in ("q", "r")}
        spec = JobSpec.model_validate(connection.execute(jobs.select()).one().spec).model_copy(
            update={"questions": two}
        )
        connection.execute(jobs.update().values(spec=spec.model_dump(mode="json")))
    claim = bench.claim()
    assert claim is not None
    leases.save_batch(db, claim, LEASE_S, record(db), [{**answers(0, 1)[0], "question": "r"}])
    leases.give_back(db, claim)
    assert bench.run() is JobStatus.SUCCEEDED
    (error,) = set_aside(db, bench.job_id)
    assert (error.row_number, error.question) == (0, "q")


def test_a_shard_whose_every_row_kills_ends(db: Database, tmp_path: Path) -> None:
    bench = make_bench(db, tmp_path, 100, set(range(100)))
    assert bench.run() is None
    assert bench.deaths == DEATHS_PER_ATTEMPT * ATTEMPTS
    assert status_of(db, bench.job_id) is JobStatus.FAILED


def test_deaths_before_the_first_trial_blame_no_row_and_end_the_shard(db: Database, tmp_path: Path) -> None:
    bench = make_bench(db, tmp_path, 100, set())
    for _ in range(1 + ATTEMPTS):
        assert bench.claim() is not None
        recovery.release_leases(db, "w", ATTEMPTS)
    assert bench.claim() is None
    assert set_aside(db, bench.job_id) == []
    assert status_of(db, bench.job_id) is JobStatus.FAILED


def test_random_deaths_between_progress_blame_no_row(db: Database, tmp_path: Path) -> None:
    """A worker that is killed again and again, though each time it has saved something."""
    bench = make_bench(db, tmp_path, 400, set())
    for _ in range(30):
        claim = bench.claim()
        assert claim is not None
        for group in suspect_groups(bench.session, claim):
            bench.score(group)
            break
        recovery.release_leases(db, "w", ATTEMPTS)
        if not recovery.list_queued(db, bench.job_id):
            break
    assert bench.run() is JobStatus.SUCCEEDED
    assert set_aside(db, bench.job_id) == []


def status_of(db: Database, job_id: int) -> JobStatus:
    return reports.get_job(db, job_id).status
