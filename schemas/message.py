"""The one message on the queue. It names ids and nothing else, so a message can never carry work of its own."""

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, PositiveInt


class ShardMessage(BaseModel):
    """ "Shard `shard_id` of job `job_id` is waiting": a doorbell; the database says whether it is true."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    job_id: PositiveInt
    shard_id: PositiveInt


@dataclass(frozen=True)
class QueuedShard:
    """A shard whose message must be sent."""

    job_id: int
    shard_id: int
    priority: int
