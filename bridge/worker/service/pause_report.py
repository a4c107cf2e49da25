"""The pauses of a worker and their beginnings: for the metrics, the log and /readyz."""

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


class PauseReport:
    """The pauses of one worker, at most one for each reason. `clock` returns unix seconds."""

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
        """Note the beginning of a pause: the API's answer, or the broker's refusal."""
        since = self._clock()
        self._on[reason] = _Begun(since, status, code, unstored)
        self._metrics.paused.labels(reason).set(1)
        self._metrics.paused_since.labels(reason).set(since)
        self._metrics.pauses.labels(reason).inc()
        queue, fault = unstored or (None, None)
        log.warning("paused", reason=reason, status=status, code=code, queue=queue, fault=fault)

    def note_unstored(self, unstored: Unstored) -> None:
        """Note the copy that the broker refused last, in the pause for that."""
        begun = self._on["broker_blocked"]
        self._on["broker_blocked"] = begun._replace(unstored=unstored)

    @property
    def unstored(self) -> Unstored | None:
        """What the broker does not store, in the pause for that."""
        begun = self._on.get("broker_blocked")
        return None if begun is None else begun.unstored

    def turn(self, reason: PauseReason) -> None:
        """Note that a pause goes on for another reason, which begins next."""
        del self._on[reason]
        self._metrics.paused.labels(reason).set(0)
        self._metrics.paused_since.labels(reason).set(0)

    def end(self, reason: PauseReason) -> None:
        """Note the end of a pause."""
        self.turn(reason)
        log.info("resumed", reason=reason)

    def facts(self) -> list[dict[str, object]]:
        """Describe each pause that is on, the oldest first."""
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
