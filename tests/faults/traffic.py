"""What the fault tests of the worker send, and what the service answers to it."""

import json
import time
from typing import Any

import pytest

from tests.faults.bench import Bench, Live, eventually, make_numbers

WITH_AND_WITHOUT_IDS = pytest.mark.parametrize("ids", [True, False], ids=["with_id", "without_id"])
NOT_SENT: dict[str, Any] = {"status": 503, "headers": {"Retry-After": "1"}}
# Goes up the ladder as well, and does not slow the worker down.
TOO_EARLY: dict[str, Any] = {"status": 425}
REFUSED: dict[str, Any] = {"status": 400}


def once_each(numbers: list[str], fault: dict[str, Any]) -> list[dict[str, Any]]:
    """Make a fault that hits the first POST for each number only."""
    return [{**fault, "to": number, "count": 1} for number in numbers]


def has_taken(bench: Bench, numbers: list[str], count: int) -> bool:
    """Say whether the service has accepted so many messages."""
    return len(bench.service.taken(numbers)) >= count


async def seconds_to_send(bench: Bench, count: int) -> float:
    """Publish messages one after the other; return how long the slowest took to be accepted."""
    slowest = 0.0
    for number in make_numbers(count):
        published = time.time()
        await bench.publish([number])
        await bench.until_taken([number])
        (message,) = bench.service.taken([number])
        slowest = max(slowest, message.received_at - published)
    return slowest


def texts_of(bench: Bench, numbers: list[str]) -> list[str]:
    """Return the texts that were accepted for these numbers, in order."""
    return [message.text for message in bench.service.taken(numbers)]


async def publish_texts(bench: Bench, number: str, count: int, *, start: int = 0) -> list[str]:
    texts = [f"text {place}" for place in range(start, start + count)]
    for text in texts:
        body = json.dumps({"to": number, "from": "Acme", "text": text}).encode()
        await bench.amqp.publish(bench.queue, body, message_id=f"{number} {text}")
    return texts


async def has_in_flight(bench: Bench, numbers: list[str]) -> None:
    """Return when a request is in flight for each of the numbers."""
    await eventually(lambda: len(bench.service.posts(numbers)) == len(numbers), what="POSTs")


def has_peers(live: Live, count: int) -> bool:
    """Say whether a worker hears so many others."""
    return live.metric("sms_bridge_worker_peers") == count
