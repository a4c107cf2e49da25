"""Why a worker sends nothing: its own pauses, and the report of all pauses.

A worker pauses while an operator wants it to, while the broker stores no copies (no outcome could
be recorded), and while it drains. A pause for a fault of the SMS service is the circuit breaker's.
"""

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple

from bridge.config import WorkerSettings
from bridge.deadline import wait_at_most
from bridge.errors import BrokerError, PublishFault
from bridge.telemetry.log_format import utc_text
from bridge.telemetry.logs import Log
from bridge.worker.delivery import Delivery
from bridge.worker.fates import PauseReason
from bridge.worker.metrics import WorkerMetrics
from bridge.worker.outcomes import Retried

log = Log(__name__)


class WakeUp:
    """Wakes the consumer and the waiting messages, to check again what is allowed.

    `consumer` is set when the prefetch should change; the consumer clears it.
    """

    def __init__(self) -> None:
        self.consumer = asyncio.Event()
        self._messages = asyncio.Event()

    def all(self) -> None:
        self.consumer.set()
        self.messages()

    def messages(self) -> None:
        self._messages.set()
        self._messages = asyncio.Event()

    async def wait(self, most_seconds: float | None = None) -> None:
        """Return when the messages are woken, or after `most_seconds`."""
        await wait_at_most(most_seconds, self._messages)


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
    """The current pauses of one worker, at most one per reason: in the metrics, the log, /readyz.

    `clock` returns unix seconds.
    """

    def __init__(self, metrics: WorkerMetrics, *, clock: Callable[[], float]) -> None:
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


class WorkerPauses:
    """The worker's own reasons not to send a message, whatever its SMS service says.

    `is_on` tells whether there is one. `clock` returns unix seconds.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        metrics: WorkerMetrics,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.report = PauseReport(metrics, clock=clock)
        self.wake_up = WakeUp()
        self._put_off_seconds = settings.retry_delays[0]
        self.is_on = False
        self.by_operator = False
        self.is_broker_blocked = False
        self.is_draining = False

    @property
    def reason(self) -> PauseReason | None:
        """Why the worker is paused; None while it is not, or only drains."""
        if self.by_operator:
            return "operator"
        return "broker_blocked" if self.is_broker_blocked else None

    async def wait(self, delivery: Delivery) -> Retried | None:
        """Wait until the broker stores copies again; return None if the message may go on.

        During an operator's pause, which may be long, the message moves to a retry queue. Raises
        BrokerError if it returns to the queue.
        """
        while True:
            if self.is_draining or delivery.session.is_leaving:
                raise BrokerError("waiting deliveries go back to the queue")
            if self.by_operator:
                detail = "the worker is paused: operator"
                return Retried("paused", self._put_off_seconds, detail)
            if not self.is_broker_blocked:
                return None
            with delivery.waits("broker"):
                await self.wake_up.wait()

    def drain(self) -> None:
        """Start no further request: messages that are not in flight return to the queue."""
        self.is_draining = True
        self._changed()

    def operator_paused(self) -> None:
        """Stop consuming and sending until `operator_resumed`; not even a probe is sent."""
        if not self.by_operator:
            self.by_operator = True
            self.report.begin("operator")
            self._changed()

    def operator_resumed(self) -> None:
        """Resume: the operator has ended the pause."""
        if self.by_operator:
            self.by_operator = False
            self.report.end("operator")
            self._changed()

    def block(self, queue: str, fault: PublishFault) -> None:
        """Stop consuming and sending until `unblock`: the broker does not store a copy."""
        unstored = Unstored(queue, fault)
        if self.is_broker_blocked:
            self.report.note_unstored(unstored)
        else:
            self.is_broker_blocked = True
            self.report.begin("broker_blocked", unstored=unstored)
            self._changed()

    def unblock(self) -> None:
        """Resume: the broker has stored the copy."""
        if self.is_broker_blocked:
            self.is_broker_blocked = False
            self.report.end("broker_blocked")
            self._changed()

    def _changed(self) -> None:
        self.is_on = self.by_operator or self.is_broker_blocked or self.is_draining
        self.wake_up.all()
