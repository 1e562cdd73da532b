"""Three stages at once: rows are read ahead, a batch is scored, and the batch before it is saved.

Owns the two threads and how errors and stops travel between them. What each stage does is handed in.
"""

from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

WRITES_AHEAD = 2  # batches that may wait to be saved before scoring waits for them


def read_ahead(items: Iterator[T]) -> Generator[T, None, None]:
    """Yield the items, each fetched in a thread while the one before is used; an error arrives where it is fetched."""
    with ThreadPoolExecutor(1, "read-ahead") as thread:
        fetched = thread.submit(next, items, None)
        while (item := fetched.result()) is not None:
            fetched = thread.submit(next, items, None)
            yield item


class WriteBehind:
    """Runs writes in order in a thread. A write that raises stops the next `put`, and all writes after it."""

    def __init__(self, thread: ThreadPoolExecutor) -> None:
        self._thread = thread
        self._pending: list[Future[None]] = []
        self._failed = False

    def put(self, write: Callable[[], None]) -> None:
        """Queue a write; waits while too many are queued, and raises what an earlier one raised."""
        self._await(WRITES_AHEAD)
        self._pending.append(self._thread.submit(self._run, write))

    def flush(self) -> None:
        """Wait until all is written; raises what a write raised."""
        self._await(0)

    def _await(self, allowed: int) -> None:
        while self._pending and (len(self._pending) > allowed or self._pending[0].done()):
            self._pending.pop(0).result()

    def _run(self, write: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            write()
        except BaseException:
            self._failed = True
            raise


@contextmanager
def write_behind() -> Iterator[WriteBehind]:
    """A WriteBehind whose writes have all ended when the block does, even when the block raises."""
    with ThreadPoolExecutor(1, "write-behind") as thread:
        writes = WriteBehind(thread)
        yield writes
        writes.flush()
