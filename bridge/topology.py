"""The queues, exchanges and bindings as data; how they are declared or verified.

A retry queue is a quorum queue whose messages expire and go back to the main queue with
`at-least-once` dead-lettering, which needs `reject-publish`. Every other combination loses all
waiting messages when the broker restarts after their time is up (RabbitMQ docs, "Dead Letter
Exchanges", section "Safety").
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import aio_pika
import aiormq

from bridge.broker import RPC_TIMEOUT_SECONDS, close_channel, open_channel
from bridge.config import Role, Settings, WebhookSettings, WorkerSettings, format_duration
from bridge.errors import BrokerError
from bridge.logs import Log

log = Log(__name__)

QUORUM: Final = {"x-queue-type": "quorum"}


@dataclass(frozen=True, slots=True)
class Queue:
    """A durable quorum queue."""

    name: str
    arguments: dict[str, Any] = field(default_factory=lambda: dict(QUORUM))


@dataclass(frozen=True, slots=True)
class Exchange:
    """A durable topic exchange."""

    name: str


@dataclass(frozen=True, slots=True)
class Binding:
    """What of an exchange goes to a queue."""

    exchange: str
    queue: str
    routing_key: str = "#"


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


def dead_queue(queue: str) -> str:
    """Name the dead-letter queue: `sms.outbound.dead`."""
    return f"{queue}.dead"


def worker_topology(settings: WorkerSettings) -> Topology:
    """List what the worker needs: its queue, the retry ladder, the dead letters."""
    ladder = (
        Queue(
            retry_queue(settings.queue, delay),
            QUORUM
            | {
                "x-message-ttl": round(delay * 1000),
                "x-dead-letter-exchange": "",
                "x-dead-letter-routing-key": settings.queue,
                "x-dead-letter-strategy": "at-least-once",
                "x-overflow": "reject-publish",
            },
        )
        for delay in settings.retry_delays
    )
    outcome = settings.outcome_exchange
    return Topology(
        queues=(Queue(settings.queue), *ladder, Queue(dead_queue(settings.queue))),
        exchanges=() if outcome is None else (Exchange(outcome),),
    )


def webhook_topology(settings: WebhookSettings) -> Topology:
    """List what the webhook receiver needs: the exchange, and a queue so that nothing is lost."""
    exchange = Exchange(settings.exchange)
    if settings.queue is None:
        return Topology(exchanges=(exchange,))
    return Topology(
        queues=(Queue(settings.queue),),
        exchanges=(exchange,),
        bindings=(Binding(settings.exchange, settings.queue),),
    )


def bridge_topology(settings: Settings, roles: Iterable[Role]) -> Topology:
    """List what these roles need together."""
    parts = {
        "worker": lambda: worker_topology(settings.worker),
        "webhook": lambda: webhook_topology(settings.webhook),
    }
    needed = [parts[role]() for role in roles]
    return Topology(
        queues=tuple(queue for part in needed for queue in part.queues),
        exchanges=tuple(exchange for part in needed for exchange in part.exchanges),
        bindings=tuple(binding for part in needed for binding in part.bindings),
    )


async def ensure(
    connection: aio_pika.Connection,
    topology: Topology,
    mode: Literal["declare", "verify", "off"],
) -> None:
    """Declare, verify or leave alone; on channels of its own, because a refusal closes one.

    Raises BrokerError that names the entity, what the broker said, and the remedy.
    """
    if mode == "declare":
        for entity in topology.declarable:
            await _declare(connection, entity, passive=False)
        for binding in topology.bindings:
            await _bind(connection, binding)
    elif mode == "verify":
        async for difference in compare(connection, topology):
            if difference.kind != "not_compared":
                raise BrokerError(difference.why)
            name = name_of(difference.entity)
            log.warning("topology_not_compared", entity=name, why=difference.why)


@dataclass(frozen=True, slots=True)
class Difference:
    """Where the broker is not as it should be; `why` names the entity and the remedy."""

    entity: Queue | Exchange | Binding
    kind: Literal["missing", "different", "not_compared"]
    why: str


async def compare(
    connection: aio_pika.Connection, topology: Topology
) -> AsyncGenerator[Difference, None]:
    """Yield each queue and exchange that is missing, or differs from what is needed.

    Nothing is created: a passive declare shows that something of the name exists, and only then
    it is declared with equal arguments, so that the broker itself names the difference. Bindings
    cannot be seen over AMQP.
    """
    for entity in topology.declarable:
        try:
            await _declare(connection, entity, passive=True)
        except BrokerError as error:
            missing = isinstance(error.__cause__, aiormq.exceptions.ChannelNotFoundEntity)
            yield Difference(entity, "missing" if missing else "different", str(error))
            continue
        try:
            await _declare(connection, entity, passive=False)
        except BrokerError as error:
            refused = isinstance(error.__cause__, aiormq.exceptions.ChannelAccessRefused)
            yield Difference(entity, "not_compared" if refused else "different", str(error))


async def _declare(
    connection: aio_pika.Connection, entity: Queue | Exchange, *, passive: bool
) -> None:
    channel = await open_channel(connection)
    try:
        async with asyncio.timeout(RPC_TIMEOUT_SECONDS):
            if isinstance(entity, Queue):
                await channel.queue_declare(
                    entity.name, durable=True, passive=passive, arguments=entity.arguments
                )
            else:
                await channel.exchange_declare(
                    entity.name, exchange_type="topic", durable=True, passive=passive
                )
            await close_channel(channel)
    except aiormq.exceptions.ChannelClosed as error:
        raise BrokerError(_explain(entity, error)) from error


async def _bind(connection: aio_pika.Connection, binding: Binding) -> None:
    channel = await open_channel(connection)
    try:
        async with asyncio.timeout(RPC_TIMEOUT_SECONDS):
            await channel.queue_bind(binding.queue, binding.exchange, binding.routing_key)
            await close_channel(channel)
    except aiormq.exceptions.ChannelClosed as error:
        raise BrokerError(_explain(binding, error)) from error


def name_of(entity: Queue | Exchange | Binding) -> str:
    """Write which entity is meant: `queue sms.outbound`."""
    name = f"{entity.exchange} -> {entity.queue}" if isinstance(entity, Binding) else entity.name
    return f"{type(entity).__name__.lower()} {name}"


def _explain(entity: Queue | Exchange | Binding, error: aiormq.exceptions.ChannelClosed) -> str:
    said = error.args[-1] if error.args else type(error).__name__
    match error:
        case aiormq.exceptions.ChannelNotFoundEntity():
            remedy = "create it, or set rabbitmq.topology to declare"
        case aiormq.exceptions.ChannelPreconditionFailed():
            remedy = "delete and re-create it with the arguments named, once it is empty"
        case aiormq.exceptions.ChannelAccessRefused():
            remedy = "grant the permission, or set rabbitmq.topology to verify or off"
        case _:
            remedy = "see the broker's log"
    return f"{name_of(entity)}: {said}; {remedy}"


@dataclass(frozen=True, slots=True)
class QueueSizes:
    """What a passive declare tells: messages ready, consumers, and whether it is there at all."""

    ready: int
    consumers: int
    exists: bool = True


async def read_queue(connection: aio_pika.Connection, name: str) -> QueueSizes | None:
    """Read a queue's sizes, or None when they cannot be had now.

    A queue that does not exist holds nothing: its last size must not be shown for ever.
    """
    try:
        async with asyncio.timeout(RPC_TIMEOUT_SECONDS):
            channel = await open_channel(connection)
            answer = await channel.queue_declare(name, passive=True)
            await close_channel(channel)
    except aiormq.exceptions.ChannelNotFoundEntity:
        return QueueSizes(ready=0, consumers=0, exists=False)
    except (aiormq.exceptions.ChannelClosed, TimeoutError):
        return None
    return QueueSizes(answer.message_count or 0, answer.consumer_count or 0)
