"""The minimum that receives a webhook safely: verify, publish, wait for the confirm, answer 200."""

import hashlib
import hmac
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aio_pika
import uvicorn
from aio_pika.abc import AbstractExchange
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

SECRET = os.environ["BENCH_SECRET"].encode()


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    """Keep one channel with confirms while the program runs."""
    connection = await aio_pika.connect_robust(os.environ["BENCH_AMQP_URL"])
    async with connection:
        channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
        app.state.exchange = await channel.get_exchange(os.environ["BENCH_EXCHANGE"])
        yield


async def receive(request: Request) -> Response:
    """Receive a webhook."""
    body = await request.body()
    expected = hmac.new(SECRET, body, hashlib.sha256).hexdigest()
    given = request.headers.get("X-Service-Signature", "")
    if not hmac.compare_digest(expected.encode(), given.encode()):
        return Response(status_code=401)
    exchange: AbstractExchange = request.app.state.exchange
    await exchange.publish(
        aio_pika.Message(body, delivery_mode=aio_pika.DeliveryMode.PERSISTENT),
        routing_key="message.received",
        mandatory=True,
    )
    return Response(status_code=200)


app = Starlette(routes=[Route("/webhooks", receive, methods=["POST"])], lifespan=lifespan)

if __name__ == "__main__":
    uvicorn.run(
        app,
        port=int(os.environ["BENCH_PORT"]),
        loop="uvloop",
        http="httptools",
        access_log=False,
    )
