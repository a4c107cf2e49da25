"""Check a set-up against the real thing: broker, topology, limits, API, clock; change nothing.

Every probe runs at the same time as the others and has a deadline. None sends an SMS, publishes a
message, takes one or creates anything: permissions are tried with requests that RabbitMQ refuses
after it has checked the permission, so that only the kind of the refusal differs.
"""

import asyncio
import contextlib
import re
import resource
import ssl
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Iterator,
)
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

import httpx
from pydantic import SecretStr
from yarl import URL

from bridge.amqp.channels import RPC_TIMEOUT_SECONDS, close_channel, open_channel
from bridge.amqp.client import Channel, ChannelAccessRefused, ChannelClosed, Connection
from bridge.amqp.connecting import close_quietly, host_of, open_connection
from bridge.amqp.login import tls_context
from bridge.amqp.properties import Properties
from bridge.config import RabbitMQSettings, Role, Settings, TopologyMode
from bridge.credentials import load_authorities
from bridge.errors import BrokerError, ConfigError, causes_of
from bridge.happy_eyeballs import create_connection
from bridge.operators.management import Management, clock_skew, open_management
from bridge.operators.readiness import UNKNOWN, Standing, explain, read_standing
from bridge.topology.comparison import compare
from bridge.topology.declarations import (
    Binding,
    Exchange,
    Queue,
    Topology,
    bridge_topology,
    dead_queue,
    name_of,
)
from bridge.topology.differences import Difference, is_unusable
from bridge.topology.queue_rules import (
    CheckResult,
    Finding,
    judge_bindings,
    judge_queue,
    judge_retry_queue,
)
from bridge.topology.queue_sizes import read_queue

PROBE_SECONDS: Final = 15.0
CERTIFICATE_DAYS: Final = 14
MAX_SKEW_SECONDS: Final = 5.0
API_PATH: Final = "/v1/messages"
# Files beside the connections: logs, epoll, certificates, the broker, the admin port.
OTHER_FILES: Final = 64
_SEPARATOR: Final = "; "

Probes = dict[str, Coroutine[Any, Any, list[Finding]]]

# What only the management API tells.
_NOT_CHECKED: Final = (
    "limits and policies that drop messages, bindings, alternate exchanges, alarms"
)


def look_over(settings: Settings, roles: Collection[Role]) -> list[Finding]:
    """Say what looks wrong in a configuration with which these roles start."""
    url = settings.sms_api.base_url or ""
    if "worker" not in roles or not url.endswith(("/v1", API_PATH)):
        return []
    fix = f"leave {API_PATH} out of sms_api.base_url: the worker adds it"
    return [Finding("SMS API", "warn", f"messages will be posted to {url}{API_PATH}", fix)]


async def examine(
    settings: Settings, roles: Collection[Role], *, management: str | None = None
) -> list[Finding]:
    """Run every probe for these roles and return what they found, in a fixed order.

    `management` is the URL of the management API when it is not on the broker's host and usual
    port.
    """
    probes: Probes = {
        "broker": _examine_broker(settings, roles, management),
        "files": _examine_files(settings, roles),
    }
    if "worker" in roles:
        probes["API"] = _examine_api(settings)
    return await _run(probes, PROBE_SECONDS * 3)


async def _run(probes: Probes, seconds: float) -> list[Finding]:
    """Run probes at the same time; one that ends early or late takes nothing from the others."""
    results = await asyncio.gather(*(_run_one(*named, seconds) for named in probes.items()))
    return [finding for found in results for finding in found]


async def _run_one(
    name: str, probe: Coroutine[Any, Any, list[Finding]], seconds: float
) -> list[Finding]:
    try:
        async with asyncio.timeout(seconds):
            return await probe
    except ConfigError:
        raise
    except TimeoutError:
        return [Finding(name, "fail", "did not answer in time", "look at it, and run this again")]
    except Exception as error:  # noqa: BLE001  the other probes have something to say
        text = str(error) if isinstance(error, BrokerError) else type(error).__name__
        return [Finding(name, "fail", f"could not be looked at: {text}", "run it again")]


# The broker


