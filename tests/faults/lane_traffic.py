"""What the fault tests of lanes send, and with which settings."""

import json
from typing import Any

from tests.faults.bench import Bench, eventually

LANES = 4
ON: dict[str, Any] = {
    "worker__ordering": "recipient",
    "worker__lanes": LANES,
    "worker__max_uncertain_attempts": 6,
}


async def publish_in_turn(bench: Bench, numbers: list[str], each: int, *, start: int = 0) -> None:
    """Publish numbered texts to each of the numbers, one to each in turn."""
    for place in range(start, start + each):
        for number in numbers:
            body = json.dumps({"to": number, "from": "Acme", "text": f"text {place}"}).encode()
            await bench.amqp.publish(bench.queue, body, message_id=f"{number}.{place}")


async def until_all_sent(bench: Bench, numbers: list[str], each: int, seconds: float = 40) -> None:
    """Return when all texts are accepted, whatever was sent twice."""

    def is_sent() -> bool:
        taken = {(message.to, message.text) for message in bench.service.taken(numbers)}
        return len(taken) == len(numbers) * each

    await eventually(is_sent, what="all texts", seconds=seconds)
