"""Circuit breakers and accounts for tests without an SMS service."""

import random
import time
from collections.abc import Callable
from typing import cast

from bridge.config import WorkerSettings
from bridge.worker.fates import PauseReason
from bridge.worker.limits.capacity import Capacity
from bridge.worker.limits.rate_limits import RateLimits
from bridge.worker.metrics import WorkerMetrics
from bridge.worker.pauses import WorkerPauses
from bridge.worker.service.account import Account
from bridge.worker.service.breaker import CircuitBreaker, Cluster, News
from bridge.worker.service.breaker_states import ServiceState
from bridge.worker.service.sender import Sender


class Alone:
    """A cluster without other workers."""

    others = 0
    is_probing = False

    def publish(self, news: News, state: ServiceState) -> None:
        """Tell nobody."""

    def publish_closed(self, reason: PauseReason) -> None:
        """Tell nobody."""


ALONE = Alone()


class Parts:
    """A closed breaker, with the objects that it shares with its account and worker."""

    def __init__(
        self,
        settings: WorkerSettings,
        metrics: WorkerMetrics,
        *,
        cluster: Cluster = ALONE,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        self.pauses = WorkerPauses(settings, metrics)
        self.changed = self.pauses.wake_up.consumer
        self.rates = RateLimits(
            settings.rate_limit,
            most_wait_seconds=settings.retry_delays[0],
            changed=self.changed,
            metrics=metrics,
            clock=clock,
        )
        self.breaker = CircuitBreaker(
            settings,
            rates=self.rates,
            cluster=cluster,
            report=self.pauses.report,
            wake_up=self.pauses.wake_up,
            clock=clock,
            chance=chance,
        )
        self.capacity = Capacity(settings, changed=self.changed, clock=clock)

    def account(self, sender: object, *, now: Callable[[], float] = time.time) -> Account:
        """Make an account. `sender` may be a stand-in."""
        return Account(
            self._settings,
            sender=cast("Sender", sender),
            breaker=self.breaker,
            capacity=self.capacity,
            pauses=self.pauses,
            metrics=self._metrics,
            now=now,
        )


def open_breaker(breaker: CircuitBreaker, reason: PauseReason) -> None:
    """Open a breaker, as if another worker had reported the reason."""
    breaker.peer_opened(reason, breaker.state.counted_since)
