"""Checks over AMQP: connections, topology, permissions, and consumers."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final, NamedTuple

from pydantic import SecretStr
from yarl import URL

from bridge.admin.admin_port_client import UNKNOWN, explain_local_pause, read_worker
from bridge.admin.checks.findings import (
    WAIT_SECONDS,
    CheckedBroker,
    Finding,
    judge_certificate,
)
from bridge.admin.pausing import explain_paused, find_pause
from bridge.amqp.channels import RPC_TIMEOUT_SECONDS, close_channel, open_channel
from bridge.amqp.client import Channel, ChannelAccessRefused, ChannelClosed, Connection
from bridge.amqp.connecting import (
    close_quietly,
    host_of,
    open_connection,
    tls_context,
    version_of,
)
from bridge.amqp.properties import ClientProperties
from bridge.config import RabbitMQSettings, TopologyMode
from bridge.deadline import Deadline
from bridge.errors import BrokerError
from bridge.happy_eyeballs import create_connection
from bridge.topology.comparison import compare
from bridge.topology.declarations import (
    Binding,
    Exchange,
    Queue,
    active_queue,
    dead_queue,
    name_of,
    request_queues,
    workers_exchange,
)
from bridge.topology.differences import Difference, is_unusable
from bridge.topology.paused_queue import HIDDEN, HIDDEN_REMEDY, HiddenPauseError, paused_queue
from bridge.topology.queue_sizes import read_queue

# Connections


async def connect(
    settings: RabbitMQSettings, stack: contextlib.AsyncExitStack
) -> tuple[list[tuple[SecretStr, Connection]], list[Finding]]:
    """Connect to all URLs concurrently; the connections close with `stack`."""
    results = await asyncio.gather(*(_connect(settings, url, stack) for url in settings.url))
    opened = [(url, one) for url, (one, _) in zip(settings.url, results, strict=True) if one]
    findings = [finding for _, found in results for finding in found]
    if opened:
        # A cluster works without some of its nodes.
        findings = [
            Finding(one.subject, "warn", one.text, one.fix) if one.result == "fail" else one
            for one in findings
        ]
    return opened, findings


async def _connect(
    settings: RabbitMQSettings, url: SecretStr, stack: contextlib.AsyncExitStack
) -> tuple[Connection | None, list[Finding]]:
    subject = f"broker {host_of(url)}"
    started = time.monotonic()
    try:
        connection = await open_connection(settings, url, name="check", ask_http=True)
    except BrokerError as error:
        # In a BrokerError a semicolon separates the fault from the remedy.
        text, _, fix = str(error).partition("; ")
        return None, [Finding(subject, "fail", text, fix or None)]
    stack.push_async_callback(close_quietly, connection)
    milliseconds = round((time.monotonic() - started) * 1000)
    version = ".".join(map(str, version_of(connection)))
    findings = [Finding(subject, "ok", f"RabbitMQ {version}, connected in {milliseconds} ms")]
    certificate = await read_certificate(settings, URL(url.get_secret_value()))
    if certificate is not None:
        findings.append(judge_certificate(subject, certificate))
    return connection, findings


async def read_certificate(settings: RabbitMQSettings, url: URL) -> dict[str, Any] | None:
    """Read a broker's certificate on a separate connection; None without TLS, or on failure."""
    if url.scheme != "amqps":
        return None
    with contextlib.suppress(OSError, TimeoutError):
        async with Deadline(settings.connect_timeout_seconds):
            transport, _ = await create_connection(
                asyncio.Protocol,
                url.host or "",
                url.port or 5671,
                tls=tls_context(settings),
                server_hostname=settings.tls.server_name,
            )
            certificate = transport.get_extra_info("ssl_object").getpeercert()
            transport.close()
            return dict(certificate)
    return None


# Topology

_DECLARED_AT_START: Final = "a role declares what it needs when it starts"
_DECLARE: Final = "start the roles, or run `sms-bridge topology declare`"


async def check_topology(broker: CheckedBroker) -> list[Finding]:
    count = len(broker.topology.declarable)
    mode = broker.settings.rabbitmq.topology
    differences = [one async for one in compare(broker.connection, broker.topology)]
    missing = {name_of(one.entity) for one in differences if one.kind == "missing"}
    if mode == "declare" and len(missing) == count:
        # Before the first start, one line replaces one for each.
        text = f"none of the {count} queues and exchanges exists"
        return [Finding("topology", "warn", f"{text}; {_DECLARED_AT_START}", _DECLARE)]
    findings = [_judge_difference(one, mode) for one in differences]
    right = count - len({finding.subject for finding in findings})
    if right and not any(finding.result == "fail" for finding in findings):
        findings.insert(0, Finding("topology", "ok", f"{right} queues and exchanges match"))
    return findings


