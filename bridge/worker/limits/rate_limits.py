"""How fast to send: the worker's rate limit, that of each sender, and the start after an outage.

A delivery over a limit waits in the limit's line. Only the first in line takes a token, so that
while it is held up, by a missing slot or by `Retry-After`, no tokens pile up behind it to be spent
in one burst later.

The line of one sender is short. A delivery that would have to wait for longer is given a time, and
waits for it on the retry ladder, so that one sender's messages never fill the prefetch.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Final

from bridge.config import RateLimitSettings
from bridge.worker.delivery import MAX_HOLD_SECONDS, Waits
from bridge.worker.limits.slots import Slots
from bridge.worker.metrics import WorkerMetrics

# After an outage: the rate at first, and for how long it doubles every second.
SLOW_START_PER_SECOND: Final = 10.0
SLOW_START_SECONDS: Final = 10.0
# A timer may go off so much before its time, and the token is there by then but for this.
EARLY_SECONDS: Final = 0.001
# How long to wait for a token before looking again: the rate may be another one meanwhile.
LOOK_AGAIN_SECONDS: Final = 1.0
MAX_SENDERS: Final = 1000
# How many deliveries may wait here for the limits of their senders, besides those that can be sent.
# The room grows and shrinks in large steps: each change interrupts consuming for a moment.
FIRST_ROOM: Final = 16
MAX_ROOM: Final = 1024
ROOM_FACTOR: Final = 4
# How long to wait until the number of workers that share a limit is known.
FIRST_SHARE_SECONDS: Final = 10.0


class TokenBucket:
    """Lets `per_second` through on average and `burst` at once."""

    def __init__(self, per_second: float, burst: float, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.per_second = per_second
        self._burst = burst
        self._tokens = burst
        self._at = clock()

    def take(self) -> float:
        """Take a token, on credit if need be, and return how many seconds to wait for it."""
        self._fill()
        self._tokens -= 1
        return max(0.0, -self._tokens / self.per_second)

    def seconds_until(self, number: int) -> float:
        """Return how many seconds it takes until there are so many tokens."""
        self._fill()
        return max(0.0, (number - self._tokens) / self.per_second)

    def give_back(self) -> None:
        """Undo a `take` that is not used."""
        self._tokens += 1

    def fill_from(self, moment: float) -> None:
        """Keep no more tokens than have been added since a moment."""
        self._fill()
        self._tokens = min(self._tokens, (self._clock() - moment) * self.per_second)

    def resize(self, per_second: float, burst: float) -> None:
        """Change the rate; what has been used stays used."""
        self._fill()
        self.per_second = per_second
        self._burst = burst
        self._tokens = min(self._tokens, burst)

    def _fill(self) -> None:
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self.per_second)
        self._at = now


class SlowStart(TokenBucket):
    """Lets a few through a second, and twice as many each second later.

    They are shared by so many `workers`, which begin together.
    """

    def __init__(self, workers: int, clock: Callable[[], float]) -> None:
        self._first_per_second = SLOW_START_PER_SECOND / workers
        super().__init__(self._first_per_second, 1, clock)
        self._began_at = clock()

    @property
    def is_over(self) -> bool:
        """Whether it limits nothing any more."""
        return self._clock() - self._began_at > SLOW_START_SECONDS

    def _fill(self) -> None:
        seconds = min(self._clock() - self._began_at, SLOW_START_SECONDS)
        self.per_second = self._first_per_second * 2.0**seconds
        super()._fill()


class WaitingLine:
    """The deliveries that wait for the same tokens, in order of arrival, the urgent ones first.

    The first waits until there is a token, and takes it when it goes: were it taken before, those
    that come in the meantime could go beside it, one more than the burst.
    """

    def __init__(self, *buckets: TokenBucket) -> None:
        self.buckets = list(buckets)
        self.waiting = 0
        self._urgent_waiting = 0
        self._first_place = Slots(1)

    @property
    def holds_up(self) -> bool:
        """Whether a delivery that comes now has to wait."""
        return self.waiting > 0 or self.wait_seconds() > 0

    def wait_seconds(self) -> float:
        """Return how long a delivery that comes now waits for its token."""
        return self._seconds_until(self.waiting + 1)

    def urgent_wait_seconds(self) -> float:
        """Return how long an urgent one that comes now waits, which passes all that are not."""
        return self._seconds_until(self._urgent_waiting + self._first_place.taken + 1)

    def _seconds_until(self, tokens: int) -> float:
        return max((bucket.seconds_until(tokens) for bucket in self.buckets), default=0.0)

    async def come_first(self, *, is_urgent: bool) -> None:
        """Wait to be the first of the line, then until there is a token; `leave` must be called."""
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
        """Let the next one be the first; a token that this one does not take is there for it."""
        if with_token:
            for bucket in self.buckets:
                bucket.take()
        self._first_place.give_back()
        self.waiting -= 1


class SenderLine(WaitingLine):
    """The line of one sender.

    `plan` gives each message that comes its time, on credit; the line's own bucket holds the rate.
    """

    def __init__(self, bucket: TokenBucket, plan: TokenBucket) -> None:
        super().__init__(bucket)
        self.plan = plan


class RateToken:
    """A delivery's leave to go under the limits: the first place of some lines, a token of each.

    Spend it when the delivery goes. Until then the next one in line waits behind it.
    """

    def __init__(self) -> None:
        self.is_spent = False
        self._lines: list[WaitingLine] = []

    async def wait_in(self, line: WaitingLine, *, is_urgent: bool) -> None:
        """Wait for the first place of one more line, and for a token there."""
        await line.come_first(is_urgent=is_urgent)
        self._lines.append(line)

    def spend(self) -> None:
        """Go, and let the next one in line wait for a token of its own."""
        self.is_spent = True
        self._leave(with_token=True)

    def give_back(self) -> None:
        """Stay after all, and let the next one in line have the token."""
        self._leave(with_token=False)

    def _leave(self, *, with_token: bool) -> None:
        while self._lines:
            self._lines.pop().leave(with_token=with_token)


class _Unlimited:
    """Hands out one shared token: without a limit, a message should cost nothing here."""

    def __init__(self) -> None:
        self._token = RateToken()

    async def __aenter__(self) -> RateToken:
        return self._token

    async def __aexit__(self, *_: object) -> None:
        pass


class RateLimits:
    """The limits of one worker. Times are of the monotonic clock.

    `most_wait_seconds`: who waits for its sender's limit for longer is sent up the ladder.
    `changed` is set when `most_held` may say something else.
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
        # Then nothing is sent before `share_with` has been called with the number of workers.
        self.is_shared = limit.scope == "cluster" and any((limit.per_second, limit.per_sender))
        self._workers = 1
        self._last_seen: int | None = None
        # Before that nobody knows what others have used.
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
        """Divide the limits by the number of workers on the queue, as seen every second.

        The larger of two counts in a row is used: workers that start together do not see each other
        at once.
        """
        seen, self._last_seen = self._last_seen, consumers
        if seen is not None:
            self.divide_by(max(seen, consumers))

    def divide_by(self, workers: int) -> None:
        """Divide the limits by the number of workers, which is known for certain."""
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
        """Begin with empty buckets, once it is known how many workers fill them."""
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
        """Wait for the first count, for FIRST_SHARE_SECONDS at most: the broker may not answer."""
        if self._knows_share:
            return
        try:
            async with asyncio.timeout(FIRST_SHARE_SECONDS):
                await self._is_share_known.wait()
        except TimeoutError:
            self._start()

    def most_held(self, concurrency: int) -> int:
        """Return how many deliveries to take: those that are to be sent, and room for who waits."""
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

    def seconds_on_ladder(self, sender: str, *, planned_in_seconds: float | None = None) -> float:
        """Return in how many seconds a delivery has its turn, 0 when it is to wait for it here.

        `planned_in_seconds` is what is left of the time that it was given before, if it was.
        """
        common = self._common_line()
        if common.buckets and (wait := common.wait_seconds()) > MAX_HOLD_SECONDS:
            return wait
        line = self._sender_line(sender)
        if line is None:
            return 0.0
        wait = line.plan.take() if planned_in_seconds is None else planned_in_seconds
        here, most = line.wait_seconds(), self._most_wait_seconds
        if wait <= most and here <= most and (here == 0 or self._has_room()):
            return 0.0
        if planned_in_seconds is not None and wait <= most < here:
            # Its time has come, but others are waiting: without a new time all would come back at
            # once.
            wait = line.plan.take()
        return max(wait, here)

    def urgent_seconds_on_ladder(self, sender: str) -> float:
        """Return in how many seconds an urgent delivery has its turn, 0 when it waits for it here.

        It waits behind other urgent ones only, and takes no time in the plan of its sender.
        """
        line, common = self._sender_line(sender), self._common_line()
        wait = max(one.urgent_wait_seconds() for one in (common, line or common))
        return wait if wait > MAX_HOLD_SECONDS else 0.0

    def token(
        self, sender: str, waits: Waits, *, is_urgent: bool = False
    ) -> AbstractAsyncContextManager[RateToken]:
        """Wait in line until a request of this sender may go; `waits` measures that.

        What is not spent within the `async with` block is given back at its end.
        """
        line, common = self._sender_line(sender), self._common_line()
        if line is None and not common.buckets:
            return self._unlimited
        return self._limited(line, common, waits, is_urgent=is_urgent)

    def start_slowly(self, *, workers: int = 1) -> None:
        """Let few requests of all `workers` through at first, and twice as many each second."""
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

    def _has_room(self) -> bool:
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
        """Forget the sender that has been silent for longest."""
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
