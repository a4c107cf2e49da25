"""The dead-letter queue, gone through from its oldest letter on; safe to kill at any point.

A look takes the messages with a consumer, unacked, and gives them back by closing the channel.
RabbitMQ has nothing more harmless: a quorum queue counts each time that a message comes back,
whether by a closed channel, a nack (until 4.3), `basic.get` or the management API's "get
messages", and drops what is over its delivery limit (20 by default since RabbitMQ 4.0). So a
message that has come back `MAX_LOOKS` times is not given back but renewed: published to the end
of the same queue, confirmed, then acked, which starts its count anew. No number of looks can drop
a dead letter, unless the queue has a delivery limit of 4 or less.

RabbitMQ counts only what it delivers, so `list` takes no more than it shows. Only unacked messages
are kept in memory: at most one and a half times `PREFETCH`.
"""

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Final

from bridge import __version__
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
    Connection,
    DeliveredMessage,
)
from bridge.amqp.connecting import close_quietly, open_first_connection
from bridge.amqp.properties import Properties
from bridge.amqp.publisher import Publisher
from bridge.amqp.wire import Wire
from bridge.config import Settings
from bridge.errors import BridgeError, BrokerError, PublishError
from bridge.metrics import BridgeMetrics, new_registry
from bridge.operators.dead_letters.letter import DeadLetter, read_dead_letter
from bridge.outbound.envelope import moved_properties
from bridge.topology.declarations import dead_queue
from bridge.topology.queue_sizes import read_queue

PREFETCH: Final = 1000
ACK_SECONDS: Final = 5.0
# How many letters are moved at the same time.
IN_FLIGHT: Final = 50
MAX_LOOKS: Final = 4
# After this long without a delivery, check whether another consumer has emptied the queue; give up
# after this many checks of a queue that is not empty.
IDLE_SECONDS: Final = 2.0
IDLE_LOOKS: Final = 5
PUBLISH_SECONDS: Final = 10.0
# How long to wait for the broker's reason, which comes after the channel has ended.
REFUSAL_SECONDS: Final = 1.0


