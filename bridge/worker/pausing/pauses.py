"""Which pauses of a worker are on, and since when: for the metrics, the log and /readyz."""

import time
from collections.abc import Callable
from typing import NamedTuple

from bridge.errors import PublishFault
from bridge.telemetry.log_format import utc_text
from bridge.telemetry.logs import Log
from bridge.worker.fates import PauseReason
from bridge.worker.metrics import WorkerMetrics

log = Log(__name__)


class Unstored(NamedTuple):
    """The queue for which the broker does not store a copy, and how it refuses."""

    queue: str
    fault: PublishFault


class _Begun(NamedTuple):
    since: float
    status: int | None
    code: str | None
    unstored: Unstored | None


class Pauses:
    """One worker's; at most one of each reason is on. `clock` tells unix seconds."""

    def __init__(self, metrics: WorkerMetrics, *, clock: Callable[[], float] = time.time) -> None:
        self._metrics = metrics
        self._clock = clock
        self._on: dict[PauseReason, _Begun] = {}

    def begin(
        self,
        reason: PauseReason,
        *,
        status: int | None = None,
        code: str | None = None,
        unstored: Unstored | None = None,
    ) -> None:
        """Note that one begins.

        `status` and `code` are what the API answered, `unstored` what the broker does not store.
        """
        begun = _Begun(self._clock(), status, code, unstored)
        self._on[reason] = begun
        self._metrics.paused.labels(reason).set(1)
        self._metrics.paused_since.labels(reason).set(begun.since)
        self._metrics.pauses.labels(reason).inc()
        queue, fault = unstored or (None, None)
        log.warning("paused", reason=reason, status=status, code=code, queue=queue, fault=fault)

    def note_unstored(self, reason: PauseReason, unstored: Unstored) -> None:
        """Note what the broker does not store by now, in a pause that is on."""
        self._on[reason] = self._on[reason]._replace(unstored=unstored)

    @property
    def unstored(self) -> Unstored | None:
        """What the broker does not store, in the pause for that."""
        begun = self._on.get("broker_blocked")
        return None if begun is None else begun.unstored

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
                "queue": None if begun.unstored is None else begun.unstored.queue,
                "fault": None if begun.unstored is None else begun.unstored.fault,
            }
            for reason, begun in self._on.items()
        ]
