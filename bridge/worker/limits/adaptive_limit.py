"""Learn from the service's latency and refusals how many requests should be in flight at once.

`AdaptiveLimit` is the gradient algorithm of Netflix's concurrency-limits (2018), which is based on
TCP Vegas (Brakmo, Peterson, 1995). If the latency is higher than that of an unloaded service,
requests queue at the service. After each round, a number of measured requests, the limit becomes

    limit = limit * (unloaded latency / latency) + sqrt(limit)

which leaves a short queue, just enough to keep the service busy. Three rules come from TCP's
congestion control (RFC 5681): slow start, which doubles the limit while the latency stays low; the
halving after a refusal, at most once per round trip; and the threshold up to which the limit may
double again. Limits that the service has refused are tried again only after a while, because each
trial costs a refusal.
"""

import math
import time
from collections.abc import Callable
from typing import Final

from bridge.worker.fates import Answer, Fate

FIRST_LIMIT: Final = 4
# Minimum number of latencies in a round; a round has as many as the limit if that is higher.
MIN_SAMPLES: Final = 10
# Latency up to this multiple of the unloaded latency does not indicate a queue.
LATENCY_TOLERANCE: Final = 1.1
# Tolerance of a round's mean, in standard errors: random variation does not indicate a queue.
MARGIN_STANDARD_ERRORS: Final = 1.5
# If the limit was cut to this share or less and the latency did not fall, our requests cause no
# queue: the service itself has become slower.
CONCLUSIVE_CUT_SHARE: Final = 0.75
# A round at most halves the limit, as a refusal does.
MIN_GRADIENT: Final = 0.5
# A refused limit is tried again after the first of these delays, which doubles with each trial up
# to the second. Nothing is sent during Retry-After, so two trials are also at least this many times
# Retry-After apart.
FIRST_TRIAL_SECONDS: Final = 15.0
MAX_TRIAL_SECONDS: Final = 60.0
RETRY_AFTERS_PER_TRIAL: Final = 20
# How often the limit is halved for one round, to measure the latency of a less loaded service:
# after this many seconds, or this many latencies, whichever is longer.
DIP_SECONDS: Final = 60.0
DIP_LATENCIES: Final = 100
# Initial prefetch, and the factor by which it changes.
FIRST_HELD: Final = 16
HELD_FACTOR: Final = 4


class AdaptiveLimit:
    """Learns from each request how many should be in flight: `limit`, from 1 to `maximum`.

    Call `begin` before a request and `end` after it; both are cheap. Times are of the monotonic
    clock. Only accepted requests are timed, because the latency of errors is unrelated to theirs.
    """

    def __init__(self, maximum: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._maximum = maximum
        self._clock = clock
        self.limit = min(FIRST_LIMIT, maximum)
        self._held = FIRST_HELD
        self._in_flight = 0
        # Estimated latency of the unloaded service, and the mean latency of the last round.
        self._unloaded = math.inf
        self._latency = 0.0
        self._is_doubling = True
        # The highest limit not known to be refused, and when to try a higher one.
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
        # The current round. Only requests sent after `_measured_from` count, as they show the
        # effect of the current limit.
        self._measured_from = -math.inf
        self._was_full = False
        self._samples = 0
        self._sum = self._squares = 0.0

    def prefetch(self) -> int:
        """Return the number of deliveries to prefetch, so that there is always one to send.

        It follows the limit in large steps, because each change interrupts consuming briefly.
        Prefetching the maximum instead would starve other workers of the queue, and would increment
        the delivery count of all those messages if this worker dies.
        """
        while self._held < self.limit * 1.5:
            self._held *= HELD_FACTOR
        while self._held > FIRST_HELD and self.limit * HELD_FACTOR * 2 <= self._held:
            self._held //= HELD_FACTOR
        return min(self._held, self._maximum)

    def begin(self) -> float:
        """Note that a request is sent; return the time, for `end`."""
        self._in_flight += 1
        if self._in_flight >= self.limit:
            self._was_full = True
        return self._clock()

    def end(self, began: float, answer: Answer | None) -> None:
        """Note the end of a request; `answer` is None if it was cancelled."""
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
            # It was sent before the cut, so the previous level was too high by one more.
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
            # The service refuses at any level: it is down, not overloaded, and its real limit is
            # unknown.
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
        """Keep the lowest latency, or accept a higher one that our requests did not cause."""
        if self._before is not None:
            limit, latency = self._before
            share = self.limit / limit
            if share <= CONCLUSIVE_CUT_SHARE and mean - margin > latency * (1 + share) / 2:
                self._unloaded = mean + margin
        self._unloaded = min(self._unloaded, mean + margin)

    def _choose(self, now: float, latency: float) -> int:
        """Return the next limit after a round in which the current one was fully used."""
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
        # A trial raises the limit by one, so it costs at most one refusal.
        self._ceiling = self._maximum
        self._is_doubling = False
        self._trial_level = self.limit + 1
        return self._trial_level

    def _change(self, limit: int, now: float) -> None:
        if limit != self.limit:
            self.limit = limit
            # Skip one latency: new connections are opened, and the service's queue adjusts.
            now += self._latency
        self._start_round(now)

    def _start_round(self, measured_from: float) -> None:
        self._measured_from = measured_from
        self._was_full = False
        self._samples = 0
        self._sum = self._squares = 0.0
