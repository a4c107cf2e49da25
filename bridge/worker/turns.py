"""Process one message per ordering key at a time, in the order of delivery."""

import asyncio
import json
from collections import deque
from collections.abc import Awaitable, Callable

from bridge.telemetry.logs import Log
from bridge.worker.delivery import Delivery
from bridge.worker.envelope import ORDERING_KEY

log = Log(__name__)

Work = Callable[[Delivery], Awaitable[None]]


class Turns:
    """A FIFO of deliveries for each ordering key; bounded, because the prefetch is."""

    def __init__(self) -> None:
        # Each place is a future that completes when it is the first of its queue.
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}

    async def take_turn(self, delivery: Delivery, *, learn: Work, work: Work) -> None:
        """Process a delivery when the earlier ones of its key are settled or returned.

        Must be called in the order of the deliveries. `learn` runs at once, so that redeliveries do
        not wait for each other's answers. If it is cancelled before its turn, the delivery returns
        to the queue.
        """
        # The order is kept within each queue.
        key = f"{delivery.queue} {ordering_key(delivery)}"
        place = asyncio.get_running_loop().create_future()
        line = self._lines.setdefault(key, deque())
        line.append(place)
        _call_first(line)
        try:
            if delivery.redelivered:
                await learn(delivery)
            if not place.done():
                with delivery.waits("order"):
                    await place
            if not delivery.goes_back:
                await work(delivery)
        except asyncio.CancelledError:
            log.debug("not_begun", message_id=delivery.envelope.key)
        finally:
            line.remove(place)
            if line:
                _call_first(line)
            else:
                del self._lines[key]


def _call_first(line: deque[asyncio.Future[None]]) -> None:
    # A completed place already has its turn, or is about to be removed after a cancellation.
    if not line[0].done():
        line[0].set_result(None)


def ordering_key(delivery: Delivery) -> str:
    """Return the key that the publisher set, else the recipient's number; never raises.

    A message that cannot be parsed has an empty key, and is found invalid when it is sent.
    """
    named = (delivery.properties.headers or {}).get(ORDERING_KEY)
    if isinstance(named, bytes | bytearray):
        named = bytes(named).decode("utf-8", "replace")
    if isinstance(named, str) and named:
        return named
    try:
        recipient = json.loads(delivery.body)["to"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return ""
    return recipient if isinstance(recipient, str) else ""
