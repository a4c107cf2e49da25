"""The result of `sms-bridge status`: these models are the members of its `--json`.

None means unknown. Times are UTC, like `2030-01-31T03:12:00Z`. Rates are those between two
readings. No part can hold a phone number, a text or a secret.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import BaseModel

from bridge.admin.admin_port import PauseFacts

QueueRole = Literal["requests", "retry", "dead_letters", "events"]


class BrokerReport(BaseModel, frozen=True):
    """`fault`: why the broker does not answer. `stores` is False in an alarm of memory or disk.

    `refused` are the queues on which the user has no permission, so that nothing is known of them.
    """

    fault: str | None
    stores: bool | None
    refused: Sequence[str] = ()


class QueueReport(BaseModel, frozen=True):
    """`ready` messages wait in the queue. `delay_seconds` is the delay of a retry queue."""

    name: str
    role: QueueRole
    delay_seconds: float | None = None
    exists: bool | None = None
    ready: int | None = None
    consumers: int | None = None


class OperatorPauseReport(BaseModel, frozen=True):
    """The pause of every worker; `reason` was given with `sms-bridge pause`."""

    since: str | None
    reason: str | None


class RatesReport(BaseModel, frozen=True):
    """Deliveries per second, by outcome."""

    sent_per_second: float
    retried_per_second: float
    dead_per_second: float


class WorkerReport(BaseModel, frozen=True):
    """One worker, with counts since its start.

    `held` deliveries are taken and not settled, `in_flight` requests wait for the service's answer,
    and the oldest held message was published `oldest_seconds` ago. `outage_suspected`: requests
    fail in a row, so that messages that have failed are held back; None of an earlier version. The
    service wants no request for `retry_after_seconds` more. `stored` copies went to the retry
    queues, and `returned` came back to this worker. `is_standby`: another worker is the active one;
    None where all are active.
    """

    queue: str
    pauses: Sequence[PauseFacts]
    outage_suspected: bool | None
    retry_after_seconds: float
    is_consuming: bool
    is_standby: bool | None = None
    held: int
    in_flight: int
    oldest_seconds: float | None
    last_sent_at: str | None
    rates: RatesReport | None
    sent: int
    stored: int = 0
    returned: int = 0
    retried: Mapping[str, int]
    dead: Mapping[str, int]


class ReceiverReport(BaseModel, frozen=True):
    """One webhook receiver, with its webhooks since its start by outcome."""

    last_event_at: str | None
    published_per_second: float | None
    refused_per_second: float | None
    failed_per_second: float | None
    events: Mapping[str, int]


class ProcessReport(BaseModel, frozen=True):
    """One admin port; `fault` says why no role answers there, and all else is unknown then.

    `name` was asked for and stands for `address`. `failing` are the failing checks of /readyz.
    """

    name: str
    address: str
    fault: str | None
    version: str | None = None
    failing: Sequence[str] = ()
    is_connected: bool | None = None
    worker: WorkerReport | None = None
    webhook: ReceiverReport | None = None


class DeadLettersReport(BaseModel, frozen=True):
    """The dead letters that wait, and those that the workers have made since they started."""

    waiting: int | None
    by_reason: Mapping[str, int]


class LadderReport(BaseModel, frozen=True):
    """Retries that the workers which answer have stored, and that came back to them.

    The difference, `not_back`, waits in the retry queues, in the queue of requests, or outside it
    if that queue is full and refuses messages. A worker that has ended is not counted.
    """

    stored: int
    returned: int
    not_back: int


class Status(BaseModel, frozen=True):
    """All of it.

    `queues_from` is the broker, or the workers if the broker does not answer: their last reading,
    at `queues_at`. `rates` and `dead_letters` add up the workers that answer, and `oldest_seconds`
    is the age of the oldest message that any of them holds.
    """

    at: str
    broker: BrokerReport
    queues: Sequence[QueueReport]
    queues_from: Literal["broker", "workers"] | None
    queues_at: str | None
    is_paused_by_operator: bool | None
    paused_by_operator: OperatorPauseReport | None
    oldest_seconds: float | None
    rates: RatesReport | None
    dead_letters: DeadLettersReport
    ladder: LadderReport | None = None
    processes: Sequence[ProcessReport]

    @property
    def workers(self) -> list[tuple[ProcessReport, WorkerReport]]:
        """The workers that answer."""
        return [(one, one.worker) for one in self.processes if one.worker is not None]
