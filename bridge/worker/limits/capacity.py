"""The number of requests that may be in flight, and of deliveries to prefetch for them.

Both are fixed, or adapt to the service with `worker.concurrency: auto` (see `adaptive_limit`).
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from typing import Final, NoReturn, Self

from bridge.config import WorkerSettings
from bridge.telemetry.logs import Log
from bridge.worker.delivery import Waits
from bridge.worker.fates import Answer
from bridge.worker.limits.adaptive_limit import AdaptiveLimit

log = Log(__name__)

# While both lanes have waiters, one ordinary waiter follows this many urgent ones, so that neither
# lane can starve the other.
URGENT_IN_A_ROW: Final = 8
# One spare delivery is prefetched for this many slots. A slot is free once the ack is written, but
# the delivery occupies the prefetch until the broker has read the ack: without spare deliveries,
# slots would be empty for these milliseconds. There are few, because each waits here while another
# worker may have a free slot.
SLOTS_PER_SPARE: Final = 10
# The adaptive limit is logged when it has changed by this factor.
LOGGED_FACTOR: Final = 2
# Interval of the check; the limit changes all the time, and the metric shows each change.
LOG_SECONDS: Final = 15.0


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


class Capacity:
    """The slots of one worker; each request in flight occupies one.

    `prefetch`: number of deliveries to prefetch, so that there is always one to send. `changed` is
    set when it changes. `until_ack`: a message that may have been sent, and is not retried, keeps
    its slot until its ack is written, so that a killed worker leaves at most as many such messages
    as there are slots. This does not apply to the adaptive limit, which only follows the service
    and may be 1; with it, no more deliveries are prefetched than requests may ever be in flight.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        changed: asyncio.Event,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queue = settings.queue
        self._changed = changed
        self._adaptive = (
            AdaptiveLimit(settings.max_concurrency, clock=clock)
            if settings.concurrency == "auto"
            else None
        )
        self._slots = Slots(self._adaptive.limit if self._adaptive else settings.most_in_flight)
        self._logged_limit = self._slots.limit
        # With ordering, deliveries wait for each other here, and a smaller prefetch helps no other
        # worker.
        self._holds_most = self._adaptive is None or settings.ordering == "recipient"
        self.until_ack = self._adaptive is None
        self.prefetch = settings.most_in_flight
        if self.until_ack:
            self.prefetch += settings.most_in_flight // SLOTS_PER_SPARE
        if self._adaptive is not None:
            self._follow(self._adaptive)

    @property
    def limit(self) -> int:
        """Number of requests that may be in flight now."""
        return self._slots.limit

    def take_free_slot(self) -> "RequestSlot | None":
        """Take a slot if one is free and no delivery waits for it; use it in a `with` block."""
        return RequestSlot(self, self._slots) if self._slots.acquire_free() else None

    async def slot(self, waits: Waits, *, is_urgent: bool = False) -> "RequestSlot":
        """Wait for a slot, measured by `waits`; use it in a `with` block."""
        with waits("slot"):
            await self._slots.acquire(is_urgent=is_urgent)
        return RequestSlot(self, self._slots)

    async def keep_logging(self) -> NoReturn:
        """Check every few seconds whether to log the limit."""
        while True:
            self.log_limit()
            await asyncio.sleep(LOG_SECONDS)

    def log_limit(self) -> None:
        """Log the limit if it has at least doubled or halved since it was last logged."""
        low, high = sorted((self.limit, self._logged_limit))
        if high >= low * LOGGED_FACTOR:
            self._logged_limit = self.limit
            log.info("concurrency_changed", queue=self._queue, limit=self.limit)

    def begin(self) -> float:
        """Note that a request is sent; pass the returned time to `end`."""
        return 0.0 if self._adaptive is None else self._adaptive.begin()

    def end(self, began: float, answer: Answer | None) -> None:
        """Note the end of a request and adapt the limit; None if the request was cancelled."""
        if self._adaptive is not None:
            self._adaptive.end(began, answer)
            if self._adaptive.limit != self.limit:
                self._follow(self._adaptive)

    def _follow(self, adaptive: AdaptiveLimit) -> None:
        """Apply the adaptive limit; requests in flight stay in flight."""
        self._slots.resize(adaptive.limit)
        if not self._holds_most and (held := adaptive.prefetch()) != self.prefetch:
            self.prefetch = held
            self._changed.set()


class RequestSlot:
    """The slot of one request; leaving its `with` block frees it.

    Call `begin` when the request is sent, and set `answer` when the answer has arrived.
    """

    __slots__ = ("_began", "_capacity", "_is_kept", "_slots", "answer")

    def __init__(self, capacity: Capacity, slots: Slots) -> None:
        self._capacity = capacity
        self._slots = slots
        self._began: float | None = None
        self._is_kept = False
        self.answer: Answer | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._began is not None:
            self._capacity.end(self._began, self.answer)
        if not self._is_kept:
            self._slots.give_back()

    def begin(self) -> None:
        """Note that the request is sent."""
        self._began = self._capacity.begin()

    def keep(self) -> Callable[[], None]:
        """Keep the slot after the block; return the function that frees it, to be called once."""
        self._is_kept = True
        return self._slots.give_back
