"""The order of `worker.ordering: recipient`: one message of a key at a time, none past another.

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
from bridge.outbound.delivery import Delivery
from bridge.outbound.fates import Policy
from bridge.outbound.rates import MAX_HOLD_SECONDS

# A message that does not come back from the ladder by then was taken out by somebody.
MAX_LATE_SECONDS: Final = 900.0
MAX_MESSAGES: Final = 100_000


@dataclass(slots=True, eq=False)
class Turn:
    """One delivery's turn. `behind_seconds`: the step to wait on instead, None when it may go."""

    behind_seconds: float | None = None
    stays_seconds: float | None = None
    goes_back: bool = False

    def stay_ahead(self, delay_seconds: float) -> None:
        """Keep the place in the order: the message comes back from the ladder after a delay."""
        self.stays_seconds = delay_seconds


@dataclass(slots=True, eq=False)
class _Place:
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
    order: dict[str, _Place] = field(default_factory=dict)


class Lanes:
    """The lanes of all keys; bounded in messages, the oldest lane that is idle goes first."""

    def __init__(self, policy: Policy, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._policy = policy
        self._step_seconds = policy.retry_delays_seconds[0]
        self._clock = clock
        self._lanes: dict[str, _Lane] = {}
        self._messages = 0

    @asynccontextmanager
    async def turn(
        self, key: str, delivery: Delivery, *, waits: bool = True
    ) -> AsyncIterator[Turn]:
        """Wait for a delivery's turn, for no longer than a delivery is held.

        With `waits` false it goes behind one that is held at once. Raising BrokerError or
        CancelledError out of the turn gives the delivery back to the queue, and keeps its place
        for a moment.
        """
        lane, message = self._lanes.setdefault(key, _Lane()), delivery.envelope.key
        lane.users += 1
        self._line_up(lane, message)
        turn, is_locked = Turn(), False
        try:
            with delivery.waits("order"):
                is_locked = await _lock(lane, MAX_HOLD_SECONDS if waits else 0)
                turn.behind_seconds = await self._step_behind(lane, message, is_locked=is_locked)
            yield turn
        except (BrokerError, asyncio.CancelledError):
            # It comes again, ahead of those that are on the ladder behind it.
            turn.goes_back = True
            raise
        finally:
            if is_locked:
                lane.lock.release()
            lane.users -= 1
            self._leave(key, lane, message, turn)

    def _line_up(self, lane: _Lane, message: str) -> None:
        now = self._clock()
        place = lane.order.get(message)
        if place is None:
            place = lane.order[message] = _Place(now + self._step_seconds, 0.0)
            self._messages += 1
        place.given_up_at = now + MAX_LATE_SECONDS

    async def _step_behind(self, lane: _Lane, message: str, *, is_locked: bool) -> float | None:
        """Return the step of the ladder that ends soon after the first of the lane comes back.

        It is late by the first step at most. Of two that go up one step the queue keeps the order.
        """
        while lane.order and (first := next(iter(lane.order))) != message:
            place = lane.order[first]
            if place.given_up_at <= self._clock():
                self._forget(lane, first)
                continue
            if place.leaving is not None:
                await asyncio.wait({place.leaving}, timeout=MAX_HOLD_SECONDS)
            left = max(0.0, place.back_at - self._clock())
            return self._policy.longest_within(left + self._step_seconds)
        return None if is_locked else self._step_seconds

    def _leave(self, key: str, lane: _Lane, message: str, turn: Turn) -> None:
        place = lane.order.get(message)
        if place is not None and turn.goes_back:
            place.back_at = self._clock()
            place.given_up_at = place.back_at + MAX_HOLD_SECONDS
        elif place is not None and turn.stays_seconds is not None:
            self._go_up(place, turn.stays_seconds)
        else:
            self._forget(lane, message)
        if not lane.users and not lane.order:
            del self._lanes[key]
        if self._messages > MAX_MESSAGES:
            self._make_room()

    def _go_up(self, place: _Place, delay_seconds: float) -> None:
        """Note when it comes back: after its delay, from when what settles it here has ended."""

        def note(_: object = None) -> None:
            place.back_at = self._clock() + delay_seconds
            place.given_up_at = place.back_at + MAX_LATE_SECONDS

        note()
        place.leaving = asyncio.current_task()
        if place.leaving is not None:
            place.leaving.add_done_callback(note)

    def _forget(self, lane: _Lane, message: str) -> None:
        if lane.order.pop(message, None) is not None:
            self._messages -= 1

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
