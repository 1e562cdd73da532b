"""Finds what the queue lost: shards whose worker vanished, and shards whose message did."""

import logging

from jobs.errors import BrokerError
from jobs.queue import count_messages, send_shards
from jobs.settings import Settings
from jobs.store import recovery
from jobs.store.database import Database
from schemas.message import QueuedShard

log = logging.getLogger(__name__)

MAX_RESENT = 10_000  # shards in one sweep; the next takes the rest


def sweep(db: Database, settings: Settings, only_job: int | None = None) -> None:
    """Queue the shards of ended leases again, then send a message for each waiting shard whose message is gone.

    Messages are counted first: while there is one for every waiting shard, none is lost, however long they have waited.
    `only_job`: look after this job alone; for a worker whose queue no other job uses.
    """
    send_again(settings, recovery.expire_leases(db, settings.max_attempts, only_job))
    waiting = recovery.count_queued(db, only_job)
    if waiting and count_messages(settings) < waiting:
        send_again(settings, recovery.take_unsent(db, settings.resend_s, MAX_RESENT, only_job))


def send_again(settings: Settings, queued: list[QueuedShard]) -> None:
    """Send messages that a later sweep would send, too: a broker that cannot be used now is no error."""
    if not queued:
        return
    log.warning("sending %d waiting shards again", len(queued))
    try:
        send_shards(settings, queued)
    except BrokerError as error:
        log.warning("%s; a later sweep will send them", error)
