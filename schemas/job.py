"""Jobs and shards: what was asked for, and the states it passes through. Owns no SQL."""

import json
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, StringConstraints

NonEmptyText = Annotated[str, StringConstraints(min_length=1)]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
BackendName = Literal["auto", "eager", "compile", "tilelang", "aot", "onnx"]

ROUTER = "router"  # a job's checkpoint when each row goes to one of `ROUTED_TO` by its language
ROUTED_TO = ("english", "multilingual")
RouteName = Literal["english", "multilingual"]  # the same

MAX_PRIORITY = 9  # Redis has no priorities of its own: Celery keeps one list for each, and ten are enough


class JobStatus(StrEnum):
    """planning → queued → running → succeeded | failed | cancelled."""

    PLANNING = "planning"  # rows are being divided into shards
    QUEUED = "queued"  # no shard has been claimed yet
    RUNNING = "running"  # some shard has been claimed
    SUCCEEDED = "succeeded"  # every row has an answer or a row error
    FAILED = "failed"  # too many row errors, or a shard ran out of attempts; what was saved stays
    CANCELLED = "cancelled"  # stopped by the user; what was saved stays


class ShardStatus(StrEnum):
    """queued → running → done | failed | cancelled; running → queued when a lease ends or is given back."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class TransitionError(ValueError):
    """A job or shard was asked to go where its state does not lead."""


# One table for each kind: members of two StrEnums with the same text are equal, and would share an entry.
_JOB_TRANSITIONS: dict[StrEnum, frozenset[StrEnum]] = {
    JobStatus.PLANNING: frozenset({JobStatus.QUEUED}),
    JobStatus.QUEUED: frozenset({JobStatus.RUNNING, JobStatus.CANCELLED}),
    JobStatus.RUNNING: frozenset({JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.CANCELLED}),
    JobStatus.SUCCEEDED: frozenset(),
    JobStatus.FAILED: frozenset({JobStatus.QUEUED}),  # retry
    JobStatus.CANCELLED: frozenset({JobStatus.QUEUED}),  # retry
}
_SHARD_TRANSITIONS: dict[StrEnum, frozenset[StrEnum]] = {
    ShardStatus.QUEUED: frozenset({ShardStatus.RUNNING, ShardStatus.CANCELLED}),
    ShardStatus.RUNNING: frozenset({ShardStatus.QUEUED, ShardStatus.DONE, ShardStatus.FAILED, ShardStatus.CANCELLED}),
    ShardStatus.DONE: frozenset(),
    ShardStatus.FAILED: frozenset({ShardStatus.QUEUED}),  # retry
    ShardStatus.CANCELLED: frozenset({ShardStatus.QUEUED}),  # retry
}

FINISHED_JOBS = frozenset({JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.CANCELLED})


def states_before(after: StrEnum) -> list[StrEnum]:
    """Every state from which `after` may be reached: the guard of the UPDATE that makes the transition."""
    return [state for state in type(after) if after in _transitions_of(state)]


def check_transition(before: StrEnum, after: StrEnum) -> None:
    """Raise TransitionError unless `before` leads to `after`."""
    if after not in _transitions_of(before):
        raise TransitionError(
            f"a {type(before).__name__.removesuffix('Status').lower()} cannot go from {before} to {after}"
        )


def _transitions_of(state: StrEnum) -> frozenset[StrEnum]:
    return (_JOB_TRANSITIONS if isinstance(state, JobStatus) else _SHARD_TRANSITIONS)[state]


class Calibration(BaseModel):
    """Temperatures that replace a checkpoint's: what a calibration file says, and its SHA-256."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    content: dict[str, Any]
    sha256: Sha256  # of the file

    def __eq__(self, other: object) -> bool:
        """Two files that say the same are the same calibration, however they are written."""
        return isinstance(other, Calibration) and self.content == other.content

    def __hash__(self) -> int:
        return hash(json.dumps(self.content, sort_keys=True))


