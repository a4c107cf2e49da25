"""The engine of `dlq` and `drain`: take messages, act on them, and give back the others.

Killed at any point it loses nothing: a message is acked only when its replacement is safe, either a
confirmed copy or a line on the disk.

RabbitMQ has no harmless way to look at a message. A quorum queue counts each time that a message
comes back, and drops it above its delivery limit, 20 by default since RabbitMQ 4.0. Until 4.2 a
nack counts, a closed channel, a lost connection, `basic.get` and the management API's "get
messages". From 4.3 on a nack does not count; the others do. So a message that stays is nacked at
the end of the run, in its order. One that has come back `Action.max_returns` times is renewed
instead: published to the end of its queue, confirmed, then acked, so that its count starts anew.
All messages behind it that stay are renewed as well, so that a look at the whole queue keeps its
order. A kill between the confirm and the ack leaves a message in the queue twice, with one id. With
a delivery limit below `max_returns` the renewal comes too late.

Messages are taken in rounds. A consumer with a prefetch gets a new message for each one that it
acks, so each round has a consumer of its own, whose prefetch is the size of the round, and acks are
sent after its end. The first round takes one message and the next ones more: a run that cannot
work, as with a full queue, touches a single message.

Memory is bounded, whatever the size of the messages: a round is acted on in batches of
`MAX_BATCH_BYTES`, and while as many bytes wait in the inbox the connection is not read, so that TCP
stops the broker.
"""

import asyncio
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, Final, NamedTuple

from bridge.admin.replacement import Copies, QueueFullError, Replaced, new_publisher
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
from bridge.amqp.connecting import close_quietly, open_first_connection
from bridge.amqp.frames import Body
from bridge.amqp.properties import Properties
from bridge.amqp.wire import Wire
from bridge.config import Settings
from bridge.deadline import Deadline
from bridge.errors import BridgeError, BrokerError
from bridge.topology.queue_sizes import QueueSizes, ask_queue
from bridge.worker.envelope import DELIVERY_COUNT

# A round ends up with about this many bytes; one message may be larger.
MAX_BATCH_BYTES: Final = 4 * 1024 * 1024
# After this long without a delivery, check whether another consumer has emptied the queue; give up
# after this many checks of a queue that is not empty.
IDLE_SECONDS: Final = 2.0
IDLE_CHECKS: Final = 5
# How long a consumer may take to end: the deliveries that the broker sent before come first.
CANCEL_SECONDS: Final = 60.0
# RabbitMQ 3 keeps the order of at most 32 messages in one nack.
NACKED_TOGETHER: Final = 32
# After this many nacks the broker gets time to pass them on. RabbitMQ 3 hands a quorum queue 32
# commands at once and holds back the rest, whose messages lose their order.
NACKS_AT_ONCE: Final = 16


class TakenMessage(NamedTuple):
    """A message that is taken and not acked; the broker gives it to others when the channel ends.

    `redelivered`: another consumer had it before and did not ack it.
    """

    tag: int
    redelivered: bool
    properties: Properties
    body: Body

    @property
    def returns(self) -> int:
        """How often a quorum queue has counted that the message came back."""
        count = (self.properties.headers or {}).get(DELIVERY_COUNT)
        return count if type(count) is int else 0


class Action(ABC):
    """The work of a run on the messages that it takes.

    A message that has come back `max_returns` times is renewed.
    """

    max_returns: int

    @abstractmethod
    def next_round(self) -> int:
        """Return how many messages to take at most; a kill may leave as many in both places."""

    @abstractmethod
    async def act(self, mover: "MessageMover", messages: Sequence[TakenMessage], /) -> Replaced:
        """Replace messages, or leave them; after BridgeError all of them stay in their queue."""

    @abstractmethod
    def renewed(self, message: TakenMessage) -> Properties | None:
        """Return the properties of the copy that renews a message; None if none is renewed."""


