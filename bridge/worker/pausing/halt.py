"""A pause in which nothing is tried, not even with one message: something else has to end it."""

import asyncio
from collections.abc import Callable

from bridge.worker.fates import PauseReason
from bridge.worker.pausing.pauses import Pauses, Unstored


class Halt:
    """Begins and ends for one reason, as often as it has to; `notify` is called at each change."""

    def __init__(
        self, reason: PauseReason, pauses: Pauses, *, notify: Callable[[], object]
    ) -> None:
        self._reason = reason
        self._pauses = pauses
        self._notify = notify
        self._over = asyncio.Event()
        self._over.set()
        # Whether it has begun and not ended; asked for each message.
        self.is_on = False

    async def over(self) -> None:
        """Wait for its end."""
        await self._over.wait()

    def begin(self, unstored: Unstored | None = None) -> None:
        """Begin, unless it has begun; `unstored`: what the broker does not store."""
        if not self.is_on:
            self.is_on = True
            self._over.clear()
            self._pauses.begin(self._reason, unstored=unstored)
            self._notify()
        elif unstored is not None:
            self._pauses.note_unstored(self._reason, unstored)

    def end(self) -> None:
        """End, if it has begun."""
        if self.is_on:
            self.is_on = False
            self._over.set()
            self._pauses.end(self._reason)
            self._notify()
