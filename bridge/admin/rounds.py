"""Take messages from queues in rounds, and give back what was not settled, so that none is lost.

RabbitMQ has no harmless look at a message. A quorum queue counts each time that one comes back, and
drops what is over its delivery limit, 20 by default since RabbitMQ 4.0. Until 4.2 a nack counts, a
closed channel, a lost connection, `basic.get` and the management API's "get messages" as well; from
4.3 on a nack does not, the others do. So a message that is not wanted is nacked, in its order, and
one that has come back `max_looks` times is renewed instead: published to the end of its queue,
confirmed, then acked, which starts its count anew. A kill between the confirm and the ack leaves it
there twice, with one id. With a delivery limit below `max_looks` this is too late; a kill before
the confirm counts as one more.

Never one more is taken than is wanted. A consumer with a prefetch is given a new message for each
that it acks, so each round has a consumer of its own, whose prefetch is the size of the round, and
acks after that one is cancelled. A round begins with one message and grows: what cannot work, as
with a full queue, touches a single one.

What has arrived and is not handed on yet is bounded in bytes: above `MAX_HELD_BYTES` the connection
is not read, and TCP stops the broker.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Final, NamedTuple

from bridge.admin.moving import Copies, CopyRefusedError, open_copies
from bridge.amqp.channels import (
    RPC_TIMEOUT_SECONDS,
    close_channel,
    open_channel,
    wait_for_held_back_acks,
)
from bridge.amqp.client import (
    AMQPError,
    Channel,
    ChannelAccessRefused,
    ChannelInvalidStateError,
    ChannelPreconditionFailed,
    Connection,
    ConsumerCallback,
)
from bridge.amqp.properties import Properties
from bridge.amqp.wire import Body, Wire
from bridge.config import Settings
from bridge.deadline import Deadline
from bridge.errors import BridgeError, BrokerError
from bridge.worker.envelope import DELIVERY_COUNT

# How many bytes may have arrived before the connection is not read; one message may be larger.
MAX_HELD_BYTES: Final = 4 * 1024 * 1024
# After this long without a delivery, check whether another consumer has emptied the queue; give up
# after this many checks of a queue that is not empty.
IDLE_SECONDS: Final = 2.0
IDLE_LOOKS: Final = 5
# How long a consumer may take to end: what the broker has sent before comes first.
CANCEL_SECONDS: Final = 60.0
# RabbitMQ 3 keeps the order of at most 32 messages in one nack.
NACKED_TOGETHER: Final = 32
# After this many nacks the broker gets time to pass them on. RabbitMQ 3 hands a quorum queue 32
# commands at once and holds back the rest, whose messages lose their order.
NACKS_AT_ONCE: Final = 16


class Taken(NamedTuple):
    """A message that is taken and not acked; the broker gives it to others when the channel ends.

    `redelivered`: somebody had it before, and has not acked it.
    """

    tag: int
    redelivered: bool
    properties: Properties
    body: Body

    @property
    def looks(self) -> int:
        """How often a quorum queue has counted that it came back."""
        count = (self.properties.headers or {}).get(DELIVERY_COUNT)
        return count if type(count) is int else 0


# Makes the properties with which a message of a queue is renewed; None: it is given back instead.
Renewal = Callable[[str, Taken], Properties | None]


class Rounds:
    """Takes from queues on one channel, a round after the other."""

    def __init__(
        self,
        settings: Settings,
        connection: Connection,
        channel: Channel,
        *,
        copies: Copies,
        renewal: Renewal,
        max_looks: int,
    ) -> None:
        self._settings = settings
        self._connection = connection
        self._channel = channel
        self._wire: Wire = connection.wire
        self._copies = copies
        self._renewal = renewal
        self._max_looks = max_looks
        self._fresh = asyncio.Lock()
        self._callback: ConsumerCallback = _take_nothing
        # None wakes the reader: for an end, or that of the consumer or the channel.
        self._arrived: asyncio.Queue[Taken | None] = asyncio.Queue()
        self._arrived_bytes = 0
        self._has_ended = self._is_lost = False
        # What is in hand: the tag of each message, and the round in which it came.
        self._round = 0
        self._held: dict[int, int] = {}
        self._settled: list[int] = []
        self._last_ack_at = -math.inf
        channel.closing.add_done_callback(self._lose)
        channel.on_consumer_cancel_callbacks.add(self._lose)

    def _lose(self, _: object) -> None:
        self._is_lost = True
        self._arrived.put_nowait(None)

    @contextmanager
    def consuming(self) -> Iterator[None]:
        """Have the wire hand over what is delivered, as long as the block lasts."""
        with self._wire.deliveries(self._channel, self._add) as self._callback:
            yield

    def _add(self, tag: int, redelivered: bool, properties: Properties, body: Body) -> None:  # noqa: FBT001  as the wire calls it
        self._held[tag] = self._round
        self._arrived_bytes += len(body)
        if self._arrived_bytes > MAX_HELD_BYTES:
            self._wire.set_reading(enabled=False)
        self._arrived.put_nowait(Taken(tag, redelivered, properties, body))

    def end(self) -> None:
        """Take no more; what has come is still handed on."""
        self._has_ended = True
        self._arrived.put_nowait(None)

    @property
    def has_ended(self) -> bool:
        """Whether somebody has called `end`."""
        return self._has_ended

    async def check(self, queue: str, target: str) -> None:
        """Raise BrokerError unless this user may read a queue, and publish copies to a target.

        Nothing is taken for it.
        """
        try:
            await self._copies.check(target)
        except BrokerError:
            # The first thing that is missing is told first.
            await self._check_readable(queue)
            raise

    async def _check_readable(self, queue: str) -> None:
        """Raise BrokerError when this user may not read a queue, without taking anything.

        The broker looks at the permission first, then refuses the argument.
        """
        channel = await open_channel(self._connection)
        arguments = {"x-priority": "none"}
        with suppress(ChannelPreconditionFailed):
            await _consume(channel, queue, _take_nothing, arguments=arguments)

    async def take(self, queue: str, count: int) -> AsyncGenerator[Taken, None]:
        """Yield so many messages, or fewer when there are no more or somebody has called `end`.

        Give each to `settled` or `let_go`; use it with `aclosing`, which lets go of those that it
        has not yielded. Then call `settle`. Raises BrokerError when the user may not, or the broker
        ends it.
        """
        self._round += 1
        try:
            async with Deadline(RPC_TIMEOUT_SECONDS):
                await self._channel.basic_qos(prefetch_count=count)
            consumer = await _consume(self._channel, queue, self._callback)
        except (AMQPError, ChannelInvalidStateError, TimeoutError):
            raise _is_gone(queue) from None
        is_whole = False
        try:
            for _ in range(count):
                message = await self._next(queue)
                if message is None:
                    break
                yield message
            async for message in self._rest(queue, consumer):
                yield message
            is_whole = True
        finally:
            if not is_whole and not self._channel.is_closed:
                async for message in self._rest(queue, consumer):
                    await self.let_go(queue, message)

    def _hand_on(self, message: Taken) -> Taken:
        self._arrived_bytes -= len(message.body)
        if self._arrived_bytes <= MAX_HELD_BYTES:
            self._wire.set_reading(enabled=True)
        self._wire.keep_alive()
        return message

    async def _next(self, queue: str) -> Taken | None:
        """Return the next delivery of a queue, or None when there are no more or none are wanted.

        Raises BrokerError when the broker ends it, or delivers nothing of what the queue has.
        """
        looks = 0
        while looks < IDLE_LOOKS:
            if self._has_ended:
                return None
            try:
                async with asyncio.timeout(IDLE_SECONDS):
                    message = await self._arrived.get()
            except TimeoutError:
                if await self._nothing_is_ready(queue):
                    return None
                looks += 1
                continue
            if message is not None:
                return self._hand_on(message)
            if self._is_lost and not self._has_ended:
                raise BrokerError(f"queue {queue}: the broker ended the consumer; run it again")
        # Of a quorum queue the broker does not tell whether it is that.
        raise BrokerError(
            f"queue {queue}: the broker delivers nothing; when another consumer has it for itself "
            "(x-single-active-consumer), stop that one, workers with `sms-bridge pause`, and run "
            "this again, else look at the broker's log"
        )

    async def _nothing_is_ready(self, queue: str) -> bool:
        try:
            async with Deadline(RPC_TIMEOUT_SECONDS):
                answer = await self._channel.queue_declare(queue, passive=True)
        except (AMQPError, ChannelInvalidStateError, TimeoutError):
            raise _is_gone(queue) from None
        return not answer.message_count

    async def _rest(self, queue: str, consumer: str) -> AsyncIterator[Taken]:
        """End a consumer, and yield what came before the broker's answer to that."""
        cancelling = asyncio.create_task(self._cancel(consumer))
        cancelling.add_done_callback(lambda _: self._arrived.put_nowait(None))
        self._wire.set_reading(enabled=True)
        while True:
            message = await self._arrived.get()
            if message is not None:
                yield self._hand_on(message)
            elif cancelling.done() and self._arrived.empty():
                break
        try:
            cancelling.result()
        except (AMQPError, ChannelInvalidStateError, TimeoutError, asyncio.CancelledError):
            raise _is_gone(queue) from None

    async def _cancel(self, consumer: str) -> None:
        async with Deadline(CANCEL_SECONDS):
            await self._channel.basic_cancel(consumer)

    def settled(self, message: Taken) -> None:
        """Note that a message is needed no more: the next `settle` acks it."""
        self._settled.append(message.tag)

    async def settle(self, queue: str) -> None:
        """Ack what is settled, and return when the broker has read that, between two rounds.

        A kill would undo acks that are only written. Raises BrokerError when the broker is gone.
        """
        if not self._settled:
            return
        for tag in self._settled:
            self._wire.ack(self._channel, tag)
            self._held.pop(tag, None)
        self._settled.clear()
        self._last_ack_at = asyncio.get_running_loop().time()
        try:
            async with Deadline(RPC_TIMEOUT_SECONDS):
                await self._wire.acks_read(self._channel)
        except (AMQPError, ChannelInvalidStateError, TimeoutError):
            raise _is_gone(queue) from None

    async def let_go(self, queue: str, message: Taken) -> None:
        """Leave a message where it is; one that has come back often is renewed.

        Where that is not possible it is given back with the others.
        """
        with suppress(BrokerError):
            await self.renew(queue, message)

    def is_due(self, message: Taken) -> bool:
        """Say whether a message has come back so often that it is to be renewed."""
        return message.looks >= self._max_looks

    async def renew(self, queue: str, message: Taken, *, to_keep_order: bool = False) -> None:
        """Renew a message if it has come back often; raise BrokerError when it cannot be.

        `to_keep_order`: also if not, unless the queue refuses it, as a full one does.
        """
        is_due = self.is_due(message)
        if not (is_due or to_keep_order):
            return
        properties = self._renewal(queue, message)
        if properties is None:
            return
        try:
            await self._copies.store(message.body, queue=queue, properties=properties)
        except CopyRefusedError:
            if not is_due:
                return
            await self._renew_afresh(queue, message, properties)
        self.settled(message)

    async def _renew_afresh(self, queue: str, message: Taken, properties: Properties) -> None:
        # A full quorum queue refuses a channel that has published to it until it has room for many.
        # It has room for one in place of each that is taken, and asks a new channel for no more.
        async with (
            self._fresh,
            open_copies(self._settings, "publish in place of one that is taken") as copies,
        ):
            await copies.store(message.body, queue=queue, properties=properties)

    async def finish(self, queue: str) -> None:
        """Give back, in its order, what is neither settled nor renewed.

        Returns when what was acked stays acked, whatever becomes of the channel.
        """
        await self.settle(queue)
        last = self._last_of_each_nack()
        self._held.clear()
        for start in range(0, len(last), NACKS_AT_ONCE):
            await wait_for_held_back_acks(self._last_ack_at)
            try:
                async with Deadline(CANCEL_SECONDS):
                    for tag in last[start : start + NACKS_AT_ONCE]:
                        await self._channel.basic_nack(tag, multiple=True, requeue=True)
                    await self._wire.acks_read(self._channel)
            except (AMQPError, ChannelInvalidStateError, TimeoutError):
                raise _is_gone(queue) from None
            if len(last) > NACKS_AT_ONCE:
                self._last_ack_at = asyncio.get_running_loop().time()
        await wait_for_held_back_acks(self._last_ack_at)

    def _last_of_each_nack(self) -> list[int]:
        """Return the last tag of each nack that gives back all that is held.

        RabbitMQ keeps the order within a nack of one consumer, and of two one after the other.
        """
        last: list[int] = []
        count, before = 0, 0
        for tag, number in sorted(self._held.items()):
            if last and number == before and count < NACKED_TOGETHER:
                last[-1] = tag
                count += 1
            else:
                last.append(tag)
                count, before = 1, number
        return last