class DeadLetterQueue:
    """The dead letters that are there when it is opened, each taken once.

    `total` is how many there were then, `done` how many have been moved away or removed. Whatever
    is in hand goes back when it is closed.
    """

    def __init__(
        self,
        name: str,
        channel: Channel,
        wire: Wire,
        publisher: Publisher,
        *,
        serving: asyncio.Task[None],
        total: int,
    ) -> None:
        self.name = name
        self.total = total
        self.done = 0
        self._channel = channel
        self._wire = wire
        self._publisher = publisher
        self._serving = serving
        # None wakes the reader for something else: a stop, a fault, the end of the channel.
        self._arrived: asyncio.Queue[DeliveredMessage | None] = asyncio.Queue()
        self._delivered = self._unacked = self._prefetch = 0
        self._slots = asyncio.Semaphore(IN_FLIGHT)
        self._moves: set[asyncio.Task[None]] = set()
        self._fault: BridgeError | None = None
        self._stopping = asyncio.Event()
        self._last_ack_at = -math.inf
        channel.closing.add_done_callback(lambda _: self._arrived.put_nowait(None))
        channel.on_consumer_cancel_callbacks.add(lambda _: self._arrived.put_nowait(None))

    def stop(self) -> None:
        """Take no more; what is being moved is finished."""
        self._stopping.set()
        self._arrived.put_nowait(None)

    @property
    def is_stopped(self) -> bool:
        """Whether somebody asked to stop."""
        return self._stopping.is_set()

    async def wait(self, seconds: float) -> None:
        """Wait so long, or until somebody asks to stop."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds)):
                await self._stopping.wait()

    async def letters(self, at_most: int | None = None) -> AsyncGenerator[DeadLetter, None]:
        """Yield the letters, oldest first; give each to `keep`, `move` or `remove`, then `finish`.

        Raises BrokerError when the broker ends it.
        """
        total = self.total if at_most is None else min(self.total, at_most)
        for _ in range(total):
            await self._ask_for_more(total)
            message = await self._next()
            if message is None:
                return
            yield read_dead_letter(message)

    async def _ask_for_more(self, total: int) -> None:
        # A letter that is kept stays unacked and takes up prefetch for good, so another consumer
        # asks for the next ones.
        if not self._arrived.empty() or self._delivered >= total:
            return
        if self._prefetch - self._unacked > PREFETCH // 2:
            return
        prefetch = min(PREFETCH, total - self._delivered)
        try:
            async with asyncio.timeout(RPC_TIMEOUT_SECONDS):
                await self._channel.basic_qos(prefetch_count=prefetch)
                await self._channel.basic_consume(self.name, self._on_delivery)
        except ChannelAccessRefused:
            raise BrokerError(
                f"queue {self.name}: no permission to read; grant it with rabbitmqctl "
                "set_permissions, or name a user that may in rabbitmq.username"
            ) from None
        self._prefetch += prefetch

    async def _on_delivery(self, message: DeliveredMessage) -> None:
        self._delivered += 1
        self._unacked += 1
        self._arrived.put_nowait(message)

    async def _next(self) -> DeliveredMessage | None:
        """Return the next delivery, or None when there are no more or they are not wanted."""
        for _ in range(IDLE_LOOKS):
            if self.is_stopped or self._fault is not None:
                return None
            try:
                async with asyncio.timeout(IDLE_SECONDS):
                    message = await self._arrived.get()
            except TimeoutError:
                if await self._is_empty():
                    return None
                continue
            if message is not None or self.is_stopped or self._fault is not None:
                return message
            raise BrokerError(f"queue {self.name}: the broker ended the consumer; run it again")
        raise BrokerError(f"queue {self.name}: the broker delivers nothing; look at its log")

    async def _is_empty(self) -> bool:
        async with asyncio.timeout(RPC_TIMEOUT_SECONDS):
            answer = await self._channel.queue_declare(self.name, passive=True)
        return not answer.message_count

    async def keep(self, letter: DeadLetter) -> None:
        """Leave a letter in the queue; one that was looked at often is renewed."""
        if letter.looks >= MAX_LOOKS:
            await self._start(letter, self.name, moved_properties(letter.properties), counts=False)

    async def move(self, letter: DeadLetter, queue: str, properties: Properties) -> None:
        """Publish a letter to a queue, have that confirmed, then ack it; at most 50 at once.

        Returns when it has begun; `finish` tells what became of it.
        """
        await self._start(letter, queue, properties, counts=True)

    async def remove(self, letter: DeadLetter) -> None:
        """Ack a letter: it is gone."""
        if not await self._ack(letter):
            raise BrokerError(f"queue {self.name}: the broker is gone; run it again")
        self.done += 1

    async def flush(self) -> None:
        """Return when the broker has processed every ack; it forgets the others with the channel.

        Raises TimeoutError, or aiormq's error when the channel has ended.
        """
        if self._last_ack_at == -math.inf:
            return
        async with asyncio.timeout(RPC_TIMEOUT_SECONDS):
            await self._wire.acks_read(self._channel)
        await wait_for_held_back_acks(self._last_ack_at)

    async def _ack(self, letter: DeadLetter) -> bool:
        try:
            async with asyncio.timeout(ACK_SECONDS):
                # Until it is written: a kill would undo an ack that is only queued.
                await self._channel.basic_ack(letter.tag, wait=True)
        except (AMQPError, ChannelInvalidStateError, TimeoutError):
            return False
        self._unacked -= 1
        self._last_ack_at = asyncio.get_running_loop().time()
        return True

    async def finish(self) -> None:
        """Wait for what is being moved; raise BridgeError when something could not be."""
        while self._moves:
            await asyncio.wait(set(self._moves))
        if self._fault is not None:
            raise self._fault

    async def _start(
        self, letter: DeadLetter, queue: str, properties: Properties, *, counts: bool
    ) -> None:
        await self._slots.acquire()
        if self._fault is not None:
            self._slots.release()
            return
        task = asyncio.create_task(self._move(letter, queue, properties, counts=counts))
        self._moves.add(task)
        task.add_done_callback(self._moves.discard)
        task.add_done_callback(lambda _: self._slots.release())

    async def _move(
        self, letter: DeadLetter, queue: str, properties: Properties, *, counts: bool
    ) -> None:
        try:
            await self._publisher.publish(
                letter.body, exchange="", routing_key=queue, properties=properties
            )
            if await self._ack(letter):
                self.done += counts
            else:
                self._fault = BrokerError(
                    f"queue {self.name}: the broker is gone; some letters may be in both queues, "
                    "with one key"
                )
        except PublishError as error:
            why = await self._why_not_stored(error)
            self._fault = BrokerError(
                f"queue {queue}: not stored: {why}; nothing is lost, mend it and run this again"
            )
        if self._fault is not None:
            self._arrived.put_nowait(None)

    async def _why_not_stored(self, error: PublishError) -> str:
        if error.fault != "error":
            return str(error)
        # The channel has ended. The broker's words, such as a missing permission, come with that.
        await asyncio.wait({self._serving}, timeout=REFUSAL_SECONDS)
        ended = self._serving.exception() if self._serving.done() else None
        return str(ended) if isinstance(ended, BrokerError) else str(error)


@contextlib.asynccontextmanager
async def open_dead_letters(settings: Settings) -> AsyncIterator[DeadLetterQueue]:
    """Open the dead-letter queue of `worker.queue`; what is still in hand goes back at the end.

    Raises BrokerError when there is no broker or no such queue.
    """
    name = dead_queue(settings.worker.queue)
    async with contextlib.AsyncExitStack() as stack:
        consuming = await _open_connection(settings, "dead letters", stack)
        sizes = await read_queue(consuming, name)
        if sizes is None:
            raise BrokerError(f"queue {name}: it answers nothing; look at its leader and its nodes")
        if not sizes.exists:
            raise BrokerError(
                f"queue {name}: there is none; is worker.queue right? A worker makes it when it "
                "starts, or `sms-bridge topology declare` does"
            )
        publisher = Publisher(_metrics(settings), timeout_seconds=PUBLISH_SECONDS)
        # An alarm blocks the connection that publishes, and must not block acks.
        publishing = await _open_connection(settings, "dead letters publish", stack)
        serving = asyncio.create_task(publisher.serve(publishing))
        stack.callback(serving.cancel)
        channel = await open_channel(consuming)
        queue = DeadLetterQueue(
            name, channel, consuming.wire, publisher, serving=serving, total=sizes.ready
        )
        try:
            yield queue
        finally:
            with contextlib.suppress(BridgeError):
                await queue.finish()
            with contextlib.suppress(AMQPError, ChannelInvalidStateError, TimeoutError):
                await queue.flush()
        async with asyncio.timeout(RPC_TIMEOUT_SECONDS):
            await close_channel(channel)


async def _open_connection(
    settings: Settings, name: str, stack: contextlib.AsyncExitStack
) -> Connection:
    connection = await open_first_connection(settings.rabbitmq, name=name)
    stack.push_async_callback(close_quietly, connection)
    return connection


def _metrics(settings: Settings) -> BridgeMetrics:
    # Nobody reads them, but publishing is counted wherever it is done.
    exchanges = ("default", settings.webhook.exchange)
    return BridgeMetrics(
        new_registry(), component="cli", version=__version__, revision="", exchanges=exchanges
    )
