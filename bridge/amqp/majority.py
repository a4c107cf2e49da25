"""Leaves a RabbitMQ node that is cut off from the other nodes of its cluster."""

import asyncio
from typing import Any, Final

from bridge.amqp.channels import close_channel, heed_cancellation, open_channel
from bridge.amqp.client import ChannelAccessRefused, ChannelClosed, Connection
from bridge.amqp.connecting import version_of
from bridge.deadline import Deadline
from bridge.errors import BrokerError
from bridge.telemetry.logs import Log

log = Log(__name__)

# From this version on, RabbitMQ always keeps its metadata in Khepri. With Mnesia, a node that is
# cut off closes its connections (`pause_minority`), and no queue is declared while another hangs.
_WITH_KHEPRI: Final = (4, 3)
_CLASSIC: Final[dict[str, Any]] = {"x-queue-type": "classic"}


async def watch_majority(connection: Connection, queue: str, *, seconds: float) -> None:
    """Raise BrokerError within twice `seconds` after the node is cut off from its cluster.

    Such a node keeps its connections and answers passive declares, but delivers nothing (seen with
    4.3.6). It cannot declare a queue, which takes a majority of the nodes: the exclusive `queue` is
    declared and deleted every `seconds`. Returns if the user may not declare it, or if the version
    is older than 4.3.
    """
    if version_of(connection) < _WITH_KHEPRI:
        return
    while True:
        await asyncio.sleep(seconds)
        try:
            async with Deadline(seconds):
                channel = await open_channel(connection)
                await channel.queue_declare(queue, exclusive=True, arguments=_CLASSIC)
                await channel.queue_delete(queue)
                await close_channel(channel)
        except TimeoutError:
            raise BrokerError("the node declares no queue; it may be cut off") from None
        except ChannelAccessRefused:
            log.debug("majority_not_watched", queue=queue)
            return
        except ChannelClosed:
            # The node has answered, so it can reach the others.
            heed_cancellation()
