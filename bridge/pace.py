"""How fast to send and whether at all: rate limits, Retry-After, pause and probe.

A pause means that the fault is not the message's: nothing new is taken, and one delivery is kept
as the probe that finds out when to go on. While the broker stores nothing, nothing is taken and
nothing sent either: what becomes of a message could not be written down.
"""

import asyncio
import random
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from bridge.config import RateLimitSettings
from bridge.fates import Answer, Fate, PauseReason
from bridge.logs import Log
from bridge.metrics import WorkerMetrics

log = Log(__name__)

# A delivery that has been held for longer is given up; one wait more may lie before that. The
# broker's own limit is 30 minutes (consumer_timeout).
MAX_HOLD_SECONDS: Final = 60.0
OUTAGE_REQUESTS: Final = 10
FIRST_PROBE_SECONDS: Final = 1.0
MAX_PROBE_SECONDS: Final = 60.0
MAX_OUTAGE_PROBE_SECONDS: Final = 15.0
FIRST_SLOW_DOWN_SECONDS: Final = 1.0
MAX_SENDERS: Final = 1000
# After an outage: so many requests a second at first, doubled every second.
SLOW_START_PER_SECOND: Final = 10.0
SLOW_START_SECONDS: Final = 10.0


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
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self.per_second)
        self._at = now
        self._tokens -= 1
        return max(0.0, -self._tokens / self.per_second)

    def give_back(self) -> None:
        """Undo a `take` that is not used."""
        self._tokens += 1

    def resize(self, per_second: float, burst: float) -> None:
        """Change the rate; what has been used stays used."""
        self.per_second = per_second
        self._burst = burst
        self._tokens = min(self._tokens, burst)


