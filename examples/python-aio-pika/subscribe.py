"""Append each text message that comes in to a file, with aio-pika.

python subscribe.py FILE

AMQP_URL names the broker. Runs until it is ended; what was not acked by then comes again.
"""

import asyncio
import base64
import json
import os
import sys
from pathlib import Path
from urllib.parse import parse_qsl

import aio_pika
from aio_pika.abc import AbstractIncomingMessage

URL = os.environ.get("AMQP_URL", "amqp://guest:guest@localhost:5672/")
# A queue of your team's own: what is bound to the exchange gets a copy of each event.
QUEUE = "my-team.sms"


def read(content_type: str | None, body: bytes) -> object:
    """Read an event: JSON, or the form that some services send. Raises ValueError."""
    kind = (content_type or "").partition(";")[0].strip().lower()
    if kind == "application/x-www-form-urlencoded":
        return dict(parse_qsl(body.decode(), keep_blank_values=True))
    return json.loads(body)


def handle(file: Path, message: AbstractIncomingMessage) -> None:
    """Do what is to be done with an event; whatever this raises, the event is not lost."""
    # The same event can come twice. The service's id of it tells, where the service gives one.
    event_id = message.headers.get("sms-bridge-event-id")
    record = {"id": event_id, "type": message.type}
    try:
        record["event"] = read(message.content_type, message.body)
    except (ValueError, RecursionError):
        # Nobody can read it, now or later: it is kept as it came, and does not stop the rest.
        record["body"] = base64.b64encode(message.body).decode()
    with file.open("a", encoding="utf-8") as records:
        records.write(json.dumps(record) + "\n")


async def main(path: str) -> None:
    """Subscribe; a connection that is lost is opened anew."""
    async with await aio_pika.connect_robust(URL) as connection:
        channel = await connection.channel()
        # Without a bound the broker sends the whole queue at once.
        await channel.set_qos(prefetch_count=20)
        queue = await channel.declare_queue(
            QUEUE, durable=True, arguments={"x-queue-type": "quorum"}
        )
        await queue.bind("sms.inbound", "message.received")
        async with queue.iterator() as messages:
            async for message in messages:
                await asyncio.to_thread(handle, Path(path), message)
                # Not `async with message.process()`, which drops a message whose handling raises.
                await message.ack()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
