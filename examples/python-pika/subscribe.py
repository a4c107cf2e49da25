"""Append each text message that comes in to a file, with pika.

python subscribe.py FILE

AMQP_URL names the broker. Runs until it is ended; what was not acked by then comes again.
"""

import base64
import json
import os
import sys
from pathlib import Path
from urllib.parse import parse_qsl

import pika
from pika.adapters.blocking_connection import BlockingChannel
from pika.spec import Basic, BasicProperties

URL = os.environ.get("AMQP_URL", "amqp://guest:guest@localhost:5672/")
# A queue of your team's own: what is bound to the exchange gets a copy of each event.
QUEUE = "my-team.sms"


def read(content_type: str | None, body: bytes) -> object:
    """Read an event: JSON, or the form that some services send. Raises ValueError."""
    kind = (content_type or "").partition(";")[0].strip().lower()
    if kind == "application/x-www-form-urlencoded":
        return dict(parse_qsl(body.decode(), keep_blank_values=True))
    return json.loads(body)


def handle(file: Path, properties: BasicProperties, body: bytes) -> None:
    """Do what is to be done with an event; whatever this raises, the event is not lost."""
    # The same event can come twice. The service's id of it tells, where the service gives one.
    event_id = (properties.headers or {}).get("sms-bridge-event-id")
    record = {"id": event_id, "type": properties.type}
    try:
        record["event"] = read(properties.content_type, body)
    except (ValueError, RecursionError):
        # Nobody can read it, now or later: it is kept as it came, and does not stop the rest.
        record["body"] = base64.b64encode(body).decode()
    with file.open("a", encoding="utf-8") as records:
        records.write(json.dumps(record) + "\n")


def main(path: str) -> None:
    """Subscribe."""
    connection = pika.BlockingConnection(pika.URLParameters(URL))
    channel = connection.channel()
    channel.queue_declare(QUEUE, durable=True, arguments={"x-queue-type": "quorum"})
    channel.queue_bind(QUEUE, "sms.inbound", "message.received")
    # Without a bound the broker sends the whole queue at once.
    channel.basic_qos(prefetch_count=20)

    def on_message(
        channel: BlockingChannel,
        method: Basic.Deliver,
        properties: BasicProperties,
        body: bytes,
    ) -> None:
        handle(Path(path), properties, body)
        channel.basic_ack(method.delivery_tag)

    channel.basic_consume(QUEUE, on_message)
    channel.start_consuming()


if __name__ == "__main__":
    main(*sys.argv[1:])
