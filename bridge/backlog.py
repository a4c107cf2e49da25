"""Watch how many messages wait in our queues, and whether anybody takes them.

The webhook's own queue gets every event, be there a subscriber or not: one that nobody reads
grows until an alarm of the broker stops both directions.
"""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import Any, Final, NoReturn

import aio_pika

from bridge.broker import heed_cancellation, wire_of
from bridge.logs import Log
from bridge.metrics import WebhookMetrics
from bridge.topology import QueueSizes, read_queue

log = Log(__name__)

Serve = Callable[[aio_pika.Connection], Coroutine[Any, Any, None]]
STATS_SECONDS: Final = 15.0


async def watch_queues(
    connection: aio_pika.Connection,
    names: Collection[str],
    note: Callable[[Mapping[str, QueueSizes]], None],
) -> NoReturn:
    """Read the sizes of these queues every 15 s, on channels of their own, and `note` them.

    What cannot be read is left out.
    """
    while True:
        # A broker that blocks the connection reads no question either.
        if not wire_of(connection).is_blocked:
            found = {name: await look_at_queue(connection, name) for name in names}
            heed_cancellation()
            note({name: sizes for name, sizes in found.items() if sizes is not None})
        await asyncio.sleep(STATS_SECONDS)


async def look_at_queue(connection: aio_pika.Connection, queue: str) -> QueueSizes | None:
    """Read the sizes of a queue; None when they cannot be read."""
    try:
        return await read_queue(connection, queue)
    except Exception as error:  # noqa: BLE001  aiormq raises more than its own classes
        # What serves on the connection finds out by itself when it is gone.
        log.debug("queue_not_read", queue=queue, error=type(error).__name__)
        return None


def watched(serve: Serve, queue: str | None, metrics: WebhookMetrics) -> Serve:
    """Make a `serve` that watches the webhook's own queue, for as long as the given one serves."""
    if queue is None:
        return serve

    def note(found: Mapping[str, QueueSizes]) -> None:
        for name, sizes in found.items():
            metrics.queue_ready.labels(name).set(sizes.ready)
            metrics.queue_consumers.labels(name).set(sizes.consumers)

    async def serve_and_watch(connection: aio_pika.Connection) -> None:
        watching = asyncio.create_task(watch_queues(connection, (queue,), note))
        try:
            await serve(connection)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    return serve_and_watch
