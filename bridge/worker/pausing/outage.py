"""When failures are the service's own: many in a row, while nothing is accepted."""

from collections.abc import Callable
from typing import Final

# How many requests in a row must have failed.
OUTAGE_REQUESTS: Final = 10
# Of more messages none is held back while an outage is suspected.
MAX_HELD_BACK: Final = 10_000


class OutageWatch:
    """Counts failures in a row, and how long nothing has been accepted. Times are of `clock`."""

    def __init__(self, after_seconds: float, clock: Callable[[], float]) -> None:
        self._after_seconds = after_seconds
        self._clock = clock
        self._failures = 0
        self._held_back: set[str] = set()
        # Or when the count began.
        self.last_accepted_at = clock()

    @property
    def is_likely(self) -> bool:
        """Whether enough have failed in a row that it is an outage if it lasts."""
        return self._failures >= OUTAGE_REQUESTS

    @property
    def is_certain(self) -> bool:
        """Whether it has lasted for long enough."""
        return self.is_likely and self._clock() - self.last_accepted_at >= self._after_seconds

    def may_hold_back(self, key: str) -> bool:
        """Whether a message that has failed may be held back now, and note that it is: once."""
        if not self.is_likely or key in self._held_back or len(self._held_back) >= MAX_HELD_BACK:
            return False
        self._held_back.add(key)
        return True

    def note_failure(self) -> None:
        """Note that the service looked down: 5xx, a time-out, no connection."""
        self._failures += 1

    def note_answer(self) -> None:
        """Note that it answered otherwise."""
        self._refute()

    def note_acceptance(self, now: float) -> None:
        """Note that it accepted a message."""
        self._refute()
        self.last_accepted_at = now

    def start_anew(self) -> None:
        """Forget what was before: a pause is over."""
        self._refute()
        self.last_accepted_at = self._clock()

    def _refute(self) -> None:
        self._failures = 0
        if self._held_back:
            self._held_back.clear()