class Pace:
    """One worker's pace. Times are of the monotonic clock."""

    def __init__(
        self,
        limit: RateLimitSettings,
        *,
        outage_after_seconds: float,
        metrics: WorkerMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = limit
        self._clock = clock
        self._metrics = metrics
        self._outage_after_seconds = outage_after_seconds
        self._consumers = 1
        self._bucket = self._new_bucket(limit.per_second)
        self._by_sender: OrderedDict[str, TokenBucket] = OrderedDict()
        self._gate_opens_at = 0.0
        self._slow_downs = 0
        self._failures = 0
        self._last_accepted_at = clock()
        self._reason: PauseReason | None = None
        self._probe: object | None = None
        self._probe_wait_seconds = FIRST_PROBE_SECONDS
        self._nudged = asyncio.Event()
        self._slow_start: TokenBucket | None = None
        self._slow_start_at = 0.0
        self._storing = asyncio.Event()
        self._storing.set()
        self.changed = asyncio.Event()

    @property
    def paused(self) -> PauseReason | None:
        """Why nothing new is taken, or None."""
        return self._reason

    @property
    def broker_blocked(self) -> bool:
        """Whether the broker stores nothing now."""
        return not self._storing.is_set()

    @property
    def is_holding(self) -> bool:
        """Whether nothing new is taken on purpose, for whatever reason."""
        return self._reason is not None or self.broker_blocked

    @property
    def needs_probe(self) -> bool:
        """Whether the worker is paused, holds no delivery to try with, and may try soon."""
        return self._reason is not None and self._probe is None and self._opens_soon

    @property
    def _opens_soon(self) -> bool:
        return self._gate_opens_at - self._clock() < MAX_HOLD_SECONDS

    def share_with(self, consumers: int) -> None:
        """Divide the limit by the number of workers on the queue when its scope is `cluster`.

        A worker that is paused is no consumer, and does not count itself.
        """
        if self._limit.scope != "cluster" or self.is_holding:
            return
        self._consumers = max(consumers, 1)
        if self._bucket is not None and self._limit.per_second is not None:
            self._bucket.resize(*self._share(self._limit.per_second))
        if self._limit.per_sender is not None:
            for bucket in self._by_sender.values():
                bucket.resize(*self._share(self._limit.per_sender))

    def most_held(self, concurrency: int) -> int:
        """Return how many deliveries to take, so that none waits too long for its turn."""
        if self._bucket is None:
            return concurrency
        return max(1, min(concurrency, int(self._bucket.per_second * MAX_HOLD_SECONDS)))

    async def turn(self, sender: str) -> float:
        """Wait until a request of this sender may go, and return 0.

        Returns how many seconds are left, at once, when that is too long to hold a delivery. A
        pause that begins meanwhile is for the caller to look at.
        """
        await self._storing.wait()
        while self._reason is None and (closed := self._gate_opens_at - self._clock()) > 0:
            self._metrics.throttled.labels("retry_after").inc(closed)
            await asyncio.sleep(closed)
        wait = self._take_tokens(sender)
        if wait > MAX_HOLD_SECONDS:
            return wait
        if wait > 0:
            self._metrics.throttled.labels("local_limit").inc(wait)
            await asyncio.sleep(wait)
        return 0.0

    def _take_tokens(self, sender: str) -> float:
        buckets = (self._bucket, self._sender_bucket(sender), self._slow_start_bucket())
        used = [bucket for bucket in buckets if bucket is not None]
        if not used:
            return 0.0
        wait = max(bucket.take() for bucket in used)
        if wait > MAX_HOLD_SECONDS:
            for bucket in used:
                bucket.give_back()
        return wait

    def note(self, answer: Answer) -> None:
        """Learn from an answer: close the gate, see an outage, or see that all is well."""
        if answer.counts_as_outage:
            self._note_failure()
            return
        self._failures = 0
        if answer.fate is Fate.SENT:
            self._slow_downs = 0
            self._last_accepted_at = self._clock()
            if self._reason == "outage":
                self.resume()
        elif answer.fate is Fate.SLOW_DOWN:
            self._slow_down(answer.retry_after_seconds)
        elif answer.fate is Fate.SETUP and answer.pause is not None:
            self.pause(answer.pause, status=answer.status)

    def _note_failure(self) -> None:
        self._failures += 1
        silent = self._clock() - self._last_accepted_at
        if self._failures >= OUTAGE_REQUESTS and silent >= self._outage_after_seconds:
            self.pause("outage")

    def pause(self, reason: PauseReason, *, status: int | None = None) -> None:
        """Take nothing new until `resume`; a second reason replaces the first.

        `status` is what the API answered, for the log.
        """
        if self._reason == reason:
            return
        if self._reason is None:
            self._probe_wait_seconds = FIRST_PROBE_SECONDS
            self._nudged.clear()
        else:
            self._metrics.paused.labels(self._reason).set(0)
        self._reason = reason
        self._metrics.paused.labels(reason).set(1)
        self._metrics.pauses.labels(reason).inc()
        log.warning("paused", reason=reason, status=status)
        self.changed.set()

    def resume(self) -> None:
        """Take new deliveries again."""
        if self._reason is None:
            return
        log.info("resumed", reason=self._reason)
        if self._reason == "outage":
            self._slow_start = TokenBucket(SLOW_START_PER_SECOND, 1, self._clock)
            self._slow_start_at = self._clock()
        self._metrics.paused.labels(self._reason).set(0)
        self._reason = self._probe = None
        self._failures = 0
        self._last_accepted_at = self._clock()
        self.changed.set()

    def block(self) -> None:
        """Take and send nothing until `unblock`: the broker stores nothing."""
        if self._storing.is_set():
            self._storing.clear()
            self._metrics.paused.labels("broker_blocked").set(1)
            self._metrics.pauses.labels("broker_blocked").inc()
            log.warning("paused", reason="broker_blocked")
            self.changed.set()

    def unblock(self) -> None:
        """Go on: the broker has stored something."""
        if not self._storing.is_set():
            self._storing.set()
            self._metrics.paused.labels("broker_blocked").set(0)
            log.info("resumed", reason="broker_blocked")
            self.changed.set()

    def nudge(self) -> None:
        """Probe at once: something may have been repaired, such as the key."""
        self._nudged.set()

    def reopen(self) -> None:
        """End a pause in which the service asked for a time that has passed, if nobody probes."""
        is_open = self._gate_opens_at <= self._clock()
        if self._reason == "rate_limited" and self._probe is None and is_open:
            self.resume()

    def claim_probe(self, delivery: object) -> bool:
        """Make a delivery the probe of a pause, unless another one is, or it would wait long."""
        if self.needs_probe:
            self._probe = delivery
            self.changed.set()
        return self._probe is delivery

    def is_probe(self, delivery: object) -> bool:
        """Whether this delivery is the probe of a pause."""
        return self._reason is not None and self._probe is delivery

    def release_probe(self, delivery: object) -> None:
        """Let another delivery become the probe."""
        if self._probe is delivery:
            self._probe = None
            self.changed.set()

    async def wait_before_probe(self) -> None:
        """Wait for the back-off, which doubles with jitter each time, or for a nudge."""
        longest = MAX_OUTAGE_PROBE_SECONDS if self._reason == "outage" else MAX_PROBE_SECONDS
        own = min(self._probe_wait_seconds, longest) * random.uniform(0.8, 1.0)  # noqa: S311
        # What the service asked for comes first.
        wait = max(own, self._gate_opens_at - self._clock())
        try:
            async with asyncio.timeout(wait):
                await self._nudged.wait()
        except TimeoutError:
            pass
        self._nudged.clear()
        # Not before: a probe whose connection ended has found out nothing.
        self._probe_wait_seconds = min(self._probe_wait_seconds * 2, longest)

    def _slow_down(self, retry_after_seconds: float | None) -> None:
        now = self._clock()
        if self._gate_opens_at <= now:
            # Of many answers at once only the first makes the own back-off grow.
            self._slow_downs += 1
        own = FIRST_SLOW_DOWN_SECONDS * 2.0 ** min(self._slow_downs - 1, 6)
        wait = retry_after_seconds or min(own, MAX_HOLD_SECONDS)
        if wait > MAX_HOLD_SECONDS:
            self.pause("rate_limited")
        # Jitter upwards only: too early is refused again.
        opens_at = now + wait * random.uniform(1.0, 1.1)  # noqa: S311
        self._gate_opens_at = max(self._gate_opens_at, opens_at)

    def _new_bucket(self, per_second: float | None) -> TokenBucket | None:
        if per_second is None:
            return None
        return TokenBucket(*self._share(per_second), self._clock)

    def _share(self, per_second: float) -> tuple[float, float]:
        """Return this worker's rate and burst."""
        burst = self._limit.burst or per_second
        return per_second / self._consumers, max(1.0, burst / self._consumers)

    def _slow_start_bucket(self) -> TokenBucket | None:
        if self._slow_start is not None:
            seconds = self._clock() - self._slow_start_at
            if seconds > SLOW_START_SECONDS:
                self._slow_start = None
            else:
                self._slow_start.per_second = SLOW_START_PER_SECOND * 2.0**seconds
        return self._slow_start

    def _sender_bucket(self, sender: str) -> TokenBucket | None:
        if self._limit.per_sender is None:
            return None
        bucket = self._by_sender.get(sender) or self._new_bucket(self._limit.per_sender)
        if bucket is not None:
            self._by_sender[sender] = bucket
            self._by_sender.move_to_end(sender)
        while len(self._by_sender) > MAX_SENDERS:
            self._by_sender.popitem(last=False)
        return bucket
