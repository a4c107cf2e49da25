"""Request one SMS with pika, and wait for its outcome.

python publish.py TO TEXT [MESSAGE_ID]

AMQP_URL is the address of RabbitMQ. Prints the outcome. The exit status is 0 if the SMS service has
accepted the message, otherwise 1.
"""

import json
import os
import sys
import time
import uuid

import pika
from pika.adapters.blocking_connection import BlockingChannel

URL = os.environ.get("AMQP_URL", "amqp://guest:guest@localhost:5672/")
BROKER_SECONDS = 10
OUTCOME_SECONDS = 60
# A one-time code is useless after this time, so the worker must not send it.
EXPIRES_SECONDS = 300


def publish(
    channel: BlockingChannel,
    to: str,
    text: str,
    message_id: str,
    reply_to: str,
    correlation_id: str,
) -> None:
    """Publish a request. Return after RabbitMQ has stored it, otherwise raise."""
    now = int(time.time())
    properties = pika.BasicProperties(
        content_type="application/json",
        delivery_mode=pika.DeliveryMode.Persistent,
        message_id=message_id,
        timestamp=now,
        reply_to=reply_to,
        correlation_id=correlation_id,
        # A whole number of seconds.
        headers={"sms-bridge-expires-at": now + EXPIRES_SECONDS},
    )
    body = json.dumps({"to": to, "from": "Acme", "text": text}).encode()
    # Waits for the confirm. `mandatory` makes a missing queue an error instead of a silent loss.
    channel.basic_publish("", "sms.outbound", body, properties, mandatory=True)


def wait_for_outcome(
    channel: BlockingChannel, replies: str, correlation_id: str
) -> dict[str, object] | None:
    """Return the outcome of this request, or None after the deadline."""
    deadline = time.monotonic() + OUTCOME_SECONDS
    for _, properties, body in channel.consume(replies, auto_ack=True, inactivity_timeout=1):
        if properties is not None and properties.correlation_id == correlation_id:
            outcome: dict[str, object] = json.loads(body)
            return outcome
        if time.monotonic() > deadline:
            return None
    return None


def main(to: str, text: str, message_id: str = "") -> int:
    """Publish and wait."""
    parameters = pika.URLParameters(URL)
    # How long RabbitMQ may block publishing when it is short of memory or disk.
    parameters.blocked_connection_timeout = BROKER_SECONDS
    connection = pika.BlockingConnection(parameters)
    try:
        channel = connection.channel()
        channel.confirm_delivery()
        replies = channel.queue_declare("", exclusive=True).method.queue
        correlation_id = str(uuid.uuid4())
        # The id from your own records. Use the same id to publish again after a crash, so that
        # the worker recognises the repeat.
        message_id = message_id or str(uuid.uuid4())
        publish(channel, to, text, message_id, replies, correlation_id)
        outcome = wait_for_outcome(channel, replies, correlation_id)
    finally:
        connection.close()
    if outcome is None:
        print(f"{message_id}: no outcome yet; it may still be sent", file=sys.stderr)
        return 1
    print(json.dumps(outcome))
    return 0 if outcome["outcome"] == "sent" else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
