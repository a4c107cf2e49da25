"""Watch how many messages wait in our queues, and whether anybody takes them."""

import asyncio
from collections.abc import Callable, Collection, Mapping
from typing import Final, NoReturn

from bridge.amqp.channels import heed_cancellation
from bridge.amqp.client import Connection
from bridge.logs import Log
from bridge.topology.declarations import QueueSizes, read_queue

log = Log(__name__)

STATS_SECONDS: Final = 15.0


async def watch_queues(
    connection: Connection,
    names: Collection[str],
    note: Callable[[Mapping[str, QueueSizes]], None],
) -> NoReturn:
    """Read the sizes of these queues every 15 s, on channels of their own, and `note` them.

    What cannot be read is left out.
    """
    while True:
        # A broker that blocks the connection reads no question either.
        if not connection.wire.is_blocked:
            found = {name: await look_at_queue(connection, name) for name in names}
            heed_cancellation()
            note({name: sizes for name, sizes in found.items() if sizes is not None})
        await asyncio.sleep(STATS_SECONDS)


async def look_at_queue(connection: Connection, queue: str) -> QueueSizes | None:
    """Read the sizes of a queue; None when they cannot be read."""
    try:
        return await read_queue(connection, queue)
    except Exception as error:  # noqa: BLE001  aiormq raises more than its own classes
        # What serves on the connection finds out by itself when it is gone.
        log.debug("queue_not_read", queue=queue, error=type(error).__name__)
        return None
