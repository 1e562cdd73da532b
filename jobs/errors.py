"""Errors of the submitter's side and of the store. The docstring is what a person reads first.

LayaBatchError
├── SettingsError
├── DatabaseError
│   ├── DatabaseBusyError
│   ├── DatabaseAwayError
│   ├── DatabaseConflictError
│   └── DatabaseRefusedError
├── BrokerError
├── InputError
├── UnreadableInputError
├── OutputError
├── JobNotFoundError
├── IdempotencyError
├── JobFailedError
└── LeaseLostError
"""


class LayaBatchError(Exception):
    """Something that the caller can mend; the message says what and how."""


class SettingsError(LayaBatchError):
    """A setting is missing, unknown or wrong."""


class DatabaseError(LayaBatchError):
    """The database cannot be used."""


class DatabaseBusyError(DatabaseError):
    """The database refused a transaction and undid it: locked, full, or in conflict with another. It may pass."""


class DatabaseAwayError(DatabaseError):
    """The connection was lost, or could not be made. What was being committed may be there or not."""


class DatabaseConflictError(DatabaseError):
    """The database refused a row that breaks a constraint, as one whose key is taken, and undid the transaction."""


class DatabaseRefusedError(DatabaseError):
    """The database refused a statement for a reason that does not pass: no right to it, no such table, a value that it
    cannot hold. The transaction is undone.
    """


class BrokerError(LayaBatchError):
    """The broker (Redis) cannot be used; nothing was queued."""


class InputError(LayaBatchError):
    """An input file cannot be scored."""


class UnreadableInputError(LayaBatchError):
    """An input file cannot be read at the moment; it may be later."""


class OutputError(LayaBatchError):
    """A file cannot be written."""


class JobNotFoundError(LayaBatchError):
    """There is no such job."""

    def __init__(self, job_id: int) -> None:
        super().__init__(f"there is no job {job_id}; `laya-batch list` shows the jobs")


class IdempotencyError(LayaBatchError):
    """An idempotency key was used before, for a job that asks for something else or whose input files have changed."""


class JobFailedError(LayaBatchError):
    """A job that was waited for did not succeed."""


class LeaseLostError(LayaBatchError):
    """This worker no longer holds the shard: its lease ended, or its job did. Its writes are refused."""
