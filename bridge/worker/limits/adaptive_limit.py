"""How many requests should be in flight at once, learned from how the service answers.

`AdaptiveLimit` is the gradient algorithm of Netflix's concurrency-limits (2018), which goes back to
TCP Vegas (Brakmo, Peterson, 1995): latency that climbs above that of an unloaded service shows a
queue at the service, so that of each round

    limit = limit * (unloaded latency / latency) + sqrt(limit)

leaves a short queue, which keeps the service busy, and no more. From TCP's congestion control
(RFC 5681) come slow start, which doubles the limit while all is well, the halving on a refusal,
once for each round trip, and the level up to which it may double again. Refused levels are left
alone for a while, as every trial of one costs a refusal.
"""

import math
import time
from collections.abc import Callable
from typing import Final

from bridge.worker.fates import Answer, Fate

FIRST_LIMIT: Final = 4
# The fewest latencies that make a round; where the limit is higher, a round has as many as that.
MIN_SAMPLES: Final = 10
# Latency up to this multiple of an unloaded service's shows no queue yet.
LATENCY_TOLERANCE: Final = 1.1
# How many standard errors a round's mean may be off: latencies that merely vary show no queue.
MARGIN_STANDARD_ERRORS: Final = 1.5
# When the limit was cut to this share or less and the latency did not fall with it, we cause no
# queue: the service itself has become slower.
CONCLUSIVE_CUT_SHARE: Final = 0.75
# A round lowers the limit to half at most, as a refusal does.
MIN_GRADIENT: Final = 0.5
# A refused level is tried again after the first of these, then after twice as long each time, up to
# the second. Nothing is sent during Retry-After, so two trials are also at least this many times
# Retry-After apart.
FIRST_TRIAL_SECONDS: Final = 15.0
MAX_TRIAL_SECONDS: Final = 60.0
RETRY_AFTERS_PER_TRIAL: Final = 20
# How often the limit is halved for one round, to measure the latency of a less loaded service:
# after this many seconds, or this many latencies, whichever is longer.
DIP_SECONDS: Final = 60.0
DIP_LATENCIES: Final = 100
# How many deliveries are held at first, and by what factor that number changes.
FIRST_HELD: Final = 16
HELD_FACTOR: Final = 4


