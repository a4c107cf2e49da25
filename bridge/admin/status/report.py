"""What `sms-bridge status` tells, as data: the members here are those of its `--json`.

None stands for what is not known. Moments are UTC, like `2030-01-31T03:12:00Z`. Rates are those
between two readings. No part of it can hold a number, a text or a secret.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

QueueRole = Literal["requests", "retry", "dead_letters", "events"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Broker:
    """`fault` says why it does not answer. An alarm of the broker has it store nothing.

    `refused` are the queues of which it tells nothing, since the user has no permission on them.
    """

    fault: str | None
    stores: bool | None
    refused: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """`ready` is how many messages wait in it. `delay_seconds` is how long, on the retry ladder."""

    name: str
    role: QueueRole
    delay_seconds: float | None = None
    exists: bool | None = None
    ready: int | None = None
    consumers: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorPause:
    """Of every worker. `reason` is what was given with `sms-bridge pause`."""

    since: str | None
    reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """Of one worker. `status` and `code` are what the service answered when it began.

    `queue` and `fault` are of what RabbitMQ does not store.
    """

    reason: str
    since: str | None
    status: int | None
    code: str | None
    queue: str | None = None
    fault: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Deliveries a second, by what became of them."""

    sent_per_second: float
    retried_per_second: float
    dead_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One worker. It counts from its start.

    `stored` are its copies on the retry ladder, `returned` those that came back to it.

    `held` are the deliveries that it has taken and not settled, `in_flight` the requests that wait
    for the service's answer, and `oldest_seconds` is how long ago the oldest held one was
    published. `outage_suspected`: so many requests have failed in a row that messages that have
    failed are held back; not known of an earlier version. `retry_after_seconds` is for how much
    longer the service wants no request.
    """

    queue: str
    pauses: Sequence[Pause]
    outage_suspected: bool | None
    retry_after_seconds: float
    is_consuming: bool
    held: int
    in_flight: int
    oldest_seconds: float | None
    last_sent_at: str | None
    rates: Rates | None
    sent: int
    stored: int = 0
    returned: int = 0
    retried: Mapping[str, int]
    dead: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Receiver:
    """One webhook receiver. It counts from its start, webhooks by what became of them."""

    last_event_at: str | None
    published_per_second: float | None
    refused_per_second: float | None
    failed_per_second: float | None
    events: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """Who answers on an admin port; `fault` says why nobody does, and all else is unknown then.

    `name` is what was asked for, `address` an address that it stands for. `failing` are the checks
    of /readyz that fail.
    """

    name: str
    address: str
    fault: str | None
    version: str | None = None
    failing: Sequence[str] = ()
    is_connected: bool | None = None
    worker: Worker | None = None
    webhook: Receiver | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetters:
    """How many wait, and by reason how many the workers have made since they started."""

    waiting: int | None
    by_reason: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """Retries that the workers which answer have stored on the ladder, and that came back to them.

    The difference, `not_back`, waits there, in the queue of requests, or outside it where that
    refuses what comes when it is full. A worker that has ended is not counted.
    """

    stored: int
    returned: int
    not_back: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """All of it.

    `queues_from` is the broker, or the workers where it does not answer: what they read last, at
    `queues_at`. `rates` and `dead_letters` add up the workers that answer, and `oldest_seconds` is
    of the oldest message that any of them holds.
    """

    at: str
    broker: Broker
    queues: Sequence[Queue]
    queues_from: Literal["broker", "workers"] | None
    queues_at: str | None
    is_paused_by_operator: bool | None
    paused_by_operator: OperatorPause | None
    oldest_seconds: float | None
    rates: Rates | None
    dead_letters: DeadLetters
    ladder: Ladder | None = None
    processes: Sequence[Process]

    @property
    def workers(self) -> list[tuple[Process, Worker]]:
        """The workers that answer."""
        return [(one, one.worker) for one in self.processes if one.worker is not None]

    @property
    def receivers(self) -> list[tuple[Process, Receiver]]:
        """The webhook receivers that answer."""
        return [(one, one.webhook) for one in self.processes if one.webhook is not None]
