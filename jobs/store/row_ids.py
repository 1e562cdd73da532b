"""How many rows of a job have no id, or one that another row has, too."""

from contextlib import suppress
from dataclasses import replace

import sqlalchemy as sa

from jobs.errors import DatabaseError
from jobs.store.database import Database
from jobs.store.replay import replayed
from schemas.job import JobInfo
from schemas.tables import jobs, results, row_errors


def with_id_counts(db: Database, job: JobInfo) -> JobInfo:
    """Return a job that has ended with its ids counted: when this is first asked, for it reads all answers."""
    if not job.is_finished or job.spec.row_id is None or job.null_ids is not None:
        return job
    null_ids, repeated_ids = _count(db, job.id)
    with suppress(DatabaseError):  # who may only read counts again the next time
        _keep(db, job, null_ids, repeated_ids)
    return replace(job, null_ids=null_ids, repeated_ids=repeated_ids)


@replayed
def _count(db: Database, job_id: int) -> tuple[int, int]:
    answered = _ids_by_row(results, job_id)
    # A row may have answers to some questions and an error of another.
    also_answered = sa.exists().where(results.c.job_id == job_id, results.c.row_number == row_errors.c.row_number)
    ids = sa.union_all(answered, _ids_by_row(row_errors, job_id).where(~also_answered)).subquery()
    groups = sa.select(ids.c.row_id, sa.func.count().label("rows")).group_by(ids.c.row_id).subquery()
    null_ids = sa.func.sum(groups.c.rows).filter(groups.c.row_id.is_(None))
    repeated_ids = sa.func.sum(groups.c.rows).filter(groups.c.row_id.is_not(None), groups.c.rows > 1)
    with db.read() as connection:
        counted = connection.execute(sa.select(null_ids, repeated_ids)).one()
    return int(counted[0] or 0), int(counted[1] or 0)


def _ids_by_row(table: sa.Table, job_id: int) -> sa.Select[tuple[int, str]]:
    """Each row once, in the order of the table's key."""
    of = table.c
    return (
        sa.select(of.row_number, sa.func.min(of.row_id).label("row_id"))
        .where(of.job_id == job_id)
        .group_by(of.row_number)
    )


def _keep(db: Database, job: JobInfo, null_ids: int, repeated_ids: int) -> None:
    unchanged = jobs.c.id == job.id, jobs.c.finished_at == job.finished_at  # not retried meanwhile
    with db.write() as connection:
        connection.execute(sa.update(jobs).where(*unchanged).values(null_ids=null_ids, repeated_ids=repeated_ids))
