"""The Celery app and the messages sent through it. Owns no task: tasks are sent by name, and live in `worker.tasks`.

A message names a shard and nothing else. It may be lost, repeated or late: the database decides what is done.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis
from celery import Celery
from kombu.exceptions import KombuError, OperationalError

from jobs.errors import BrokerError
from jobs.settings import Settings
from jobs.urls import hide_secrets, shown_url
from schemas.job import MAX_PRIORITY
from schemas.message import QueuedShard, ShardMessage

SCORE_SHARD = "laya_batch.score_shard"

# A line that goes silent without a word. Celery waits for it twice, one after the other: for the reply to its poll, and
# for that to a command on another connection. Both must have ended within half a minute.
SOCKET_TIMEOUT_S = 10.0
HEALTH_CHECK_S = 5.0  # after as many again, and a second, a poll without a reply is given up
SEND_TIMEOUT_S = 10.0  # for what a person, or the supervisor's next look at its workers, waits for
CONNECT_TIMEOUT_S = 5.0
PING_TIMEOUT_S = 3.0
LOST_WAIT_S = 1.0  # until a dead child's message is let go, and its successor gets the next

READ_AT_ONCE = 1000  # messages of about a kilobyte
# Celery's own rendering of the arguments in a message's headers: ids are found without decoding the body.
_SHARD_ID = re.compile(rb"'shard_id': (\d+)")

app = Celery("laya-batch")


def configure_app(settings: Settings) -> Celery:
    """Point the app at the settings' broker; called once by each process that uses the queue."""
    app.conf.update(
        broker_url=_verified(settings.require_broker_url()),
        broker_connection_retry_on_startup=True,
        broker_channel_error_retry=True,  # Redis out of memory is no reason to load the model again
        broker_transport_options={
            "visibility_timeout": settings.visibility_timeout_s,
            "priority_steps": list(range(MAX_PRIORITY + 1)),
            "queue_order_strategy": "priority",
            "socket_timeout": SOCKET_TIMEOUT_S,
            "socket_connect_timeout": CONNECT_TIMEOUT_S,
            "socket_keepalive": True,
            "health_check_interval": HEALTH_CHECK_S,
        },
        task_default_queue=settings.queue,
        task_serializer="json",
        accept_content=["json"],
        task_ignore_result=True,
        task_acks_late=True,
        task_reject_on_worker_lost=False,  # the lease, not the message, brings back the shard of a worker that died
        worker_prefetch_multiplier=1,
        worker_disable_prefetch=True,  # no message waits beside a busy worker while another is idle
        worker_proc_alive_timeout=settings.boot_timeout_s,
        worker_lost_wait=LOST_WAIT_S,
        worker_cancel_long_running_tasks_on_connection_loss=False,
        worker_hijack_root_logger=False,
        worker_send_task_events=False,
    )
    return app


def check_broker(settings: Settings) -> None:
    """Raise BrokerError unless the broker answers."""
    with _broker_errors(settings), _connection() as connection:
        connection.ensure_connection(max_retries=1, timeout=CONNECT_TIMEOUT_S)


def send_shards(settings: Settings, queued: list[QueuedShard]) -> None:
    """Put one message for each shard on the queue, urgent jobs' before others'.

    Raises:
        BrokerError: the broker is absent or full; some messages may have been sent, which does no harm.
    """
    with _broker_errors(settings), _connection() as connection, app.amqp.Producer(connection) as producer:
        for shard in queued:
            message = ShardMessage(job_id=shard.job_id, shard_id=shard.shard_id)
            priority = _served(shard.priority)
            app.send_task(SCORE_SHARD, kwargs=message.model_dump(), priority=priority, producer=producer, retry=False)


def read_shard_ids(settings: Settings, priority: int) -> set[int]:
    """Return the ids of the shards for which a message of this priority waits in the queue.

    Messages that a worker has taken are not among them: it claims the shard at once, or has died.
    """
    found: set[int] = set()
    with _broker_errors(settings), _connection() as connection, connection.channel() as channel:
        key = channel._q_for_pri(settings.queue, _served(priority))
        with channel.conn_or_acquire() as client:
            start, messages = 0, [b""]
            # From the end where messages are put in: what moves meanwhile is read twice, never missed.
            while messages:
                messages = client.lrange(key, start, start + READ_AT_ONCE - 1)
                found.update(int(shard_id) for message in messages for shard_id in _SHARD_ID.findall(message))
                start += READ_AT_ONCE
    return found


def _served(priority: int) -> int:
    """A job's priority as Redis has it: the lowest number is served first."""
    return MAX_PRIORITY - priority


def count_messages(settings: Settings) -> int:
    """Messages that wait in the queue, those of all priorities together."""
    with _broker_errors(settings), _connection() as connection, connection.channel() as channel:
        return int(channel.queue_declare(settings.queue, passive=False).message_count)


def ping_workers(settings: Settings) -> list[str]:
    """Return the names of the Celery workers of the settings' queue that answer; they do so while they score."""
    configure_app(settings)
    with _broker_errors(settings):
        replies = app.control.inspect(timeout=PING_TIMEOUT_S).active_queues() or {}
    return sorted(name for name, queues in replies.items() if settings.queue in [queue["name"] for queue in queues])


def _verified(url: str) -> str:
    """Over TLS, Celery takes any certificate unless it is told otherwise; `ssl_cert_reqs=none` still says so."""
    if not url.startswith("rediss://") or "ssl_cert_reqs=" in url:
        return url
    return f"{url}{'&' if '?' in url else '?'}ssl_cert_reqs=required"


def _connection() -> Any:
    """A connection for one short exchange."""
    return app.connection_for_write(transport_options={"socket_timeout": SEND_TIMEOUT_S})


@contextmanager
def _broker_errors(settings: Settings) -> Iterator[None]:
    try:
        yield
    except (OperationalError, KombuError, redis.RedisError, OSError) as error:
        shown = shown_url(settings.require_broker_url())
        raise BrokerError(f"the broker {shown} cannot be used: {hide_secrets(error)}") from error
