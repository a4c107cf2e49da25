"""The engine of `dlq` and `drain`: consume messages, act on them, and return the others.

A kill at any point loses nothing, because a message is acked only when its replacement, a confirmed
copy or a line on the disk, is safe.

RabbitMQ has no harmless way to look at a message. A quorum queue counts each return of a message,
and drops it above its delivery limit, which is 20 by default since RabbitMQ 4.0. Returns are a
closed channel, a lost connection, `basic.get`, the management API's "get messages" and, up to 4.2,
a nack. The engine therefore nacks the messages that stay, in their order, at the end of the run. A
message that has come back `Action.max_returns` times is renewed instead: published to the end of
its queue, confirmed, then acked, so that its count starts again. The messages behind it are renewed
too, so that reading a whole queue keeps its order. After a kill between confirm and ack a message
is in the queue twice, with one id. With a delivery limit below `max_returns` the renewal comes too
late.

Messages are consumed in rounds. A consumer with a prefetch gets a new message for each ack, so each
round has its own consumer, whose prefetch is the size of the round, and its acks follow when the
consumer has ended. The first round takes one message and the following rounds more, so that a run
which cannot succeed, such as one with a full queue, touches a single message.

Memory is bounded for messages of any size: a round is processed in batches of `MAX_BATCH_BYTES`,
and the connection is not read while the inbox holds more than that.
"""

import asyncio
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, Final, NamedTuple

from bridge.admin.broker_session import connected
from bridge.admin.replacement import CopyPublisher, QueueFullError, Replaced, new_publisher
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
from bridge.amqp.frames import Body
from bridge.amqp.properties import Properties
from bridge.amqp.wire import Wire
from bridge.config import Settings
from bridge.deadline import Deadline
from bridge.errors import BridgeError, BrokerError
from bridge.topology.queue_sizes import QueueSizes, ask_queue
from bridge.worker.envelope import DELIVERY_COUNT

# Rounds grow to about this size; a single message may be larger.
MAX_BATCH_BYTES: Final = 4 * 1024 * 1024
# After this time without a delivery, check whether another consumer has emptied the queue. Give up
# after this number of checks of a queue that is not empty.
IDLE_SECONDS: Final = 2.0
IDLE_CHECKS: Final = 5
# The deadline for a consumer to end, which it does after the deliveries that are on their way.
CANCEL_SECONDS: Final = 60.0
# RabbitMQ 3 keeps the order of at most 32 messages in one nack.
NACKED_TOGETHER: Final = 32
# After this number of nacks the broker gets time to process them. RabbitMQ 3 passes 32 commands to
# a quorum queue and holds back the rest, whose messages lose their order.
NACKS_AT_ONCE: Final = 16


class TakenMessage(NamedTuple):
    """An unacked message, which the broker delivers to another consumer when the channel ends.

    `redelivered`: a consumer had it before and did not ack it.
    """

    tag: int
    redelivered: bool
    properties: Properties
    body: Body

    @property
    def returns(self) -> int:
        """The number of returns that the quorum queue has counted."""
        count = (self.properties.headers or {}).get(DELIVERY_COUNT)
        return count if type(count) is int else 0


class Action(ABC):
    """The work of a run on its messages; after `max_returns` returns a message is renewed."""

    max_returns: int

    @abstractmethod
    def next_round(self) -> int:
        """Return the maximum size of the next round, 0 to end the run.

        A kill may leave as many messages in both places.
        """

    @abstractmethod
    async def act(self, mover: "MessageMover", messages: Sequence[TakenMessage], /) -> Replaced:
        """Replace messages, or leave them; after BridgeError all of them stay."""

    @abstractmethod
    def renewed(self, message: TakenMessage) -> Properties | None:
        """Return the properties of the copy that renews a message; None to renew none."""


