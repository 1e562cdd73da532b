import threading

import pytest

from laya.gate import Gate


def test_many_share_and_one_is_alone() -> None:
    gate = Gate()
    both_inside = threading.Barrier(3, timeout=10)
    leave = threading.Event()

    def share() -> None:
        with gate.shared():
            both_inside.wait()
            assert leave.wait(10)

    sharing = [threading.Thread(target=share) for _ in range(2)]
    for thread in sharing:
        thread.start()
    both_inside.wait()
    order: list[str] = []

    def alone() -> None:
        with gate.alone():
            order.append("alone")

    def late() -> None:
        with gate.shared():
            order.append("late")

    writer = threading.Thread(target=alone)
    writer.start()
    writer.join(0.2)
    assert writer.is_alive()
    reader = threading.Thread(target=late)
    reader.start()
    reader.join(0.2)
    assert order == []  # one who comes after the writer waits behind it
    leave.set()
    for thread in (*sharing, writer, reader):
        thread.join(10)
    assert order == ["alone", "late"]


def test_an_error_inside_opens_the_gate_again() -> None:
    gate = Gate()
    for enter in (gate.shared, gate.alone):
        with pytest.raises(ZeroDivisionError), enter():
            print(1 / 0)
    with gate.alone():
        pass


def test_counts_never_tear_under_many_threads() -> None:
    gate, value, seen = Gate(), [0, 0], []

    def write() -> None:
        for _ in range(200):
            with gate.alone():
                value[0] += 1
                value[1] += 1

    def read() -> None:
        for _ in range(200):
            with gate.shared():
                seen.append(value[0] == value[1])

    threads = [threading.Thread(target=work) for work in (write, read, write, read, read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert value == [400, 400]
    assert seen == [True] * 600
