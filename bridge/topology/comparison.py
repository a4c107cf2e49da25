"""Compares queues and exchanges on the broker with the needed ones, as far as AMQP allows.

A passive declare compares no arguments, and a refused declare names only one argument that differs,
with the broker's value. The next declare uses that value, and so on, until the broker accepts one:
then all differences are known.
"""

import re
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Final

from bridge.amqp.channels import RPC_TIMEOUT_SECONDS, close_channel, open_channel
from bridge.amqp.client import (
    Channel,
    ChannelAccessRefused,
    ChannelClosed,
    ChannelLockedResource,
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
    Connection,
)
from bridge.deadline import Deadline
from bridge.topology.declarations import Entity, Exchange, Queue, Topology
from bridge.topology.differences import (
    HIDDEN,
    NOT_COMPARED,
    RECREATE,
    Difference,
    compare_exchange,
    compare_queue,
)
from bridge.topology.queue_facts import ExchangeFacts, QueueFacts

# Limit of declares for one queue or exchange: more than RabbitMQ has arguments to compare.
MAX_DECLARES: Final = 40
_INEQUIVALENT: Final = re.compile(
    r"inequivalent arg '(?P<key>[^']+)' for .*"
    r"current is (?:none|(?:the value )?'(?P<value>.*?)'(?: of type '(?P<type>\w+)')?)$",
    re.DOTALL,
)
_FLAGS: Final = frozenset({"durable", "auto_delete", "internal"})
_NUMBERS: Final = re.compile(r"(un)?signed(byte|short|int)|byte|short|long|timestamp")


async def compare(connection: Connection, topology: Topology) -> AsyncGenerator[Difference, None]:
    """Yield each difference of the queues and exchanges; AMQP does not show bindings.

    Creates nothing: declares only what a passive declare has just found. Raises TimeoutError.
    """
    for entity in topology.declarable:
        for difference in await compare_one(connection, entity):
            yield difference


async def compare_one(connection: Connection, entity: Queue | Exchange) -> list[Difference]:
    """Return the differences of one queue or exchange, as `compare` does."""
    # The arguments that the broker is assumed to have; its refusals correct them.
    found: dict[str, Any] = {"durable": True, "auto_delete": False}
    if isinstance(entity, Queue):
        found |= entity.arguments
    else:
        found |= {"type": "topic", "internal": False}
    for _ in range(MAX_DECLARES):
        try:
            await _declare_existing(connection, entity.name, found, type(entity))
        except ChannelPreconditionFailed as error:
            if not _take_over(broker_text(error), found):
                return [refusal(entity, error)]
        except _HiddenError:
            text = "cannot be checked: the user has no permission on it"
            return [Difference(entity, "hidden", text, HIDDEN)]
        except ChannelAccessRefused as error:
            text = f"exists; its arguments were not compared: {broker_text(error)}"
            return [Difference(entity, "not_compared", text, NOT_COMPARED)]
        except ChannelClosed as error:
            return [refusal(entity, error)]
        else:
            break
    if isinstance(entity, Queue):
        return list(compare_queue(entity, _queue_facts(entity.name, found)))
    return list(compare_exchange(entity, _exchange_facts(found)))


def refusal(entity: Entity, error: ChannelClosed) -> Difference:
    """Turn the broker's refusal of a declare into a difference with a remedy."""
    match error:
        case ChannelNotFoundEntity():
            fix = (
                "run `sms-bridge topology declare`, or set rabbitmq.topology to declare"
                f"{_or_without(entity)}"
            )
            return Difference(entity, "missing", broker_text(error), fix)
        case ChannelLockedResource():
            fix = "declare it without `exclusive`"
            text = "another connection uses it exclusively"
            return Difference(entity, "locked", text, fix)
        case ChannelAccessRefused():
            fix = (
                "grant the permission, or set rabbitmq.topology to verify or off"
                f"{_or_without(entity)}"
            )
            return Difference(entity, "refused", broker_text(error), fix)
        case ChannelPreconditionFailed():
            return Difference(entity, "different", broker_text(error), RECREATE)
        case _:
            return Difference(entity, "different", broker_text(error), "see the broker's log")


def _or_without(entity: Entity) -> str:
    switch = entity.switch if isinstance(entity, Queue) else None
    return "" if switch is None else f", or set {switch} to null to do without the queue"


def broker_text(error: ChannelClosed) -> str:
    """Return the broker's text, which names entities and arguments, never a message."""
    return str(error.args[-1]) if error.args else type(error).__name__


async def _declare_existing(
    connection: Connection,
    name: str,
    values: Mapping[str, Any],
    kind: type[Queue | Exchange],
) -> None:
    channel = await open_channel(connection)
    arguments = {key: value for key, value in values.items() if key not in {*_FLAGS, "type"}}
    flags = {key: value for key, value in values.items() if key in _FLAGS}
    async with Deadline(RPC_TIMEOUT_SECONDS):
        await _find(channel, name, kind)
        if kind is Queue:
            await channel.queue_declare(name, arguments=arguments, **flags)
        else:
            await channel.exchange_declare(
                name, exchange_type=values["type"], arguments=arguments, **flags
            )
        await close_channel(channel)


class _HiddenError(Exception):
    """The broker does not show this user whether the entity exists."""


async def _find(channel: Channel, name: str, kind: type[Queue | Exchange]) -> None:
    """Declare passively; since RabbitMQ 4.2.6 this requires some permission on the entity."""
    try:
        if kind is Queue:
            await channel.queue_declare(name, passive=True)
        else:
            await channel.exchange_declare(name, passive=True)
    except ChannelAccessRefused:
        raise _HiddenError from None


def _take_over(text: str, found: dict[str, Any]) -> bool:
    """Store the value that the broker names in `found`; return False if there is no new one."""
    named = _INEQUIVALENT.search(text)
    if named is None:
        # For example, the broker's text is truncated to 255 bytes.
        return False
    key, value = named["key"], _read(named["value"], named["type"], found.get(named["key"]))
    if found.get(key) == value:
        return False
    if value is None:
        found.pop(key, None)
    else:
        found[key] = value
    return True


def _read(text: str | None, amqp_type: str | None, supposed: object) -> Any:  # noqa: ANN401
    """Parse a value of the broker's text; it has a type only for arguments that were not sent."""
    if text is None:
        return None
    if isinstance(supposed, bool) or amqp_type == "bool":
        return text == "true"
    is_number = isinstance(supposed, int) or (amqp_type and _NUMBERS.fullmatch(amqp_type))
    return int(text) if is_number and re.fullmatch("-?[0-9]+", text) else text


def _queue_facts(name: str, found: Mapping[str, Any]) -> QueueFacts:
    return QueueFacts(
        name=name,
        type=found.get("x-queue-type", "classic"),
        durable=found["durable"],
        auto_delete=found["auto_delete"],
        arguments={key: value for key, value in found.items() if key not in _FLAGS},
    )


def _exchange_facts(found: Mapping[str, Any]) -> ExchangeFacts:
    own = {*_FLAGS, "type"}
    return ExchangeFacts(
        **{key: value for key, value in found.items() if key in own},
        arguments={key: value for key, value in found.items() if key not in own},
    )
