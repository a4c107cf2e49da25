"""Whether each URL of the broker connects, and how long its certificate is valid."""

import asyncio
import contextlib
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

from pydantic import SecretStr
from yarl import URL

from bridge.admin.checks.certificates import judge_certificate
from bridge.admin.checks.set_up import ConnectedBroker, SetUp
from bridge.admin.finding import Finding
from bridge.amqp.connecting import close_quietly, host_of, open_connection, tls_context
from bridge.config import RabbitMQSettings
from bridge.deadline import Deadline
from bridge.errors import BrokerError
from bridge.happy_eyeballs import create_connection

# What stands between the fault and the remedy in the text of a BrokerError.
_SEPARATOR: Final = "; "


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionAttempt:
    """What came of connecting to one URL: a broker, or an error."""

    url: SecretStr
    broker: ConnectedBroker | None = None
    error: str = ""
    seconds: float = 0.0
    certificate: dict[str, Any] | None = None


async def connect_to_all(
    set_up: SetUp, stack: contextlib.AsyncExitStack
) -> list[ConnectionAttempt]:
    """Connect to every URL at the same time; the connections close with `stack`."""
    urls = set_up.settings.rabbitmq.url
    return await asyncio.gather(*(_connect(set_up, url, stack) for url in urls))


async def _connect(
    set_up: SetUp, url: SecretStr, stack: contextlib.AsyncExitStack
) -> ConnectionAttempt:
    settings = set_up.settings.rabbitmq
    started = time.monotonic()
    try:
        connection = await open_connection(settings, url, name="check", ask_http=True)
    except BrokerError as error:
        return ConnectionAttempt(url=url, error=str(error))
    stack.push_async_callback(close_quietly, connection)
    seconds = time.monotonic() - started
    certificate = await read_certificate(settings, URL(url.get_secret_value()))
    broker = ConnectedBroker(set_up=set_up, url=url, connection=connection)
    return ConnectionAttempt(url=url, broker=broker, seconds=seconds, certificate=certificate)


async def read_certificate(settings: RabbitMQSettings, url: URL) -> dict[str, Any] | None:
    """Read a broker's certificate; None without TLS, or when it cannot be had.

    On a connection of its own: the client library shows nothing of its sockets.
    """
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


def judge_attempts(attempts: Collection[ConnectionAttempt]) -> list[Finding]:
    """Say of each URL whether it connects; one of several that does not is a warning."""
    findings = []
    is_any_open = any(attempt.broker is not None for attempt in attempts)
    for attempt in attempts:
        subject = f"broker {host_of(attempt.url)}"
        if attempt.broker is None:
            text, _, fix = attempt.error.partition(_SEPARATOR)
            # A cluster of which one node is away still works.
            findings.append(Finding(subject, "warn" if is_any_open else "fail", text, fix or None))
            continue
        version = ".".join(map(str, attempt.broker.version))
        text = f"RabbitMQ {version}, connected in {round(attempt.seconds * 1000)} ms"
        findings.append(Finding(subject, "ok", text))
        if attempt.certificate is not None:
            findings.append(judge_certificate(subject, attempt.certificate))
    return findings
