"""Whether the folders that `laya-batch run` writes to can be written: nothing else can say so once a disk is full."""

import os
import time
from contextlib import suppress
from pathlib import Path

PROBE_BYTES = 1 << 20  # about what saving some batches takes
PROBE_EVERY_S = 3.0
REPEAT_S = 60.0


class DiskProbe:
    """Tries now and then to write a file in each folder."""

    def __init__(self, folders: list[Path]) -> None:
        self._folders = folders
        self._probed_at = 0.0
        self._said_at: float | None = None
        self._said: str | None = None

    def check(self) -> str | None:
        """Return why a folder cannot be written, when that is new or was not said for a minute; else None."""
        now = time.monotonic()
        if now - self._probed_at < PROBE_EVERY_S:
            return None
        self._probed_at = now
        reason = next(filter(None, map(_probe, self._folders)), None)
        due = self._said_at is None or now - self._said_at >= REPEAT_S
        if reason is None or (reason == self._said and not due):
            self._said = reason
            return None
        self._said, self._said_at = reason, now
        return reason


def _probe(folder: Path) -> str | None:
    file = folder / f".probe-{os.getpid()}"
    try:
        file.write_bytes(b"\0" * PROBE_BYTES)
    except OSError as error:
        return f"{folder} cannot be written: {error.strerror}"
    finally:
        with suppress(OSError):
            file.unlink()
    return None
