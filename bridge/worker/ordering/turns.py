"""One message of a key at a time, in the order in which they came."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial

from bridge.telemetry.logs import Log
from bridge.worker.delivery import Delivery

log = Log(__name__)

Work = Callable[[Delivery], Awaitable[None]]


class Place:
    """One delivery's place in the line of its key."""

    __slots__ = ("_call", "_line", "has_left", "key")

    def __init__(self, key: str, line: "deque[Place]") -> None:
        self.key = key
        self._line = line
        self._call: Callable[[], object] | None = None
        self.has_left = False

    @property
    def is_first(self) -> bool:
        """Whether none is before it."""
        return self._line[0] is self

    def when_first(self, call: Callable[[], object]) -> None:
        """Have `call` called as soon as none is before it any more."""
        self._call = call

    async def until_first(self) -> None:
        """Return when none is before it."""
        if not self.is_first:
            called = asyncio.get_running_loop().create_future()
            self.when_first(partial(_resolve, called))
            await called

    def call(self) -> None:
        """Tell it that it is the first."""
        if self._call is not None:
            self._call()


class Turns:
    """The lines of all keys; what is held bounds them."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[Place]] = {}

    def line_up(self, key: str) -> Place:
        """Take the last place of a key's line; call this in the order of the deliveries.

        Give the place to `leave` in the end.
        """
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = deque()
        place = Place(key, line)
        line.append(place)
        return place

    def leave(self, place: Place) -> None:
        """Give up a place, and call whoever is the first then."""
        place.has_left = True
        if not place.is_first:
            return
        line = self._lines[place.key]
        while line and line[0].has_left:
            line.popleft()
        if line:
            line[0].call()
        else:
            del self._lines[place.key]

    async def take_turn(self, place: Place, delivery: Delivery, *, learn: Work, work: Work) -> None:
        """Work on a delivery when the earlier ones of its key are done, or went back to the queue.

        `learn` is called at once, so that redeliveries do not wait for each other's answers.
        Cancelled before its turn, the delivery goes back to the queue.
        """
        try:
            if delivery.redelivered:
                await learn(delivery)
            if not place.is_first:
                with delivery.waits("order"):
                    await place.until_first()
            if not delivery.goes_back:
                await work(delivery)
        except asyncio.CancelledError:
            log.debug("not_begun", message_id=delivery.envelope.key)


def _resolve(called: "asyncio.Future[None]") -> None:
    if not called.done():
        called.set_result(None)
