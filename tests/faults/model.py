"""The states of jobs and shards in plain Python: what the store must do, whatever order things come in.

It knows no SQL, no clock and no other process. A lease that "has ended" is a flag that the test sets on both sides.
"""

from dataclasses import dataclass, field

from schemas.job import JobStatus, ShardStatus

ROWS = 4  # in each shard
MAX_ATTEMPTS = 2
MAX_DEATHS = 4


class RefusedError(Exception):
    """What the store must refuse: a write by an attempt that does not hold its shard, or a change of no state."""


@dataclass
class ModelShard:
    first_row: int
    status: ShardStatus = ShardStatus.QUEUED
    attempt: int = 0
    failures: int = 0
    deaths: int = 0
    suspects: tuple[int, int] | None = None
    suspect_attempt: int | None = None
    suspect_deaths: int = 0
    lease_ended: bool = False
    answered: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)

    @property
    def rows(self) -> range:
        return range(self.first_row, self.first_row + ROWS)

    def absolve(self) -> None:
        self.suspects, self.suspect_attempt, self.suspect_deaths = None, None, 0


@dataclass
class ModelJob:
    shards: list[ModelShard]
    max_row_errors: int | None
    status: JobStatus = JobStatus.QUEUED
    cancelled: bool = False
    over_limit: bool = False
    endings: int = 0  # how often it ended

    @property
    def must_stop(self) -> bool:
        return self.cancelled or self.over_limit

    @property
    def row_errors(self) -> int:
        return sum(len(shard.failed) for shard in self.shards)

    @property
    def is_open(self) -> bool:
        return self.status in (JobStatus.QUEUED, JobStatus.RUNNING) and not self.must_stop

    def claim(self, shard: ModelShard) -> bool:
        """A message arrived."""
        if shard.status != ShardStatus.QUEUED or not self.is_open:
            return False
        shard.status, shard.lease_ended = ShardStatus.RUNNING, False
        shard.attempt += 1
        self.status = JobStatus.RUNNING
        return True

    def hold(self, shard: ModelShard, attempt: int) -> None:
        if shard.status != ShardStatus.RUNNING or shard.attempt != attempt:
            raise RefusedError
        shard.lease_ended = False

    def save(self, shard: ModelShard, attempt: int, rows: set[int]) -> bool:
        self.hold(shard, attempt)
        shard.answered |= rows
        shard.failures = shard.deaths = 0
        return self.must_stop

    def save_errors(self, shard: ModelShard, attempt: int, rows: set[int]) -> bool:
        self.hold(shard, attempt)
        shard.failed |= rows
        if self.max_row_errors is not None and self.row_errors > self.max_row_errors:
            self.over_limit = True
            self.cancel_waiting()
        return self.must_stop

    def mark(self, shard: ModelShard, attempt: int, first: int, last: int) -> None:
        self.hold(shard, attempt)
        if shard.suspects != (first, last):
            shard.suspect_deaths = 0
        shard.suspects, shard.suspect_attempt = (first, last), attempt

    def release(self, shard: ModelShard, attempt: int, to: ShardStatus) -> JobStatus | None:
        """Finished, stopped, or given back; done again by the same attempt, it changes nothing."""
        if (shard.attempt, shard.status) == (attempt, to):
            return None
        self.hold(shard, attempt)
        shard.status = to
        if to == ShardStatus.QUEUED and self.must_stop:
            self.cancel_waiting()
        return self.settle()

    def fail(self, shard: ModelShard, attempt: int) -> None:
        self.hold(shard, attempt)
        shard.failures += 1
        self.end_attempt(shard, shard.failures >= MAX_ATTEMPTS)

    def die(self, shard: ModelShard) -> bool:
        """The process that held the shard is gone. True when the shard waits again."""
        shard.deaths += 1
        if shard.suspects is None:
            shard.suspects = (shard.rows[0], shard.rows[-1])
        elif shard.suspect_attempt == shard.attempt:
            shard.suspect_deaths += 1
        else:
            shard.failures += 1
        return self.end_attempt(shard, shard.failures >= MAX_ATTEMPTS or shard.deaths >= MAX_DEATHS)

    def end_attempt(self, shard: ModelShard, exhausted: bool) -> bool:
        if self.must_stop:
            shard.status = ShardStatus.CANCELLED
        else:
            shard.status = ShardStatus.FAILED if exhausted else ShardStatus.QUEUED
        self.settle()
        return shard.status == ShardStatus.QUEUED

    def cancel(self) -> None:
        if self.status not in (JobStatus.QUEUED, JobStatus.RUNNING):
            raise RefusedError
        self.cancelled = True
        self.cancel_waiting()
        self.settle()

    def cancel_waiting(self) -> None:
        for shard in self.shards:
            abandoned = shard.status == ShardStatus.RUNNING and shard.lease_ended
            if shard.status == ShardStatus.QUEUED or abandoned:
                shard.status = ShardStatus.CANCELLED

    def retry(self) -> None:
        over = self.max_row_errors is not None and self.row_errors > self.max_row_errors
        unfinished = [s for s in self.shards if s.status in (ShardStatus.FAILED, ShardStatus.CANCELLED)]
        if self.status not in (JobStatus.FAILED, JobStatus.CANCELLED) or over or not unfinished:
            raise RefusedError
        for shard in unfinished:
            shard.status, shard.failures, shard.deaths = ShardStatus.QUEUED, 0, 0
            shard.absolve()
        self.status, self.cancelled, self.over_limit = JobStatus.QUEUED, False, False

    def settle(self) -> JobStatus | None:
        """End the job when its last shard has; success is final."""
        states = {shard.status for shard in self.shards}
        finished = self.status not in (JobStatus.QUEUED, JobStatus.RUNNING)
        if finished or states & {ShardStatus.QUEUED, ShardStatus.RUNNING}:
            return None
        if self.over_limit or ShardStatus.FAILED in states:
            self.status = JobStatus.FAILED
        elif self.cancelled and ShardStatus.CANCELLED in states:
            self.status = JobStatus.CANCELLED
        elif self.row_errors and not any(shard.answered for shard in self.shards):
            self.status = JobStatus.FAILED  # it answered nothing
        else:
            self.status = JobStatus.SUCCEEDED
        self.endings += 1
        return self.status