class _Inbox:
    """Deliveries that have arrived and wait to be acted on, bounded in bytes."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        # None wakes the reader.
        self._arrived: asyncio.Queue[TakenMessage | None] = asyncio.Queue()
        self._bytes = 0

    def put(self, tag: int, redelivered: bool, properties: Properties, body: Body) -> None:  # noqa: FBT001  as the wire calls it
        """Add a delivery; above the bound the connection is not read."""
        self._bytes += len(body)
        if self._bytes > MAX_BATCH_BYTES:
            self._wire.set_reading(enabled=False)
        self._arrived.put_nowait(TakenMessage(tag, redelivered, properties, body))

    def wake(self, _: object) -> None:
        """Have `get` return None."""
        self._arrived.put_nowait(None)

    async def get(self) -> TakenMessage | None:
        """Return the next delivery, or None after a `wake`."""
        message = await self._arrived.get()
        if message is not None:
            self._bytes -= len(message.body)
            if self._bytes <= MAX_BATCH_BYTES:
                self._wire.set_reading(enabled=True)
            self._wire.keep_alive()
        return message


class MessageMover:
    """Takes messages from queues on one channel, a round after the other.

    `moved` counts by queue the messages that an action has replaced. No round begins once
    `stopping` is set.
    """

    def __init__(
        self,
        connection: Connection,
        channel: Channel,
        callback: ConsumerCallback,
        inbox: _Inbox,
        copies: Copies,
    ) -> None:
        self.connection = connection
        self.copies = copies
        self.stopping = asyncio.Event()
        self.moved: Counter[str] = Counter()
        self._channel = channel
        self._callback = callback
        self._inbox = inbox
        self._is_lost = self._is_consuming = False
        self._fault: BridgeError | None = None
        self._queue = ""
        self._renews_all = False
        # The messages in hand: the tag of each, and the number of the round in which it came.
        self._round = 0
        self._held: dict[int, int] = {}
        self._to_ack: list[int] = []
        self._last_ack_at = -math.inf
        channel.closing.add_done_callback(self._lose)
        channel.on_consumer_cancel_callbacks.add(self._lose)

    def _lose(self, _: object) -> None:
        self._is_lost = True
        self._inbox.wake(None)

    @asynccontextmanager
    async def _within(self, seconds: float) -> AsyncIterator[None]:
        try:
            async with Deadline(seconds):
                yield
        except (AMQPError, ChannelInvalidStateError, TimeoutError):
            raise self._gone() from None

    def _gone(self) -> BrokerError:
        return BrokerError(
            f"queue {self._queue}: the broker is gone; nothing is lost, some messages may be in "
            "both queues, with one id; run it again"
        )

    async def check(self, queue: str, target: str) -> None:
        """Raise BrokerError unless this user may read a queue, and publish to another one.

        Nothing is taken for it: the broker checks the permission first, then refuses the argument.
        """
        channel = await open_channel(self.connection)
        with suppress(ChannelPreconditionFailed):
            await _consume(channel, queue, _take_nothing, {"x-priority": "none"})
        await self.copies.check(target)

    async def run(self, action: Action, queue: str, *, at_most: int) -> AsyncIterator[int]:
        """Take up to `at_most` messages, oldest first, and act on them.

        Yields the number of messages after each round, when all that it replaced are acked. Ends
        early if there are no more, if the action wants no more, or when stopping. Raises
        BridgeError if a copy, a line or the broker fails; messages that are not replaced by then
        stay in their queue.
        """
        self._queue, self._renews_all = queue, False
        size = 1
        while not self.stopping.is_set() and (count := min(size, at_most, action.next_round())) > 0:
            taken, taken_bytes = await self._run_round(action, count)
            yield taken
            if self._fault is not None:
                raise self._fault
            if taken < count:
                return
            at_most -= count
            size = 2 * count if taken_bytes <= MAX_BATCH_BYTES else max(1, count // 2)

    async def _run_round(self, action: Action, count: int) -> tuple[int, int]:
        """Take messages and act on them; return how many there were, and their bytes."""
        taken = taken_bytes = batch_bytes = replaced = 0
        batch: list[TakenMessage] = []
        async for message in self._take(count):
            taken += 1
            taken_bytes += len(message.body)
            batch_bytes += len(message.body)
            batch.append(message)
            if batch_bytes > MAX_BATCH_BYTES:
                replaced += await self._act(action, batch)
                batch, batch_bytes = [], 0
        replaced += await self._act(action, batch)
        await self._settle()
        self.moved[self._queue] += replaced
        return taken, taken_bytes

    async def _take(self, count: int) -> AsyncIterator[TakenMessage]:
        """Yield up to this many messages. It has to be read to its end, which ends the consumer."""
        self._round += 1
        async with self._within(RPC_TIMEOUT_SECONDS):
            await self._channel.basic_qos(prefetch_count=count)
            consumer = await _consume(self._channel, self._queue, self._callback)
        self._is_consuming = True
        for _ in range(count):
            message = await self._next()
            if message is None:
                break
            self._held[message.tag] = self._round
            yield message
        # Until it answers, the broker may send more.
        cancelling = asyncio.create_task(self._cancel(consumer))
        cancelling.add_done_callback(self._inbox.wake)
        while (message := await self._inbox.get()) is not None or not cancelling.done():
            if message is not None:
                self._held[message.tag] = self._round
                yield message
        if cancelling.cancelled():
            raise self._gone()
        cancelling.result()
        self._is_consuming = False

    async def _next(self) -> TakenMessage | None:
        """Return the next delivery, or None if there are no more.

        Raises BrokerError if the broker ends the consumer, or delivers nothing of a queue that has
        messages.
        """
        for _ in range(IDLE_CHECKS):
            message = None
            with suppress(TimeoutError):
                async with asyncio.timeout(IDLE_SECONDS):
                    message = await self._inbox.get()
            if message is not None:
                return message
            if self._is_lost:
                raise BrokerError(
                    f"queue {self._queue}: the broker ended the consumer; run it again"
                )
            async with self._within(RPC_TIMEOUT_SECONDS):
                answer = await self._channel.queue_declare(self._queue, passive=True)
            if self.stopping.is_set() or not answer.message_count:
                return None
        # The broker does not say whether a quorum queue has a single active consumer.
        raise BrokerError(
            f"queue {self._queue}: the broker delivers nothing; when another consumer has it for "
            "itself (x-single-active-consumer), stop that one, workers with `sms-bridge pause`, "
            "and run this again, else look at the broker's log"
        )

    async def _cancel(self, consumer: str) -> None:
        async with self._within(CANCEL_SECONDS):
            await self._channel.basic_cancel(consumer)

    async def _act(self, action: Action, batch: Sequence[TakenMessage]) -> int:
        """Have messages replaced, and return how many are; after a fault all others stay."""
        replaced: Collection[int] = ()
        if batch and self._fault is None:
            try:
                replaced, self._fault = await action.act(self, batch)
            except BridgeError as error:
                self._fault = error
        self._to_ack += replaced
        async with asyncio.TaskGroup() as group:
            for message in batch:
                if message.tag in replaced:
                    continue
                is_due = message.returns >= action.max_returns
                if is_due or self._renews_all:
                    properties = action.renewed(message)
                    if properties is not None:
                        self._renews_all = True
                        group.create_task(self._renew(message, properties, is_due=is_due))
        return len(replaced)

    async def _renew(self, message: TakenMessage, properties: Properties, *, is_due: bool) -> None:
        """Replace a message by a copy at the end of its queue; if that fails, it is given back."""
        try:
            try:
                await self.copies.store(message.body, self._queue, properties)
            except QueueFullError:
                if not is_due:
                    return
                # A full quorum queue refuses a channel that has published to it until it has room
                # for many. It has room for one in place of each that is taken, and a new channel
                # may use that.
                await self.copies.store(message.body, self._queue, properties, alone=True)
        except BrokerError as error:
            self._fault = self._fault or error
        else:
            self._to_ack.append(message.tag)

    async def _settle(self) -> None:
        """Ack the messages that are replaced, and return when the broker has read the acks.

        A kill would undo acks that are only written. Raises BrokerError if the broker is gone.
        """
        if not self._to_ack:
            return
        wire = self.connection.wire
        for tag in self._to_ack:
            wire.ack(self._channel, tag)
            self._held.pop(tag, None)
        self._to_ack.clear()
        self._last_ack_at = asyncio.get_running_loop().time()
        async with self._within(RPC_TIMEOUT_SECONDS):
            await wire.acks_read(self._channel)

    async def release(self) -> None:
        """Give back the messages in hand, in their order, at the end of all runs.

        Returns when every ack survives the end of the channel.
        """
        if self._is_consuming:
            # A nack would have the broker deliver again. It takes all back with the connection.
            return
        await self._settle()
        last = self._last_tag_of_each_nack()
        self._held.clear()
        for start in range(0, len(last), NACKS_AT_ONCE):
            await wait_for_held_back_acks(self._last_ack_at)
            async with self._within(CANCEL_SECONDS):
                for tag in last[start : start + NACKS_AT_ONCE]:
                    await self._channel.basic_nack(tag, multiple=True, requeue=True)
                await self.connection.wire.acks_read(self._channel)
            if len(last) > NACKS_AT_ONCE:
                self._last_ack_at = asyncio.get_running_loop().time()
        await wait_for_held_back_acks(self._last_ack_at)

    def _last_tag_of_each_nack(self) -> list[int]:
        """Return the last tags of the nacks that give back all messages in hand.

        RabbitMQ keeps the order within a nack of the messages of one consumer, and of two nacks one
        after the other.
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
    arguments: dict[str, Any] | None = None,
) -> str:
    """Begin a consumer and return its tag; raise BrokerError if the user may not read the queue."""
    try:
        async with Deadline(RPC_TIMEOUT_SECONDS):
            consumer = await channel.basic_consume(queue, callback, arguments=arguments or {})
    except ChannelAccessRefused:
        raise _unreadable(queue) from None
    return consumer.consumer_tag or ""


