"""What must not outlive `laya-batch run`: its Valkey server and the folder around it, however the run ends.

Owns the folder, the lock by which it is known to be in use, and the process that removes it. Starts no server.
"""

import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import gettempdir, mkdtemp

import redis

PREFIX = "laya-batch-run-"
SOCKET, LOCK, PID_FILE = "valkey.sock", "in-use.lock", "valkey.pid"
# Reads until every holder of the pipe's other end is gone; then ends the server of the folder ($1), if it has begun,
# and removes the folder.
_AWAIT_END = """
cat >/dev/null
n=0
while [ ! -s "$1/valkey.pid" ] && [ $n -lt 20 ]; do sleep 0.1; n=$((n+1)); done
server=$(cat "$1/valkey.pid" 2>/dev/null) && kill "$server" 2>/dev/null
while [ -n "$server" ] && kill -0 "$server" 2>/dev/null && [ $n -lt 100 ]; do sleep 0.1; n=$((n+1)); done
rm -rf -- "$1"
"""


@contextmanager
def server_folder() -> Iterator[Path]:
    """A folder private to this user, locked while the block runs and removed after it; stale ones are removed first."""
    remove_stale_folders()
    folder = Path(mkdtemp(prefix=PREFIX))
    try:
        with (folder / f"{LOCK}.new").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            (folder / f"{LOCK}.new").rename(folder / LOCK)  # it is never there without being locked
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def lifeline(folder: Path) -> Iterator[int]:
    """Yield a file descriptor; once every process that holds it has ended, the server is ended and the folder removed.

    The server writes `PID_FILE` there. A child that needs the server while it drains gets the descriptor by `pass_fds`.
    At the end of the block nothing is done: what began the server ends it.
    """
    read_end, write_end = os.pipe()
    watchdog = subprocess.Popen(
        ["/bin/sh", "-c", _AWAIT_END, "sh", str(folder)],
        stdin=read_end,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,  # a signal to the terminal's processes does not reach it
    )
    os.close(read_end)
    try:
        yield write_end
    finally:
        watchdog.kill()
        watchdog.wait()
        os.close(write_end)


def remove_stale_folders() -> None:
    """Remove the folders of runs that were killed with what should have removed them, and end their servers."""
    for folder in Path(gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # in use, not ours, or gone meanwhile
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                continue
            with (folder / LOCK).open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                with suppress(redis.RedisError), redis.Redis(unix_socket_path=str(folder / SOCKET)) as server:
                    server.shutdown(nosave=True)
                shutil.rmtree(folder)
