"""The queues of a run: filled before it, or fed at an even rate."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import uvloop
from pydantic import SecretStr

from bench.rounds import BenchError
from bridge.amqp.channels import open_channel
from bridge.amqp.client import Channel
from bridge.amqp.connecting import close_quietly, open_connection
from bridge.amqp.properties import Properties
from bridge.amqp.wire import PublishingChannel
from bridge.config import RabbitMQSettings, WebhookSettings, WorkerSettings
from bridge.errors import Confirm
from bridge.topology.declarations import QUORUM

OUTBOUND: Final = str(WorkerSettings().queue)
INBOUND: Final = str(WebhookSettings().queue)
EXCHANGE: Final = str(WebhookSettings().exchange)

# Number of unconfirmed publishes.
WINDOW: Final = 1000
CONFIRM_SECONDS: Final = 60
# Interval of the feeder. Messages that are due together are published together.
TICK_SECONDS: Final = 0.001
# Messages in the queue while it is kept filled.
BACKLOG: Final = 500
BACKLOG_TICK_SECONDS: Final = 0.005
# Warm-up, which does not count.
WARM_UP: Final = 1 / 3
POLL_SECONDS: Final = 0.1
TEXT: Final = "Your code is 123456. It is valid for ten minutes. Do not give it to anybody else."


@dataclass(frozen=True, slots=True)
class _Broker:
    """A channel with confirms, and its publisher."""

    channel: Channel
    publishing: PublishingChannel


class Queues:
    """The queues of a broker. Each call opens its own connection.

    It publishes over the bridge's wire, which takes a fraction of aiormq's CPU time, because the
    feeder shares the cores with the contestant.
    """

    def __init__(self, url: str) -> None:
        self._url = url

    def make_outbound(self, messages: int = 0, *, queue: str = OUTBOUND) -> None:
        """Recreate the queue of send requests, and publish persistent messages to it."""
        uvloop.run(self._make_outbound(messages, queue))

    def fill_outbound(self, messages: int) -> None:
        """Publish persistent messages to the existing queue of send requests."""
        uvloop.run(self._fill_outbound(messages))

    def make_inbound(self) -> None:
        """Recreate the exchange of webhook events, with one empty queue."""
        uvloop.run(self._make_inbound())

    def feed_outbound(
        self, *, per_second: float, seconds: float, first: int = 0
    ) -> dict[str, float]:
        """Publish messages from this number at an even rate. Return the times in Unix seconds."""
        return uvloop.run(self._feed_outbound(per_second, seconds, first))

    def keep_outbound_filled(
        self, posted: Callable[[], int], *, seconds: float
    ) -> tuple[int, float]:
        """Publish as fast as a worker posts, so that the queue never runs empty.

        Return the number of published messages, and the worker's rate after the warm-up.
        """
        return uvloop.run(self._keep_outbound_filled(posted, seconds))

    def wait_for_consumers(self, consumers: int = 1, *, seconds: float) -> bool:
        """Wait until the queue of send requests has this many consumers."""
        return uvloop.run(self._wait_for_consumers(consumers, seconds))

    def count(self, queue: str) -> int:
        """Count the ready messages of a queue."""
        return uvloop.run(self._count(queue))

    async def _make_outbound(self, messages: int, queue: str) -> None:
        async with self._connected() as broker:
            await broker.channel.queue_delete(queue)
            await broker.channel.queue_declare(queue, durable=True, arguments=dict(QUORUM))
        await self._fill_outbound(messages, queue)

    async def _fill_outbound(self, messages: int, queue: str = OUTBOUND) -> None:
        async with self._connected() as broker:
            for start in range(0, messages, WINDOW):
                window = range(start, min(start + WINDOW, messages))
                await _confirmed([_publish(broker, number, queue) for number in window])

    async def _make_inbound(self) -> None:
        async with self._connected() as broker:
            channel = broker.channel
            await channel.queue_delete(INBOUND)
            await channel.exchange_declare(EXCHANGE, exchange_type="topic", durable=True)
            await channel.queue_declare(INBOUND, durable=True, arguments=dict(QUORUM))
            await channel.queue_bind(INBOUND, EXCHANGE, routing_key="#")

    async def _feed_outbound(
        self, per_second: float, seconds: float, first: int
    ) -> dict[str, float]:
        published: dict[str, float] = {}
        confirms: list[Awaitable[Confirm]] = []
        async with self._connected() as broker:
            begun = time.monotonic()
            total = round(per_second * seconds)
            while len(published) < total:
                due = min(total, round((time.monotonic() - begun) * per_second))
                for number in range(first + len(published), first + due):
                    published[name_message(number)] = time.time()
                    confirms.append(_publish(broker, number))
                await asyncio.sleep(TICK_SECONDS)
            await _confirmed(confirms)
        return published

    async def _keep_outbound_filled(
        self, posted: Callable[[], int], seconds: float
    ) -> tuple[int, float]:
        confirms: list[Awaitable[Confirm]] = []
        already = posted()
        warm_at, warm_count = 0.0, 0
        async with self._connected() as broker:
            begun = time.monotonic()
            while True:
                now, count = time.monotonic(), posted() - already
                if not warm_at and now - begun >= seconds * WARM_UP:
                    warm_at, warm_count = now, count
                if now - begun >= seconds:
                    break
                confirms += [
                    _publish(broker, number) for number in range(len(confirms), count + BACKLOG)
                ]
                await asyncio.sleep(BACKLOG_TICK_SECONDS)
            await _confirmed(confirms)
        return len(confirms), (count - warm_count) / (now - warm_at)

    async def _wait_for_consumers(self, consumers: int, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        async with self._connected() as broker:
            while await _count_consumers(broker.channel) < consumers:
                if time.monotonic() > deadline:
                    return False
                await asyncio.sleep(POLL_SECONDS)
        return True

    async def _count(self, queue: str) -> int:
        async with self._connected() as broker:
            return (await broker.channel.queue_declare(queue, passive=True)).message_count or 0

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[_Broker]:
        settings = RabbitMQSettings.model_validate({"url": self._url})
        connection = await open_connection(settings, SecretStr(self._url), name="bench")
        try:
            channel = await open_channel(connection, confirms=True)
            with connection.wire.publishing(channel) as publishing:
                yield _Broker(channel, publishing)
        finally:
            await close_quietly(connection)


def name_message(number: int) -> str:
    """Return a message id of typical length."""
    return f"bench-{number:030d}"


async def _count_consumers(channel: Channel) -> int:
    return (await channel.queue_declare(OUTBOUND, passive=True)).consumer_count or 0


def _publish(broker: _Broker, number: int, queue: str = OUTBOUND) -> Awaitable[Confirm]:
    request = {"to": f"+9995{number:09d}", "from": "Acme", "text": TEXT}
    return broker.publishing.publish(
        json.dumps(request).encode(),
        exchange="",
        routing_key=queue,
        properties=Properties(
            message_id=name_message(number),
            timestamp=datetime.now(UTC),
            delivery_mode=2,
            content_type="application/json",
        ),
    )


async def _confirmed(confirms: list[Awaitable[Confirm]]) -> None:
    async with asyncio.timeout(CONFIRM_SECONDS):
        answers = set(await asyncio.gather(*confirms))
    if answers - {"confirmed"}:
        raise BenchError(f"the broker did not confirm all messages: {answers}")
