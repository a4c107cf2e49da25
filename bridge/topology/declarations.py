"""The queues, exchanges and bindings that the bridge needs, as data, and their names.

A retry queue is a quorum queue whose messages expire and return to the main queue with
`at-least-once` dead-lettering, which requires `reject-publish`. Any other combination loses all
waiting messages if the broker restarts after they have expired (RabbitMQ docs, "Dead Letter
Exchanges", section "Safety").
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from bridge.config import Role, Settings, WebhookSettings, WorkerSettings
from bridge.config.fields import format_duration

QUORUM: Final[dict[str, Any]] = {"x-queue-type": "quorum"}

# Other programs that may have declared a queue with other arguments: none (`own`), publishers
# (`consumed`), or subscribers (`subscribed`).
Use = Literal["own", "consumed", "subscribed"]


@dataclass(frozen=True, slots=True)
class Queue:
    """A durable quorum queue; with other arguments, one of the bridge's own would lose messages."""

    name: str
    arguments: dict[str, Any] = field(default_factory=lambda: dict(QUORUM))
    use: Use = "own"
    # The setting that removes the need for the queue if it is null.
    switch: str | None = None


@dataclass(frozen=True, slots=True)
class Exchange:
    """A durable topic exchange."""

    name: str


@dataclass(frozen=True, slots=True)
class Binding:
    """A binding, by which messages of an exchange are routed to a queue."""

    exchange: str
    queue: str
    routing_key: str = "#"


Entity = Queue | Exchange | Binding


@dataclass(frozen=True, slots=True)
class Topology:
    """The queues, exchanges and bindings that a role needs."""

    queues: tuple[Queue, ...] = ()
    exchanges: tuple[Exchange, ...] = ()
    bindings: tuple[Binding, ...] = ()

    @property
    def declarable(self) -> tuple[Queue | Exchange, ...]:
        """Its exchanges and queues, in the order in which they are declared."""
        return (*self.exchanges, *self.queues)


def retry_queue(queue: str, delay_seconds: float) -> str:
    """Name the retry queue of a delay: `sms.outbound.retry.5s`."""
    return f"{queue}.retry.{format_duration(delay_seconds)}"


def request_queues(settings: WorkerSettings) -> tuple[str, ...]:
    """Name the queues that the worker consumes: the main queue and the urgent one, if any."""
    urgent = settings.urgent_queue
    return (settings.queue,) if urgent is None else (settings.queue, urgent)


def retry_queues(settings: WorkerSettings) -> dict[str, str]:
    """Map each retry queue to the queue to which its messages return."""
    return {
        retry_queue(queue, delay): queue
        for queue in request_queues(settings)
        for delay in settings.retry_delays
    }


def dead_queue(queue: str) -> str:
    """Name the dead-letter queue: `sms.outbound.dead`."""
    return f"{queue}.dead"


def workers_exchange(queue: str) -> str:
    """Name the exchange for control messages between a queue's workers: `sms.outbound.workers`.

    It is not part of the topology: it ends with the last worker, and workers can run without it.
    """
    return f"{queue}.workers"


def active_queue(queue: str) -> str:
    """Name the exclusive queue that makes a worker the active one: `sms.outbound.active`.

    It is not part of the topology: it ends with the connection of the active worker.
    """
    return f"{queue}.active"


def worker_topology(settings: WorkerSettings) -> Topology:
    """Return the topology of the worker: request queues, retry queues, dead letters."""
    ladder = (
        Queue(
            retry_queue(queue, delay),
            QUORUM
            | {
                "x-message-ttl": round(delay * 1000),
                "x-dead-letter-exchange": "",
                "x-dead-letter-routing-key": queue,
                "x-dead-letter-strategy": "at-least-once",
                "x-overflow": "reject-publish",
            },
            switch=_switch(settings, queue),
        )
        for queue in request_queues(settings)
        for delay in settings.retry_delays
    )
    outcome = settings.outcome_exchange
    return Topology(
        queues=(
            *(
                Queue(queue, use="consumed", switch=_switch(settings, queue))
                for queue in request_queues(settings)
            ),
            *ladder,
            Queue(dead_queue(settings.queue)),
        ),
        exchanges=() if outcome is None else (Exchange(outcome),),
    )


def _switch(settings: WorkerSettings, queue: str) -> str | None:
    return "worker.urgent_queue" if queue == settings.urgent_queue else None


def webhook_topology(settings: WebhookSettings, *, receipt_exchange: str | None = None) -> Topology:
    """Return the topology of the webhook receiver: the exchange, and a queue that stores events.

    `receipt_exchange` is the exchange for the outcomes in delivery receipts, if it is configured.
    """
    names = (settings.exchange, receipt_exchange)
    exchanges = tuple(Exchange(name) for name in names if name is not None)
    if settings.queue is None:
        return Topology(exchanges=exchanges)
    return Topology(
        queues=(Queue(settings.queue, use="subscribed"),),
        exchanges=exchanges,
        bindings=(Binding(settings.exchange, settings.queue),),
    )


def bridge_topology(settings: Settings, roles: Iterable[Role]) -> Topology:
    parts = {
        "worker": lambda: worker_topology(settings.worker),
        "webhook": lambda: webhook_topology(
            settings.webhook, receipt_exchange=settings.receipt_exchange
        ),
    }
    needed = [parts[role]() for role in roles]
    return Topology(
        queues=tuple(queue for part in needed for queue in part.queues),
        # Both roles publish to the exchange of outcome events.
        exchanges=tuple(dict.fromkeys(exchange for part in needed for exchange in part.exchanges)),
        bindings=tuple(binding for part in needed for binding in part.bindings),
    )


def name_of(entity: Entity) -> str:
    """Return an entity's kind and name: `queue sms.outbound`."""
    name = f"{entity.exchange} -> {entity.queue}" if isinstance(entity, Binding) else entity.name
    return f"{type(entity).__name__.lower()} {name}"