async def _examine_broker(
    settings: Settings, roles: Collection[Role], management: str | None
) -> list[Finding]:
    async with contextlib.AsyncExitStack() as stack:
        visits = await asyncio.gather(
            *(_visit(settings, url, stack) for url in settings.rabbitmq.url)
        )
        open_ones = [visit for visit in visits if visit.connection is not None]
        findings = _judge_visits(visits)
        if not open_ones or open_ones[0].connection is None:
            return findings
        connection = open_ones[0].connection
        topology = bridge_topology(settings, roles)
        version = _version(connection)
        probes: Probes = {
            "topology": _examine_topology(connection, settings, topology),
            "permissions": _examine_permissions(settings, open_ones[0].url, roles),
            "consumers": _examine_consumers(connection, settings, roles),
            "management": _examine_with_management(settings, roles, topology, version, management),
        }
        return findings + await _run(probes, PROBE_SECONDS * 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Visit:
    url: SecretStr
    connection: Connection | None = None
    error: str | None = None
    seconds: float = 0
    certificate: dict[str, Any] | None = None


async def _visit(settings: Settings, url: SecretStr, stack: contextlib.AsyncExitStack) -> _Visit:
    started = time.monotonic()
    try:
        connection = await open_connection(settings.rabbitmq, url, name="check", ask_http=True)
    except BrokerError as error:
        return _Visit(url=url, error=str(error))
    stack.push_async_callback(close_quietly, connection)
    seconds = time.monotonic() - started
    certificate = await _read_certificate(settings.rabbitmq, URL(url.get_secret_value()))
    return _Visit(url=url, connection=connection, seconds=seconds, certificate=certificate)


async def _read_certificate(settings: RabbitMQSettings, url: URL) -> dict[str, Any] | None:
    # On a connection of its own: the client library shows nothing of its sockets.
    if url.scheme != "amqps":
        return None
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(settings.connect_timeout_seconds):
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


def _judge_visits(visits: Collection[_Visit]) -> list[Finding]:
    findings = []
    works = any(visit.connection is not None for visit in visits)
    for visit in visits:
        subject = f"broker {host_of(visit.url)}"
        if visit.connection is None:
            text, _, fix = (visit.error or "").partition(_SEPARATOR)
            # A cluster of which one node is away still works.
            findings.append(Finding(subject, "warn" if works else "fail", text, fix or None))
            continue
        version = ".".join(map(str, _version(visit.connection)))
        milliseconds = round(visit.seconds * 1000)
        findings.append(
            Finding(subject, "ok", f"RabbitMQ {version}, connected in {milliseconds} ms")
        )
        if visit.certificate is not None:
            findings.append(_judge_certificate(subject, visit.certificate))
    return findings


def _server_properties(connection: Connection) -> dict[str, Any]:
    transport = connection.transport
    found: Any = {} if transport is None else transport.connection.server_properties
    return dict(found)


def _version(connection: Connection) -> tuple[int, ...]:
    said = re.match("[0-9.]*", str(_server_properties(connection).get("version", "")))
    return tuple(int(part) for part in said[0].split(".") if part) if said else ()


def _judge_certificate(subject: str, certificate: dict[str, Any]) -> Finding:
    ends = ssl.cert_time_to_seconds(str(certificate["notAfter"]))
    days = (ends - time.time()) / 86400
    day = datetime.fromtimestamp(ends, UTC).date()
    if days < CERTIFICATE_DAYS:
        text = f"its certificate ends in {max(0, int(days))} days, on {day}"
        return Finding(subject, "warn", text, "have it renewed")
    return Finding(subject, "ok", f"its certificate is valid until {day}")


# Topology


async def _examine_topology(
    connection: Connection, settings: Settings, topology: Topology
) -> list[Finding]:
    mode = settings.rabbitmq.topology
    findings = [_judge_difference(one, mode) async for one in compare(connection, topology)]
    if not any(finding.result == "fail" for finding in findings):
        count = len(topology.declarable) - len({finding.subject for finding in findings})
        if count:
            findings.insert(0, Finding("topology", "ok", f"{count} queues and exchanges are right"))
    return findings


def _judge_difference(difference: Difference, mode: TopologyMode) -> Finding:
    subject, text, fix = name_of(difference.entity), difference.text, difference.fix
    match difference.kind, mode:
        case "not_compared", _:
            return Finding(subject, "ok", "exists; its arguments were not compared: no permission")
        case "missing", "declare":
            return Finding(
                subject,
                "warn",
                "is missing; its role declares it when it starts",
                "start the role, or run `sms-bridge topology declare`",
            )
        case "missing", _:
            fix = "run `sms-bridge topology declare`, or set rabbitmq.topology to declare"
            return Finding(subject, "fail", "is missing", fix)
        case _, "off":
            return Finding(subject, "warn", text, fix)
        case _:
            return Finding(subject, "fail" if is_unusable(difference, mode) else "warn", text, fix)


# Permissions


async def _examine_permissions(
    settings: Settings, url: SecretStr, roles: Collection[Role]
) -> list[Finding]:
    """Try what the roles do, in a way that is refused in any case.

    On a connection of its own: one that publishes is not read any more during an alarm.
    """
    connection = await open_connection(settings.rabbitmq, url, name="check permissions")
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            return await _try_permissions(connection, settings, roles)
    except TimeoutError:
        if not connection.wire.is_blocked:
            raise
        return [
            Finding(
                f"broker {host_of(url)}",
                "fail",
                "takes no messages (a memory or disk alarm); permissions were not tried",
                "look at `rabbitmq-diagnostics check_local_alarms`, and run this again after it",
            )
        ]
    finally:
        await close_quietly(connection)


async def _try_permissions(
    connection: Connection, settings: Settings, roles: Collection[Role]
) -> list[Finding]:
    needs: list[tuple[str, Callable[[Channel], Awaitable[object]]]] = []
    if "worker" in roles:
        queue, outcome = settings.worker.queue, settings.worker.outcome_exchange
        needs.append((f"read {queue}", lambda channel: _try_to_read(channel, queue)))
        needs.append(("write amq.default", lambda channel: _try_to_write(channel, "")))
        if outcome is not None:
            needs.append((f"write {outcome}", lambda channel: _try_to_write(channel, outcome)))
    if "webhook" in roles:
        exchange = settings.webhook.exchange
        needs.append((f"write {exchange}", lambda channel: _try_to_write(channel, exchange)))
    if settings.rabbitmq.topology == "declare":
        topology = bridge_topology(settings, roles)
        needs += [_declare_need(entity) for entity in topology.declarable]
        needs += [_bind_need(binding) for binding in topology.bindings]
    refused = [what for what, attempt in needs if not await _is_permitted(connection, attempt)]
    if not refused:
        return [Finding("permissions", "ok", f"all {len(needs)} that are needed")]
    return [
        Finding(
            "permissions",
            "fail",
            f"the user may not {what}",
            "grant it with rabbitmqctl set_permissions"
            + (", or set rabbitmq.topology to verify" if what.startswith("configure") else ""),
        )
        for what in refused
    ]


def _declare_need(
    entity: Queue | Exchange,
) -> tuple[str, Callable[[Channel], Awaitable[object]]]:
    return f"configure {name_of(entity)}", lambda channel: _try_to_configure(channel, entity)


def _bind_need(
    binding: Binding,
) -> tuple[str, Callable[[Channel], Awaitable[object]]]:
    what = f"write queue {binding.queue} and read exchange {binding.exchange}"
    # To unbind what is not bound does nothing, and needs the permissions of binding.
    return what, lambda channel: channel.queue_unbind(
        binding.queue, binding.exchange, "sms-bridge-check"
    )


async def _is_permitted(
    connection: Connection, attempt: Callable[[Channel], Awaitable[object]]
) -> bool:
    channel = await open_channel(connection)
    try:
        async with asyncio.timeout(RPC_TIMEOUT_SECONDS):
            await attempt(channel)
            await close_channel(channel)
    except ChannelAccessRefused:
        return False
    except ChannelClosed:
        # Refused for what is wrong with it, or because the entity is missing: told elsewhere.
        return True
    return True


async def _try_to_read(channel: Channel, queue: str) -> None:
    async def ignore(_message: object) -> None: ...

    await channel.basic_consume(queue, ignore, arguments={"x-priority": "no number"})


async def _try_to_write(channel: Channel, exchange: str) -> None:
    # Both properties are wrong, and neither is looked at before the permission.
    wrong = Properties(user_id="sms-bridge-check", expiration="no number")
    await channel.basic_publish(
        b"", exchange=exchange, routing_key="sms-bridge-check", properties=wrong, mandatory=True
    )
    # The refusal of a publish comes by itself, at the latest before the answer to this.
    await channel.basic_qos(prefetch_count=1)


async def _try_to_configure(channel: Channel, entity: Queue | Exchange) -> None:
    if isinstance(entity, Queue):
        arguments = entity.arguments | {"x-message-ttl": "no number"}
        await channel.queue_declare(entity.name, durable=True, arguments=arguments)
    else:
        wrong: dict[str, Any] = {"alternate-exchange": 1}
        await channel.exchange_declare(
            entity.name, exchange_type="topic", durable=True, arguments=wrong
        )


# Consumers


async def _examine_consumers(
    connection: Connection, settings: Settings, roles: Collection[Role]
) -> list[Finding]:
    findings = []
    if "worker" in roles:
        name = settings.worker.queue
        fix = "start a worker; where one runs, its /readyz says why it takes nothing"
        findings.append(_judge_standing(await read_standing(settings)))
        findings += await _judge_consumers(connection, name, "nothing is sent", fix)
        dead = await read_queue(connection, dead_queue(name))
        if dead is not None and dead.ready:
            text = f"{dead.ready} dead letters wait"
            fix = "`sms-bridge dlq list` shows them"
            findings.append(Finding(f"queue {dead_queue(name)}", "warn", text, fix))
    if "webhook" in roles and settings.webhook.queue is not None:
        fix = "subscribe to it, or set webhook.queue to null when subscribers have their own queues"
        name = settings.webhook.queue
        findings += await _judge_consumers(connection, name, "events pile up", fix)
    return findings


def _judge_standing(standing: Standing | None) -> Finding:
    if standing is None:
        return Finding("worker", "ok", UNKNOWN)
    if standing.paused is None:
        return Finding("worker", "ok", "that on this computer is not paused")
    return Finding("worker", "fail", *explain(standing.paused))


async def _judge_consumers(
    connection: Connection, name: str, what_happens: str, fix: str
) -> list[Finding]:
    sizes = await read_queue(connection, name)
    if sizes is None or not sizes.exists:
        return []
    subject = f"queue {name}"
    if not sizes.consumers:
        text = f"nobody consumes it, so {what_happens}; {sizes.ready} messages wait"
        return [Finding(subject, "warn", text, fix)]
    return [Finding(subject, "ok", f"{sizes.consumers} consumers, {sizes.ready} messages wait")]


# What only the management API tells


async def _examine_with_management(
    settings: Settings,
    roles: Collection[Role],
    topology: Topology,
    version: tuple[int, ...],
    url: str | None,
) -> list[Finding]:
    async with open_management(settings.rabbitmq, url) as management:
        subject = f"management {management.url.host}:{management.url.port}"
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                return [
                    Finding(subject, "ok", "answers"),
                    *await _examine_alarms(management),
                    *_judge_clock("broker", management.clock_skew_seconds),
                    *await _examine_queues(management, settings, topology, version),
                    *await _examine_exchanges(management, settings, roles),
                ]
        except (BrokerError, TimeoutError) as error:
            why = str(error) or "no answer in time"
            return [
                Finding(
                    subject,
                    "warn",
                    f"{why}; not checked: {_NOT_CHECKED}",
                    "rabbitmq-plugins enable rabbitmq_management, give the user the tag "
                    "`monitoring`, or name it with --management-url",
                )
            ]


async def _examine_alarms(management: Management) -> list[Finding]:
    nodes = await management.read("nodes") or ()
    return [
        Finding(
            f"broker node {node['name']}",
            "fail",
            f"{what} alarm: it takes no messages",
            f"free {what} on it",
        )
        for node in nodes
        for what, key in (("memory", "mem_alarm"), ("disk", "disk_free_alarm"))
        if node.get(key)
    ]


async def _examine_queues(
    management: Management, settings: Settings, topology: Topology, version: tuple[int, ...]
) -> list[Finding]:
    found = await asyncio.gather(
        *(_examine_queue(management, settings, queue, version) for queue in topology.queues)
    )
    faults = [finding for findings in found for finding in findings]
    return faults or [
        Finding("queue limits", "ok", "no argument or policy makes a queue lose messages")
    ]


async def _examine_queue(
    management: Management, settings: Settings, queue: Queue, version: tuple[int, ...]
) -> list[Finding]:
    facts = await management.queue(queue.name)
    if facts is None:
        return []
    if queue.name.startswith(f"{settings.worker.queue}.retry.") and len(queue.arguments) > 1:
        return list(judge_retry_queue(facts, queue))
    # What subscribers do with a message of theirs that keeps coming back is theirs to say.
    drops: CheckResult = "warn" if queue.use == "subscribed" else "fail"
    found = list(judge_queue(facts, version=version, drops=drops))
    if queue.use == "own":
        return found
    # What others have declared is used as it is, but no policy has to be put up with.
    as_needed = replace(
        facts, arguments=queue.arguments, durable=True, auto_delete=False, exclusive=False
    )
    of_policies = set(judge_queue(as_needed, version=version, drops=drops))
    return [one if one in of_policies else replace(one, result="warn") for one in found]


async def _examine_exchanges(
    management: Management, settings: Settings, roles: Collection[Role]
) -> list[Finding]:
    findings: list[Finding] = []
    names = [settings.worker.outcome_exchange] if "worker" in roles else []
    if "webhook" in roles:
        name = settings.webhook.exchange
        names.append(name)
        if await management.exists(name):
            findings += judge_bindings(name, await management.bound_queues(name))
    for exchange in names:
        other = None if exchange is None else await management.alternate_exchange(exchange)
        if other is not None and not await management.exists(other):
            findings.append(
                Finding(
                    f"exchange {exchange}",
                    "warn",
                    f"its alternate exchange {other} does not exist",
                    "create that exchange, or remove the alternate exchange",
                )
            )
    return findings


# The SMS API


async def _examine_api(settings: Settings) -> list[Finding]:
    api = settings.sms_api
    url = URL(api.base_url or "")
    subject = f"SMS API {url.host}"
    if api.proxy is None:
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                await asyncio.get_running_loop().getaddrinfo(url.host, url.port)
        except (OSError, TimeoutError):
            fix = "check sms_api.base_url and the resolver"
            return [Finding(subject, "fail", "its name is not found", fix)]
    started = time.monotonic()
    try:
        async with asyncio.timeout(PROBE_SECONDS), _ask(settings) as answer:
            seconds = time.monotonic() - started
            text = f"answers {answer.status_code} to HEAD in {round(seconds * 1000)} ms"
            return [
                Finding(subject, "ok", f"{text}; whether it takes the key, only a message shows"),
                *_judge_tls(subject, answer),
                *_judge_clock(subject, clock_skew(answer)),
            ]
    except (httpx.HTTPError, OSError, TimeoutError) as error:
        return [_judge_api_failure(subject, error)]


@contextlib.asynccontextmanager
async def _ask(settings: Settings) -> AsyncIterator[httpx.Response]:
    """Ask for the head of the API's root, without the key: it cannot send anything."""
    api = settings.sms_api
    proxy = None if api.proxy is None else api.proxy.get_secret_value()
    context = load_authorities("sms_api.ca_file", api.ca_file)
    async with (
        httpx.AsyncClient(
            verify=context, proxy=proxy, timeout=api.connect_timeout_seconds, trust_env=False
        ) as client,
        client.stream("HEAD", f"{api.base_url}/") as answer,
    ):
        yield answer


def _judge_tls(subject: str, answer: httpx.Response) -> Iterator[Finding]:
    if answer.url.scheme == "http":
        host = answer.url.host
        if host not in {"localhost", "127.0.0.1", "::1"}:
            text = "http: the key and the texts travel in clear"
            yield Finding(subject, "warn", text, "use https in sms_api.base_url")
        return
    stream: Any = answer.extensions.get("network_stream")
    secure = None if stream is None else stream.get_extra_info("ssl_object")
    certificate = None if secure is None else secure.getpeercert()
    if certificate:
        yield _judge_certificate(subject, certificate)


def _judge_api_failure(subject: str, error: Exception) -> Finding:
    for cause in causes_of(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            why = cause.verify_message or "not trusted"
            fix = "check sms_api.ca_file, or the service's certificate"
            return Finding(subject, "fail", f"its certificate is refused: {why}", fix)
        if isinstance(cause, ssl.SSLError):
            return Finding(subject, "fail", "no TLS is spoken there", "check sms_api.base_url")
    timed_out = isinstance(error, TimeoutError | httpx.TimeoutException)
    text = "no answer in time" if timed_out else f"no connection ({type(error).__name__})"
    return Finding(subject, "fail", text, "check sms_api.base_url, the network and the proxy")


def _judge_clock(whose: str, skew_seconds: float | None) -> Iterable[Finding]:
    if skew_seconds is None:
        return ()
    subject = "clock"
    if abs(skew_seconds) <= MAX_SKEW_SECONDS:
        return (Finding(subject, "ok", f"agrees with {whose}'s"),)
    where = "behind" if skew_seconds > 0 else "ahead of"
    text = (
        f"{abs(skew_seconds):.0f} s {where} {whose}'s: expiries, ages and signed webhooks "
        "are judged wrongly"
    )
    return (Finding(subject, "warn", text, "synchronise it (NTP)"),)


# This computer


async def _examine_files(settings: Settings, roles: Collection[Role]) -> list[Finding]:
    needed = OTHER_FILES
    if "worker" in roles:
        needed += settings.worker.most_in_flight
    if "webhook" in roles:
        needed += settings.webhook.max_connections
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit < needed:
        text = f"{limit} may be open, about {needed} are needed"
        return [Finding("files", "warn", text, f"raise the limit: ulimit -n {needed}")]
    return [Finding("files", "ok", f"{limit} may be open, about {needed} are needed")]
