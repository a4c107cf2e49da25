"""Append each incoming text message and opt-out to a file, with pika.

python subscribe.py FILE

AMQP_URL is the address of RabbitMQ. Runs until you end it.
"""

import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pika
from pika.adapters.blocking_connection import BlockingChannel
from pika.spec import Basic, BasicProperties

URL = os.environ.get("AMQP_URL", "amqp://guest:guest@localhost:5672/")
# Your team's own queue. Every queue that is bound to the exchange gets a copy of each event.
QUEUE = "my-team.sms"
DEAD_LETTERS = "my-team.sms.dead"
ARGUMENTS = {
    "x-queue-type": "quorum",
    # An event that keeps failing becomes a dead letter.
    "x-delivery-limit": 5,
    "x-dead-letter-exchange": "",
    "x-dead-letter-routing-key": DEAD_LETTERS,
    # A dead letter leaves this queue only after the other queue has stored it.
    "x-dead-letter-strategy": "at-least-once",
    "x-overflow": "reject-publish",
}
REMEMBERED = 10_000
PAUSE_SECONDS = 1


def read(body: bytes) -> dict[str, Any] | None:
    """Read an event. Return None if it has another form."""
    try:
        match json.loads(body):
            case {"type": str(), "data": {"from": str()}} as event:
                return event
    except (ValueError, RecursionError):
        pass
    return None


def handle(file: Path, event_id: str | None, event: dict[str, Any]) -> None:
    """Put your code here. If it raises, RabbitMQ delivers the event again."""
    number = event["data"]["from"]
    record = {"id": event_id, "type": event["type"], "from": number}
    if event["type"] == "opt_out":
        pass  # The service has blocked this number. Do not send to it.
    else:
        record["text"] = event["data"].get("text", "")
    with file.open("a", encoding="utf-8") as records:
        records.write(json.dumps(record) + "\n")


def process(
    file: Path,
    handled: dict[str | None, None],
    channel: BlockingChannel,
    method: Basic.Deliver,
    properties: BasicProperties,
    body: bytes,
) -> None:
    """Handle an event, then ack it. If that fails, reject it."""
    event = read(body)
    if event is None:
        # Another delivery would not help.
        print(f"unreadable event, see {DEAD_LETTERS}", file=sys.stderr)
        channel.basic_reject(method.delivery_tag, requeue=False)
        return
    # An event may arrive twice. The header contains its id, if the service sends one.
    event_id = (properties.headers or {}).get("sms-bridge-event-id")
    if event_id not in handled:
        try:
            handle(file, event_id, event)
        except Exception as error:
            print(f"event not handled, RabbitMQ delivers it again: {error}", file=sys.stderr)
            # A short fault must not use up the delivery limit. RabbitMQ 4.3 does not count a nack.
            time.sleep(PAUSE_SECONDS)
            channel.basic_reject(method.delivery_tag, requeue=True)
            return
    if event_id is not None:
        handled[event_id] = None
        if len(handled) > REMEMBERED:
            del handled[next(iter(handled))]
    channel.basic_ack(method.delivery_tag)


def main(path: str) -> None:
    """Subscribe."""
    connection = pika.BlockingConnection(pika.URLParameters(URL))
    channel = connection.channel()
    channel.queue_declare(DEAD_LETTERS, durable=True, arguments={"x-queue-type": "quorum"})
    channel.queue_declare(QUEUE, durable=True, arguments=ARGUMENTS)
    for event_type in ("message.received", "opt_out"):
        channel.queue_bind(QUEUE, "sms.inbound", event_type)
    # Without a prefetch, RabbitMQ sends the whole queue at once.
    channel.basic_qos(prefetch_count=20)
    handled: dict[str | None, None] = {}
    channel.basic_consume(QUEUE, partial(process, Path(path), handled))
    channel.start_consuming()


if __name__ == "__main__":
    main(*sys.argv[1:])
