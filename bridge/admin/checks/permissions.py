"""Whether the user may do on the broker what the roles do.

Each is tried with a request that RabbitMQ refuses in any case, but only after it has checked the
permission. So nothing is consumed, published or created, and the kind of the refusal tells.
"""

from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NamedTuple

from bridge.admin.checks.set_up import WAIT_SECONDS, ConnectedBroker, SetUp
from bridge.admin.finding import Finding
from bridge.amqp.channels import RPC_TIMEOUT_SECONDS, close_channel, open_channel
from bridge.amqp.client import Channel, ChannelAccessRefused, ChannelClosed, Connection
from bridge.amqp.connecting import close_quietly, host_of, open_connection
from bridge.amqp.properties import ClientProperties
from bridge.deadline import Deadline
from bridge.topology.declarations import (
    Binding,
    Exchange,
    Queue,
    name_of,
    workers_exchange,
)
from bridge.topology.paused_queue import paused_queue


class Need(NamedTuple):
    """A permission by what it allows, and a request that needs it.

    `without_it`: what that costs where the roles work without it, and `instead` how to do without.
    """

    what: str
    attempt: Callable[[Channel], Awaitable[object]]
    without_it: str | None = None
    instead: str | None = None


async def check_permissions(broker: ConnectedBroker) -> list[Finding]:
    """Try what the roles do, in a way that is refused in any case.

    On a connection of its own: one that publishes is not read any more during an alarm.
    """
    connection = await open_connection(
        broker.set_up.settings.rabbitmq, broker.url, name="check permissions"
    )
    try:
        async with Deadline(WAIT_SECONDS):
            return await _try_all(connection, list(_needs(broker.set_up)))
    except TimeoutError:
        if not connection.wire.is_blocked:
            raise
        return [
            Finding(
                f"broker {host_of(broker.url)}",
                "fail",
                "takes no messages (a memory or disk alarm); permissions were not tried",
                "look at `rabbitmq-diagnostics check_local_alarms`, and run this again after it",
            )
        ]
    finally:
        await close_quietly(connection)


async def _try_all(connection: Connection, needs: list[Need]) -> list[Finding]:
    refused = [need for need in needs if not await _is_permitted(connection, need)]
    if not refused:
        return [Finding("permissions", "ok", f"all {len(needs)} that are needed")]
    return [_refusal(need) for need in refused]


def _refusal(need: Need) -> Finding:
    text, remedy = f"the user may not {need.what}", "grant it with rabbitmqctl set_permissions"
    if need.instead is not None:
        remedy += f", or {need.instead}"
    if need.without_it is not None:
        return Finding("permissions", "warn", f"{text}: {need.without_it}", remedy)
    if need.what.startswith("configure"):
        remedy += ", or set rabbitmq.topology to verify"
    return Finding("permissions", "fail", text, remedy)


async def _is_permitted(connection: Connection, need: Need) -> bool:
    channel = await open_channel(connection)
    try:
        async with Deadline(RPC_TIMEOUT_SECONDS):
            await need.attempt(channel)
            await close_channel(channel)
    except ChannelAccessRefused:
        return False
    except ChannelClosed:
        # Refused for the deliberate fault, or because the entity is missing, which another check
        # reports.
        return True
    return True


def _needs(set_up: SetUp) -> Iterator[Need]:
    settings = set_up.settings
    if "worker" in set_up.roles:
        yield _to_read(settings.worker.queue)
        yield Need("write amq.default", lambda channel: _publish(channel, ""))
        if settings.worker.coordination == "on":
            yield from _to_talk(settings.worker.queue)
        yield from _to_be_paused(settings.worker.queue)
    for exchange in set_up.topology.exchanges:
        yield _to_write(exchange.name)
    if settings.rabbitmq.topology == "declare":
        yield from map(_to_configure, set_up.topology.declarable)
        yield from map(_to_bind, set_up.topology.bindings)


def _to_talk(queue: str) -> Iterator[Need]:
    exchange = workers_exchange(queue)
    own = f"{exchange}.check"
    for need in (
        _to_configure(Exchange(exchange)),
        _to_configure(Queue(own)),
        _to_write(exchange),
        _to_bind(Binding(exchange, own)),
        _to_read(own),
    ):
        yield need._replace(
            without_it="each worker stands alone", instead="set worker.coordination to off"
        )


def _to_be_paused(queue: str) -> Iterator[Need]:
    mark = paused_queue(queue)
    yield _to_configure(Queue(mark))._replace(
        without_it="`sms-bridge pause` and `resume` need a user that may"
    )
    yield _to_read(mark)._replace(without_it="nobody is told what an operator's pause is for")


def _to_read(queue: str) -> Need:
    return Need(f"read {queue}", lambda channel: _consume(channel, queue))


def _to_write(exchange: str) -> Need:
    return Need(f"write {exchange}", lambda channel: _publish(channel, exchange))


def _to_configure(entity: Queue | Exchange) -> Need:
    return Need(f"configure {name_of(entity)}", lambda channel: _declare(channel, entity))


def _to_bind(binding: Binding) -> Need:
    # To unbind what is not bound does nothing, and needs the permissions of binding.
    return Need(
        f"write queue {binding.queue} and read exchange {binding.exchange}",
        lambda channel: channel.queue_unbind(binding.queue, binding.exchange, "sms-bridge-check"),
    )


async def _consume(channel: Channel, queue: str) -> None:
    async def ignore(_message: object) -> None: ...

    await channel.basic_consume(queue, ignore, arguments={"x-priority": "no number"})


async def _publish(channel: Channel, exchange: str) -> None:
    # Both properties are wrong, and RabbitMQ checks neither before the permission.
    wrong = ClientProperties(user_id="sms-bridge-check", expiration="no number")
    await channel.basic_publish(
        b"", exchange=exchange, routing_key="sms-bridge-check", properties=wrong, mandatory=True
    )
    # The refusal of a publish comes by itself, at the latest before the answer to this.
    await channel.basic_qos(prefetch_count=1)


async def _declare(channel: Channel, entity: Queue | Exchange) -> None:
    if isinstance(entity, Queue):
        arguments = entity.arguments | {"x-message-ttl": "no number"}
        await channel.queue_declare(entity.name, durable=True, arguments=arguments)
    else:
        wrong: dict[str, Any] = {"alternate-exchange": 1}
        await channel.exchange_declare(
            entity.name, exchange_type="topic", durable=True, arguments=wrong
        )
