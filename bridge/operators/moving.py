"""What commands that move messages share: a queue that is there, what arrives, confirmed copies."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final, Generic, TypeVar

from bridge import __version__
from bridge.amqp.channels import RPC_TIMEOUT_SECONDS
from bridge.amqp.client import Channel, ChannelAccessRefused, Connection, ConsumerCallback
from bridge.amqp.connecting import close_quietly, open_first_connection
from bridge.amqp.properties import Properties
from bridge.amqp.publisher import Publisher
from bridge.amqp.wire import Body
from bridge.config import Settings
from bridge.errors import BrokerError, PublishError
from bridge.metrics import BridgeMetrics, new_registry
from bridge.topology.queue_sizes import QueueSizes, ask_queue

T = TypeVar("T")

# How many messages are moved at the same time.
IN_FLIGHT: Final = 50
# After this long without a delivery, check whether another consumer has emptied the queue; give up
# after this many checks of a queue that is not empty.
IDLE_SECONDS: Final = 2.0
IDLE_LOOKS: Final = 5
PUBLISH_SECONDS: Final = 10.0
# How long to wait for the broker's reason, which comes after the channel has ended.
REFUSAL_SECONDS: Final = 1.0


async def read_existing_queue(connection: Connection, name: str) -> QueueSizes:
    """Read the sizes of a queue; raise BrokerError, with what to do, when there is none."""
    try:
        sizes = await ask_queue(connection, name)
    except ChannelAccessRefused:
        raise BrokerError(
            f"queue {name}: the user has no permission on it; grant one with rabbitmqctl "
            "set_permissions, or name a user that has one in rabbitmq.username"
        ) from None
    if sizes is None:
        raise BrokerError(f"queue {name}: it answers nothing; look at its leader and its nodes")
    if not sizes.exists:
        raise BrokerError(
            f"queue {name}: there is none; is worker.queue right? A worker makes it when it "
            "starts, or `sms-bridge topology declare` does"
        )
    return sizes


class Arrivals(Generic[T]):
    """What is delivered on a channel, one after the other, until nobody wants more."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        # None wakes the reader for something else: an end, or that of the consumer or the channel.
        self._arrived: asyncio.Queue[T | None] = asyncio.Queue()
        self._has_ended = False
        channel.closing.add_done_callback(lambda _: self._arrived.put_nowait(None))
        channel.on_consumer_cancel_callbacks.add(lambda _: self._arrived.put_nowait(None))

    async def consume(self, queue: str, *, prefetch: int, callback: ConsumerCallback) -> str:
        """Begin a consumer of a queue, which hands on to `add`, and return its tag.

        Raises BrokerError when the user may not read the queue, or else aiormq's error or
        TimeoutError.
        """
        try:
            async with asyncio.timeout(RPC_TIMEOUT_SECONDS):
                await self._channel.basic_qos(prefetch_count=prefetch)
                consumer = await self._channel.basic_consume(queue, callback)
        except ChannelAccessRefused:
            raise BrokerError(
                f"queue {queue}: no permission to read; grant it with rabbitmqctl "
                "set_permissions, or name a user that may in rabbitmq.username"
            ) from None
        return consumer.consumer_tag or ""

    def add(self, message: T) -> None:
        """Take note of a delivery."""
        self._arrived.put_nowait(message)

    def end(self) -> None:
        """Want no more: `next` returns None from now on."""
        self._has_ended = True
        self._arrived.put_nowait(None)

    @property
    def is_empty(self) -> bool:
        """Whether all that has arrived is taken."""
        return self._arrived.empty()

    async def next(self, queue: str) -> T | None:
        """Return the next delivery of a queue, or None when there are no more or none are wanted.

        Raises BrokerError when the broker ends it, or delivers nothing of what the queue has.
        """
        for _ in range(IDLE_LOOKS):
            if self._has_ended:
                return None
            try:
                async with asyncio.timeout(IDLE_SECONDS):
                    message = await self._arrived.get()
            except TimeoutError:
                if await self._nothing_is_ready(queue):
                    return None
                continue
            if message is not None or self._has_ended:
                return message
            raise BrokerError(f"queue {queue}: the broker ended the consumer; run it again")
        # Of a quorum queue the broker does not tell whether it is that.
        raise BrokerError(
            f"queue {queue}: the broker delivers nothing; when another consumer has it for itself "
            "(x-single-active-consumer), stop that one, workers with `sms-bridge pause`, and run "
            "this again, else look at the broker's log"
        )

    def rest(self) -> list[T]:
        """Return at once whatever else has arrived."""
        found = []
        while not self._arrived.empty():
            message = self._arrived.get_nowait()
            if message is not None:
                found.append(message)
        return found

    async def _nothing_is_ready(self, queue: str) -> bool:
        async with asyncio.timeout(RPC_TIMEOUT_SECONDS):
            answer = await self._channel.queue_declare(queue, passive=True)
        return not answer.message_count


class Copies:
    """Publishes copies of messages to queues, each confirmed."""

    def __init__(self, publisher: Publisher, serving: asyncio.Task[None]) -> None:
        self.publisher = publisher
        self._serving = serving

    async def store(self, body: Body, *, queue: str, properties: Properties) -> None:
        """Return when a copy is stored; raise BrokerError, with the broker's words, when not."""
        try:
            await self.publisher.publish(
                body, exchange="", routing_key=queue, properties=properties
            )
        except PublishError as error:
            why = await self._why_not_stored(error)
            raise BrokerError(
                f"queue {queue}: not stored: {why}; nothing is lost, mend it and run this again"
            ) from None

    async def _why_not_stored(self, error: PublishError) -> str:
        if self.publisher.is_blocked:
            return (
                f"{error}: the broker takes no messages, as in a memory or disk alarm; look at "
                "rabbitmq-diagnostics check_local_alarms; what was under way may yet be stored"
            )
        if error.fault != "error":
            return str(error)
        # The channel has ended. The broker's words, such as a missing permission, come with that.
        await asyncio.wait({self._serving}, timeout=REFUSAL_SECONDS)
        ended = self._serving.exception() if self._serving.done() else None
        return str(ended) if isinstance(ended, BrokerError) else str(error)


@asynccontextmanager
async def open_copies(settings: Settings, name: str) -> AsyncIterator[Copies]:
    """Publish copies, on a connection of their own: an alarm blocks it, and must not block acks.

    Raises BrokerError when there is no broker.
    """
    # Nobody reads the metrics, but publishing is counted wherever it is done.
    exchanges = ("default", settings.webhook.exchange)
    metrics = BridgeMetrics(
        new_registry(), component="cli", version=__version__, revision="", exchanges=exchanges
    )
    publisher = Publisher(metrics, timeout_seconds=PUBLISH_SECONDS)
    async with AsyncExitStack() as stack:
        connection = await stack.enter_async_context(open_connection(settings, name))
        serving = asyncio.create_task(publisher.serve(connection))
        stack.callback(serving.cancel)
        yield Copies(publisher, serving)


@asynccontextmanager
async def open_connection(settings: Settings, name: str) -> AsyncIterator[Connection]:
    """Connect for the time of one command; raise BrokerError when no broker answers."""
    connection = await open_first_connection(settings.rabbitmq, name=name)
    try:
        yield connection
    finally:
        await close_quietly(connection)
