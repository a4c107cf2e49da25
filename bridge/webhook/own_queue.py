"""Measures the bridge's own inbound queue, which receives every event.

Without a consumer it grows until a resource alarm of the broker blocks both directions.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from bridge.amqp.client import Connection
from bridge.topology.queue_sizes import QueueSizes, QueueWatch
from bridge.webhook.metrics import WebhookMetrics

Serve = Callable[[Connection], Coroutine[Any, Any, None]]


def watched(serve: Serve, queue: str | None, metrics: WebhookMetrics) -> Serve:
    """Wrap `serve` so that the size of the queue is measured while it runs."""
    if queue is None:
        return serve

    def note(found: Mapping[str, QueueSizes]) -> None:
        for name, sizes in found.items():
            metrics.queue_ready.labels(name).set(sizes.ready)
            metrics.queue_consumers.labels(name).set(sizes.consumers)

    watch = QueueWatch(note)

    async def serve_and_watch(connection: Connection) -> None:
        watching = asyncio.create_task(watch.watch(connection, (queue,)))
        try:
            await serve(connection)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    return serve_and_watch
