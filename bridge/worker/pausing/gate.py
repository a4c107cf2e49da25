"""Closed for a while after a 429: for `Retry-After`, or for a wait of our own choice."""

import random
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from bridge.worker.delivery import MAX_HOLD_SECONDS
from bridge.worker.service.retry_after import MAX_RETRY_AFTER_SECONDS

# Without `Retry-After` the wait begins with this, and doubles with each 429 up to a minute.
FIRST_WAIT_SECONDS: Final = 1.0
MAX_DOUBLINGS: Final = 6
# Upwards only: a request that comes too early is refused again.
MAX_JITTER: Final = 1.1
# No worker is asked for more.
MAX_CLOSED_SECONDS: Final = MAX_RETRY_AFTER_SECONDS * MAX_JITTER
MAX_SENDERS: Final = 1000
# Messages may leave for the retry queues while the gate is closed for the second time in a row, or
# for longer than this, so that messages of other senders come to the front of the queue.
LONG_WAIT_SECONDS: Final = 6.0
# How many may leave each time: a limit that holds for all must not copy the whole queue.
MAX_LEAVING: Final = 1000


class Gate:
    """When requests may go again after a 429. Times are of `clock`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._slow_downs = 0
        self._may_leave = 0
        # When the service itself has let this worker know that it may send again.
        self.asked_until = 0.0
        self.opens_at = 0.0

    @property
    def closed_seconds(self) -> float:
        """How long it stays closed; zero or less when it is open."""
        # Read for each message; the clock only where it was closed once.
        return self.opens_at - self._clock() if self.opens_at else 0.0

    @property
    def may_leave(self) -> bool:
        """Whether a message may leave, instead of waiting here until it opens."""
        closed = self.closed_seconds
        is_stubborn = self._slow_downs > 1 or closed > LONG_WAIT_SECONDS
        return closed > 0 and is_stubborn and self._may_leave > 0

    def note_leaving(self) -> None:
        """Note that a message leaves."""
        self._may_leave -= 1

    def close(self, retry_after_seconds: float | None) -> float:
        """Close it after a 429, and return for how many seconds, without the jitter."""
        now = self._clock()
        if self.opens_at <= now:
            # Of many 429s at once only the first makes our own wait grow.
            self._slow_downs += 1
            self._may_leave = MAX_LEAVING
        own = FIRST_WAIT_SECONDS * 2.0 ** min(self._slow_downs - 1, MAX_DOUBLINGS)
        wait = retry_after_seconds or min(own, MAX_HOLD_SECONDS)
        opens_at = now + wait * random.uniform(1.0, MAX_JITTER)  # noqa: S311
        self.asked_until = max(self.asked_until, opens_at)
        self.opens_at = max(self.opens_at, opens_at)
        return wait

    def stay_closed(self, seconds: float) -> None:
        """Close it for so long at least: the service has asked another worker for it.

        One that names a time longer than any service is granted is broken, and stops no other.
        """
        now, seconds = self._clock(), min(seconds, MAX_CLOSED_SECONDS)
        if self.opens_at <= now < now + seconds:
            self._slow_downs += 1
            self._may_leave = MAX_LEAVING
        self.opens_at = max(self.opens_at, now + seconds)

    def note_acceptance(self) -> None:
        """Start again with the shortest wait of our own."""
        self._slow_downs = 0


class SenderGates:
    """The gates of the senders that have to wait while others go on; bounded, the oldest go first.

    A sender's gate is there from its first closing to its next accepted message.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._gates: OrderedDict[str, Gate] = OrderedDict()
        # Whether `closed_seconds` has to be asked; read for each message.
        self.are_any = False

    def closed_seconds(self, sender: str) -> float:
        """How long a sender has to wait; zero or less when it does not."""
        gate = self._gates.get(sender)
        return 0.0 if gate is None else gate.closed_seconds

    def close(self, sender: str, retry_after_seconds: float | None) -> float:
        """Have a sender wait, and return for how many seconds."""
        gate = self._gates.get(sender)
        if gate is None:
            gate = self._gates[sender] = Gate(self._clock)
            if len(self._gates) > MAX_SENDERS:
                self._gates.popitem(last=False)
        gate.close(retry_after_seconds)
        self.are_any = True
        return gate.closed_seconds

    def note_acceptance(self, sender: str) -> None:
        """Note that a message of the sender was accepted."""
        if self.are_any and self._gates.pop(sender, None) is not None:
            self.are_any = bool(self._gates)

    def renew(self) -> None:
        """Let all senders go: the API key has changed."""
        self._gates.clear()
        self.are_any = False