class _Inbox:
    """Deliveries that have arrived and are not processed yet, bounded in bytes."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        # None wakes the reader.
        self._arrived: asyncio.Queue[TakenMessage | None] = asyncio.Queue()
        self._bytes = 0

    def put(self, tag: int, redelivered: bool, properties: Properties, body: Body) -> None:  # noqa: FBT001  as the wire calls it
        """Add a delivery; above the bound stop reading the connection."""
        self._bytes += len(body)
        if self._bytes > MAX_BATCH_BYTES:
            self._wire.set_reading(enabled=False)
        self._arrived.put_nowait(TakenMessage(tag, redelivered, properties, body))

    def wake(self, _: object) -> None:
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
    """Consumes messages on one channel, in rounds; no round begins once `stopping` is set.

    `moved` counts the replaced messages by queue; `queue` is that of the current run.
    """

    def __init__(
        self,
        connection: Connection,
        channel: Channel,
        callback: ConsumerCallback,
        inbox: _Inbox,
        copies: CopyPublisher,
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
        self.queue = ""
        self._renews_all = False
        # The unacked messages: tag, and number of the round.
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
            f"queue {self.queue}: the connection to the broker ended; nothing is lost, but some "
            "messages may be in both queues, with the same id; run it again"
        )

    def check_stopped(self) -> None:
        if self.stopping.is_set():
            done = self.moved.total()
            raise BridgeError(f"stopped after {done}; nothing is lost; run it again for the rest")

    async def check(self, queue: str, target: str) -> None:
        """Raise BrokerError unless the user may read `queue` and publish to `target`.

        Consumes nothing: the broker checks the permission, then refuses the argument.
        """
        channel = await open_channel(self.connection)
        with suppress(ChannelPreconditionFailed):
            await _consume(channel, queue, _take_nothing, {"x-priority": "none"})
        await self.copies.probe(target)

    async def run(self, action: Action, queue: str, *, at_most: int) -> AsyncIterator[int]:
        """Act on up to `at_most` messages, oldest first.

        Yields the number of messages after each round, when the replaced ones are acked. Ends early
        if the queue is empty, if the action wants no more, or when stopping. After BridgeError, of
        a copy, the file or the broker, the messages that are not replaced stay in their queue.
        """
        self.queue, self._renews_all = queue, False
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
        """Consume and process messages; return their number and their bytes."""
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
        self.moved[self.queue] += replaced
        return taken, taken_bytes

    async def _take(self, count: int) -> AsyncIterator[TakenMessage]:
        """Yield up to `count` messages; must be read to the end, which ends the consumer."""
        self._round += 1
        async with self._within(RPC_TIMEOUT_SECONDS):
            await self._channel.basic_qos(prefetch_count=count)
            consumer = await _consume(self._channel, self.queue, self._callback)
        self._is_consuming = True
        for _ in range(count):
            message = await self._next()
            if message is None:
                break
            self._held[message.tag] = self._round
            yield message
        # Deliveries may arrive until the broker answers.
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
        """Return the next delivery, or None if the queue is empty.

        Raises BrokerError if the broker ends the consumer, or delivers nothing from a queue that
        has messages.
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
                    f"queue {self.queue}: the broker ended the consumer; run it again"
                )
            async with self._within(RPC_TIMEOUT_SECONDS):
                answer = await self._channel.queue_declare(self.queue, passive=True)
            if self.stopping.is_set() or not answer.message_count:
                return None
        # The broker does not say whether a quorum queue has a single active consumer.
        raise BrokerError(
            f"queue {self.queue}: the broker delivers nothing; if the queue has a single active "
            "consumer (x-single-active-consumer), stop that one, workers with `sms-bridge pause`, "
            "and run this again; otherwise look at the broker's log"
        )

    async def _cancel(self, consumer: str) -> None:
        async with self._within(CANCEL_SECONDS):
            await self._channel.basic_cancel(consumer)

    async def _act(self, action: Action, batch: Sequence[TakenMessage]) -> int:
        """Process a batch, and return the number of replaced messages; none after a fault."""
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
        """Replace a message by a copy at the end of its queue; if that fails, it is returned."""
        try:
            try:
                await self.copies.store(message.body, self.queue, properties)
            except QueueFullError:
                if not is_due:
                    return
                # A full quorum queue refuses a channel that has published to it until much of it
                # is free. Each message that is taken frees one place, which a new channel can use.
                await self.copies.store(message.body, self.queue, properties, alone=True)
        except BrokerError as error:
            self._fault = self._fault or error
        else:
            self._to_ack.append(message.tag)

    async def _settle(self) -> None:
        """Ack the replaced messages, and return when the broker has read the acks.

        Until then a kill would undo them. Raises BrokerError if the broker is gone.
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
        """Return the unacked messages to their queue, in their order, at the end of all runs.

        Ends when every ack is certain to survive the end of the channel.
        """
        if self._is_consuming:
            # A nack would start new deliveries; the end of the connection returns all messages.
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
        """Return the last tag of each nack that is needed to return all messages.

        RabbitMQ keeps the order of one consumer's messages within a nack, and that of two nacks.
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
    """Start a consumer and return its tag; raise BrokerError if the user may not read the queue."""
    try:
        async with Deadline(RPC_TIMEOUT_SECONDS):
            consumer = await channel.basic_consume(queue, callback, arguments=arguments or {})
    except ChannelAccessRefused:
        raise _unreadable(queue) from None
    return consumer.consumer_tag or ""


async def _take_nothing(_: object) -> None:
    """Never called: a consumer that is refused gets no delivery."""


def _unreadable(queue: str) -> BrokerError:
    return BrokerError(
        f"queue {queue}: no permission to read; grant it with rabbitmqctl set_permissions, or set "
        "rabbitmq.username to a user with this permission"
    )


@asynccontextmanager
async def open_mover(settings: Settings, name: str) -> AsyncIterator[MessageMover]:
    """Connect, to move messages; unacked messages are returned at the end.

    Copies have their own connection, because an alarm of the broker blocks it, and must not block
    the acks. Raises BrokerError if no broker answers.
    """
    publisher = new_publisher(settings)
    async with AsyncExitStack() as stack:
        rabbitmq = settings.rabbitmq
        connection = await stack.enter_async_context(connected(rabbitmq, name=name))
        publishing = await stack.enter_async_context(connected(rabbitmq, name=f"{name} publish"))
        serving = asyncio.create_task(publisher.serve(publishing))
        stack.callback(serving.cancel)
        channel = await open_channel(connection)
        inbox = _Inbox(connection.wire)
        with connection.wire.deliveries(channel, inbox.put) as callback:
            copies = CopyPublisher(publisher, serving)
            mover = MessageMover(connection, channel, callback, inbox, copies)
            try:
                yield mover
            except BaseException:
                # Report this error rather than one of the release.
                with suppress(BridgeError):
                    await mover.release()
                raise
            await mover.release()
        async with Deadline(RPC_TIMEOUT_SECONDS):
            await close_channel(channel)


async def read_readable_queue(connection: Connection, name: str) -> QueueSizes:
    """Read the sizes of a queue, which need not exist; raise BrokerError if they are unknown."""
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
            f"queue {name}: does not exist; check worker.queue; a worker declares it when it "
            "starts, and so does `sms-bridge topology declare`"
        )
    return sizes
