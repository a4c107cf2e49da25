"""The queues of a bench: new for each run, filled before it or fed at an even rate."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Final

import aiormq
import uvloop

from bridge.amqp.properties import Properties
from bridge.config import WebhookSettings, WorkerSettings
from bridge.topology.declarations import QUORUM

OUTBOUND: Final = str(WorkerSettings().queue)
INBOUND: Final = str(WebhookSettings().queue)
EXCHANGE: Final = str(WebhookSettings().exchange)

# Publishes that wait for their confirm at a time.
WINDOW: Final = 1000
TICK_SECONDS: Final = 0.005
POLL_SECONDS: Final = 0.1
TEXT: Final = "Your code is 123456. It is valid for ten minutes. Do not give it to anybody else."


class Queues:
    """What is done with the queues of one broker; each call has a connection of its own."""

    def __init__(self, url: str) -> None:
        self._url = url

    def make_outbound(self, messages: int = 0, *, queue: str = OUTBOUND) -> None:
        """Make the queue of send requests anew, and put so many persistent messages there."""
        uvloop.run(self._make_outbound(messages, queue))

    def fill_outbound(self, messages: int) -> None:
        """Put so many persistent messages into the queue of send requests as it is."""
        uvloop.run(self._fill_outbound(messages))

    def make_inbound(self) -> None:
        """Make the exchange of webhook events anew, with one empty queue."""
        uvloop.run(self._make_inbound())

    def feed_outbound(self, *, per_second: float, seconds: float) -> dict[str, float]:
        """Publish at an even rate; return when each message was published, in unix seconds."""
        return uvloop.run(self._feed_outbound(per_second, seconds))

    def wait_for_consumers(self, consumers: int = 1, *, seconds: float) -> bool:
        """Wait until so many consume the queue of send requests."""
        return uvloop.run(self._wait_for_consumers(consumers, seconds))

    def count(self, queue: str) -> int:
        """Count the messages of a queue that wait for a consumer."""
        return uvloop.run(self._count(queue))

    async def _make_outbound(self, messages: int, queue: str) -> None:
        async with self._channel() as channel:
            await channel.queue_delete(queue)
            await channel.queue_declare(queue, durable=True, arguments=dict(QUORUM))
        await self._fill_outbound(messages, queue)

    async def _fill_outbound(self, messages: int, queue: str = OUTBOUND) -> None:
        async with self._channel() as channel:
            for start in range(0, messages, WINDOW):
                window = range(start, min(start + WINDOW, messages))
                await asyncio.gather(*(_publish(channel, number, queue) for number in window))

    async def _make_inbound(self) -> None:
        async with self._channel() as channel:
            await channel.queue_delete(INBOUND)
            await channel.exchange_declare(EXCHANGE, exchange_type="topic", durable=True)
            await channel.queue_declare(INBOUND, durable=True, arguments=dict(QUORUM))
            await channel.queue_bind(INBOUND, EXCHANGE, routing_key="#")

    async def _feed_outbound(self, per_second: float, seconds: float) -> dict[str, float]:
        published: dict[str, float] = {}
        async with self._channel() as channel, asyncio.TaskGroup() as group:
            begun = time.monotonic()
            total = round(per_second * seconds)
            while len(published) < total:
                due = min(total, round((time.monotonic() - begun) * per_second))
                for number in range(len(published), due):
                    published[name_message(number)] = time.time()
                    group.create_task(_publish(channel, number))
                await asyncio.sleep(TICK_SECONDS)
        return published

    async def _wait_for_consumers(self, consumers: int, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        async with self._channel() as channel:
            while await _count_consumers(channel) < consumers:
                if time.monotonic() > deadline:
                    return False
                await asyncio.sleep(POLL_SECONDS)
        return True

    async def _count(self, queue: str) -> int:
        async with self._channel() as channel:
            return (await channel.queue_declare(queue, passive=True)).message_count or 0

    @asynccontextmanager
    async def _channel(self) -> AsyncIterator[aiormq.abc.AbstractChannel]:
        connection = await aiormq.connect(self._url)
        try:
            yield await connection.channel(publisher_confirms=True, on_return_raises=True)
        finally:
            await connection.close()


def name_message(number: int) -> str:
    """Return the id of a message; it is as long as those that people use."""
    return f"bench-{number:030d}"


async def _count_consumers(channel: aiormq.abc.AbstractChannel) -> int:
    return (await channel.queue_declare(OUTBOUND, passive=True)).consumer_count or 0


async def _publish(channel: aiormq.abc.AbstractChannel, number: int, queue: str = OUTBOUND) -> None:
    request = {"to": f"+4915{number:09d}", "from": "Acme", "text": TEXT}
    await channel.basic_publish(
        json.dumps(request).encode(),
        routing_key=queue,
        properties=Properties(
            message_id=name_message(number),
            timestamp=datetime.now(UTC),
            delivery_mode=2,
            content_type="application/json",
        ),
        mandatory=True,
    )
