"""A readers-writer gate: many may pass at once, or one alone. Owns no data; the agent says what passing means."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """Whoever wants to be alone waits for those inside, and holds back those who come later."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._waiting_alone = 0
        self._alone = False

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Pass with others. Not to be entered again from inside: one who waits to be alone stands between."""
        with self._changed:
            self._changed.wait_for(lambda: not self._alone and not self._waiting_alone)
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Pass when nobody else is inside."""
        with self._changed:
            self._waiting_alone += 1
            try:
                self._changed.wait_for(lambda: not self._alone and not self._inside)
                self._alone = True
            finally:
                self._waiting_alone -= 1
        try:
            yield
        finally:
            with self._changed:
                self._alone = False
                self._changed.notify_all()
