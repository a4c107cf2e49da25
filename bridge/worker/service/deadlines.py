"""The deadlines of all exchanges in flight, behind one timer of the event loop.

Why no timer for each: nearly all exchanges are done in time, and to begin a timer and to cancel it
costs more than to parse the answer.
"""

import asyncio
import math
import time
from collections.abc import Callable
from typing import Protocol


class Expiring(Protocol):
    """What has a deadline."""

    def expire(self) -> None:
        """Give up: the deadline is over."""


class Deadlines:
    """Has everything that is not done by its deadline `expire`. Times are of `clock`.

    Bounded by who calls it: what is added must be removed.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: dict[Expiring, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._looks_at = math.inf

    def add(self, waiting: Expiring, deadline: float) -> None:
        """Have it expire at its deadline; call `remove` when it is done, or has expired."""
        self._open[waiting] = deadline
        if deadline < self._looks_at:
            self._look_at(deadline)

    def remove(self, waiting: Expiring) -> None:
        """Note that it is done."""
        del self._open[waiting]

    def _look_at(self, moment: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._looks_at = moment
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(0.0, moment - self._clock()), self._look)

    def _look(self) -> None:
        self._timer, self._looks_at = None, math.inf
        now = self._clock()
        due = [waiting for waiting, deadline in self._open.items() if deadline <= now]
        next_deadline = min((at for at in self._open.values() if at > now), default=None)
        if next_deadline is not None:
            self._look_at(next_deadline)
        for waiting in due:
            waiting.expire()
