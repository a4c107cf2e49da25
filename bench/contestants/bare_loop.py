"""The minimum that moves a message: consume, parse, POST, ack. No retries, no log.

It is the yardstick, not a usable program: any failure drops the message.
"""

import asyncio
import os

import aio_pika
import aiohttp
import uvloop
from aio_pika.abc import AbstractIncomingMessage
from prometheus_client import Counter, Histogram
from pydantic import BaseModel, Field

IN_FLIGHT = int(os.environ["BENCH_IN_FLIGHT"])
URL = os.environ["BENCH_API_URL"] + "/v1/messages"
KEY = {"Authorization": f"Bearer {os.environ['BENCH_API_KEY']}"}

SENT = Counter("sent_total", "Messages that the API accepted.")
SECONDS = Histogram("send_seconds", "From the request to the answer.")


class SendRequest(BaseModel):
    """A send request."""

    to: str
    sender: str = Field(alias="from")
    text: str


async def main() -> None:
    """Consume until the process ends."""
    connector = aiohttp.TCPConnector(limit=IN_FLIGHT)
    async with aiohttp.ClientSession(connector=connector, headers=KEY) as session:

        async def handle(message: AbstractIncomingMessage) -> None:
            async with message.process():
                request = SendRequest.model_validate_json(message.body)
                headers = {
                    "Content-Type": "application/json",
                    "Idempotency-Key": message.message_id or "",
                }
                body = request.model_dump_json(by_alias=True)
                with SECONDS.time():
                    async with session.post(URL, data=body, headers=headers) as response:
                        response.raise_for_status()
                        await response.read()
                SENT.inc()

        connection = await aio_pika.connect_robust(os.environ["BENCH_AMQP_URL"])
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=IN_FLIGHT)
        queue = await channel.get_queue(os.environ["BENCH_QUEUE"])
        await queue.consume(handle)
        await asyncio.Future()


if __name__ == "__main__":
    uvloop.run(main())
