"""A pause in which nothing is tried, not even with one message: something else has to end it."""

import asyncio
from collections.abc import Callable

from bridge.logs import Log
from bridge.outbound.fates import PauseReason
from bridge.outbound.metrics import WorkerMetrics

log = Log(__name__)


class Halt:
    """Begins and ends for one reason, as often as it has to; `notify` is called at each change."""

    def __init__(
        self, reason: PauseReason, metrics: WorkerMetrics, *, notify: Callable[[], object]
    ) -> None:
        self._reason = reason
        self._metrics = metrics
        self._notify = notify
        self._over = asyncio.Event()
        self._over.set()
        # Whether it has begun and not ended; asked for each message.
        self.is_on = False

    async def over(self) -> None:
        """Wait for its end."""
        await self._over.wait()

    def begin(self) -> None:
        """Begin, unless it has begun."""
        if not self.is_on:
            self.is_on = True
            self._over.clear()
            self._metrics.paused.labels(self._reason).set(1)
            self._metrics.pauses.labels(self._reason).inc()
            log.warning("paused", reason=self._reason)
            self._notify()

    def end(self) -> None:
        """End, if it has begun."""
        if self.is_on:
            self.is_on = False
            self._over.set()
            self._metrics.paused.labels(self._reason).set(0)
            log.info("resumed", reason=self._reason)
            self._notify()
