"""Submit scoring jobs and read their answers. Importing it imports no model code.

    import jobs

    job = jobs.submit("tickets/", questions="triage.yaml", state="text", row_id="ticket_id")
    jobs.wait(job.id, progress=True)
    table = jobs.results(job.id).read_all()

The database and the broker come from the `LAYA_BATCH_…` environment variables, or from a `Settings` given to a call.
"""

from jobs.client import cancel, export, get, list_jobs, results, retry, row_errors, submit, wait
from jobs.errors import (
    BrokerError,
    DatabaseError,
    IdempotencyError,
    InputError,
    JobFailedError,
    JobNotFoundError,
    LayaBatchError,
    LeaseLostError,
    OutputError,
    SettingsError,
    UnreadableInputError,
)
from jobs.settings import Settings, load_settings
from schemas.job import JobInfo, JobStatus
from schemas.question import QuestionSetError

__all__ = [
    "BrokerError",
    "DatabaseError",
    "IdempotencyError",
    "InputError",
    "JobFailedError",
    "JobInfo",
    "JobNotFoundError",
    "JobStatus",
    "LayaBatchError",
    "LeaseLostError",
    "OutputError",
    "QuestionSetError",
    "Settings",
    "SettingsError",
    "UnreadableInputError",
    "cancel",
    "export",
    "get",
    "list_jobs",
    "load_settings",
    "results",
    "retry",
    "row_errors",
    "submit",
    "wait",
]
