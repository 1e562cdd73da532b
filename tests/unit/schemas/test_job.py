import pytest

from schemas.job import (
    FINISHED_JOBS,
    JobStatus,
    ShardStatus,
    TransitionError,
    check_transition,
    states_before,
)
from schemas.message import ShardMessage


def test_a_finished_job_leads_nowhere_but_a_retry() -> None:
    for before in FINISHED_JOBS:
        for after in JobStatus:
            if after is JobStatus.QUEUED and before is not JobStatus.SUCCEEDED:
                check_transition(before, after)
            else:
                with pytest.raises(TransitionError, match=f"a job cannot go from {before} to {after}"):
                    check_transition(before, after)


def test_jobs_and_shards_keep_their_own_transitions_though_their_states_share_names() -> None:
    assert states_before(JobStatus.SUCCEEDED) == [JobStatus.RUNNING]
    assert states_before(ShardStatus.DONE) == [ShardStatus.RUNNING]
    assert states_before(ShardStatus.RUNNING) == [ShardStatus.QUEUED]
    check_transition(ShardStatus.RUNNING, ShardStatus.QUEUED)
    with pytest.raises(TransitionError):
        check_transition(JobStatus.RUNNING, JobStatus.QUEUED)


@pytest.mark.parametrize(
    "message", [{}, {"job_id": 1}, {"job_id": 1, "shard_id": 0}, {"job_id": 1, "shard_id": 2, "file": "/etc/passwd"}]
)
def test_a_message_names_two_ids_and_nothing_else(message: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="validation error"):
        ShardMessage.model_validate(message)
