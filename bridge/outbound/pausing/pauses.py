"""Which pauses of a worker are on, and since when: for the metrics, the log and /readyz."""

import time
from collections.abc import Callable
from typing import NamedTuple

from bridge.log_lines import utc_text
from bridge.logs import Log
from bridge.outbound.fates import PauseReason
from bridge.outbound.metrics import WorkerMetrics

log = Log(__name__)


class _Begun(NamedTuple):
    since: float
    status: int | None
    code: str | None


class Pauses:
    """One worker's; at most one of each reason is on. `clock` tells unix seconds."""

    def __init__(self, metrics: WorkerMetrics, *, clock: Callable[[], float] = time.time) -> None:
        self._metrics = metrics
        self._clock = clock
        self._on: dict[PauseReason, _Begun] = {}

    def begin(
        self, reason: PauseReason, *, status: int | None = None, code: str | None = None
    ) -> None:
        """Note that one begins; `status` and `code` are what the API answered."""
        begun = _Begun(self._clock(), status, code)
        self._on[reason] = begun
        self._metrics.paused.labels(reason).set(1)
        self._metrics.paused_since.labels(reason).set(begun.since)
        self._metrics.pauses.labels(reason).inc()
        log.warning("paused", reason=reason, status=status, code=code)

    def turn(self, reason: PauseReason) -> None:
        """Note that one goes on for another reason, which begins next."""
        del self._on[reason]
        self._metrics.paused.labels(reason).set(0)
        self._metrics.paused_since.labels(reason).set(0)

    def end(self, reason: PauseReason) -> None:
        """Note that one is over."""
        self.turn(reason)
        log.info("resumed", reason=reason)

    def facts(self) -> list[dict[str, object]]:
        """Tell each pause that is on, the oldest first."""
        return [
            {
                "reason": reason,
                "since": utc_text(begun.since),
                "status": begun.status,
                "code": begun.code,
            }
            for reason, begun in self._on.items()
        ]
