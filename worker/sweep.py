"""Finds what the queue lost: shards whose worker vanished, and shards whose message did."""

import logging

from jobs.queue import count_messages, send_shards
from jobs.settings import Settings
from jobs.store import leases
from jobs.store.database import Database

log = logging.getLogger(__name__)

MAX_RESENT = 10_000  # shards in one sweep; the next takes the rest


def sweep(db: Database, settings: Settings, only_job: int | None = None) -> None:
    """Queue the shards of ended leases again, then send a message for each waiting shard whose message is gone.

    `only_job`: look after this job alone; for a worker whose queue no other job uses.

    Messages are counted first: while there is one for every waiting shard, none is lost, however long they have waited.
    """
    if released := leases.expire_leases(db, settings.max_attempts, only_job):
        log.warning("%d shards lost their worker; sending them again", len(released))
        send_shards(settings, released)
    waiting = leases.count_queued(db, only_job)
    if waiting == 0 or count_messages(settings) >= waiting:
        return
    lost = leases.take_unsent(db, settings.resend_s, MAX_RESENT, only_job)
    if lost:
        log.warning("%d waiting shards have no message; sending them again", len(lost))
        send_shards(settings, lost)
