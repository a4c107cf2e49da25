"""A webhook receiver on FastAPI that publishes with aio-pika, as their documentation teaches."""

import hashlib
import hmac
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

import aio_pika
import uvicorn
from aio_pika.abc import AbstractExchange
from fastapi import Depends, FastAPI, Header, HTTPException, Request
from pydantic import BaseModel

SECRET = os.environ["BENCH_SECRET"].encode()


class Event(BaseModel):
    """The fields of a webhook's body that the program needs."""

    type: str


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Keep one channel while the program runs."""
    connection = await aio_pika.connect_robust(os.environ["BENCH_AMQP_URL"])
    async with connection:
        channel = await connection.channel(on_return_raises=True)
        app.state.exchange = await channel.get_exchange(os.environ["BENCH_EXCHANGE"])
        yield


app = FastAPI(lifespan=lifespan)


async def verified_body(
    request: Request, x_service_signature: Annotated[str, Header()] = ""
) -> bytes:
    """Return the raw body, or refuse it."""
    body: bytes = await request.body()
    expected = hmac.new(SECRET, body, hashlib.sha256).hexdigest()
    if not hmac.compare_digest(expected.encode(), x_service_signature.encode()):
        raise HTTPException(status_code=401, detail="the signature is not valid")
    return body


@app.post("/webhooks")
async def receive(request: Request, body: Annotated[bytes, Depends(verified_body)]) -> None:
    """Receive a webhook."""
    event = Event.model_validate_json(body)
    exchange: AbstractExchange = request.app.state.exchange
    await exchange.publish(
        aio_pika.Message(
            body,
            content_type="application/json",
            delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
        ),
        routing_key=event.type,
    )


if __name__ == "__main__":
    uvicorn.run(app, port=int(os.environ["BENCH_PORT"]))
