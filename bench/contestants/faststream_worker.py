"""A worker on FastStream that posts with httpx, as FastStream's documentation teaches."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from faststream import Context, ContextRepo, FastStream
from faststream.rabbit import Channel, RabbitBroker, RabbitMessage, RabbitQueue
from pydantic import BaseModel, Field

IN_FLIGHT = int(os.environ["BENCH_IN_FLIGHT"])

broker = RabbitBroker(
    os.environ["BENCH_AMQP_URL"], default_channel=Channel(prefetch_count=IN_FLIGHT)
)


class SendRequest(BaseModel):
    """A send request."""

    to: str
    sender: str = Field(alias="from")
    text: str


@asynccontextmanager
async def lifespan(context: ContextRepo) -> AsyncIterator[None]:
    """Keep one HTTP client while the program runs."""
    async with httpx.AsyncClient(
        base_url=os.environ["BENCH_API_URL"],
        headers={"Authorization": f"Bearer {os.environ['BENCH_API_KEY']}"},
        limits=httpx.Limits(max_connections=IN_FLIGHT, max_keepalive_connections=IN_FLIGHT),
    ) as client:
        context.set_global("client", client)
        yield


app = FastStream(broker, lifespan=lifespan)


@broker.subscriber(RabbitQueue(os.environ["BENCH_QUEUE"], declare=False))
async def handle(
    request: SendRequest,
    message: RabbitMessage,
    client: httpx.AsyncClient = Context(),  # noqa: B008  FastStream's way of injection
) -> None:
    """POST a request. FastStream acks if this returns, and rejects if it raises."""
    response = await client.post(
        "/v1/messages",
        json=request.model_dump(by_alias=True),
        headers={"Idempotency-Key": message.message_id},
    )
    response.raise_for_status()


if __name__ == "__main__":
    asyncio.run(app.run())
