"""Append each incoming text message and opt-out to a file, with aio-pika.

python subscribe.py FILE

AMQP_URL is the address of RabbitMQ. Runs until you end it.
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
# Your team's own queue. Every queue that is bound to the exchange gets a copy of each event.
QUEUE = "my-team.sms"
DEAD_LETTERS = "my-team.sms.dead"
ARGUMENTS: dict[str, Any] = {
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


async def process(
    file: Path, message: AbstractIncomingMessage, handled: dict[str | None, None]
) -> None:
    """Handle an event, then ack it. If that fails, reject it."""
    event = read(message.body)
    if event is None:
        # Another delivery would not help.
        print(f"unreadable event, see {DEAD_LETTERS}", file=sys.stderr)
        await message.reject()
        return
    # An event may arrive twice. The header contains its id, if the service sends one.
    event_id = str(message.headers.get("sms-bridge-event-id", "")) or None
    if event_id not in handled:
        try:
            await asyncio.to_thread(handle, file, event_id, event)
        except Exception as error:
            print(f"event not handled, RabbitMQ delivers it again: {error}", file=sys.stderr)
            # A short fault must not use up the delivery limit. RabbitMQ 4.3 does not count a nack.
            await asyncio.sleep(PAUSE_SECONDS)
            await message.reject(requeue=True)
            return
    if event_id is not None:
        handled[event_id] = None
        if len(handled) > REMEMBERED:
            del handled[next(iter(handled))]
    await message.ack()


async def main(path: str) -> None:
    """Subscribe, and reconnect after a lost connection."""
    async with await aio_pika.connect_robust(URL) as connection:
        channel = await connection.channel()
        # Without a prefetch, RabbitMQ sends the whole queue at once.
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
