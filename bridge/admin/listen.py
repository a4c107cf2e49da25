"""Consume inbound events, like any subscriber."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from bridge.admin.broker_session import open_session
from bridge.amqp.client import AbstractIncomingMessage, ChannelAccessRefused, ChannelNotFoundEntity
from bridge.config import Settings
from bridge.errors import BrokerError

# The headers of a delivery receipt, by their names in the output.
_RECEIPT: Final = {
    "delivery": "sms-bridge-delivery",
    "provider_id": "sms-bridge-provider-id",
    "message_id": "sms-bridge-message-id",
}


@asynccontextmanager
async def listen(settings: Settings) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    """Subscribe to the inbound exchange; yield the events from now on, as plain data.

    Creates only a queue that ends with the connection. Raises BrokerError if the exchange does not
    exist, if a permission is missing, and when the connection ends.
    """
    name = settings.webhook.exchange
    async with open_session(settings) as (_, channel):
        try:
            await channel.declare_exchange(name, passive=True)
            queue = await channel.declare_queue(exclusive=True)
            await queue.bind(name, "#")
        except ChannelNotFoundEntity:
            raise BrokerError(
                f"exchange {name}: does not exist; check webhook.exchange, and start the webhook "
                "receiver once or run `sms-bridge topology declare`"
            ) from None
        except ChannelAccessRefused:
            raise BrokerError(
                f"exchange {name}: no permission to listen; the user needs to read it, and to "
                "configure, write and read queues amq.gen-*"
            ) from None
        async with queue.iterator(no_ack=True) as messages:
            yield _events(messages)


async def _events(
    messages: AsyncIterator[AbstractIncomingMessage],
) -> AsyncIterator[dict[str, Any]]:
    async for message in messages:
        yield _event(message)
    raise BrokerError("the broker ended the connection; run it again")


def _event(message: AbstractIncomingMessage) -> dict[str, Any]:
    stamp, headers = message.timestamp, message.headers
    receipt = {name: headers[header] for name, header in _RECEIPT.items() if header in headers}
    return {
        "routing_key": message.routing_key,
        "type": message.type,
        "event_id": headers.get("sms-bridge-event-id"),
        **receipt,
        "received_at": None if stamp is None else stamp.isoformat(),
        "body": _body(message.body),
    }


def _body(content: bytes) -> Any:  # noqa: ANN401
    """Return a body as JSON, or as text if it cannot be written as JSON."""
    try:
        body = json.loads(content)
        # Numbers may have become infinite, and deeply nested values cannot be written.
        json.dumps(body, allow_nan=False)
    except (ValueError, RecursionError):
        return content.decode("utf-8", "replace")
    return body