async def _take_nothing(_: object) -> None:
    """Do nothing: nothing is delivered to it."""


def _unreadable(queue: str) -> BrokerError:
    return BrokerError(
        f"queue {queue}: no permission to read; grant it with rabbitmqctl set_permissions, or name "
        "a user that may in rabbitmq.username"
    )


@asynccontextmanager
async def open_mover(settings: Settings, name: str) -> AsyncIterator[MessageMover]:
    """Connect, to move messages; those in hand at the end are given back.

    Copies have a connection of their own: an alarm of the broker blocks it, and must not block the
    acks. Raises BrokerError if no broker answers.
    """
    publisher = new_publisher(settings)
    async with AsyncExitStack() as stack:
        connection = await open_first_connection(settings.rabbitmq, name=name)
        stack.push_async_callback(close_quietly, connection)
        publishing = await open_first_connection(settings.rabbitmq, name=f"{name} publish")
        stack.push_async_callback(close_quietly, publishing)
        serving = asyncio.create_task(publisher.serve(publishing))
        stack.callback(serving.cancel)
        channel = await open_channel(connection)
        inbox = _Inbox(connection.wire)
        with connection.wire.deliveries(channel, inbox.put) as callback:
            copies = Copies(publisher, serving)
            mover = MessageMover(connection, channel, callback, inbox, copies)
            try:
                yield mover
            except BaseException:
                # This error is reported, not one of the release.
                with suppress(BridgeError):
                    await mover.release()
                raise
            await mover.release()
        async with Deadline(RPC_TIMEOUT_SECONDS):
            await close_channel(channel)


async def read_readable_queue(connection: Connection, name: str) -> QueueSizes:
    """Read the sizes of a queue, which may not exist; raise BrokerError if they are not known."""
    try:
        sizes = await ask_queue(connection, name)
    except ChannelAccessRefused:
        raise _unreadable(name) from None
    if sizes is None:
        raise BrokerError(f"queue {name}: no answer; look at its leader and its nodes")
    return sizes


async def read_existing_queue(connection: Connection, name: str) -> QueueSizes:
    """Read the sizes of a queue; raise BrokerError, with the remedy, if it does not exist."""
    sizes = await read_readable_queue(connection, name)
    if not sizes.exists:
        raise BrokerError(
            f"queue {name}: there is none; is worker.queue right? A worker makes it when it "
            "starts, or `sms-bridge topology declare` does"
        )
    return sizes
