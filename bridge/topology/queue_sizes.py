"""Reads how many ready messages and consumers a queue has, once or periodically."""

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
from bridge.amqp.client import (
    ChannelAccessRefused,
    ChannelClosed,
    ChannelNotFoundEntity,
    Connection,
)
from bridge.deadline import Deadline
from bridge.telemetry.logs import Log

log = Log(__name__)

INTERVAL_SECONDS: Final = 15.0
REFUSED_REMEDY: Final = (
    "the metrics do not show how many messages wait there; grant the user read permission on "
    "them with rabbitmqctl set_permissions"
)


@dataclass(frozen=True, slots=True)
class QueueSizes:
    """The result of a passive declare: ready messages, consumers, and whether the queue exists."""

    ready: int
    consumers: int
    exists: bool = True


async def ask_queue(connection: Connection, name: str) -> QueueSizes | None:
    """Read a queue's sizes, or None if the broker does not answer in time.

    A queue that does not exist counts as empty, so that a metric does not keep its last size for
    ever. Raises ChannelAccessRefused if the user has no permission of any kind on the queue; since
    version 4.2.6, RabbitMQ requires one.
    """
    try:
        async with Deadline(RPC_TIMEOUT_SECONDS):
            channel = await open_channel(connection)
            answer = await channel.queue_declare(name, passive=True)
            await close_channel(channel)
    except ChannelNotFoundEntity:
        return QueueSizes(ready=0, consumers=0, exists=False)
    except ChannelAccessRefused:
        raise
    except (ChannelClosed, TimeoutError):
        return None
    return QueueSizes(answer.message_count or 0, answer.consumer_count or 0)


async def read_queue(connection: Connection, name: str) -> QueueSizes | None:
    """Read a queue's sizes as `ask_queue` does; return None also without a permission."""
    try:
        return await ask_queue(connection, name)
    except ChannelAccessRefused:
        return None


async def try_to_read_queue(
    connection: Connection, queue: str, *, refused: set[str] | None = None
) -> QueueSizes | None:
    """Read a queue's sizes as `read_queue` does; return None also if the connection is lost.

    A queue on which the user has no permission is added to `refused`.
    """
    try:
        return await ask_queue(connection, queue)
    except ChannelAccessRefused:
        if refused is not None:
            refused.add(queue)
    except Exception as error:  # noqa: BLE001  aiormq raises other errors too
        # The other users of the connection notice by themselves that it is lost.
        log.debug("queue_not_read", queue=queue, error=type(error).__name__)
    return None


class QueueWatch:
    """Reads the sizes of queues every 15 s, on channels of their own, and calls `note` with them.

    A queue that cannot be read is left out. Queues on which the user has no permission are logged
    once, and not read again on the same connection.
    """

    def __init__(self, note: Callable[[Mapping[str, QueueSizes]], None]) -> None:
        self._note = note
        self._logged: frozenset[str] = frozenset()

    async def watch(self, connection: Connection, names: Collection[str]) -> NoReturn:
        """Read the sizes of these queues for as long as the connection is served."""
        refused: set[str] = set()
        while True:
            # A broker that blocks the connection would not read the request.
            if not connection.wire.is_blocked:
                found = {
                    name: await try_to_read_queue(connection, name, refused=refused)
                    for name in names
                    if name not in refused
                }
                heed_cancellation()
                self._log(refused)
                self._note({name: sizes for name, sizes in found.items() if sizes is not None})
            await asyncio.sleep(INTERVAL_SECONDS)

    def _log(self, refused: Collection[str]) -> None:
        if not self._logged.issuperset(refused):
            self._logged = self._logged.union(refused)
            log.warning("queue_sizes_refused", queues=sorted(refused), remedy=REFUSED_REMEDY)
