"""Watch how many events wait in the webhook's own queue, and whether anybody takes them.

The queue gets every event, be there a subscriber or not: one that nobody reads grows until an
alarm of the broker stops both directions.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final

import aio_pika

from bridge.broker import wire_of
from bridge.logs import facts
from bridge.metrics import WebhookMetrics
from bridge.topology import read_queue

log = logging.getLogger(__name__)

Serve = Callable[[aio_pika.Connection], Coroutine[Any, Any, None]]
STATS_SECONDS: Final = 15.0


def watched(serve: Serve, queue: str | None, metrics: WebhookMetrics) -> Serve:
    """Make a `serve` that reads the queue now and then, for as long as the given one serves."""
    if queue is None:
        return serve

    async def serve_and_watch(connection: aio_pika.Connection) -> None:
        watching = asyncio.create_task(_watch(connection, queue, metrics))
        try:
            await serve(connection)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    return serve_and_watch


async def _watch(connection: aio_pika.Connection, queue: str, metrics: WebhookMetrics) -> None:
    while True:
        # A broker that blocks the connection reads no question either.
        if not wire_of(connection).is_blocked:
            await _look(connection, queue, metrics)
        await asyncio.sleep(STATS_SECONDS)


async def _look(connection: aio_pika.Connection, queue: str, metrics: WebhookMetrics) -> None:
    try:
        sizes = await read_queue(connection, queue)
    except Exception as error:  # noqa: BLE001  aiormq raises more than its own classes
        # What serves on the connection finds out by itself when it is gone.
        log.debug("queue_not_read", extra=facts(queue=queue, error=type(error).__name__))
        return
    if sizes is not None:
        metrics.queue_ready.labels(queue).set(sizes.ready)
        metrics.queue_consumers.labels(queue).set(sizes.consumers)
