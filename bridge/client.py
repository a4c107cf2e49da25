"""The two ends of the bridge as a team would use them: publish a send request, hear events."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import aiormq
from aio_pika import DeliveryMode, ExchangeType, Message
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage

from bridge.broker import close_quietly, open_first_connection
from bridge.config import Settings
from bridge.errors import BridgeError, BrokerError
from bridge.models import parse_request

PUBLISH_SECONDS = 10.0


async def send(
    settings: Settings, request: dict[str, str | None], *, wait_seconds: float | None
) -> tuple[str, dict[str, Any] | None]:
    """Publish one request; return its message id and, when waited for, its outcome event.

    Raises InvalidMessageError for what the worker would refuse, BrokerError when the broker does
    not take it. The outcome is None when there was none within `wait_seconds`.
    """
    body = json.dumps({name: value for name, value in request.items() if value is not None})
    parse_request(body.encode(), settings.worker)
    message_id = str(uuid.uuid4())
    async with _channel(settings) as channel:
        replies = None if wait_seconds is None else await channel.declare_queue(exclusive=True)
        message = Message(
            body.encode(),
            content_type="application/json",
            delivery_mode=DeliveryMode.PERSISTENT,
            message_id=message_id,
            timestamp=datetime.now(UTC),
            reply_to=None if replies is None else replies.name,
            correlation_id=message_id,
        )
        await _publish(channel, message, settings.worker.queue)
        if replies is None or wait_seconds is None:
            return message_id, None
        deadline = time.monotonic() + wait_seconds
        while time.monotonic() < deadline:
            reply = await replies.get(fail=False, no_ack=True)
            if reply is not None:
                return message_id, json.loads(reply.body)
            await asyncio.sleep(0.1)
    return message_id, None


async def _publish(channel: AbstractChannel, message: Message, queue: str) -> None:
    try:
        await channel.default_exchange.publish(message, queue, timeout=PUBLISH_SECONDS)
    except aiormq.exceptions.PublishError:
        raise BrokerError(
            f"queue {queue}: there is none; start the worker once, which declares it"
        ) from None
    except TimeoutError:
        raise BrokerError(
            f"queue {queue}: no confirm within {PUBLISH_SECONDS:g} s, as while RabbitMQ has a "
            "memory or disk alarm; `sms-bridge check --online` looks for one; the request "
            f"{message.message_id} may be stored yet, so do not send it again before you know"
        ) from None
    except aiormq.exceptions.DeliveryError:
        raise BrokerError(
            f"queue {queue}: not stored, the broker refused it; see whether the queue is full"
        ) from None
    except aiormq.exceptions.AMQPError as error:
        raise BrokerError(
            f"queue {queue}: not confirmed ({type(error).__name__}); see the broker's log; "
            f"the request {message.message_id} may be stored"
        ) from None


async def listen(settings: Settings) -> AsyncIterator[dict[str, Any]]:
    """Yield the events of the inbound exchange from now on, as plain data."""
    async with _channel(settings) as channel:
        exchange = await channel.declare_exchange(
            settings.webhook.exchange, ExchangeType.TOPIC, durable=True
        )
        queue = await channel.declare_queue(exclusive=True)
        await queue.bind(exchange, "#")
        async with queue.iterator(no_ack=True) as messages:
            async for message in messages:
                yield _event(message)


def _event(message: AbstractIncomingMessage) -> dict[str, Any]:
    try:
        body: Any = json.loads(message.body)
    except ValueError:
        body = message.body.decode("utf-8", "replace")
    stamp = message.timestamp
    return {
        "routing_key": message.routing_key,
        "type": message.type,
        "event_id": message.headers.get("sms-bridge-event-id"),
        "received_at": None if stamp is None else stamp.isoformat(),
        "body": body,
    }


@asynccontextmanager
async def _channel(settings: Settings) -> AsyncIterator[AbstractChannel]:
    connection = await open_first_connection(settings.rabbitmq, name="cli")
    try:
        yield await connection.channel(on_return_raises=True)
    except aiormq.exceptions.AMQPError as error:
        raise BridgeError(f"the broker ended the conversation: {type(error).__name__}") from None
    finally:
        await close_quietly(connection)