def _judge_difference(difference: Difference, mode: TopologyMode) -> Finding:
    subject, text, fix = name_of(difference.entity), difference.text, difference.fix
    match difference.kind, mode:
        case "not_compared", _:
            return Finding(subject, "ok", "exists; its arguments were not compared: no permission")
        case "hidden", _:
            return Finding(subject, "warn", text, fix)
        case "missing", "declare":
            return Finding(subject, "warn", f"is missing; {_DECLARED_AT_START}", _DECLARE)
        case "missing", _:
            fix = "run `sms-bridge topology declare`, or set rabbitmq.topology to declare"
            return Finding(subject, "fail", "is missing", fix)
        case _:
            is_failure = mode != "off" and is_unusable(difference, mode)
            return Finding(subject, "fail" if is_failure else "warn", text, fix)


# Permissions. Each is tried with an invalid request, which RabbitMQ refuses only after it has
# checked the permission. So nothing is consumed, published or created, and the error tells whether
# the permission is missing.


class Need(NamedTuple):
    """A permission, and a request that needs it.

    `without_it` is set if the roles work without it, and names the cost; `instead` is the setting
    that avoids the need.
    """

    what: str
    request: Callable[[Channel], Awaitable[object]]
    without_it: str | None = None
    instead: str | None = None


async def check_permissions(broker: CheckedBroker) -> list[Finding]:
    """Try what the roles need, on a separate connection, because an alarm may block it."""
    needs = list(_needs(broker))
    connection = await open_connection(
        broker.settings.rabbitmq, broker.url, name="check permissions"
    )
    try:
        async with Deadline(WAIT_SECONDS):
            refused = [need for need in needs if not await _is_permitted(connection, need)]
    except TimeoutError:
        if not connection.wire.is_blocked:
            raise
        return [
            Finding(
                f"broker {host_of(broker.url)}",
                "fail",
                "accepts no messages (memory or disk alarm); permissions were not checked",
                "look at `rabbitmq-diagnostics check_alarms`; run this again after the alarm",
            )
        ]
    finally:
        await close_quietly(connection)
    if not refused:
        return [Finding("permissions", "ok", f"all {len(needs)} that are needed")]
    return [_judge_refusal(need) for need in refused]


def _judge_refusal(need: Need) -> Finding:
    text, remedy = f"the user may not {need.what}", "grant it with rabbitmqctl set_permissions"
    if need.instead is not None:
        remedy += f", or {need.instead}"
    if need.without_it is not None:
        return Finding("permissions", "warn", f"{text}: {need.without_it}", remedy)
    if need.what.startswith("configure") and need.instead is None:
        remedy += ", or set rabbitmq.topology to verify"
    return Finding("permissions", "fail", text, remedy)


async def _is_permitted(connection: Connection, need: Need) -> bool:
    channel = await open_channel(connection)
    try:
        async with Deadline(RPC_TIMEOUT_SECONDS):
            await need.request(channel)
            await close_channel(channel)
    except ChannelAccessRefused:
        return False
    except ChannelClosed:
        # Refused for the deliberate fault, or for a missing entity, which another check reports.
        return True
    return True


def _needs(broker: CheckedBroker) -> Iterator[Need]:
    settings = broker.settings
    if "worker" in broker.roles:
        queue = settings.worker.queue
        yield from map(_to_read, request_queues(settings.worker))
        if settings.worker.ordering == "recipient":
            lock = _to_configure(Queue(active_queue(queue)))
            yield lock._replace(instead="set worker.ordering to none")
        yield Need("write amq.default", lambda channel: _publish(channel, ""))
        if settings.worker.coordination == "on":
            yield from _to_coordinate(queue)
        yield _to_configure(Queue(paused_queue(queue)))._replace(
            without_it="`sms-bridge pause` and `resume` need a user with this permission"
        )
        yield _to_read(paused_queue(queue))._replace(
            without_it="the reason for an operator's pause cannot be shown"
        )
    for exchange in broker.topology.exchanges:
        yield _to_write(exchange.name)
    if settings.rabbitmq.topology == "declare":
        yield from map(_to_configure, broker.topology.declarable)
        yield from map(_to_bind, broker.topology.bindings)


