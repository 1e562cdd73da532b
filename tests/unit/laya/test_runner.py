from collections.abc import Iterator

import pytest

from laya.runner import one_behind


def test_what_is_not_done_waits_for_the_item_behind_it() -> None:
    events: list[str] = []

    def launches() -> Iterator[int]:
        for i in range(3):
            events.append(f"launch {i}")
            yield i

    for i in one_behind(launches(), lambda _: False):
        events.append(f"result {i}")
    assert events == ["launch 0", "launch 1", "result 0", "launch 2", "result 1", "result 2"]


def test_what_is_done_waits_for_nothing() -> None:
    launched: list[int] = []

    def launches() -> Iterator[int]:
        for i in range(4):
            launched.append(i)
            yield i

    results = one_behind(launches(), lambda i: i != 2)
    assert [next(results), next(results)] == [0, 1]
    assert launched == [0, 1]
    assert next(results) == 2
    assert launched == [0, 1, 2, 3]
    assert list(results) == [3]


def test_an_item_that_does_not_come_loses_none_before_it() -> None:
    def launches() -> Iterator[int]:
        yield 0
        raise OSError("the file is gone")

    waiting = one_behind(launches(), lambda _: False)
    assert next(waiting) == 0
    with pytest.raises(OSError, match="gone"):
        next(waiting)
