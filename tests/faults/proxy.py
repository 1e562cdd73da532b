"""A wire between clients and a server that can be cut at the worst moment: while a COMMIT is on its way.

Cut *before* the COMMIT arrives, the transaction is undone; cut *after*, it is done. The client sees the same.
"""

import math
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Literal, Self

COMMIT = b"COMMIT"
CHUNK_BYTES = 1 << 16


class CommitProxy:
    """Listens on a port of its own and passes everything on, but for the COMMITs that it is told to cut."""

    def __init__(self, server_port: int) -> None:
        self.server_port = server_port
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self.listener.getsockname()[1])
        self.cuts = 0
        self._lock = threading.Lock()
        self._cut: Literal["before", "after"] = "before"
        self._every = 0  # cut the first COMMIT, and then each so-manieth; 0: none
        self._commits = 0

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.listener.close()

    @contextmanager
    def cutting(self, moment: Literal["before", "after"], every: int) -> Iterator[None]:
        """Within the block, cut the first COMMIT, and then each so-manieth."""
        with self._lock:
            self._cut, self._every, self._commits, self.cuts = moment, every, 0, 0
        try:
            yield
        finally:
            with self._lock:
                self._every = 0

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, suppress(OSError), socket.create_connection(("127.0.0.1", self.server_port)) as server:
            replies = threading.Thread(target=_pass, args=(server, client), daemon=True)
            replies.start()
            self._pass_requests(client, server)
            replies.join()

    def _pass_requests(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while data := client.recv(CHUNK_BYTES):
                if COMMIT in data and self._strikes():
                    _shut(client)
                    if self._cut == "after":
                        server.sendall(data)
                    break
                server.sendall(data)
        # The server has read all that was sent before it sees the end: it commits what it was told to.
        with suppress(OSError):
            server.shutdown(socket.SHUT_WR)
        _shut(client)

    def _strikes(self) -> bool:
        with self._lock:
            self._commits += 1
            strikes = self._every > 0 and self._commits % self._every == 1 % self._every
            self.cuts += strikes
            return strikes


class SilentProxy(CommitProxy):
    """Passes everything on, until the lines that there are fall silent: open, but nothing comes through any more.

    As when a firewall forgets them. New ones are well, unless they are to be silent, too: accepted, and never answered.
    """

    def __init__(self, server_port: int) -> None:
        super().__init__(server_port)
        self._lines = 0
        self._silent = 0.0  # the last that is

    def silence(self, new_ones: bool = False) -> None:
        self._silent = math.inf if new_ones else self._lines

    def _serve(self, client: socket.socket) -> None:
        with self._lock:
            self._lines += 1
            number = self._lines
        with client, suppress(OSError), socket.create_connection(("127.0.0.1", self.server_port)) as server:
            replies = threading.Thread(target=self._pass_unless_silent, args=(server, client, number), daemon=True)
            replies.start()
            self._pass_unless_silent(client, server, number)
            replies.join()

    def _pass_unless_silent(self, source: socket.socket, target: socket.socket, number: int) -> None:
        with suppress(OSError):
            while data := source.recv(CHUNK_BYTES):
                if number > self._silent:
                    target.sendall(data)
        _shut(target)


def _pass(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(CHUNK_BYTES):
            target.sendall(data)
    _shut(target)


def _shut(one: socket.socket) -> None:
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
