"""Request one SMS with aio-pika, and wait for its outcome.

python publish.py TO TEXT [MESSAGE_ID]

AMQP_URL is the address of RabbitMQ. Prints the outcome. The exit status is 0 if the SMS service has
accepted the message, otherwise 1.
"""

import asyncio
import json
import os
import sys
import time
import uuid
from datetime import UTC, datetime

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractQueue

URL = os.environ.get("AMQP_URL", "amqp://guest:guest@localhost:5672/")
BROKER_SECONDS = 10
OUTCOME_SECONDS = 60
# A one-time code is useless after this time, so the worker must not send it.
EXPIRES_SECONDS = 300


async def publish(
    channel: AbstractChannel,
    to: str,
    text: str,
    message_id: str,
    reply_to: str,
    correlation_id: str,
) -> None:
    """Publish a request. Return after RabbitMQ has stored it, otherwise raise."""
    message = aio_pika.Message(
        json.dumps({"to": to, "from": "Acme", "text": text}).encode(),
        content_type="application/json",
        delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
        message_id=message_id,
        timestamp=datetime.now(UTC),
        reply_to=reply_to,
        correlation_id=correlation_id,
        # An integer. aio-pika encodes a float in 32 bits, which is wrong by up to a minute.
        headers={"sms-bridge-expires-at": int(time.time()) + EXPIRES_SECONDS},
    )
    # Mandatory by default, so that a missing queue is an error.
    await channel.default_exchange.publish(message, "sms.outbound", timeout=BROKER_SECONDS)


async def wait_for_outcome(replies: AbstractQueue, correlation_id: str) -> dict[str, object]:
    """Return the outcome of this request."""
    async with replies.iterator(no_ack=True) as messages:
        async for message in messages:
            if message.correlation_id == correlation_id:
                outcome: dict[str, object] = json.loads(message.body)
                return outcome
    raise ConnectionError("the reply queue is gone")


async def main(to: str, text: str, message_id: str = "") -> int:
    """Publish and wait."""
    async with await aio_pika.connect(URL, timeout=BROKER_SECONDS) as connection:
        # Without `on_return_raises`, an unroutable message is only logged.
        channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
        replies = await channel.declare_queue(exclusive=True)
        correlation_id = str(uuid.uuid4())
        # The id from your own records. Use the same id to publish again after a crash, so that
        # the worker recognises the repeat.
        message_id = message_id or str(uuid.uuid4())
        await publish(channel, to, text, message_id, replies.name, correlation_id)
        try:
            async with asyncio.timeout(OUTCOME_SECONDS):
                outcome = await wait_for_outcome(replies, correlation_id)
        except TimeoutError:
            print(f"{message_id}: no outcome yet; it may still be sent", file=sys.stderr)
            return 1
    print(json.dumps(outcome))
    return 0 if outcome["outcome"] == "sent" else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main(*sys.argv[1:])))
