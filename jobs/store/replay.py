"""Trying a transaction again. Owns which errors pass, and for how long a call waits for that; no statement.

An error before COMMIT undoes the transaction. A connection that dies during COMMIT leaves it open whether it was done:
what is replayed then must find its own traces by its keys, and neither double them nor call them an error.
"""

import logging
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from tenacity import Retrying, before_sleep_log, retry_if_exception_type, stop_after_delay, wait_random_exponential

from jobs.errors import DatabaseAwayError, DatabaseBusyError
from jobs.store.database import Database

log = logging.getLogger(__name__)

FIRST_WAIT_S, LAST_WAIT_S = 0.1, 2.0

P = ParamSpec("P")
R = TypeVar("R")
Transaction = Callable[Concatenate[Database, P], R]  # a function of the store: its first argument is the database


def replayed(transaction: Transaction[P, R]) -> Transaction[P, R]:
    """Run a store function again, with the same arguments, after any error that passes, for up to `db.retry_s` seconds.

    The function must bear being run again after it was committed.
    """
    return _again_after((DatabaseBusyError, DatabaseAwayError), transaction)


def repeated(transaction: Transaction[P, R]) -> Transaction[P, R]:
    """Run a store function again only after errors that have undone it: it need not bear being run twice."""
    return _again_after((DatabaseBusyError,), transaction)


def _again_after(errors: tuple[type[Exception], ...], transaction: Transaction[P, R]) -> Transaction[P, R]:
    @wraps(transaction)
    def run(db: Database, /, *args: P.args, **kwargs: P.kwargs) -> R:
        again = Retrying(
            retry=retry_if_exception_type(errors),
            wait=wait_random_exponential(multiplier=FIRST_WAIT_S, max=LAST_WAIT_S),
            stop=stop_after_delay(db.retry_s),
            before_sleep=before_sleep_log(log, logging.WARNING),
            reraise=True,
        )
        return again(transaction, db, *args, **kwargs)

    return run
