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
    DeliveredMessage,
)
from bridge.amqp.properties import Properties
from bridge.amqp.wire import Wire
from bridge.config import Settings
from bridge.errors import BridgeError, BrokerError
from bridge.operators.dead_letters.letter import DeadLetter, read_dead_letter
from bridge.operators.moving import (
    IN_FLIGHT,
    Arrivals,
    Copies,
    open_connection,
    open_copies,
    read_existing_queue,
)
from bridge.outbound.copies import moved_properties
from bridge.topology.declarations import dead_queue

PREFETCH: Final = 1000
ACK_SECONDS: Final = 5.0
MAX_LOOKS: Final = 4


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
        copies: Copies,
        *,
        total: int,
    ) -> None:
        self.name = name
        self.total = total
        self.done = 0
        self._channel = channel
        self._wire = wire
        self._copies = copies
        self._arrivals: Arrivals[DeliveredMessage] = Arrivals(channel)
        self._delivered = self._unacked = self._prefetch = 0
        self._slots = asyncio.Semaphore(IN_FLIGHT)
        self._moves: set[asyncio.Task[None]] = set()
        self._fault: BridgeError | None = None
        self._stopping = asyncio.Event()
        self._last_ack_at = -math.inf

    def stop(self) -> None:
        """Take no more; what is being moved is finished."""
        self._stopping.set()
        self._arrivals.end()

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
            message = await self._arrivals.next(self.name)
            if message is None:
                return
            yield read_dead_letter(message)

    async def _ask_for_more(self, total: int) -> None:
        # A letter that is kept stays unacked and takes up prefetch for good, so another consumer
        # asks for the next ones.
        if not self._arrivals.is_empty or self._delivered >= total:
            return
        if self._prefetch - self._unacked > PREFETCH // 2:
            return
        prefetch = min(PREFETCH, total - self._delivered)
        await self._arrivals.consume(self.name, prefetch=prefetch, callback=self._on_delivery)
        self._prefetch += prefetch

    async def _on_delivery(self, message: DeliveredMessage) -> None:
        self._delivered += 1
        self._unacked += 1
        self._arrivals.add(message)

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
            await self._copies.store(letter.body, queue=queue, properties=properties)
        except BrokerError as error:
            self._fault = error
        else:
            if await self._ack(letter):
                self.done += counts
            else:
                self._fault = BrokerError(
                    f"queue {self.name}: the broker is gone; some letters may be in both queues, "
                    "with one key"
                )
        if self._fault is not None:
            self._arrivals.end()


@contextlib.asynccontextmanager
async def open_dead_letters(settings: Settings) -> AsyncIterator[DeadLetterQueue]:
    """Open the dead-letter queue of `worker.queue`; what is still in hand goes back at the end.

    Raises BrokerError when there is no broker or no such queue.
    """
    name = dead_queue(settings.worker.queue)
    async with contextlib.AsyncExitStack() as stack:
        consuming = await stack.enter_async_context(open_connection(settings, "dead letters"))
        sizes = await read_existing_queue(consuming, name)
        copies = await stack.enter_async_context(open_copies(settings, "dead letters publish"))
        channel = await open_channel(consuming)
        queue = DeadLetterQueue(name, channel, consuming.wire, copies, total=sizes.ready)
        try:
            yield queue
        finally:
            with contextlib.suppress(BridgeError):
                await queue.finish()
            with contextlib.suppress(AMQPError, ChannelInvalidStateError, TimeoutError):
                await queue.flush()
        async with asyncio.timeout(RPC_TIMEOUT_SECONDS):
            await close_channel(channel)
