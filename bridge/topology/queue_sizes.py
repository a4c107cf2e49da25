"""How many messages wait in a queue, and how many consumers it has: read once, or watched."""

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final, NoReturn

from bridge.amqp.channels import (
    RPC_TIMEOUT_SECONDS,
    close_channel,
    heed_cancellation,
    open_channel,
)
from bridge.amqp.client import ChannelClosed, ChannelNotFoundEntity, Connection
from bridge.logs import Log

log = Log(__name__)

INTERVAL_SECONDS: Final = 15.0


@dataclass(frozen=True, slots=True)
class QueueSizes:
    """What a passive declare returns: messages ready, consumers, and whether the queue exists."""

    ready: int
    consumers: int
    exists: bool = True


async def read_queue(connection: Connection, name: str) -> QueueSizes | None:
    """Read a queue's sizes, or None when the broker refuses them or does not answer in time.

    A queue that does not exist counts as empty, so that a metric does not show its last size for
    ever.
    """
    try:
        async with asyncio.timeout(RPC_TIMEOUT_SECONDS):
            channel = await open_channel(connection)
            answer = await channel.queue_declare(name, passive=True)
            await close_channel(channel)
    except ChannelNotFoundEntity:
        return QueueSizes(ready=0, consumers=0, exists=False)
    except (ChannelClosed, TimeoutError):
        return None
    return QueueSizes(answer.message_count or 0, answer.consumer_count or 0)


async def watch_queues(
    connection: Connection,
    names: Collection[str],
    note: Callable[[Mapping[str, QueueSizes]], None],
) -> NoReturn:
    """Read the sizes of these queues every 15 s, on channels of their own, and `note` them.

    A queue that cannot be read is left out.
    """
    while True:
        # A broker that blocks the connection would not read the request.
        if not connection.wire.is_blocked:
            found = {name: await try_to_read_queue(connection, name) for name in names}
            heed_cancellation()
            note({name: sizes for name, sizes in found.items() if sizes is not None})
        await asyncio.sleep(INTERVAL_SECONDS)


async def try_to_read_queue(connection: Connection, queue: str) -> QueueSizes | None:
    """Read a queue's sizes as `read_queue` does; None also when the connection is gone."""
    try:
        return await read_queue(connection, queue)
    except Exception as error:  # noqa: BLE001  aiormq raises more than its own classes
        # Whatever else runs on the connection notices by itself when it is gone.
        log.debug("queue_not_read", queue=queue, error=type(error).__name__)
        return None