class JobSpec(BaseModel):
    """What one job asks for: kept as JSON with the job, and compared when an idempotency key is used again."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    inputs: list[NonEmptyText] = Field(min_length=1)
    questions: dict[str, dict[str, Any]] = Field(min_length=1)  # as check_questions returns it
    state: list[NonEmptyText] = Field(min_length=1)  # one column, or several that make a JSON object
    row_id: NonEmptyText | None = None
    checkpoint: NonEmptyText = "english"
    routes: dict[str, NonEmptyText] | None = None  # with checkpoint "router" alone: where each of ROUTED_TO is
    language_column: NonEmptyText | None = None  # with checkpoint "router" alone
    default_route: RouteName | None = None  # with checkpoint "router" alone: of rows whose language is undecided
    revision: NonEmptyText | None = None  # of a checkpoint on the Hub: a commit, branch or tag
    expected_sha256: dict[NonEmptyText, Sha256] | None = None  # by file; in a routed job `english/…`, `multilingual/…`
    max_len: PositiveInt | None = None  # tokens; None: the checkpoint's
    head_max_len: PositiveInt | None = None  # tokens; None: the checkpoint's
    calibration: dict[NonEmptyText, Calibration] | None = None  # by checkpoint: the job's, or each of ROUTED_TO
    backend: BackendName = "auto"
    max_row_errors: NonNegativeInt | None = None  # None: any number
    unique_ids: bool = False  # the inputs were checked: each row has an id, and no two the same

    def digests_of(self, route: str | None) -> dict[str, str]:
        """Return the digests expected of the job's checkpoint, or of one of a routed job's, by path in its folder."""
        expected = self.expected_sha256 or {}
        if route is None:
            return expected
        prefix = f"{route}/"
        return {path.removeprefix(prefix): digest for path, digest in expected.items() if path.startswith(prefix)}

    def calibration_of(self, route: str | None) -> Calibration | None:
        """Return the calibration of the job's checkpoint, or of one of a routed job's."""
        return (self.calibration or {}).get(route or self.checkpoint)

    @property
    def engine_options(self) -> dict[str, Any]:
        """What the job asks of its checkpoint beyond what the checkpoint says, for people: a calibration as digest."""
        calibrations = {name: calibration.sha256 for name, calibration in (self.calibration or {}).items()}
        names = ("revision", "expected_sha256", "max_len", "head_max_len", "default_route")
        return {**{name: getattr(self, name) for name in names}, "calibration_sha256": calibrations or None}


@dataclass(frozen=True)
class JobInfo:
    """A job as a person asks about it: its state and how far it is."""

    id: int
    name: str | None
    status: JobStatus
    spec: JobSpec
    priority: int
    rows: int
    shards: int
    shards_done: int
    answers: int  # results saved so far
    unanswered: int  # (row, question) pairs that ended in an error
    row_errors: int
    error: str | None
    last_error: str | None  # why a shard that has not ended was not done at its last attempt
    cancel_requested: bool
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    null_ids: int | None = None  # rows without an id; None: not counted yet, or no row id was asked for
    repeated_ids: int | None = None  # rows whose id another row has, too
    warnings: tuple[str, ...] = ()  # of questions whose options the model cannot tell apart

    @property
    def rows_done(self) -> int:
        """Rows' worth of (row, question) pairs that have ended, in an answer or an error."""
        return (self.answers + self.unanswered) // len(self.spec.questions)

    @property
    def is_finished(self) -> bool:
        return self.status in FINISHED_JOBS


@dataclass(frozen=True)
class InputFile:
    """An input file as it was found: where, how large, and when it was last changed."""

    name: str  # absolute path or URL
    size: int  # bytes
    modified: str


@dataclass(frozen=True)
class JobFile(InputFile):
    """An input file as its job was planned with it: a file that differs from this has changed since."""

    rows: int
    first_row_number: int  # 0-based within the job


@dataclass(frozen=True)
class ShardPlan:
    """Some consecutive rows of a job: the unit that a worker claims."""

    first_row_number: int  # 0-based within the job
    rows: int
    files: tuple[JobFile, ...] = ()  # those that hold its rows, in order; filled in by the claim

    def part(self, first_row: int, rows: int) -> "ShardPlan":
        """Some consecutive rows of the shard; `first_row` is a row number within the job."""
        return replace(self, first_row_number=first_row, rows=rows)


@dataclass(frozen=True)
class JobPlan:
    """The input files of a job, and its rows divided into shards."""

    files: list[JobFile]
    shards: list[ShardPlan]

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)


@dataclass(frozen=True)
class Suspects:
    """Consecutive rows of a shard, some of which may have killed the process that scored them."""

    first_row: int  # row numbers within the job
    last_row: int
    deaths: int  # of processes that were scoring just these rows
    reason: str  # how the last of them died

    @property
    def rows(self) -> int:
        return self.last_row - self.first_row + 1


@dataclass(frozen=True)
class Lease:
    """What a shard is held by. The fence: a write under another attempt, or by another worker, is refused."""

    shard_id: int
    attempt: int
    owner: str  # the worker's name


@dataclass(frozen=True)
class Claim:
    """A shard that a worker holds, with all that it needs to score it."""

    job_id: int
    shard_id: int
    attempt: int
    owner: str
    priority: int
    spec: JobSpec
    plan: ShardPlan
    suspects: Suspects | None = None  # None: no process has died with this shard in hand

    @property
    def lease(self) -> Lease:
        return Lease(self.shard_id, self.attempt, self.owner)

    def __str__(self) -> str:
        return f"job {self.job_id} shard {self.shard_id} attempt {self.attempt}"
