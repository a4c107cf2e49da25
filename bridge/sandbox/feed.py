"""What happens in the sandbox, numbered: for pages that look on, and for tests that wait."""

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

# Of so many happenings a page that was away can be told; one that missed more looks anew.
MAX_KEPT: Final = 4096


class Happening(NamedTuple):
    """One thing that happened; `show` says in JSON how what it is about stands when it is told."""

    number: int
    kind: str
    show: Callable[[], object]


class Feed:
    """The newest happenings; `run` tells the numbers of this process from those of an earlier."""

    def __init__(self, max_kept: int = MAX_KEPT) -> None:
        self.run = secrets.token_hex(4)
        self.last = 0
        self._kept: deque[Happening] = deque(maxlen=max_kept)
        self._news = asyncio.Event()

    def tell(self, kind: str, show: Callable[[], object]) -> None:
        """Give a happening the next number, keep it, and wake all who wait."""
        self.last += 1
        self._kept.append(Happening(self.last, kind, show))
        self._news.set()
        self._news = asyncio.Event()

    def after(self, number: int) -> Sequence[Happening] | None:
        """Return what happened after a number; None where some of that is no longer kept."""
        missed = self.last - number
        if not 0 <= missed <= len(self._kept):
            return None
        return [self._kept[index] for index in range(len(self._kept) - missed, len(self._kept))]

    async def wait(self, number: int, seconds: float) -> bool:
        """Wait until something has happened after a number; False when the time is up before."""
        if self.last > number:
            return True
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            return False
        return True
