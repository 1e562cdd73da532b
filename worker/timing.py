"""A stopwatch. Owns no clock policy: every duration of the worker is a wall-clock one, in milliseconds."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter


class Stopwatch:
    """Adds up the milliseconds spent in each named stage."""

    def __init__(self) -> None:
        self.ms: dict[str, float] = {}

    @contextmanager
    def time(self, stage: str) -> Iterator[None]:
        """Add the time spent in the block to `stage`."""
        started = perf_counter()
        try:
            yield
        finally:
            self.ms[stage] = self.ms.get(stage, 0.0) + (perf_counter() - started) * 1000
