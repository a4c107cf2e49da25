"""The order of `worker.ordering: recipient`: one message of a key at a time, none overtakes.

A message that went up the retry ladder stays ahead of those that came after it: they go up behind
it, for what is left of its step, until it is settled. This is known to one process and forgotten
when it ends; a key is a recipient's number, or what the publisher named.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from bridge.errors import BrokerError
from bridge.worker.delivery import MAX_HOLD_SECONDS, Delivery
from bridge.worker.outcomes import Policy

# How late a message may come back from the ladder; then somebody has taken it out of its queue.
MAX_LATE_SECONDS: Final = 900.0
MAX_MESSAGES: Final = 100_000
# How often to look for those that are so late, and at how many lanes with each delivery: to look
# at 100,000 at once would take a tenth of a second.
LOOK_SECONDS: Final = 60.0
LOOK_AT_LANES: Final = 100


@dataclass(slots=True, eq=False)
class Place:
    """One delivery's place; `behind_seconds` is None when it may go, else its ladder step."""

    behind_seconds: float | None = None
    stays_seconds: float | None = None
    goes_back: bool = False

    def stay_ahead(self, delay_seconds: float) -> None:
        """Keep the place: the message comes back from the ladder after a delay."""
        self.stays_seconds = delay_seconds


@dataclass(slots=True, eq=False)
class _Unsettled:
    """A message that is not settled: when it comes back from the ladder, and what brings it there.

    `leaving` ends when the copy that waits on the ladder is there.
    """

    back_at: float
    given_up_at: float
    leaving: "asyncio.Task[object] | None" = None


@dataclass(slots=True, eq=False)
class _Lane:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0
    order: dict[str, _Unsettled] = field(default_factory=dict)


class Lanes:
    """The lanes of all keys; bounded in messages, the oldest lane that is idle goes first."""

    def __init__(self, policy: Policy, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._policy = policy
        self._step_seconds = policy.retry_delays_seconds[0]
        self._clock = clock
        self._lanes: dict[str, _Lane] = {}
        self._messages = 0
        self._next_look_at = clock() + LOOK_SECONDS
        self._to_look_at: list[str] = []

    @asynccontextmanager
    async def place(
        self, key: str, delivery: Delivery, *, may_wait: bool = True
    ) -> AsyncIterator[Place]:
        """Wait until a delivery is the first of its key, for no longer than a delivery is held.

        With `may_wait` false it goes up the ladder at once when an earlier one is held. Raising
        BrokerError or CancelledError out of the block gives the delivery back to the queue, and
        keeps its place for a moment.
        """
        lane, message = self._lanes.setdefault(key, _Lane()), delivery.envelope.key
        lane.users += 1
        self._line_up(lane, message)
        place, is_locked = Place(), False
        try:
            if lane.users == 1 and next(iter(lane.order)) == message:
                is_locked = await lane.lock.acquire()
            else:
                with delivery.waits("order"):
                    is_locked = await _lock(lane, MAX_HOLD_SECONDS if may_wait else 0)
                    place.behind_seconds = await self._step_behind(
                        lane, message, is_locked=is_locked
                    )
            yield place
        except (BrokerError, asyncio.CancelledError):
            # It comes again, ahead of those that are on the ladder behind it.
            place.goes_back = True
            raise
        finally:
            if is_locked:
                lane.lock.release()
            lane.users -= 1
            self._leave(key, lane, message, place)

    def _line_up(self, lane: _Lane, message: str) -> None:
        now = self._clock()
        record = lane.order.get(message)
        if record is None:
            record = lane.order[message] = _Unsettled(now + self._step_seconds, 0.0)
            self._messages += 1
        record.given_up_at = now + MAX_LATE_SECONDS

    async def _step_behind(self, lane: _Lane, message: str, *, is_locked: bool) -> float | None:
        """Return the step of the ladder that ends soon after the first of the lane has come back.

        It is late by the first step at most. Of two that go up one step the queue keeps the order.
        """
        while lane.order and (first := next(iter(lane.order))) != message:
            record = lane.order[first]
            if record.given_up_at <= self._clock():
                self._forget(lane, first)
                continue
            if record.leaving is not None:
                await asyncio.wait({record.leaving}, timeout=MAX_HOLD_SECONDS)
            left = max(0.0, record.back_at - self._clock())
            return self._policy.longest_within(left + self._step_seconds)
        return None if is_locked else self._step_seconds

    def _leave(self, key: str, lane: _Lane, message: str, place: Place) -> None:
        record = lane.order.get(message)
        if record is not None and place.goes_back:
            record.back_at = self._clock()
            record.given_up_at = record.back_at + MAX_HOLD_SECONDS
        elif record is not None and place.stays_seconds is not None:
            self._go_up(record, place.stays_seconds)
        else:
            self._forget(lane, message)
        if not lane.users and not lane.order:
            del self._lanes[key]
        if self._messages > MAX_MESSAGES:
            self._make_room()
        self._forget_late()

    def _go_up(self, record: _Unsettled, delay_seconds: float) -> None:
        """Note when it comes back: after its delay, from when what settles it here has ended."""
        leaving = asyncio.current_task()

        def note(_: object = None) -> None:
            record.back_at = self._clock() + delay_seconds
            record.given_up_at = record.back_at + MAX_LATE_SECONDS
            if record.leaving is leaving:
                # Half of what a message takes while it is on the ladder.
                record.leaving = None

        note()
        record.leaving = leaving
        if leaving is not None:
            leaving.add_done_callback(note)

    def _forget(self, lane: _Lane, message: str) -> None:
        if lane.order.pop(message, None) is not None:
            self._messages -= 1

    def _forget_late(self) -> None:
        """Forget what does not come back: another worker has taken it, or nobody ever will."""
        now = self._clock()
        if not self._to_look_at and now >= self._next_look_at:
            self._next_look_at = now + LOOK_SECONDS
            self._to_look_at = list(self._lanes)
        for key in self._to_look_at[-LOOK_AT_LANES:]:
            lane = self._lanes.get(key)
            if lane is not None and not lane.users:
                late = [message for message, one in lane.order.items() if one.given_up_at <= now]
                for message in late:
                    self._forget(lane, message)
                if not lane.order:
                    del self._lanes[key]
        del self._to_look_at[-LOOK_AT_LANES:]

    def _make_room(self) -> None:
        oldest = next((key for key, lane in self._lanes.items() if not lane.users), None)
        if oldest is not None:
            self._messages -= len(self._lanes.pop(oldest).order)


async def _lock(lane: _Lane, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            return await lane.lock.acquire()
    except TimeoutError:
        return False
