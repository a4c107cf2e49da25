"""Leaves a RabbitMQ node that is cut off from the other nodes of its cluster."""

import asyncio
import time
from typing import Any, Final

from bridge.amqp.channels import close_channel, heed_cancellation, open_channel
from bridge.amqp.client import (
    ChannelAccessRefused,
    ChannelClosed,
    ChannelPreconditionFailed,
    Connection,
)
from bridge.amqp.connecting import version_of
from bridge.deadline import Deadline
from bridge.errors import BrokerError
from bridge.telemetry.logs import Log

log = Log(__name__)

# From this version on, RabbitMQ always keeps its metadata in Khepri. With Mnesia, a node that is
# cut off closes its connections (`pause_minority`), and no queue is declared while another hangs.
_WITH_KHEPRI: Final = (4, 3)
_CLASSIC: Final[dict[str, Any]] = {"x-queue-type": "classic"}
# How long the patience with the next nodes lasts, and its limit.
PATIENT_SECONDS: Final = 60.0
MAX_PATIENCE_SECONDS: Final = 80.0


class Patience:
    """For how long a node may answer nothing before the next one is tried.

    Doubles each time a node is left, because the next one may be just as slow: a slow disk, or a
    cluster whose metadata has no leader at the moment. An answer that takes longer would never
    arrive. After `PATIENT_SECONDS` without leaving a node, it is the initial one again.
    """

    def __init__(self, seconds: float) -> None:
        self._initial = self._doubled = seconds
        self._until = 0.0

    @property
    def seconds(self) -> float:
        return self._doubled if time.monotonic() < self._until else self._initial

    def note_left(self) -> None:
        seconds = self.seconds
        self._doubled = max(seconds, min(2 * seconds, MAX_PATIENCE_SECONDS))
        self._until = time.monotonic() + self._doubled + PATIENT_SECONDS


async def watch_majority(connection: Connection, queue: str, patience: Patience) -> None:
    """Raise BrokerError once the node has been cut off from its cluster for too long.

    Such a node keeps its connections and answers passive declares, but delivers nothing (seen with
    4.3.6). It cannot declare a queue, which takes a majority of the nodes: the exclusive `queue` is
    declared and deleted at regular intervals, half of the patience. Returns if RabbitMQ refuses it,
    or if the version is older than 4.3.
    """
    if version_of(connection) < _WITH_KHEPRI:
        return
    while True:
        await asyncio.sleep(patience.seconds / 2)
        try:
            async with Deadline(patience.seconds / 2):
                channel = await open_channel(connection)
                await channel.queue_declare(queue, exclusive=True, arguments=_CLASSIC)
                await channel.queue_delete(queue)
                await close_channel(channel)
        except TimeoutError:
            patience.note_left()
            raise BrokerError("the node declares no queue; it may be cut off") from None
        except (ChannelAccessRefused, ChannelPreconditionFailed):
            # A permission is missing, or the virtual host has as many queues as it may have.
            # RabbitMQ logs an error for each attempt.
            log.debug("majority_not_watched", queue=queue)
            return
        except ChannelClosed:
            # The node has answered, so it can reach the others.
            heed_cancellation()
