"""Finds what the queue lost: shards whose worker vanished, and shards whose message did."""

import logging
import os
import socket
import time
from contextlib import closing
from dataclasses import replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import NoReturn

from jobs.errors import BrokerError, LayaBatchError
from jobs.queue import read_shard_ids, send_shards
from jobs.settings import Settings
from jobs.store import recovery
from jobs.store.database import Database
from jobs.store.recovery import EndedLeases, Unclaimed
from schemas.message import QueuedShard

log = logging.getLogger(__name__)

MAX_RESENT = 10_000  # shards of one priority in one sweep; the next takes the rest
REST = 20  # times as long as it took to read the messages of a priority, they are not read again: a twentieth of a CPU


class Sweeper:
    """Sweeps again and again, in a thread of its own: while it waits for the database, the supervisor does not."""

    def __init__(self, db: Database, settings: Settings, only_job: int | None = None) -> None:
        """Sweep the database's shards.

        `only_job`: look after this job alone; for a worker whose queue no other job uses.
        """
        self.db = db
        self.settings = settings
        self.only_job = only_job
        self._last: tuple[datetime, float] | None = None  # the database's time when it was read last, and ours
        self._steady_since = time.monotonic()
        self._read_not_before: dict[int, float] = {}  # by priority

    def run(self) -> NoReturn:
        """Sweep for ever."""
        while True:
            try:
                self.sweep()
            except LayaBatchError as error:
                log.warning("sweep: %s", error)
            except Exception:  # whatever it is, the next sweep must come
                log.exception("sweep")
            time.sleep(self.settings.sweep_s)

    def sweep(self) -> None:
        """Queue the shards of ended leases again, then send a message for each waiting shard that has none."""
        ended = EndedLeases(self._read_clock(), self.only_job)
        if time.monotonic() - self._steady_since < self.settings.lease_s:
            ended = self._of_dead_workers(ended)
        send_again(self.settings, recovery.expire_leases(self.db, ended, self.settings.max_attempts))
        for priority in recovery.list_priorities(self.db, self.only_job):
            if time.monotonic() >= self._read_not_before.get(priority, 0.0):
                send_again(self.settings, self._take_lost(priority))

    def _read_clock(self) -> datetime:
        """The database's time, by which leases end.

        When it cannot be told how long the database was away, or its clock has jumped, a worker that lives may not
        have renewed its lease: it has one lease's time for that, in which only those end whose worker is known to be
        dead. So it is also when the sweeps begin.
        """
        before, self._last = self._last, None  # should this raise
        now, at = recovery.read_clock(self.db), time.monotonic()
        self._last = now, at
        if before is None:
            self._steady_since = at
            return now
        by_database_s, by_host_s = (now - before[0]).total_seconds(), at - before[1]
        jump_s, tolerated_s = by_database_s - by_host_s, self.settings.lease_s / 2
        if by_host_s > self.settings.sweep_s + tolerated_s or abs(jump_s) > tolerated_s:
            log.warning("sweep: %.0f s since the last, %.0f s by the database's clock", by_host_s, by_database_s)
            self._steady_since = at
        if jump_s < -tolerated_s:
            recovery.shorten_leases(self.db, self.settings.lease_s)
        return now

    def _of_dead_workers(self, ended: EndedLeases) -> EndedLeases:
        """Those of workers that ran on this host and are gone."""
        owners = recovery.list_owners(self.db, ended, socket.gethostname())
        alive = {name for name, pid in owners if _is_alive(name, pid)}
        return replace(ended, owners={name for name, _ in owners} - alive)

    def _take_lost(self, priority: int) -> list[QueuedShard]:
        """The waiting shards of this priority whose message is gone, marked as sent again."""
        began = time.monotonic()
        in_queue = read_shard_ids(self.settings, priority)
        unclaimed = self._unclaimed_since(began)
        with closing(recovery.stream_unclaimed(self.db, unclaimed, priority)) as found:
            lost = list(islice((shard for shard in found if shard.shard_id not in in_queue), MAX_RESENT))
        self._read_not_before[priority] = began + REST * (time.monotonic() - began)
        return recovery.take_unclaimed(self.db, self._unclaimed_since(began), lost) if lost else []

    def _unclaimed_since(self, began: float) -> Unclaimed:
        return Unclaimed(time.monotonic() - began, self.settings.resend_s, self.only_job)


def send_again(settings: Settings, queued: list[QueuedShard]) -> None:
    """Send messages that a later sweep would send, too: a broker that cannot be used now is no error."""
    if not queued:
        return
    log.warning("sending %d waiting shards again", len(queued))
    try:
        send_shards(settings, queued)
    except BrokerError as error:
        log.warning("%s; a later sweep will send them", error)


def _is_alive(name: str, pid: int) -> bool:
    """Whether the process of this id is the worker of this name, which is on its command line."""
    try:
        return name.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return not Path(f"/proc/{os.getpid()}").exists()  # where there is no /proc, nobody can tell
