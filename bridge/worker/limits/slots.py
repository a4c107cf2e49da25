"""A semaphore with an adjustable size and a fast lane for urgent messages."""

import asyncio
import contextlib
from collections import deque
from typing import Final

# While both lanes have waiters, one ordinary waiter follows this many urgent ones, so that neither
# lane can starve the other.
URGENT_IN_A_ROW: Final = 8


class Slots:
    """A number of slots. If the number shrinks, occupied slots stay occupied.

    Waiters are served in the order of their calls, the urgent ones first, except for one in nine.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        self._urgent: deque[asyncio.Future[None]] = deque()
        self._others: deque[asyncio.Future[None]] = deque()
        self._urgent_in_a_row = 0

    def acquire_free(self) -> bool:
        """Take a slot if one is free and nothing waits for it; return whether that succeeded."""
        if self.taken < self.limit and not self._others and not self._urgent:
            self.taken += 1
            return True
        return False

    async def acquire(self, *, is_urgent: bool = False) -> None:
        """Take a slot; wait for one if necessary."""
        if self.acquire_free():
            return
        handed_over = asyncio.get_running_loop().create_future()
        waiting = self._urgent if is_urgent else self._others
        waiting.append(handed_over)
        try:
            await handed_over
        except asyncio.CancelledError:
            if handed_over.cancelled():
                with contextlib.suppress(ValueError):
                    waiting.remove(handed_over)
                self._hand_out()
            else:
                # It received a slot just before it was cancelled.
                self.give_back()
            raise

    def give_back(self) -> None:
        """Free a slot, and pass it to the next waiter."""
        self.taken -= 1
        if self._others or self._urgent:
            self._hand_out()

    def resize(self, limit: int) -> None:
        """Change the number of slots."""
        self.limit = limit
        self._hand_out()

    def _hand_out(self) -> None:
        while self.taken < self.limit and (waiting := self._next_line()):
            handed_over = waiting.popleft()
            if not handed_over.done():
                is_ahead = waiting is self._urgent and bool(self._others)
                self._urgent_in_a_row = self._urgent_in_a_row + 1 if is_ahead else 0
                self.taken += 1
                handed_over.set_result(None)

    def _next_line(self) -> deque[asyncio.Future[None]]:
        is_others_turn = self._urgent_in_a_row >= URGENT_IN_A_ROW and self._others
        return self._others if is_others_turn or not self._urgent else self._urgent
