"""One timer for all waits that are equally long: a timer for each costs more than its wait."""

import asyncio
from collections.abc import Callable
from itertools import takewhile
from typing import Final, Generic, TypeVar

from bridge.amqp.publication import READ_ITERATIONS

WaitT = TypeVar("WaitT")


class Deadlines(Generic[WaitT]):
    """Calls `expire`, which must not raise, with each wait that was not discarded in `seconds`.

    What has arrived by then is read first: after a stall timers run before sockets are read. Waits
    are told apart by their hash.
    """

    def __init__(self, seconds: float, expire: Callable[[WaitT], object]) -> None:
        self._seconds: Final = seconds
        self._expire = expire
        # Times of the event loop, the first to be reached in front.
        self._waits: dict[WaitT, float] = {}
        self._has_timer = False

    def add(self, wait: WaitT) -> None:
        """Begin a wait."""
        loop = asyncio.get_running_loop()
        deadline = self._waits[wait] = loop.time() + self._seconds
        if not self._has_timer:
            self._has_timer = True
            loop.call_at(deadline, self._look, READ_ITERATIONS)

    def discard(self, wait: WaitT) -> bool:
        """End a wait; return False when it was ended before, or has expired."""
        return self._waits.pop(wait, None) is not None

    def _look(self, iterations: int) -> None:
        """Expire what is late after so many iterations of the event loop, and set the timer."""
        loop = asyncio.get_running_loop()
        if iterations:
            loop.call_soon(self._look, iterations - 1)
            return
        now = loop.time()
        late = [wait for wait, _ in takewhile(lambda one: one[1] <= now, self._waits.items())]
        for wait in late:
            del self._waits[wait]
        following = next(iter(self._waits.values()), None)
        self._has_timer = following is not None
        if following is not None:
            loop.call_at(following, self._look, READ_ITERATIONS)
        for wait in late:
            self._expire(wait)
