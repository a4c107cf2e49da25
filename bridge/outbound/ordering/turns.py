"""One message of a key at a time, in the order in which they came."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from bridge.logs import Log
from bridge.outbound.delivery import Delivery
from bridge.outbound.ordering.keys import ordering_key

log = Log(__name__)

Work = Callable[[Delivery], Awaitable[None]]


class Place:
    """One delivery's place in the line of its key."""

    __slots__ = ("_called", "_line", "has_left")

    def __init__(self, line: "deque[Place]") -> None:
        self._line = line
        self._called: asyncio.Future[None] | None = None
        self.has_left = False

    @property
    def is_first(self) -> bool:
        """Whether none is before it."""
        return self._line[0] is self

    async def until_first(self) -> None:
        """Return when none is before it."""
        if not self.is_first:
            self._called = asyncio.get_running_loop().create_future()
            await self._called

    def call(self) -> None:
        """Tell it that it is the first."""
        if self._called is not None and not self._called.done():
            self._called.set_result(None)


class Turns:
    """The lines of all keys; what is held bounds them."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[Place]] = {}

    async def take_turn(self, delivery: Delivery, *, learn: Work, work: Work) -> None:
        """Work on a delivery when those of its key that came before it are done, or went back.

        `learn` is called at once, so that of many that come again none waits for the answers of
        those before it. Call this in the order of the deliveries, each in a task of its own.
        Cancelled before its turn, or when its lane is being left, it goes back to the queue.
        """
        key = ordering_key(delivery.properties, delivery.body)
        place = self._line_up(key)
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
        finally:
            self._leave(key, place)

    def _line_up(self, key: str) -> Place:
        line = self._lines.setdefault(key, deque())
        place = Place(line)
        line.append(place)
        return place

    def _leave(self, key: str, place: Place) -> None:
        place.has_left = True
        line = self._lines[key]
        while line and line[0].has_left:
            line.popleft()
        if line:
            line[0].call()
        else:
            del self._lines[key]