class AdaptiveLimit:
    """Learns from each request how many should be in flight: `limit`, from 1 to `maximum`.

    Call `begin` before a request and `end` after it; both are cheap. Times are of the monotonic
    clock. Only accepted requests are timed: an error's latency says nothing of theirs.
    """

    def __init__(self, maximum: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._maximum = maximum
        self._clock = clock
        self.limit = min(FIRST_LIMIT, maximum)
        self._held = FIRST_HELD
        self._in_flight = 0
        # Latency of a service with nothing to wait for, as far as is known, and of the last round.
        self._unloaded = math.inf
        self._latency = 0.0
        self._is_doubling = True
        # The highest level that is not known to be refused, and when to try a higher one.
        self._ceiling = maximum
        self._trial_seconds = FIRST_TRIAL_SECONDS
        self._next_trial_at = 0.0
        self._trial_level = 0
        self._cut_at = -math.inf
        self._accepted_since_cut = False
        # Limit and latency before the limit was lowered to see whether the latency follows.
        self._before: tuple[int, float] | None = None
        self._is_dip = False
        self._dip_at = clock() + DIP_SECONDS
        # The round: requests that began late enough to show what the limit does.
        self._measured_from = -math.inf
        self._was_full = False
        self._samples = 0
        self._sum = self._squares = 0.0

    def most_held(self) -> int:
        """Return how many deliveries to hold, so that there is always one to send.

        It follows the limit in large steps: each change interrupts consuming for a moment.
        Holding the maximum instead would starve other workers on the queue, and count a return
        of so many more messages when this one dies.
        """
        while self._held < self.limit * 1.5:
            self._held *= HELD_FACTOR
        while self._held > FIRST_HELD and self.limit * HELD_FACTOR * 2 <= self._held:
            self._held //= HELD_FACTOR
        return min(self._held, self._maximum)

    def begin(self) -> float:
        """Note that a request goes out; return the time, for `end`."""
        self._in_flight += 1
        if self._in_flight >= self.limit:
            self._was_full = True
        return self._clock()

    def end(self, began: float, answer: Answer | None) -> None:
        """Note how a request ended; None when nobody waited for its answer."""
        self._in_flight -= 1
        if answer is None:
            return
        if answer.fate is Fate.SENT:
            self._accepted_since_cut = True
            if began >= self._measured_from:
                self._measure(began)
        elif answer.counts_as_overload:
            self._refuse(began, answer.retry_after_seconds or 0.0)

    # Refusals

    def _refuse(self, began: float, retry_after_seconds: float) -> None:
        if began <= self._cut_at:
            # It left before the cut, so the level was too high by one more.
            self._ceiling = max(self.limit, self._ceiling - 1)
            return
        now = self._clock()
        level, half = self._in_flight, max(1, self.limit // 2)
        if self._accepted_since_cut:
            self._ceiling = min(max(half, level), self._maximum)
            is_trial = self.limit == self._trial_level
            longer = min(2 * self._trial_seconds, MAX_TRIAL_SECONDS)
            self._trial_seconds = longer if is_trial else FIRST_TRIAL_SECONDS
            rarely = RETRY_AFTERS_PER_TRIAL * retry_after_seconds
            self._next_trial_at = now + max(self._trial_seconds, rarely)
        else:
            # It refuses at any level: it is down rather than full, and its real limit is unknown.
            self._ceiling = self._maximum
        self._is_doubling = True
        self._accepted_since_cut = False
        self._before, self._is_dip = None, False
        self._cut_at = now
        self._change(half, now)

    # Rounds

    def _measure(self, began: float) -> None:
        now = self._clock()
        seconds = now - began
        self._samples += 1
        self._sum += seconds
        self._squares += seconds * seconds
        if self._samples >= MIN_SAMPLES and self._samples >= self.limit:
            self._finish_round(now)

    def _finish_round(self, now: float) -> None:
        mean = self._sum / self._samples
        variance = max(0.0, self._squares / self._samples - mean * mean)
        margin = MARGIN_STANDARD_ERRORS * math.sqrt(variance / self._samples)
        self._latency = mean
        self._learn_unloaded(mean, margin)
        if self._is_dip and self._before is not None:
            limit, _ = self._before
            self._before, self._is_dip = None, False
            self._change(limit, now)
        elif self._was_full:
            self._change(self._choose(now, mean - margin), now)
        else:
            self._start_round(now)

    def _learn_unloaded(self, mean: float, margin: float) -> None:
        """Keep the lowest latency, and take a higher one when no queue of ours makes it."""
        if self._before is not None:
            limit, latency = self._before
            share = self.limit / limit
            if share <= CONCLUSIVE_CUT_SHARE and mean - margin > latency * (1 + share) / 2:
                self._unloaded = mean + margin
        self._unloaded = min(self._unloaded, mean + margin)

    def _choose(self, now: float, latency: float) -> int:
        """Return the limit after a round in which all of this one was used."""
        gradient = min(1.0, LATENCY_TOLERANCE * self._unloaded / latency) if latency > 0 else 1.0
        wanted = self._maximum
        if gradient < 1:
            self._is_doubling = False
            wanted = int(self.limit * max(gradient, MIN_GRADIENT) + math.sqrt(self.limit))
            if wanted < self.limit:
                self._before = self._before or (self.limit, self._latency)
                return wanted
        self._before = None
        if now >= self._dip_at and self.limit > 1:
            self._before, self._is_dip = (self.limit, self._latency), True
            self._dip_at = now + max(DIP_SECONDS, DIP_LATENCIES * self._latency)
            return self.limit // 2
        return min(wanted, self._grown(now)) if wanted > self.limit else self.limit

    def _grown(self, now: float) -> int:
        if self.limit < self._ceiling:
            step = self.limit if self._is_doubling else math.sqrt(self.limit)
            return min(int(self.limit + step), self._ceiling)
        if now < self._next_trial_at or self.limit == self._maximum:
            return self.limit
        # A trial goes one above, so it costs one refusal at most.
        self._ceiling = self._maximum
        self._is_doubling = False
        self._trial_level = self.limit + 1
        return self._trial_level

    def _change(self, limit: int, now: float) -> None:
        if limit != self.limit:
            self.limit = limit
            # Connections are opened, and the service's queue grows or shrinks, for a while.
            now += self._latency
        self._start_round(now)

    def _start_round(self, measured_from: float) -> None:
        self._measured_from = measured_from
        self._was_full = False
        self._samples = 0
        self._sum = self._squares = 0.0
