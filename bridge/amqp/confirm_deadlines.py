"""When the confirms of what was written are late: one timer for all that get equally long.

A timer for each costs more than its wait.
"""

import asyncio
from collections.abc import Callable, Iterator
from itertools import takewhile
from typing import Final, Generic, TypeVar

from bridge.amqp.publication import READ_ITERATIONS

KeyT = TypeVar("KeyT")
WaitT = TypeVar("WaitT")


class ConfirmDeadlines(Generic[KeyT, WaitT]):
    """Calls `expire`, which must not raise, with what was not discarded in `seconds`, and its key.

    What has arrived by then is read first: after a stall timers run before sockets are read.
    """

    def __init__(self, seconds: float, expire: Callable[[KeyT, WaitT], object]) -> None:
        self._seconds: Final = seconds
        self._expire = expire
        # With times of the event loop, the first to be reached in front.
        self._waits: dict[KeyT, tuple[WaitT, float]] = {}
        self._has_timer = False

    def __len__(self) -> int:
        return len(self._waits)

    def __iter__(self) -> Iterator[KeyT]:
        return iter(self._waits)

    def add(self, key: KeyT, wait: WaitT) -> None:
        """Begin a wait; none may have its key."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._seconds
        self._waits[key] = (wait, deadline)
        if not self._has_timer:
            self._has_timer = True
            loop.call_at(deadline, self._look, READ_ITERATIONS)

    def discard(self, key: KeyT) -> WaitT | None:
        """End a wait and return it, or None when it was ended before, or has expired."""
        found = self._waits.pop(key, None)
        return None if found is None else found[0]

    def _look(self, iterations: int) -> None:
        """Expire what is late after so many iterations of the event loop, and set the timer."""
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
