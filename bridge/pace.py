"""Whether to send at all: Retry-After, pause and probe.

A pause means that the fault is not the message's: nothing new is taken, and one delivery is kept
as the probe that finds out when to go on. While the broker stores nothing, nothing is taken and
nothing sent either: what becomes of a message could not be written down.
"""

import asyncio
import random
import time
from collections.abc import Callable
from typing import Final

from bridge.config import RateLimitSettings
from bridge.fates import Answer, Fate, PauseReason
from bridge.logs import Log
from bridge.metrics import WorkerMetrics
from bridge.rates import MAX_HOLD_SECONDS, RateLimits

log = Log(__name__)

OUTAGE_REQUESTS: Final = 10
FIRST_PROBE_SECONDS: Final = 1.0
MAX_PROBE_SECONDS: Final = 60.0
MAX_OUTAGE_PROBE_SECONDS: Final = 15.0
FIRST_SLOW_DOWN_SECONDS: Final = 1.0


class Pace:
    """One worker's pace; `rates` are its limits. Times are of the monotonic clock.

    `first_step_seconds` is the ladder's first step: nothing waits longer for its sender's limit.
    """

    def __init__(
        self,
        limit: RateLimitSettings,
        *,
        outage_after_seconds: float,
        first_step_seconds: float,
        metrics: WorkerMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._metrics = metrics
        self._outage_after_seconds = outage_after_seconds
        self._gate_opens_at = 0.0
        self._slow_downs = 0
        self._failures = 0
        self._last_accepted_at = clock()
        self._reason: PauseReason | None = None
        self._probe: object | None = None
        self._probe_wait_seconds = FIRST_PROBE_SECONDS
        self._nudged = asyncio.Event()
        self._storing = asyncio.Event()
        self._storing.set()
        self.changed = asyncio.Event()
        self.rates = RateLimits(
            limit,
            most_wait_seconds=first_step_seconds,
            changed=self.changed,
            metrics=metrics,
            clock=clock,
        )

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

    @property
    def is_open(self) -> bool:
        """Whether a request may go now, as far as the service and the broker are concerned."""
        return self._storing.is_set() and (self._reason is not None or self._closed_seconds <= 0)

    async def until_open(self) -> None:
        """Wait while the service wants a wait, or the broker stores nothing.

        A pause that begins meanwhile ends the wait, and is for the caller to look at.
        """
        await self._storing.wait()
        while self._reason is None and (closed := self._closed_seconds) > 0:
            self._metrics.throttled.labels("retry_after").inc(closed)
            await asyncio.sleep(closed)

    @property
    def _closed_seconds(self) -> float:
        return self._gate_opens_at - self._clock()

    def share_with(self, consumers: int) -> None:
        """Share the limits with so many workers; one that is paused does not count itself."""
        if not self.is_holding:
            self.rates.share_with(consumers)

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
            self.rates.start_slowly()
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
