"""The queues, exchanges and bindings that the bridge needs, as data, and their names.

A retry queue is a quorum queue whose messages expire and go back to the main queue with
`at-least-once` dead-lettering, which needs `reject-publish`. Every other combination loses all
waiting messages when the broker restarts after their time is up (RabbitMQ docs, "Dead Letter
Exchanges", section "Safety").
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from bridge.config import Role, Settings, WebhookSettings, WorkerSettings
from bridge.config.fields import format_duration

QUORUM: Final[dict[str, Any]] = {"x-queue-type": "quorum"}

# Who else may have declared a queue, with other arguments: nobody (our own queues), the publishers
# of what we consume, or the subscribers.
Use = Literal["own", "consumed", "subscribed"]


@dataclass(frozen=True, slots=True)
class Queue:
    """A durable quorum queue; with other arguments one of our own would lose messages."""

    name: str
    arguments: dict[str, Any] = field(default_factory=lambda: dict(QUORUM))
    use: Use = "own"
    # The setting whose null does without the queue.
    switch: str | None = None


@dataclass(frozen=True, slots=True)
class Exchange:
    """A durable topic exchange."""

    name: str


@dataclass(frozen=True, slots=True)
class Binding:
    """Which messages of an exchange go to a queue."""

    exchange: str
    queue: str
    routing_key: str = "#"


Entity = Queue | Exchange | Binding


@dataclass(frozen=True, slots=True)
class Topology:
    """All that a role needs on the broker."""

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
    """Name the queues that the worker consumes: the main queue, and the urgent one if there is."""
    urgent = settings.urgent_queue
    return (settings.queue,) if urgent is None else (settings.queue, urgent)


def retry_queues(settings: WorkerSettings) -> dict[str, str]:
    """Map each retry queue to the queue to which its messages go back."""
    return {
        retry_queue(queue, delay): queue
        for queue in request_queues(settings)
        for delay in settings.retry_delays
    }


def dead_queue(queue: str) -> str:
    """Name the dead-letter queue: `sms.outbound.dead`."""
    return f"{queue}.dead"


def workers_exchange(queue: str) -> str:
    """Name the exchange over which a queue's workers talk: `sms.outbound.workers`.

    It is no part of the topology: it ends with the last worker, and none needs it.
    """
    return f"{queue}.workers"


def active_queue(queue: str) -> str:
    """Name the exclusive queue that makes a worker the active one: `sms.outbound.active`.

    It is no part of the topology: it ends with the connection of the worker that has it.
    """
    return f"{queue}.active"


def worker_topology(settings: WorkerSettings) -> Topology:
    """List what the worker needs: its queues, the retry ladder, the dead letters."""
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
    """List what the webhook receiver needs: the exchange, and a queue so that nothing is lost.

    `receipt_exchange` is where it tells what delivery receipts say, if anybody asked.
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
    """List what these roles need together."""
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
