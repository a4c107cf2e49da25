"""Circuit breakers for tests that need no service."""

import asyncio
import random
import time
from collections.abc import Callable

from bridge.config import RateLimitSettings
from bridge.worker.fates import PauseReason
from bridge.worker.limits.rate_limits import RateLimits
from bridge.worker.metrics import WorkerMetrics
from bridge.worker.outcomes import Policy
from bridge.worker.service.breaker import CircuitBreaker, Cluster, News
from bridge.worker.service.breaker_states import Breaker

OUTAGE_AFTER_SECONDS = 10.0
NO_LIMIT = RateLimitSettings()


class Alone:
    """No other workers: this one decides for itself."""

    others = 0
    is_probing = False

    def publish(self, news: News, state: Breaker) -> None:
        """Tell nobody."""

    def publish_closed(self, reason: PauseReason) -> None:
        """Tell nobody."""


ALONE = Alone()


def make_breaker(
    policy: Policy,
    metrics: WorkerMetrics,
    *,
    limit: RateLimitSettings = NO_LIMIT,
    cluster: Cluster = ALONE,
    clock: Callable[[], float] = time.monotonic,
    chance: Callable[[], float] = random.random,
) -> CircuitBreaker:
    """Make a closed breaker, with the rate limits that it starts slowly after an outage."""
    return CircuitBreaker(
        policy,
        outage_after_seconds=OUTAGE_AFTER_SECONDS,
        rates=RateLimits(
            limit,
            most_wait_seconds=policy.retry_delays_seconds[0],
            changed=asyncio.Event(),
            metrics=metrics,
            clock=clock,
        ),
        cluster=cluster,
        metrics=metrics,
        clock=clock,
        chance=chance,
    )


def open_breaker(breaker: CircuitBreaker, reason: PauseReason) -> None:
    """Open a breaker, as if another worker had found the reason."""
    breaker.peer_opened(reason, breaker.state.counted_since)
