"""Report when sending pauses and why: in the metrics, the log and /readyz."""

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
    """The queue in which the broker does not store a copy, and how it refuses."""

    queue: str
    fault: PublishFault


class _Begun(NamedTuple):
    since: float
    status: int | None
    code: str | None
    unstored: Unstored | None


class PauseReport:
    """The current pauses of one worker, at most one per reason. `clock` returns unix seconds."""

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
        """Note the start of a pause, with the API's answer or broker's refusal that caused it."""
        since = self._clock()
        self._on[reason] = _Begun(since, status, code, unstored)
        self._metrics.paused.labels(reason).set(1)
        self._metrics.paused_since.labels(reason).set(since)
        self._metrics.pauses.labels(reason).inc()
        queue, fault = unstored or (None, None)
        log.warning("paused", reason=reason, status=status, code=code, queue=queue, fault=fault)

    def note_unstored(self, unstored: Unstored) -> None:
        """Note the copy that the broker refused last, during a `broker_blocked` pause."""
        begun = self._on["broker_blocked"]
        self._on["broker_blocked"] = begun._replace(unstored=unstored)

    @property
    def unstored(self) -> Unstored | None:
        """The copy that the broker does not store; None if the broker stores all."""
        begun = self._on.get("broker_blocked")
        return None if begun is None else begun.unstored

    def turn(self, reason: PauseReason) -> None:
        """Note that a pause continues for another reason; `begin` follows."""
        del self._on[reason]
        self._metrics.paused.labels(reason).set(0)
        self._metrics.paused_since.labels(reason).set(0)

    def end(self, reason: PauseReason) -> None:
        """Note the end of a pause."""
        self.turn(reason)
        log.info("resumed", reason=reason)

    def facts(self) -> list[dict[str, object]]:
        """Describe each current pause, the oldest first."""
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
