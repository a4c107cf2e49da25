"""Take messages from queues in rounds: never one more than is wanted.

A consumer with a prefetch is given a new message for each that it acks. What is over would have to
go back, as a redelivery of which a worker has to find out whether it was sent. So each round has a
consumer of its own, whose prefetch is the size of the round, and acks after that one is cancelled.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

from bridge.amqp.channels import (
    RPC_TIMEOUT_SECONDS,
    close_channel,
    open_channel,
    wait_for_held_back_acks,
)
from bridge.amqp.client import (
    AMQPError,
    Channel,
    ChannelInvalidStateError,
    Connection,
    ConsumerCallback,
)
from bridge.amqp.properties import Properties
from bridge.amqp.wire import Body, Wire
from bridge.errors import BrokerError
from bridge.operators.moving import Arrivals


class Taken(NamedTuple):
    """A message that is taken and not acked; the broker gives it to others when the channel ends.

    `redelivered`: somebody had it before, and has not acked it.
    """

    tag: int
    redelivered: bool
    properties: Properties
    body: Body


class Rounds:
    """Takes from queues on one channel, a round after the other."""

    def __init__(
        self, channel: Channel, wire: Wire, callback: ConsumerCallback, arrivals: Arrivals[Taken]
    ) -> None:
        self._channel = channel
        self._wire = wire
        self._callback = callback
        self._arrivals = arrivals
        self._last_ack_at = -math.inf

    def end(self) -> None:
        """Take no more; what has come is returned."""
        self._arrivals.end()

    async def take(self, queue: str, count: int) -> list[Taken]:
        """Take so many messages, or fewer when there are no more or somebody has called `end`.

        Raises BrokerError when the user may not, or the broker ends it.
        """
        taken: list[Taken] = []
        try:
            tag = await self._arrivals.consume(queue, prefetch=count, callback=self._callback)
            while len(taken) < count and (one := await self._arrivals.next(queue)) is not None:
                taken.append(one)
            async with asyncio.timeout(RPC_TIMEOUT_SECONDS):
                await self._channel.basic_cancel(tag)
        except (AMQPError, ChannelInvalidStateError, TimeoutError):
            raise _is_gone(queue) from None
        # What came before the broker's answer to the cancel.
        return taken + self._arrivals.rest()

    async def ack(self, queue: str, messages: Sequence[Taken]) -> None:
        """Ack messages, and return when the broker has read that; raise BrokerError if it has not.

        A kill would undo acks that are only written.
        """
        for message in messages:
            self._wire.ack(self._channel, message.tag)
        self._last_ack_at = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(RPC_TIMEOUT_SECONDS):
                await self._wire.acks_read(self._channel)
        except (AMQPError, ChannelInvalidStateError, TimeoutError):
            raise _is_gone(queue) from None

    async def finish(self) -> None:
        """Wait until what is acked stays acked, whatever becomes of the channel."""
        await wait_for_held_back_acks(self._last_ack_at)


def _is_gone(queue: str) -> BrokerError:
    return BrokerError(
        f"queue {queue}: the broker is gone; nothing is lost, some messages may be in both queues, "
        "with one id; run it again"
    )


@asynccontextmanager
async def open_rounds(connection: Connection) -> AsyncIterator[Rounds]:
    """Open a channel to take messages on."""
    channel = await open_channel(connection)
    arrivals: Arrivals[Taken] = Arrivals(channel)

    def take(tag: int, redelivered: bool, properties: Properties, body: Body) -> None:  # noqa: FBT001  as the wire calls it
        arrivals.add(Taken(tag, redelivered, properties, body))

    with connection.wire.deliveries(channel, take) as callback:
        yield Rounds(channel, connection.wire, callback, arrivals)
        async with asyncio.timeout(RPC_TIMEOUT_SECONDS):
            await close_channel(channel)
