"""Celery's consumer, as one that takes shards' messages: what it refuses, counts, ignores and gives back."""

from collections.abc import Callable
from typing import Any

from celery.worker.consumer import Consumer
from kombu.exceptions import ContentDisallowed, DecodeError

from worker.watch import Watch

# Whatever a message says of these. It names a shard; when that is scored, and for how long, its sender does not say.
IGNORED = {"timelimit": [None, None], "eta": None, "expires": None}
# Of Celery's headers, those that say which task is meant, and how its log lines call it.
KEPT = ("lang", "task", "id", "argsrepr", "kwargsrepr")


def consumer_of(watch: Watch) -> type[Consumer]:
    """A consumer that logs and counts what it refuses, as `laya-batch workers` shows, and scores what it takes."""
    vitals = watch.vitals

    class ShardConsumer(Consumer):  # type: ignore[misc]  # Celery has no types
        def on_decode_error(self, message: Any, exc: Exception) -> None:
            vitals.count_refused()
            super().on_decode_error(message, exc)

        def on_unknown_message(self, body: Any, message: Any) -> None:
            vitals.count_refused()
            super().on_unknown_message(body, message)

        def on_unknown_task(self, body: Any, message: Any, exc: Exception) -> None:
            vitals.count_refused()
            super().on_unknown_task(body, message, exc)

        def on_invalid_task(self, body: Any, message: Any, exc: Exception) -> None:
            vitals.count_refused()
            super().on_invalid_task(body, message, exc)

        def create_task_handler(self, *arguments: Any, **options: Any) -> Callable[[Any], Any]:
            take = super().create_task_handler(*arguments, **options)

            def take_shard(message: Any) -> Any:
                if not watch.has_warm_child():  # it died while the broker was asked
                    message.channel.qos.restore_by_tag(message.delivery_tag)  # for another, as the first
                    return message.ack()
                if not _is_task(message):
                    return self.on_unknown_message(None, message)
                message.headers = {name: message.headers[name] for name in KEPT if name in message.headers} | IGNORED
                return take(message)

            return take_shard

    return ShardConsumer


def _is_task(message: Any) -> bool:
    """Whether it is a task that is named in its headers, and that starts no others."""
    headers = message.headers or {}
    if not all(isinstance(headers.get(name), str) for name in ("task", "id")):
        return False
    try:
        _, _, next_tasks = message.payload
        return not any(next_tasks.values())
    except (ContentDisallowed, DecodeError):
        return True  # Celery says so
    except (TypeError, ValueError, AttributeError):
        return False
