"""A plain AMQP client, independent of the bridge's AMQP code."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage

SECONDS: Final = 30.0
POLL_SECONDS: Final = 0.05


class _Unnamed(str):
    """An empty message id. Without one, aiormq generates an id. pamqp leaves this one out."""

    __slots__ = ()

    def __bool__(self) -> bool:
        """Look like an id to aiormq."""
        return True

    def __str__(self) -> "_Unnamed":
        """Stay an `_Unnamed` when aio-pika calls `str`."""
        return self


NO_ID: Final = _Unnamed()


class Amqp:
    """Publishes, counts and takes messages without the proxies of a test."""

    def __init__(self, connection: aio_pika.abc.AbstractConnection) -> None:
        self._connection = connection
        self.channel: AbstractChannel

    async def open(self) -> "Amqp":
        """Open the shared channel."""
        self.channel = await self._connection.channel(on_return_raises=True)
        return self

    async def publish(self, queue: str, body: bytes, **properties: Any) -> None:
        """Publish a persistent message, and wait for the confirm."""
        mode = aio_pika.DeliveryMode.PERSISTENT
        own: dict[str, Any] = {"delivery_mode": mode, "message_id": NO_ID}
        message = aio_pika.Message(body, **own | properties)
        await self.channel.default_exchange.publish(message, queue, timeout=SECONDS)

    async def get(self, queue: str) -> AbstractIncomingMessage:
        """Get a message without acking it."""
        source = await self.channel.get_queue(queue, ensure=False)
        return await source.get(timeout=SECONDS)

    async def take(self, queue: str, **wanted: object) -> AbstractIncomingMessage:
        """Take messages until one has these attributes, and return it."""
        source = await self.channel.get_queue(queue, ensure=False)
        deadline = time.monotonic() + SECONDS
        while True:
            while (message := await source.get(fail=False, no_ack=True)) is not None:
                if all(getattr(message, name) == value for name, value in wanted.items()):
                    return message
            assert time.monotonic() < deadline, f"no message with {wanted} in {queue}"
            await asyncio.sleep(POLL_SECONDS)

    async def take_all(self, queue: str) -> list[AbstractIncomingMessage]:
        """Take all messages, even if the broker's count is too low, as after a restart."""
        source = await self.channel.get_queue(queue, ensure=False)
        wanted = await self.count(queue)
        arrived: asyncio.Queue[AbstractIncomingMessage] = asyncio.Queue()
        messages: list[AbstractIncomingMessage] = []
        if wanted:
            tag = await source.consume(arrived.put, no_ack=True)
            while len(messages) < wanted:
                # Per message, because a busy machine takes minutes for thousands.
                async with asyncio.timeout(60):
                    messages.append(await arrived.get())
            await source.cancel(tag)
        while not arrived.empty():
            messages.append(arrived.get_nowait())
        while (message := await source.get(fail=False, no_ack=True, timeout=SECONDS)) is not None:
            messages.append(message)
        return messages

    async def count(self, queue: str) -> int:
        """Count the ready messages of a queue."""
        async with self._connection.channel() as channel:
            declared = await channel.declare_queue(queue, passive=True)
            return declared.declaration_result.message_count or 0

    async def count_if_there(self, queue: str) -> int:
        """Count the ready messages of a queue, 0 if it does not exist."""
        try:
            return await self.count(queue)
        except aio_pika.exceptions.ChannelNotFoundEntity:
            return 0

    async def consumers(self, queue: str) -> int:
        async with self._connection.channel() as channel:
            declared = await channel.declare_queue(queue, passive=True)
            return declared.declaration_result.consumer_count or 0

    async def until_count(self, queue: str, count: int) -> None:
        """Wait until a queue has this many ready messages."""
        deadline = time.monotonic() + SECONDS
        while (found := await self.count(queue)) != count:
            assert time.monotonic() < deadline, f"{found} messages in {queue}, not {count}"
            await asyncio.sleep(POLL_SECONDS)

    async def purge(self, queue: str) -> None:
        await (await self.channel.get_queue(queue, ensure=False)).purge()

    async def delete(self, names: Sequence[str]) -> None:
        for name in names:
            await self.channel.queue_delete(name)
            await self.channel.exchange_delete(name)


@asynccontextmanager
async def open_amqp(url: str) -> AsyncIterator[Amqp]:
    """Open a client of a broker."""
    async with await aio_pika.connect(url, timeout=SECONDS) as connection:
        yield await Amqp(connection).open()
