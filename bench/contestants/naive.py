"""A worker after the first page of each library's documentation: aio-pika, httpx, tenacity."""

import asyncio
import os

import aio_pika
import httpx
from aio_pika.abc import AbstractIncomingMessage
from pydantic import BaseModel, Field
from tenacity import retry, stop_after_attempt, wait_exponential

IN_FLIGHT = int(os.environ["BENCH_IN_FLIGHT"])


class SendRequest(BaseModel):
    """A send request."""

    to: str
    sender: str = Field(alias="from")
    text: str


@retry(stop=stop_after_attempt(5), wait=wait_exponential(max=10))
async def send(client: httpx.AsyncClient, request: SendRequest, message_id: str) -> None:
    """POST a request, and retry after a failure."""
    response = await client.post(
        "/v1/messages",
        json=request.model_dump(by_alias=True),
        headers={"Idempotency-Key": message_id},
    )
    response.raise_for_status()


async def main() -> None:
    """Consume until the process ends."""
    async with httpx.AsyncClient(
        base_url=os.environ["BENCH_API_URL"],
        headers={"Authorization": f"Bearer {os.environ['BENCH_API_KEY']}"},
        limits=httpx.Limits(max_connections=IN_FLIGHT, max_keepalive_connections=IN_FLIGHT),
    ) as client:

        async def handle(message: AbstractIncomingMessage) -> None:
            async with message.process():
                request = SendRequest.model_validate_json(message.body)
                await send(client, request, message.message_id or "")

        connection = await aio_pika.connect_robust(os.environ["BENCH_AMQP_URL"])
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=IN_FLIGHT)
        queue = await channel.get_queue(os.environ["BENCH_QUEUE"])
        await queue.consume(handle)
        await asyncio.Future()


if __name__ == "__main__":
    asyncio.run(main())