async def _consume(
    channel: Channel,
    queue: str,
    callback: ConsumerCallback,
    arguments: dict[str, str] | None = None,
) -> str:
    """Begin a consumer of a queue, and return its tag; BrokerError: the user may not read it."""
    try:
        async with Deadline(RPC_TIMEOUT_SECONDS):
            consumer = await channel.basic_consume(queue, callback, arguments=dict(arguments or {}))
    except ChannelAccessRefused:
        raise BrokerError(
            f"queue {queue}: no permission to read; grant it with rabbitmqctl "
            "set_permissions, or name a user that may in rabbitmq.username"
        ) from None
    return consumer.consumer_tag or ""


async def _take_nothing(_: object) -> None:
    """Do nothing: nothing is delivered to it."""


def _is_gone(queue: str) -> BrokerError:
    return BrokerError(
        f"queue {queue}: the broker is gone; nothing is lost, some messages may be in both queues, "
        "with one id; run it again"
    )


@asynccontextmanager
async def open_rounds(
    settings: Settings,
    connection: Connection,
    *,
    queue: str,
    copies: Copies,
    renewal: Renewal,
    max_looks: int,
) -> AsyncIterator[Rounds]:
    """Open a channel to take messages on; what is in hand at the end is given back.

    `queue` is the one that an error names. What has come back `max_looks` times is renewed.
    """
    channel = await open_channel(connection)
    rounds = Rounds(
        settings, connection, channel, copies=copies, renewal=renewal, max_looks=max_looks
    )
    with rounds.consuming():
        try:
            yield rounds
        except BaseException:
            # Whatever went wrong is told, not that this went wrong as well.
            with suppress(BridgeError):
                await rounds.finish(queue)
            raise
        await rounds.finish(queue)
    async with Deadline(RPC_TIMEOUT_SECONDS):
        await close_channel(channel)
