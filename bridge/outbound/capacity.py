"""How many requests may be in flight at once."""

import asyncio
import contextlib
from collections import deque


class Slots:
    """A semaphore whose size can change. Whoever holds a slot keeps it when there are fewer."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def acquire(self) -> None:
        """Take a slot; wait for one in the order of the calls."""
        if self._taken < self.limit and not self._waiting:
            self._taken += 1
            return
        handed_over = asyncio.get_running_loop().create_future()
        self._waiting.append(handed_over)
        try:
            await handed_over
        except asyncio.CancelledError:
            if handed_over.cancelled():
                with contextlib.suppress(ValueError):
                    self._waiting.remove(handed_over)
                self._hand_out()
            else:
                # It had just been given one.
                self.give_back()
            raise

    def give_back(self) -> None:
        """Give a slot back."""
        self._taken -= 1
        if self._waiting:
            self._hand_out()

    def resize(self, limit: int) -> None:
        """Change how many there are."""
        self.limit = limit
        self._hand_out()

    def _hand_out(self) -> None:
        while self._waiting and self._taken < self.limit:
            handed_over = self._waiting.popleft()
            if not handed_over.done():
                self._taken += 1
                handed_over.set_result(None)
