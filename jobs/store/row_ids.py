"""How many rows of a job have no id, or one that another row has, too."""

from dataclasses import replace

import sqlalchemy as sa

from jobs.store.database import Database
from jobs.store.replay import repeated, replayed
from schemas.job import JobInfo
from schemas.tables import jobs, results, row_errors


def with_id_counts(db: Database, job: JobInfo) -> JobInfo:
    """Return a job that has ended with its ids counted: when this is first asked, for it reads all answers."""
    if not job.is_finished or job.spec.row_id is None or job.null_ids is not None:
        return job
    null_ids, repeated_ids = _count(db, job.id)
    _keep(db, job, null_ids, repeated_ids)
    return replace(job, null_ids=null_ids, repeated_ids=repeated_ids)


@replayed
def _count(db: Database, job_id: int) -> tuple[int, int]:
    ids = sa.union(
        *(
            sa.select(table.c.row_number, table.c.row_id).where(table.c.job_id == job_id)
            for table in (results, row_errors)
        )
    ).subquery()
    rows = sa.func.count().label("rows")
    shared = sa.select(rows).where(ids.c.row_id.is_not(None)).group_by(ids.c.row_id).having(rows > 1).subquery()
    with db.read() as connection:
        null_ids = connection.scalar(sa.select(rows).select_from(ids).where(ids.c.row_id.is_(None)))
        repeated_ids = connection.scalar(sa.select(sa.func.coalesce(sa.func.sum(shared.c.rows), 0)))
    return int(null_ids or 0), int(repeated_ids or 0)


@repeated
def _keep(db: Database, job: JobInfo, null_ids: int, repeated_ids: int) -> None:
    unchanged = jobs.c.id == job.id, jobs.c.status == job.status  # not retried meanwhile
    with db.write() as connection:
        connection.execute(sa.update(jobs).where(*unchanged).values(null_ids=null_ids, repeated_ids=repeated_ids))