def _to_coordinate(queue: str) -> Iterator[Need]:
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
            without_it="workers do not coordinate", instead="set worker.coordination to off"
        )


def _to_read(queue: str) -> Need:
    return Need(f"read {queue}", lambda channel: _consume(channel, queue))


def _to_write(exchange: str) -> Need:
    return Need(f"write {exchange}", lambda channel: _publish(channel, exchange))


def _to_configure(entity: Queue | Exchange) -> Need:
    return Need(f"configure {name_of(entity)}", lambda channel: _declare(channel, entity))


def _to_bind(binding: Binding) -> Need:
    # Removing a binding that does not exist changes nothing, but needs the same permissions.
    return Need(
        f"write queue {binding.queue} and read exchange {binding.exchange}",
        lambda channel: channel.queue_unbind(binding.queue, binding.exchange, "sms-bridge-check"),
    )


async def _consume(channel: Channel, queue: str) -> None:
    async def ignore(_message: object) -> None: ...

    await channel.basic_consume(queue, ignore, arguments={"x-priority": "no number"})


async def _publish(channel: Channel, exchange: str) -> None:
    # Both properties are invalid; RabbitMQ checks the permission first.
    wrong = ClientProperties(user_id="sms-bridge-check", expiration="no number")
    await channel.basic_publish(
        b"", exchange=exchange, routing_key="sms-bridge-check", properties=wrong, mandatory=True
    )
    # A refusal of the publish arrives before the answer to this request.
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


# Consumers

# This many waiting events are a warning, because a subscriber reads a reply within milliseconds.
MANY_EVENTS: Final = 1000


async def check_consumers(broker: CheckedBroker) -> list[Finding]:
    """Check the worker on this computer, pauses, and the consumers of the main queues."""
    settings, connection = broker.settings, broker.connection
    findings = []
    if "worker" in broker.roles:
        name = settings.worker.queue
        fix = "start a worker; if one is running, its /readyz says why it does not consume"
        worker = await read_worker(settings)
        if worker is None:
            findings.append(Finding("worker", "ok", UNKNOWN))
        elif (pause := worker.deciding_pause) is None:
            findings.append(Finding("worker", "ok", "the one on this computer is not paused"))
        else:
            findings.append(Finding("worker", "fail", *explain_local_pause(pause)))
        findings += await _judge_pause(connection, name)
        for queue in request_queues(settings.worker):
            findings += await _judge_consumers(connection, queue, "nothing is sent", fix)
        dead = await read_queue(connection, dead_queue(name))
        if dead is not None and dead.ready:
            text, fix = f"{dead.ready} dead letters", "`sms-bridge dlq list` shows them"
            findings.append(Finding(f"queue {dead_queue(name)}", "warn", text, fix))
    if "webhook" in broker.roles and settings.webhook.queue is not None:
        fix = "subscribe to it, or set webhook.queue to null when subscribers have their own queues"
        name = settings.webhook.queue
        what_happens = "events pile up until RabbitMQ runs short of disk"
        findings += await _judge_consumers(connection, name, what_happens, fix, MANY_EVENTS)
    return findings


async def _judge_pause(connection: Connection, queue: str) -> list[Finding]:
    try:
        paused = await find_pause(connection, queue)
    except HiddenPauseError:
        text = f"unknown, because there is no permission on {paused_queue(queue)}; {HIDDEN}"
        return [Finding("pause", "warn", text, HIDDEN_REMEDY)]
    return [] if paused is None else [Finding("pause", "fail", *explain_paused(queue, paused))]


async def _judge_consumers(
    connection: Connection, name: str, what_happens: str, fix: str, many: int | None = None
) -> list[Finding]:
    sizes = await read_queue(connection, name)
    if sizes is None or not sizes.exists:
        return []
    subject = f"queue {name}"
    if not sizes.consumers:
        text = f"it has no consumer, so {what_happens}; {sizes.ready} messages waiting"
        return [Finding(subject, "warn", text, fix)]
    consumers = "1 consumer" if sizes.consumers == 1 else f"{sizes.consumers} consumers"
    text = f"{consumers}, {sizes.ready} messages waiting"
    if many is not None and sizes.ready >= many:
        fix = "look at the log of the subscriber; start more subscribers if it is only slow"
        return [Finding(subject, "warn", f"{text}: they are too slow, or stuck", fix)]
    return [Finding(subject, "ok", text)]
