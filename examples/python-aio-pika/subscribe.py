"""Append each text message and opt-out that comes in to a file, with aio-pika.

python subscribe.py FILE

AMQP_URL names the broker. Runs until it is ended; an event that was not acked comes again.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import aio_pika
from aio_pika.abc import AbstractIncomingMessage

URL = os.environ.get("AMQP_URL", "amqp://guest:guest@localhost:5672/")
# Your team's own queue: each queue that is bound to the exchange gets a copy of each event.
QUEUE = "my-team.sms"
DEAD_LETTERS = "my-team.sms.dead"
ARGUMENTS: dict[str, Any] = {
    "x-queue-type": "quorum",
    # An event that fails again and again becomes a dead letter.
    "x-delivery-limit": 5,
    "x-dead-letter-exchange": "",
    "x-dead-letter-routing-key": DEAD_LETTERS,
    # A dead letter leaves this queue only when it is stored in the other.
    "x-dead-letter-strategy": "at-least-once",
    "x-overflow": "reject-publish",
}
REMEMBERED = 10_000
PAUSE_SECONDS = 1


def read(body: bytes) -> dict[str, Any] | None:
    """Read an event; None if it has another form."""
    try:
        match json.loads(body):
            case {"type": str(), "data": {"from": str()}} as event:
                return event
    except (ValueError, RecursionError):
        pass
    return None


def handle(file: Path, event_id: str | None, event: dict[str, Any]) -> None:
    """Put your code here. If it raises, the event is tried again."""
    number = event["data"]["from"]
    record = {"id": event_id, "type": event["type"], "from": number}
    if event["type"] == "opt_out":
        pass  # The service has blocked this number: send it nothing more.
    else:
        record["text"] = event["data"].get("text", "")
    with file.open("a", encoding="utf-8") as records:
        records.write(json.dumps(record) + "\n")


async def process(
    file: Path, message: AbstractIncomingMessage, handled: dict[str | None, None]
) -> None:
    """Ack an event once it is handled; a failed one is rejected, never dropped."""
    event = read(message.body)
    if event is None:
        # No further try would read it.
        print(f"an event cannot be read: see {DEAD_LETTERS}", file=sys.stderr)
        await message.reject()
        return
    # The same event can come twice; the header tells, if the service gives its events ids.
    event_id = str(message.headers.get("sms-bridge-event-id", "")) or None
    if event_id not in handled:
        try:
            await asyncio.to_thread(handle, file, event_id, event)
        except Exception as error:
            print(f"an event was not handled, and is tried again: {error}", file=sys.stderr)
            # A short fault must not use up the tries. RabbitMQ 4.3 counts no nack as a try.
            await asyncio.sleep(PAUSE_SECONDS)
            await message.reject(requeue=True)
            return
    if event_id is not None:
        handled[event_id] = None
        if len(handled) > REMEMBERED:
            del handled[next(iter(handled))]
    await message.ack()


async def main(path: str) -> None:
    """Subscribe; a lost connection is opened anew."""
    async with await aio_pika.connect_robust(URL) as connection:
        channel = await connection.channel()
        # Without a bound the broker sends the whole queue at once.
        await channel.set_qos(prefetch_count=20)
        await channel.declare_queue(
            DEAD_LETTERS, durable=True, arguments={"x-queue-type": "quorum"}
        )
        queue = await channel.declare_queue(QUEUE, durable=True, arguments=ARGUMENTS)
        for event_type in ("message.received", "opt_out"):
            await queue.bind("sms.inbound", event_type)
        handled: dict[str | None, None] = {}
        async with queue.iterator() as messages:
            async for message in messages:
                await process(Path(path), message, handled)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
