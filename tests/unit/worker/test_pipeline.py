import threading
from collections.abc import Iterator

import pytest

from worker.pipeline import read_ahead, write_behind


def test_items_arrive_in_order_and_one_is_fetched_ahead() -> None:
    fetched: list[int] = []
    third = threading.Event()

    def items() -> Iterator[int]:
        for i in range(5):
            fetched.append(i)
            if i == 2:
                third.set()
            yield i

    reading = read_ahead(items())
    assert next(reading) == 0
    assert next(reading) == 1
    assert third.wait(5)
    assert 4 not in fetched
    assert list(reading) == [2, 3, 4]


def test_an_error_of_reading_arrives_after_the_items_before_it() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise OSError("gone")

    reading = read_ahead(items())
    assert next(reading) == 1
    with pytest.raises(OSError, match="gone"):
        next(reading)


def test_writes_run_in_order_in_another_thread() -> None:
    written: list[tuple[int, str]] = []
    with write_behind() as writes:
        for i in range(20):
            writes.put(lambda i=i: written.append((i, threading.current_thread().name)))
    assert [i for i, _ in written] == list(range(20))
    assert threading.current_thread().name not in {name for _, name in written}


def test_a_failed_write_stops_the_writer_and_the_writes_behind_it() -> None:
    written: list[int] = []

    def write(i: int) -> None:
        if i == 2:
            raise OSError("disk full")
        written.append(i)

    with pytest.raises(OSError, match="disk full"), write_behind() as writes:
        for i in range(100):
            writes.put(lambda i=i: write(i))
    assert written == [0, 1]


def test_nothing_is_written_after_a_failure_though_it_was_told_of() -> None:
    written: list[int] = []

    def fail() -> None:
        raise OSError("disk full")

    with write_behind() as writes:
        writes.put(fail)
        with pytest.raises(OSError, match="disk full"):
            writes.flush()
        writes.put(lambda: written.append(1))
    assert written == []


def test_the_last_write_fails_the_block() -> None:
    def fail() -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"), write_behind() as writes:
        writes.put(fail)


def test_what_was_put_is_written_though_the_block_raises() -> None:
    written: list[int] = []
    with pytest.raises(KeyError), write_behind() as writes:
        for i in range(2):
            writes.put(lambda i=i: written.append(i))
        raise KeyError
    assert written == [0, 1]
