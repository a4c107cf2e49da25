"""How many requests may be in flight at once, and how many deliveries to hold for them.

Both are fixed, or follow the service with `worker.concurrency: auto` (see `adaptive_limit`).
"""

import asyncio
import time
from collections.abc import Callable
from typing import Final, NoReturn, Self

from bridge.config import WorkerSettings
from bridge.telemetry.logs import Log
from bridge.worker.delivery import Waits
from bridge.worker.fates import Answer
from bridge.worker.limits.adaptive_limit import AdaptiveLimit
from bridge.worker.limits.slots import Slots

log = Log(__name__)

# Of so many slots one has a delivery to spare. A slot is free once the ack is written, but the
# delivery keeps its place of the prefetch until the broker has read that: without spare ones, slots
# would be empty for these milliseconds. Each has to wait here while another worker may have a free
# slot, so that they are few.
SLOTS_PER_SPARE: Final = 10
# A limit that follows the service is logged when it is higher or lower by this factor.
LOGGED_FACTOR: Final = 2
# It moves all the time, and the metric shows each move.
LOG_SECONDS: Final = 15.0


class Capacity:
    """The slots of one worker, of which each request in flight has one.

    `most_held`: how many deliveries to hold, so that there is always one to send. `changed` is set
    when it is another number than before. `until_ack`: what may have been sent, and is not sent
    again, keeps its slot until its ack has left, so that a worker that is killed leaves no more
    of such messages than there are slots. A limit that follows the service is about that alone, and
    may be 1: there, no more deliveries are held than requests may ever be in flight.
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
        # With ordering, deliveries wait for each other here, and holding fewer helps no other
        # worker.
        self._holds_most = self._adaptive is None or settings.ordering == "recipient"
        self.until_ack = self._adaptive is None
        self.most_held = settings.most_in_flight
        if self.until_ack:
            self.most_held += settings.most_in_flight // SLOTS_PER_SPARE
        if self._adaptive is not None:
            self._follow(self._adaptive)

    @property
    def limit(self) -> int:
        """How many requests may be in flight now."""
        return self._slots.limit

    def free_slot(self) -> "RequestSlot | None":
        """Take a slot if there is one that nobody waits for; a `with` block gives it back."""
        return RequestSlot(self, self._slots) if self._slots.acquire_free() else None

    async def slot(self, waits: Waits, *, is_urgent: bool = False) -> "RequestSlot":
        """Wait for a slot, which `waits` measures; a `with` block gives it back."""
        with waits("slot"):
            await self._slots.acquire(is_urgent=is_urgent)
        return RequestSlot(self, self._slots)

    async def keep_logging(self) -> NoReturn:
        """Log the limit every few seconds, if it is another one than was logged last."""
        while True:
            self.log_limit()
            await asyncio.sleep(LOG_SECONDS)

    def log_limit(self) -> None:
        """Log the limit if it has at least doubled or halved since it was logged last."""
        low, high = sorted((self.limit, self._logged_limit))
        if high >= low * LOGGED_FACTOR:
            self._logged_limit = self.limit
            log.info("concurrency_changed", queue=self._queue, limit=self.limit)

    def begin(self) -> float:
        """Note that a request goes out; pass the time that is returned to `end`."""
        return 0.0 if self._adaptive is None else self._adaptive.begin()

    def end(self, began: float, answer: Answer | None) -> None:
        """Note how a request ended, None when nobody waited for its answer; the limit follows."""
        if self._adaptive is not None:
            self._adaptive.end(began, answer)
            if self._adaptive.limit != self.limit:
                self._follow(self._adaptive)

    def _follow(self, adaptive: AdaptiveLimit) -> None:
        """Have so many requests in flight from now on; those that are stay so."""
        self._slots.resize(adaptive.limit)
        if not self._holds_most and (held := adaptive.most_held()) != self.most_held:
            self.most_held = held
            self._changed.set()


class RequestSlot:
    """The place of one request among those in flight; a `with` block gives it back.

    Call `begin` when the request leaves, and set `answer` when it is there.
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
        """Note that the request leaves."""
        self._began = self._capacity.begin()

    def keep(self) -> Callable[[], None]:
        """Hold it beyond the block; return what gives it back, to be called once."""
        self._is_kept = True
        return self._slots.give_back
