"""A PgBouncer in transaction mode before the tests' PostgreSQL, with fewer sessions than it has clients."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Self

import psycopg
import sqlalchemy as sa

from tests.conftest import missing_service
from tests.faults.servers import free_port, wait_until

SESSIONS = 3  # of each database; taken in turns, so that a client never has the same twice
CONFIG = """
[databases]
* = host={host} port={port}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {own_port}
unix_socket_dir =
auth_type = trust
auth_file = {folder}/users
pool_mode = transaction
default_pool_size = {sessions}
max_client_conn = 200
server_idle_timeout = 5
server_round_robin = 1
"""


class PgBouncer:
    """It refuses to run as root: then `nobody` runs it."""

    def __init__(self, server: sa.URL) -> None:
        self.port = free_port()
        self._folder = Path(tempfile.mkdtemp(prefix="laya-batch-pgbouncer-"))
        self._server = server

    def __enter__(self) -> Self:
        program = shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin")
        if program is None:
            missing_service("PgBouncer")
        server, folder = self._server, self._folder
        config = CONFIG.format(
            host=server.host, port=server.port or 5432, own_port=self.port, folder=folder, sessions=SESSIONS
        )
        (folder / "pgbouncer.ini").write_text(config, encoding="utf-8")
        (folder / "users").write_text(f'"{server.username}" "{server.password or ""}"\n', encoding="utf-8")
        folder.chmod(0o755)
        as_user = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"] if os.geteuid() == 0 else []
        with (folder / "log").open("wb") as log:
            command = [*as_user, program, str(folder / "pgbouncer.ini")]
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd="/")
        wait_until(self._answers)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def before(self, url: str) -> str:
        """The URL of the same database, through this."""
        return sa.make_url(url).set(host="127.0.0.1", port=self.port).render_as_string(hide_password=False)

    def _answers(self) -> bool:
        url = self.before(self._server.set(drivername="postgresql").render_as_string(hide_password=False))
        assert self._process.poll() is None, (self._folder / "log").read_text(encoding="utf-8")
        try:
            psycopg.connect(url).close()
        except psycopg.OperationalError:
            return False
        return True
