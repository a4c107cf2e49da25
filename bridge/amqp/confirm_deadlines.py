"""Deadlines of many confirms with the same timeout, on one timer.

A timer for each publish costs more than the wait itself.
"""

import asyncio
from collections.abc import Callable, Iterator
from itertools import takewhile
from typing import Final, Generic, TypeVar

from bridge.amqp.publication import READ_ITERATIONS

KeyT = TypeVar("KeyT")
WaitT = TypeVar("WaitT")


class ConfirmDeadlines(Generic[KeyT, WaitT]):
    """Calls `expire(key, wait)` for each wait that is not discarded within `seconds`.

    `expire` must not raise. The sockets are read first, because after a stall timers run earlier.
    """

    def __init__(self, seconds: float, expire: Callable[[KeyT, WaitT], object]) -> None:
        self._seconds: Final = seconds
        self._expire = expire
        # With deadlines on the event loop's clock, earliest first.
        self._waits: dict[KeyT, tuple[WaitT, float]] = {}
        self._has_timer = False

    def __len__(self) -> int:
        return len(self._waits)

    def __iter__(self) -> Iterator[KeyT]:
        return iter(self._waits)

    def add(self, key: KeyT, wait: WaitT) -> None:
        """Begin a wait. Its key must be unused."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._seconds
        self._waits[key] = (wait, deadline)
        if not self._has_timer:
            self._has_timer = True
            loop.call_at(deadline, self._look, READ_ITERATIONS)

    def discard(self, key: KeyT) -> WaitT | None:
        """End a wait and return it; None if it has ended or expired before."""
        found = self._waits.pop(key, None)
        return None if found is None else found[0]

    def _look(self, iterations: int) -> None:
        """Expire late waits after this many loop iterations, and set the next timer."""
        loop = asyncio.get_running_loop()
        if iterations:
            loop.call_soon(self._look, iterations - 1)
            return
        now = loop.time()
        late = list(takewhile(lambda one: one[1][1] <= now, self._waits.items()))
        for key, _ in late:
            del self._waits[key]
        following = next(iter(self._waits.values()), None)
        self._has_timer = following is not None
        if following is not None:
            loop.call_at(following[1], self._look, READ_ITERATIONS)
        for key, (wait, _) in late:
            self._expire(key, wait)
