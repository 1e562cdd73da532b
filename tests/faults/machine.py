"""The real store and the model side by side: a machine whose every rule happens to both, and must end alike."""

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import sqlalchemy as sa
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from jobs.errors import LeaseLostError
from jobs.store import leases, lifecycle, recovery, suspects, workers
from jobs.store.database import Database, seconds_from_now
from jobs.store.leases import BatchRecord, RowError
from jobs.store.lifecycle import JobOptions
from jobs.store.recovery import EndedLeases
from schemas.job import Claim, JobSpec, JobStatus, ShardStatus, TransitionError
from schemas.message import ShardMessage
from schemas.tables import jobs, results, row_errors, shards
from tests.faults.model import MAX_ATTEMPTS, ROWS, ModelJob, ModelShard, RefusedError
from tests.plans import even_plan

LEASE_S = 3600.0
MOST_JOBS = 2  # few, so that much happens to each
OFTEN = 8  # how much likelier an event is that matters
ROW_SETS = st.sets(st.integers(0, ROWS - 1), min_size=1)


class StoreMachine(RuleBasedStateMachine):
    """The real store and the model, side by side. A held shard is known by its claim, which may long be stale."""

    open_database: ClassVar[Callable[[], Database]]

    def __init__(self) -> None:
        super().__init__()
        self.db = type(self).open_database()
        worker = workers.WorkerStart("w", "h", 1, 1, "cpu", "english", "auto")
        self.worker_id = workers.start_worker(self.db, worker)
        self.jobs: dict[int, ModelJob] = {}
        self.shards: dict[int, tuple[ModelJob, ModelShard]] = {}
        self.claims: list[Claim] = []

    def teardown(self) -> None:
        self.db.close()

    @initialize(data=st.data(), shard_count=st.integers(1, 2), max_row_errors=st.sampled_from([None, None, 0, 2]))
    def begin(self, data: st.DataObject, shard_count: int, max_row_errors: int | None) -> None:
        """Hypothesis leaves rules out at random: no run shall be without a job."""
        self.submit(shard_count, max_row_errors)
        self.deliver(data)

    @precondition(lambda self: len(self.jobs) < MOST_JOBS)
    @rule(shard_count=st.integers(1, 2), max_row_errors=st.sampled_from([None, None, 0, 2]))
    def submit(self, shard_count: int, max_row_errors: int | None) -> None:
        asked = {"inputs": ["/a"], "questions": {"q": {"type": "noul", "instructions": "x"}}, "state": ["text"]}
        plan = even_plan(shard_count, ROWS)
        spec = JobSpec(**asked, max_row_errors=max_row_errors)
        job_id = lifecycle.create_job(self.db, spec, JobOptions(), plan)
        job = ModelJob([ModelShard(shard.first_row_number) for shard in plan.shards], max_row_errors)
        self.jobs[job_id] = job
        with self.db.read() as connection:
            ids = connection.scalars(sa.select(shards.c.id).where(shards.c.job_id == job_id).order_by(shards.c.number))
            self.shards |= {shard_id: (job, shard) for shard_id, shard in zip(ids, job.shards, strict=True)}

    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        """A message comes: for the first time, again, or late."""
        if not self.shards:
            return
        waiting = [id_ for id_, (_, one) in self.shards.items() if one.status == ShardStatus.QUEUED]
        shard_id = data.draw(st.sampled_from([*sorted(self.shards), *waiting * OFTEN]))
        job, shard = self.shards[shard_id]
        job_id = next(number for number, known in self.jobs.items() if known is job)
        message, owner = ShardMessage(job_id=job_id, shard_id=shard_id), owner_of(shard_id, shard.attempt + 1)
        found = leases.claim_shard(self.db, message, owner, LEASE_S)
        assert (found is not None) == job.claim(shard)
        if found is None:
            return
        seen = found.suspects and (found.suspects.first_row, found.suspects.last_row, found.suspects.deaths)
        assert seen == (None if shard.suspects is None else (*shard.suspects, shard.suspect_deaths))
        self.claims.append(found)

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), rows=ROW_SETS)
    def save(self, data: st.DataObject, rows: set[int]) -> None:
        claim = self.pick(data)
        job, shard = self.shards[claim.shard_id]
        new = {claim.plan.first_row_number + row for row in rows} - shard.answered - shard.failed
        if not new:
            return
        record = BatchRecord(self.worker_id, "eager", None, "cpu", "float32", 32, len(new), 9, 32, 1.0, 1.0, 1.0, 1.0)
        self.both(
            lambda: leases.save_batch(self.db, claim, LEASE_S, record, [answer(row) for row in sorted(new)]),
            lambda: job.save(shard, claim.attempt, new),
        )

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), row=st.integers(0, ROWS - 1), aside=st.booleans())
    def save_error(self, data: st.DataObject, row: int, aside: bool) -> None:
        claim = self.pick(data)
        job, shard = self.shards[claim.shard_id]
        row += claim.plan.first_row_number
        if row in shard.answered | shard.failed:
            return
        error, write = RowError(row, "*", None, "c", "m"), suspects.set_aside if aside else leases.save_row_errors

        def expect() -> bool:
            stop = job.save_errors(shard, claim.attempt, {row})
            if aside:
                shard.absolve()
            return stop

        self.both(lambda: write(self.db, claim, LEASE_S, [error]), expect)

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), first=st.integers(0, ROWS - 1), more=st.integers(0, ROWS - 1))
    def try_suspects(self, data: st.DataObject, first: int, more: int) -> None:
        claim = self.pick(data)
        job, shard = self.shards[claim.shard_id]
        first += claim.plan.first_row_number
        last = min(first + more, shard.rows[-1])
        self.both(
            lambda: suspects.mark_suspects(self.db, claim, LEASE_S, first, last),
            lambda: job.mark(shard, claim.attempt, first, last),
        )

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def clear_suspects(self, data: st.DataObject) -> None:
        claim = self.pick(data)
        job, shard = self.shards[claim.shard_id]

        def expect() -> None:
            job.hold(shard, claim.attempt)
            shard.absolve()

        self.both(lambda: suspects.clear_suspects(self.db, claim, LEASE_S), expect)

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        claim = self.pick(data)
        _, shard = self.shards[claim.shard_id]
        if set(shard.rows) == shard.answered | shard.failed:
            self.release(claim, leases.finish_shard, ShardStatus.DONE)

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        claim = self.pick(data)
        job, shard = self.shards[claim.shard_id]
        self.both(
            lambda: leases.give_back(self.db, claim),
            lambda: job.release(shard, claim.attempt, ShardStatus.QUEUED) and None,
        )

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        claim = self.pick(data)
        job, _ = self.shards[claim.shard_id]
        if job.must_stop:
            self.release(claim, leases.stop_shard, ShardStatus.CANCELLED)

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        claim = self.pick(data)
        job, shard = self.shards[claim.shard_id]
        self.both(
            lambda: leases.fail_shard(self.db, claim, "boom", MAX_ATTEMPTS), lambda: job.fail(shard, claim.attempt)
        )

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        """Its process dies, and a successor of the same name boots."""
        claim = self.pick(data)
        job, shard = self.shards[claim.shard_id]
        held = shard.status == ShardStatus.RUNNING and shard.attempt == claim.attempt
        queued = recovery.release_leases(self.db, owner_of(claim.shard_id, claim.attempt), MAX_ATTEMPTS, "killed")
        waits = job.die(shard) if held else False
        assert [one.shard_id for one in queued] == ([claim.shard_id] if waits else [])

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def vanish(self, data: st.DataObject) -> None:
        """Its machine is gone, and the lease ends; the process may wake later, and write."""
        claim = self.pick(data)
        _, shard = self.shards[claim.shard_id]
        if shard.status == ShardStatus.RUNNING and shard.attempt == claim.attempt:
            shard.lease_ended = True
            with self.db.write() as connection:
                ended = sa.update(shards).where(shards.c.id == claim.shard_id)
                connection.execute(ended.values(lease_expires_at=seconds_from_now(-60)))

    @rule()
    def sweep(self) -> None:
        queued = recovery.expire_leases(self.db, EndedLeases(recovery.read_clock(self.db)), MAX_ATTEMPTS)
        waiting = []
        for shard_id, (job, shard) in self.shards.items():
            if shard.status == ShardStatus.RUNNING and shard.lease_ended and job.die(shard):
                waiting.append(shard_id)
        assert sorted(one.shard_id for one in queued) == sorted(waiting)

    @rule(data=st.data(), again=st.booleans())
    def cancel_or_retry(self, data: st.DataObject, again: bool) -> None:
        if not self.jobs:
            return
        job_id = data.draw(st.sampled_from(sorted(self.jobs)))
        if again:
            self.both(lambda: lifecycle.retry_job(self.db, job_id, None), self.jobs[job_id].retry)
        else:
            self.both(lambda: lifecycle.request_cancel(self.db, job_id), self.jobs[job_id].cancel)

    @invariant()
    def store_and_model_agree(self) -> None:
        with self.db.read() as connection:
            found_jobs = connection.execute(sa.select(jobs)).all()
            found_shards = connection.execute(sa.select(shards)).all()
            answered = connection.execute(sa.select(results.c.job_id, results.c.row_number)).all()
            failed = connection.execute(sa.select(row_errors.c.job_id, row_errors.c.row_number)).all()
        for row in found_jobs:
            job = self.jobs[row.id]
            assert (row.status, row.cancel_requested_at is not None) == (job.status, job.cancelled)
            assert (row.finished_at is not None) == (job.status not in (JobStatus.QUEUED, JobStatus.RUNNING))
            if job.status == JobStatus.SUCCEEDED:  # nothing lost
                assert all(shard.answered | shard.failed == set(shard.rows) for shard in job.shards)
                assert row.row_errors == job.row_errors
        for row in found_shards:
            _, shard = self.shards[row.id]
            marked = None if row.suspect_first_row is None else (row.suspect_first_row, row.suspect_last_row)
            assert (row.status, row.attempt, row.failures, row.deaths) == (
                *(shard.status, shard.attempt, shard.failures, shard.deaths),
            )
            assert (marked, row.suspect_deaths) == (shard.suspects, shard.suspect_deaths)
            assert (row.answers, row.row_errors) == (len(shard.answered), len(shard.failed))
        for found, name in ((answered, "answered"), (failed, "failed")):
            expected = [(id_, row) for id_, job in self.jobs.items() for s in job.shards for row in getattr(s, name)]
            assert sorted(map(tuple, found)) == sorted(expected)

    def pick(self, data: st.DataObject) -> Claim:
        """A claim: most often one that holds its shard, and else one that is stale."""
        if not any(self.holds(claim) for claim in self.claims):
            self.deliver(data)
        held = [claim for claim in self.claims if self.holds(claim)]
        return data.draw(st.sampled_from([*self.claims, *held * OFTEN]))

    def holds(self, claim: Claim) -> bool:
        _, shard = self.shards[claim.shard_id]
        return shard.status == ShardStatus.RUNNING and shard.attempt == claim.attempt

    def release(self, claim: Claim, write: Callable[[Database, Claim], Any], to: ShardStatus) -> None:
        job, shard = self.shards[claim.shard_id]
        self.both(lambda: write(self.db, claim), lambda: job.release(shard, claim.attempt, to))

    @staticmethod
    def both(store: Callable[[], object], model: Callable[[], object]) -> None:
        """Do the same on both sides: both refuse it, or both return the same."""
        try:
            expected = model()
        except RefusedError:
            with pytest.raises((LeaseLostError, TransitionError)):
                store()
        else:
            assert store() == expected


def owner_of(shard_id: int, attempt: int) -> str:
    """Each claim is made by a worker of its own."""
    return f"worker of {shard_id}, {attempt}"


def answer(row: int) -> dict[str, Any]:
    return {
        "row_number": row,
        "question": "q",
        "type": "noul",
        "noul": 0.5,
        "probabilities": {},
        "confidence": 0.5,
        "answer_confidence": 0.5,
        "act_probability": 1.0,
        "state_tokens_dropped": 0,
    }
