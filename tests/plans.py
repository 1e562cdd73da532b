"""Plans of jobs for tests: of files that need not exist, and of real ones."""

from dataclasses import replace

from jobs.planning import plan_job
from schemas.job import Claim, JobFile, JobPlan, JobSpec, ShardPlan


def even_plan(shard_count: int, rows: int, name: str = "/a") -> JobPlan:
    """One file, with shards of `rows` rows each."""
    file = JobFile(name, 1, "m", shard_count * rows, 0)
    return JobPlan([file], [ShardPlan(number * rows, rows) for number in range(shard_count)])


def planned_claims(spec: JobSpec, rows_per_shard: int) -> list[Claim]:
    """A claim of each shard of real files."""
    plan = plan_job(spec, rows_per_shard, [])
    shards = [replace(shard, files=tuple(plan.files)) for shard in plan.shards]
    return [Claim(1, number, 1, "w", 0, spec, shard) for number, shard in enumerate(shards)]
