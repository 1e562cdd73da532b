"""A fact that parent and child share: set once, by either."""

from multiprocessing.sharedctypes import RawValue


class Flag:
    """Set once, seen on both sides of a fork. It has no lock: a signal handler may set it, and no death keep it."""

    def __init__(self) -> None:
        self._value = RawValue("b", 0)

    def set(self) -> None:
        self._value.value = 1

    def is_set(self) -> bool:
        return bool(self._value.value)
