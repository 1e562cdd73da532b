"""Messages that are refused before a task sees them: pickled or garbled ones, and of unknown tasks. Counts them."""

from typing import Any

from celery.worker.consumer import Consumer

from worker.vitals import Vitals


def count_refusals(vitals: Vitals) -> type[Consumer]:
    """Celery's consumer, which logs what it refuses, with a count that `laya-batch workers` shows."""

    class CountingConsumer(Consumer):  # type: ignore[misc]  # Celery has no types
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

    return CountingConsumer
