"""A worker that an engineer who knows asyncio and RabbitMQ writes in a day: aiormq and aiohttp.

It has a pool of tasks instead of a task per message, and acks finished messages in one frame. It
lacks dead letters, growing delays, deduplication and reconnects (it ends, and is restarted).
"""

import asyncio
import os
import signal
from typing import NoReturn

import aiohttp
import aiormq
import uvloop
from aiormq.abc import AbstractChannel, DeliveredMessage
from prometheus_client import Counter, Histogram, start_http_server
from pydantic import BaseModel, Field, ValidationError
from yarl import URL

IN_FLIGHT = int(os.environ["BENCH_IN_FLIGHT"])
API = URL(os.environ["BENCH_API_URL"] + "/v1/messages")
KEY = f"Bearer {os.environ['BENCH_API_KEY']}"
ANSWER = aiohttp.ClientTimeout(total=30)
# Delay before a message that was not accepted returns to the queue.
RETRY_AFTER_SECONDS = 1.0

SENT = Counter("sent_total", "Messages that the API accepted.")
SECONDS = Histogram("send_seconds", "From the request to the answer.")


class SendRequest(BaseModel):
    """A send request."""

    to: str = Field(min_length=1)
    sender: str = Field(alias="from", min_length=1)
    text: str = Field(min_length=1)


class Acks:
    """Acks finished messages together, with `multiple` where possible."""

    def __init__(self, channel: AbstractChannel) -> None:
        self._channel = channel
        # All tags up to this one are settled, and the following ones above it.
        self._frontier = 0
        self._beyond: set[int] = set()
        self._unacked: list[int] = []
        self._more = asyncio.Event()

    def settle(self, tag: int, *, is_acked: bool = False) -> None:
        """Mark a delivery as settled. `is_acked`: it is already acked."""
        self._beyond.add(tag)
        if not is_acked:
            self._unacked.append(tag)
            self._more.set()

    async def follow(self) -> NoReturn:
        """Ack until cancelled."""
        while True:
            await self._more.wait()
            await self.flush()

    async def flush(self) -> None:
        """Ack all settled deliveries."""
        self._more.clear()
        unacked, self._unacked = self._unacked, []
        while self._frontier + 1 in self._beyond:
            self._frontier += 1
            self._beyond.remove(self._frontier)
        # RabbitMQ accepts each tag only once, even with `multiple`.
        up_to = max((tag for tag in unacked if tag <= self._frontier), default=0)
        if up_to:
            await self._channel.basic_ack(up_to, multiple=True, wait=False)
        for tag in unacked:
            if tag > self._frontier:
                await self._channel.basic_ack(tag, wait=False)


class Worker:
    """Posts the deliveries of a channel."""

    def __init__(self, session: aiohttp.ClientSession, channel: AbstractChannel) -> None:
        self.deliveries: asyncio.Queue[DeliveredMessage] = asyncio.Queue()
        self.acks = Acks(channel)
        self._session = session
        self._channel = channel

    async def work(self) -> NoReturn:
        """Handle one delivery after the other."""
        while True:
            delivery = await self.deliveries.get()
            await self._handle(delivery)
            self.deliveries.task_done()

    async def _handle(self, delivery: DeliveredMessage) -> None:
        tag = delivery.delivery_tag
        assert tag is not None
        try:
            SendRequest.model_validate_json(delivery.body)
            await self._post(delivery)
        except ValidationError:
            await self._channel.basic_nack(tag, requeue=False)
            self.acks.settle(tag, is_acked=True)
        except (aiohttp.ClientError, TimeoutError):
            await asyncio.sleep(RETRY_AFTER_SECONDS)
            await self._channel.basic_nack(tag, requeue=True)
            self.acks.settle(tag, is_acked=True)
        else:
            self.acks.settle(tag)

    async def _post(self, delivery: DeliveredMessage) -> None:
        headers = {
            "Authorization": KEY,
            "Content-Type": "application/json",
            "Idempotency-Key": delivery.header.properties.message_id or "",
        }
        with SECONDS.time():
            async with self._session.post(API, data=delivery.body, headers=headers) as response:
                await response.read()
        response.raise_for_status()
        SENT.inc()


async def main() -> None:
    """Work until SIGTERM, then finish the messages in flight."""
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    connection = await aiormq.connect(os.environ["BENCH_AMQP_URL"])
    channel = await connection.channel(publisher_confirms=False)
    connector = aiohttp.TCPConnector(limit=IN_FLIGHT)
    async with aiohttp.ClientSession(
        connector=connector, timeout=ANSWER, cookie_jar=aiohttp.DummyCookieJar()
    ) as session:
        worker = Worker(session, channel)
        pool = [asyncio.create_task(worker.work()) for _ in range(IN_FLIGHT)]
        pool.append(asyncio.create_task(worker.acks.follow()))
        stopping = asyncio.create_task(stopped.wait())

        async def take(delivery: DeliveredMessage) -> None:
            worker.deliveries.put_nowait(delivery)

        # Twice the concurrency, so that the next message is there before the last ack.
        await channel.basic_qos(prefetch_count=2 * IN_FLIGHT)
        consumer = await channel.basic_consume(os.environ["BENCH_QUEUE"], take)
        await asyncio.wait([*pool, stopping, channel.closing], return_when=asyncio.FIRST_COMPLETED)
        if not stopped.is_set():
            raise SystemExit("the broker ended the channel, or a task failed")
        assert consumer.consumer_tag is not None
        await channel.basic_cancel(consumer.consumer_tag)
        await worker.deliveries.join()
        await worker.acks.flush()
    await connection.close()


if __name__ == "__main__":
    start_http_server(int(os.environ["BENCH_METRICS_PORT"]), "127.0.0.1")
    uvloop.run(main())
