"""Rate limits: of the worker, of each sender, and during the slow start after an outage.

A delivery over a limit waits in a line. Only the first in line takes a token. While it waits for a
slot or for `Retry-After`, the deliveries behind it take none; otherwise all of them would be sent
in one burst afterwards.

The line of a sender is short. A delivery that would wait too long is assigned a time and waits for
it in a retry queue, so that one sender's messages never fill the prefetch.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Final

from bridge.config import RateLimitSettings
from bridge.deadline import wait_at_most
from bridge.worker.delivery import MAX_HOLD_SECONDS, Waits
from bridge.worker.limits.capacity import Slots
from bridge.worker.metrics import WorkerMetrics

# Slow start after an outage: the initial rate, and how long it doubles every second.
SLOW_START_PER_SECOND: Final = 10.0
SLOW_START_SECONDS: Final = 10.0
# A timer may fire this much early; a token that is due within this time counts as available.
EARLY_SECONDS: Final = 0.001
# Maximum wait before checking again, because the rate may have changed meanwhile.
LOOK_AGAIN_SECONDS: Final = 1.0
MAX_SENDERS: Final = 1000
# Number of deliveries that may wait here for their sender's limit, in addition to those that can be
# sent. It changes in large steps, because each change interrupts consuming briefly.
FIRST_ROOM: Final = 16
MAX_ROOM: Final = 1024
ROOM_FACTOR: Final = 4
# How long to wait until the number of workers that share a limit is known.
FIRST_SHARE_SECONDS: Final = 10.0


class TokenBucket:
    """A token bucket: `per_second` on average, `burst` at once."""

    def __init__(self, per_second: float, burst: float, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.per_second = per_second
        self._burst = burst
        self._tokens = burst
        self._at = clock()

    def take(self) -> float:
        """Take a token, on credit if necessary; return the seconds until it is covered."""
        self._fill()
        self._tokens -= 1
        return max(0.0, -self._tokens / self.per_second)

    def seconds_until(self, number: int) -> float:
        self._fill()
        return max(0.0, (number - self._tokens) / self.per_second)

    def give_back(self) -> None:
        """Return a token that was not used."""
        self._tokens += 1

    def fill_from(self, moment: float) -> None:
        """Reduce the tokens to those added since `moment`."""
        self._fill()
        self._tokens = min(self._tokens, (self._clock() - moment) * self.per_second)

    def resize(self, per_second: float, burst: float) -> None:
        """Change the rate and the burst; used tokens stay used."""
        self._fill()
        self.per_second = per_second
        self._burst = burst
        self._tokens = min(self._tokens, burst)

    def _fill(self) -> None:
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self.per_second)
        self._at = now


class SlowStart(TokenBucket):
    """A token bucket whose rate starts low and doubles every second.

    The rate is divided by `workers`, all of which start at the same time.
    """

    def __init__(self, workers: int, clock: Callable[[], float]) -> None:
        self._first_per_second = SLOW_START_PER_SECOND / workers
        super().__init__(self._first_per_second, 1, clock)
        self._began_at = clock()

    @property
    def is_over(self) -> bool:
        return self._clock() - self._began_at > SLOW_START_SECONDS

    def _fill(self) -> None:
        seconds = min(self._clock() - self._began_at, SLOW_START_SECONDS)
        self.per_second = self._first_per_second * 2.0**seconds
        super()._fill()


class WaitingLine:
    """The deliveries that wait for the same tokens, in order of arrival, urgent ones first.

    The first in line waits until there is a token, and takes it only when it is sent. If it took
    the token earlier, the bucket would refill while it waits, and the burst could be exceeded by
    one.
    """

    def __init__(self, *buckets: TokenBucket) -> None:
        self.buckets = list(buckets)
        self.waiting = 0
        self._urgent_waiting = 0
        self._first_place = Slots(1)

    @property
    def holds_up(self) -> bool:
        """Whether a delivery that arrives now has to wait."""
        return self.waiting > 0 or self.wait_seconds() > 0

    def wait_seconds(self) -> float:
        """Return the seconds that a delivery that arrives now waits for its token."""
        return self._seconds_until(self.waiting + 1)

    def urgent_wait_seconds(self) -> float:
        """Return the seconds that an urgent delivery waits; it overtakes ordinary ones."""
        return self._seconds_until(self._urgent_waiting + self._first_place.taken + 1)

    def _seconds_until(self, tokens: int) -> float:
        return max((bucket.seconds_until(tokens) for bucket in self.buckets), default=0.0)

    async def come_first(self, *, is_urgent: bool) -> None:
        """Wait to be the first in line, then for a token. The caller must call `leave`."""
        self.waiting += 1
        self._urgent_waiting += is_urgent
        try:
            await self._first_place.acquire(is_urgent=is_urgent)
        except BaseException:
            self.waiting -= 1
            raise
        finally:
            self._urgent_waiting -= is_urgent
        try:
            wait = self._seconds_until(1)
            while wait > EARLY_SECONDS:
                await asyncio.sleep(min(wait, LOOK_AGAIN_SECONDS))
                wait = self._seconds_until(1)
        except BaseException:
            self.leave(with_token=False)
            raise

    def leave(self, *, with_token: bool) -> None:
        """Make room for the next in line; without `with_token` the token is left for it."""
        if with_token:
            for bucket in self.buckets:
                bucket.take()
        self._first_place.give_back()
        self.waiting -= 1


class SenderLine(WaitingLine):
    """The line of one sender.

    `plan` is a bucket taken on credit, which assigns each arriving message its time. The line's own
    bucket enforces the rate.
    """

    def __init__(self, bucket: TokenBucket, plan: TokenBucket) -> None:
        super().__init__(bucket)
        self.plan = plan


class RateToken:
    """Permission to send one delivery: the first place in each of its lines, and their tokens.

    Call `spend` when the delivery is sent. Until then the next in line waits behind it.
    """

    def __init__(self) -> None:
        self.is_spent = False
        self._lines: list[WaitingLine] = []

    async def wait_in(self, line: WaitingLine, *, is_urgent: bool) -> None:
        """Wait for the first place in one more line, and for a token there."""
        await line.come_first(is_urgent=is_urgent)
        self._lines.append(line)

    def spend(self) -> None:
        """Take the tokens, and leave the lines to the next deliveries."""
        self.is_spent = True
        self._leave(with_token=True)

    def give_back(self) -> None:
        """Leave the lines without taking the tokens."""
        self._leave(with_token=False)

    def _leave(self, *, with_token: bool) -> None:
        while self._lines:
            self._lines.pop().leave(with_token=with_token)


class _Unlimited:
    """Returns one shared token: without a limit, a message has no cost here."""

    def __init__(self) -> None:
        self._token = RateToken()

    async def __aenter__(self) -> RateToken:
        return self._token

    async def __aexit__(self, *_: object) -> None:
        pass


class RateLimits:
    """The rate limits of one worker. Times are of the monotonic clock.

    `most_wait_seconds`: a delivery that would wait longer for its sender's limit moves to a retry
    queue. `changed` is set when `prefetch` may have changed.
    """

    def __init__(
        self,
        limit: RateLimitSettings,
        *,
        most_wait_seconds: float,
        changed: asyncio.Event,
        metrics: WorkerMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = limit
        self._most_wait_seconds = min(most_wait_seconds, MAX_HOLD_SECONDS)
        self.changed = changed
        self._metrics = metrics
        self._clock = clock
        # Whether all workers share the limits. If so, nothing is sent until the number of workers
        # is known or FIRST_SHARE_SECONDS have passed.
        self.is_shared = limit.scope == "cluster" and any((limit.per_second, limit.per_sender))
        self._workers = 1
        self._last_seen: int | None = None
        # Tokens used by other workers before this time are unknown.
        self._shared_since = clock()
        self._is_share_known = asyncio.Event()
        self._common = WaitingLine()
        self._bucket: TokenBucket | None = None
        if limit.per_second is not None:
            self._bucket = self._new_bucket(limit.per_second)
            self._common.buckets.append(self._bucket)
        self._slow_start: SlowStart | None = None
        self._by_sender: OrderedDict[str, SenderLine] = OrderedDict()
        self._unlimited = _Unlimited()
        self._waiting = 0
        self._room = FIRST_ROOM

    def share_with(self, consumers: int) -> None:
        """Divide the limits by the number of workers on the queue, which is counted every second.

        The larger of the last two counts is used, because workers that start together do not see
        each other at once.
        """
        seen, self._last_seen = self._last_seen, consumers
        if seen is not None:
            self.divide_by(max(seen, consumers))

    def divide_by(self, workers: int) -> None:
        """Divide the limits by a number of workers, counted or estimated.

        The first call ends the wait for that number.
        """
        if not self.is_shared or (workers == self._workers and self._knows_share):
            return
        self._workers = max(workers, 1)
        if self._bucket is not None and self._limit.per_second is not None:
            self._bucket.resize(*self._share(self._limit.per_second))
        if self._limit.per_sender is not None:
            share = self._share(self._limit.per_sender)
            for line in self._by_sender.values():
                for bucket in (line.plan, *line.buckets):
                    bucket.resize(*share)
        self._start()

    def _start(self) -> None:
        """Start with empty buckets once the number of workers is known."""
        if self._is_share_known.is_set():
            return
        self._shared_since = self._clock()
        lines = self._by_sender.values()
        for bucket in (*self._common.buckets, *(b for line in lines for b in line.buckets)):
            bucket.fill_from(self._shared_since)
        self._is_share_known.set()

    @property
    def _knows_share(self) -> bool:
        return not self.is_shared or self._is_share_known.is_set()

    async def _until_share_is_known(self) -> None:
        """Wait for the first count, at most FIRST_SHARE_SECONDS: the broker may not answer."""
        if self._knows_share:
            return
        if not await wait_at_most(FIRST_SHARE_SECONDS, self._is_share_known):
            self._start()

    def prefetch(self, concurrency: int) -> int:
        """Return the prefetch: `concurrency` messages to send, and room for waiting ones."""
        held = concurrency
        if self._bucket is not None:
            held = max(1, min(held, int(self._bucket.per_second * MAX_HOLD_SECONDS)))
        if self._limit.per_sender is None:
            return held
        while self._waiting >= self._room < MAX_ROOM:
            self._room *= ROOM_FACTOR
        while self._room > FIRST_ROOM and self._waiting * ROOM_FACTOR**2 <= self._room:
            self._room //= ROOM_FACTOR
        return held + self._room

    def plan_turn(self, sender: str, *, planned_in_seconds: float | None = None) -> float:
        """Assign a delivery its time, unless it has one; return its seconds on a retry queue.

        0 means that it can wait here. `planned_in_seconds` is the rest of its assigned time, if it
        has one.
        """
        common = self._common_line()
        if common.buckets and (wait := common.wait_seconds()) > MAX_HOLD_SECONDS:
            return wait
        line = self._sender_line(sender)
        if line is None:
            return 0.0
        wait = line.plan.take() if planned_in_seconds is None else planned_in_seconds
        here, most = line.wait_seconds(), self._most_wait_seconds
        if wait <= most and here <= most and (here == 0 or self._ask_for_room()):
            return 0.0
        if planned_in_seconds is not None and wait <= most < here:
            # Its time has come, but others are waiting: without a new time, all would return at
            # once.
            wait = line.plan.take()
        return max(wait, here)

    def urgent_retry_queue_seconds(self, sender: str) -> float:
        """Return the seconds that an urgent delivery waits on a retry queue; 0 if it waits here.

        It waits behind other urgent deliveries only, and is not assigned a time.
        """
        line, common = self._sender_line(sender), self._common_line()
        wait = max(one.urgent_wait_seconds() for one in (common, line or common))
        return wait if wait > MAX_HOLD_SECONDS else 0.0

    def token(
        self, sender: str, waits: Waits, *, is_urgent: bool = False
    ) -> AbstractAsyncContextManager[RateToken]:
        """Wait until a request of this sender may be sent; `waits` measures the wait.

        A token that is not spent within the `async with` block is returned when the block ends.
        """
        line, common = self._sender_line(sender), self._common_line()
        if line is None and not common.buckets:
            return self._unlimited
        return self._limited(line, common, waits, is_urgent=is_urgent)

    def start_slowly(self, *, workers: int = 1) -> None:
        """Start slowly after an outage, with a rate divided among all `workers`."""
        self._end_slow_start()
        self._slow_start = SlowStart(workers, self._clock)
        self._common.buckets.append(self._slow_start)

    @asynccontextmanager
    async def _limited(
        self, line: SenderLine | None, common: WaitingLine, waits: Waits, *, is_urgent: bool
    ) -> AsyncIterator[RateToken]:
        token, came_at = RateToken(), self._clock()
        is_held_up = common.holds_up or (line is not None and line.holds_up)
        try:
            with waits("rate") if is_held_up or not self._knows_share else nullcontext():
                await self._wait_in_lines(token, line, common, is_urgent=is_urgent)
            self._metrics.throttled.labels("local_limit").inc(self._clock() - came_at)
            yield token
        finally:
            if not token.is_spent:
                token.give_back()
                if line is not None and not is_urgent:
                    line.plan.give_back()

    async def _wait_in_lines(
        self, token: RateToken, line: SenderLine | None, common: WaitingLine, *, is_urgent: bool
    ) -> None:
        takes_room = line is not None and line.wait_seconds() > 0
        self._waiting += takes_room
        try:
            await self._until_share_is_known()
            if line is not None:
                await token.wait_in(line, is_urgent=is_urgent)
        finally:
            self._waiting -= takes_room
        await token.wait_in(common, is_urgent=is_urgent)

    def _ask_for_room(self) -> bool:
        """Return whether one more delivery may wait here; if not, ask for a larger prefetch."""
        if self._waiting < self._room:
            return True
        self.changed.set()
        return False

    def _common_line(self) -> WaitingLine:
        if self._slow_start is not None and self._slow_start.is_over:
            self._end_slow_start()
        return self._common

    def _end_slow_start(self) -> None:
        if self._slow_start is not None:
            self._common.buckets.remove(self._slow_start)
            self._slow_start = None

    def _sender_line(self, sender: str) -> SenderLine | None:
        if self._limit.per_sender is None:
            return None
        line = self._by_sender.get(sender)
        if line is None:
            per_second = self._limit.per_sender
            line = SenderLine(self._new_bucket(per_second), plan=self._new_bucket(per_second))
            self._by_sender[sender] = line
        self._by_sender.move_to_end(sender)
        if len(self._by_sender) > MAX_SENDERS:
            self._forget_a_sender()
        return line

    def _forget_a_sender(self) -> None:
        """Forget the sender that has been idle for longest."""
        silent = next((name for name, line in self._by_sender.items() if not line.waiting), None)
        if silent is not None:
            del self._by_sender[silent]

    def _new_bucket(self, per_second: float) -> TokenBucket:
        bucket = TokenBucket(*self._share(per_second), self._clock)
        if self.is_shared:
            bucket.fill_from(self._shared_since)
        return bucket

    def _share(self, per_second: float) -> tuple[float, float]:
        """Return this worker's rate and burst."""
        burst = self._limit.burst or per_second
        return per_second / self._workers, max(1.0, burst / self._workers)
