"""Connections to RabbitMQ that stay alive.

A `Link` connects, hands the connection to its user, watches it, and starts again from nothing
when anything on it ends. Nothing is restored in place: a restored channel can stay dead for ever
on a healthy connection (aio-pika, `RobustChannel`), a new connection cannot.
"""

import asyncio
import contextlib
import random
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from importlib.metadata import version
from typing import Final, NoReturn, cast

import aio_pika
import aiormq
from pydantic import SecretStr
from yarl import URL

from bridge.amqp.properties import tolerate_broken_properties
from bridge.amqp.wire import FOREIGN_BYTES, Wire
from bridge.config import RabbitMQSettings
from bridge.credentials import load_authorities, read_secret, unreadable
from bridge.errors import BrokerError, ConfigError, ConnectError, ConnectFault, causes_of
from bridge.logs import Log
from bridge.metrics import BridgeMetrics

log = Log(__name__)

Serve = Callable[[aio_pika.Connection], Awaitable[object]]

MIN_BACKOFF_SECONDS: Final = 0.5
MAX_BACKOFF_SECONDS: Final = 30.0
# A refused connection costs a broker that starts next to nothing, and a login does.
MAX_BACKOFF_REFUSED_SECONDS: Final = 5.0
RPC_TIMEOUT_SECONDS: Final = 10.0
# A session that ends sooner was of no use: the back-off goes on growing.
USEFUL_SECONDS: Final = 1.0
CLOSE_TIMEOUT_SECONDS: Final = 3.0
ASK_HTTP_SECONDS: Final = 1.0

_REMEDIES: Final[Mapping[ConnectFault, str]] = {
    "auth_failed": "check rabbitmq.username, rabbitmq.password and the vhost in rabbitmq.url",
    "refused": "check that RabbitMQ runs and that rabbitmq.url names its host and port",
    "tls_failed": "check rabbitmq.tls and the broker's certificate",
    "timeout": "check the network to the broker, and the port in rabbitmq.url: nothing answered",
    "client_unsupported": "nothing would be delivered: install the versions that uv.lock names, or "
    "use the released image",
}
_CLIENT: Final = ("aio-pika", "aiormq", "pamqp")


class Link:
    """One named connection, made again for as long as the process runs."""

    def __init__(self, name: str, settings: RabbitMQSettings, metrics: BridgeMetrics) -> None:
        self.name = name
        self._settings = settings
        self._metrics = metrics
        self._turn = 0
        self._last_fault = ""
        self._is_refused = False
        self._connection: aio_pika.Connection | None = None

    @property
    def is_up(self) -> bool:
        """Whether the connection is open now."""
        return self._connection is not None and self._connection.connected.is_set()

    @property
    def is_blocked(self) -> bool:
        """Whether the broker refuses to take messages on this connection (an alarm)."""
        return self._connection is not None and wire_of(self._connection).is_blocked

    async def run(self, serve: Serve) -> NoReturn:
        """Connect and `serve`, for ever. `serve` ends or raises when the connection is no use.

        Between two tries it waits for a random time of at most half of the time that the broker
        has been away, 0.5 to 30 s, to 5 s while nobody listens there: quick after a restart, and
        no storm when many come back.
        """
        down_since = time.monotonic()
        while True:
            try:
                await self._session(serve)
            except BrokerError as error:
                self._log_fault(str(error))
            else:
                down_since = time.monotonic()
                self._last_fault = ""
            longest = MAX_BACKOFF_REFUSED_SECONDS if self._is_refused else MAX_BACKOFF_SECONDS
            await asyncio.sleep(_backoff(time.monotonic() - down_since, longest))

    def _log_fault(self, why: str) -> None:
        # One line for each change: an outage of an hour is not a thousand lines.
        if why == self._last_fault:
            log.debug("broker_unavailable", link=self.name, why=why)
        else:
            log.warning("broker_unavailable", link=self.name, why=why)
        self._last_fault = why

    async def _session(self, serve: Serve) -> None:
        """Serve one connection until it ends; raise BrokerError when it was never of use."""
        connection = await self._connect()
        started = time.monotonic()
        self._connection = connection
        try:
            await _serve_until_closed(connection, serve)
        except Exception as error:  # whatever the client library raises, the link goes on
            self._metrics.connections.labels("closed_by_broker").inc()
            if time.monotonic() - started < USEFUL_SECONDS:
                raise BrokerError(_describe(error)) from error
            log.warning("broker_lost", link=self.name, why=_describe(error))
        finally:
            self._connection = None
            await close_quietly(connection)

    async def _connect(self) -> aio_pika.Connection:
        url = self._settings.url[self._turn % len(self._settings.url)]
        self._turn += 1
        try:
            connection = await open_connection(self._settings, url, name=self.name)
        except ConnectError as error:
            self._is_refused = error.fault == "refused"
            self._metrics.connections.labels(error.fault).inc()
            raise
        self._is_refused = False
        self._metrics.connections.labels("opened").inc()
        wire_of(connection).on_blocked(self._log_blocked)
        log.info("broker_connected", link=self.name, host=host_of(url))
        return connection

    def _log_blocked(self, reason: str | None) -> None:
        if reason is None:
            log.info("broker_unblocked", link=self.name)
            return
        remedy = "it takes no messages; look at rabbitmq-diagnostics check_local_alarms"
        log.warning("broker_blocked", link=self.name, why=f"{reason}; {remedy}")


async def _serve_until_closed(connection: aio_pika.Connection, serve: Serve) -> None:
    transport = connection.transport
    if transport is None:
        raise BrokerError("the connection closed at once")
    closing = transport.connection.closing
    serving = asyncio.ensure_future(serve(connection))
    try:
        await asyncio.wait({closing, serving}, return_when=asyncio.FIRST_COMPLETED)
        # Closing a channel cancels what waits on it, which would look like our own cancellation.
        if serving.done() and not serving.cancelled():
            serving.result()
        raise BrokerError(_describe(_reason(closing)))
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        closing.cancel()


def _reason(closing: "asyncio.Future[object]") -> BaseException:
    if not closing.done():
        return BrokerError("the channel ended")
    if closing.cancelled():
        return BrokerError("the connection was closed")
    return closing.exception() or BrokerError("the connection was closed")


def _backoff(down_seconds: float, longest_seconds: float) -> float:
    longest = min(max(down_seconds / 2, MIN_BACKOFF_SECONDS), longest_seconds)
    return random.uniform(0, longest)  # noqa: S311  jitter, no secret


async def open_connection(
    settings: RabbitMQSettings, url: SecretStr, *, name: str, ask_http: bool = False
) -> aio_pika.Connection:
    """Open one connection; user, password and certificates are read anew each time.

    Raises ConnectError within `connect_timeout_seconds`; its text names the fault and the remedy.
    With `ask_http` a port that answers nothing is asked whether it speaks HTTP, for another second:
    RabbitMQ's management page is silent to AMQP.
    """
    try:
        tolerate_broken_properties()
        connection = _new_connection(settings, url, name)
    except ConfigError as error:  # a file of the login
        raise ConnectError("auth_failed", str(error)) from error
    except _OTHER_INTERFACE as error:
        raise _unsupported(host_of(url)) from error
    try:
        async with asyncio.timeout(settings.connect_timeout_seconds):
            await connection.connect()
    except BaseException as error:
        await close_quietly(connection)
        if not isinstance(error, Exception):
            raise
        # aiormq raises more than its own classes.
        wire = wire_of(connection)
        foreign, closed = wire.foreign, wire.closed
        is_silent = not foreign and closed is None
        if ask_http and is_silent and _classify(error) in {"refused", "timeout"}:
            foreign = await _ask_http(settings, URL(url.get_secret_value()))
        raise _refusal(error, host_of(url), closed or (0, ""), foreign) from error
    if not wire_of(connection).is_open:
        # It would live, and hear nothing of what is delivered and confirmed.
        await close_quietly(connection)
        raise _unsupported(host_of(url))
    return connection


def _refusal(error: Exception, host: str, closed: tuple[int, str], foreign: bytes) -> ConnectError:
    """Make the error that names the fault and the remedy of a connection that did not open."""
    if isinstance(error, _OTHER_INTERFACE):
        return _unsupported(host)
    code, said = closed
    fault = "auth_failed" if code in _REFUSED_LOGIN else _classify(error)
    why = f"{fault}: {said}" if said else fault
    cause, remedy = _look_closer(error, foreign) or (why, _REMEDIES[fault])
    return ConnectError(fault, f"no connection to {host} ({cause}); {remedy}")


# What a library raises that is called as another version of it is.
_OTHER_INTERFACE = (AttributeError, TypeError)


def _unsupported(host: str) -> ConnectError:
    installed = ", ".join(f"{name} {version(name)}" for name in _CLIENT)
    fault: ConnectFault = "client_unsupported"
    cause = f"no connection to {host} ({fault}: {installed})"
    return ConnectError(fault, f"{cause}; {_REMEDIES[fault]}")


async def _ask_http(settings: RabbitMQSettings, url: URL) -> bytes:
    """Return how the answer to an HTTP request begins, or nothing when it is none.

    A broker that is merely slow answers it too, with the versions of AMQP that it speaks.
    """
    secure = url.scheme == "amqps"
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(ASK_HTTP_SECONDS):
            reader, writer = await asyncio.open_connection(
                url.host,
                _port_of(url),
                ssl=tls_context(settings) if secure else None,
            )
            with contextlib.closing(writer):
                writer.write(b"GET / HTTP/1.0\r\n\r\n")
                answer = await reader.read(FOREIGN_BYTES)
                return answer if answer.startswith(b"HTTP/") else b""
    return b""


def _new_connection(settings: RabbitMQSettings, url: SecretStr, name: str) -> aio_pika.Connection:
    target = URL(url.get_secret_value()).update_query(
        heartbeat=settings.heartbeat_seconds, name=f"sms-bridge {name}"
    )
    target = with_credentials(target, settings)
    try:
        context = tls_context(settings) if target.scheme == "amqps" else None
    except ConfigError as error:
        raise ConnectError("tls_failed", str(error)) from error
    connection = aio_pika.Connection(target, ssl_context=context)
    connection.kwargs["transport_factory"] = Wire()
    if settings.tls.server_name is not None and target.scheme == "amqps":
        connection.kwargs["server_hostname"] = settings.tls.server_name
    return connection


async def open_first_connection(settings: RabbitMQSettings, *, name: str) -> aio_pika.Connection:
    """Open a connection to the first broker of `rabbitmq.url` that takes one; each is tried once.

    Raises BrokerError, that of the last one.
    """
    *others, last = settings.url
    for url in others:
        try:
            return await open_connection(settings, url, name=name, ask_http=True)
        except BrokerError:
            continue
    return await open_connection(settings, last, name=name, ask_http=True)


def with_credentials(url: URL, settings: RabbitMQSettings) -> URL:
    """Lay `rabbitmq.username` and `.password`, or their files, over those of a URL."""
    username, password = settings.username, None
    if settings.username_file is not None:
        username = read_secret("rabbitmq.username_file", settings.username_file)
    if settings.password is not None:
        password = settings.password.get_secret_value()
    if settings.password_file is not None:
        password = read_secret("rabbitmq.password_file", settings.password_file)
    url = url if username is None else url.with_user(username)
    return url if password is None else url.with_password(password)


def tls_context(settings: RabbitMQSettings) -> ssl.SSLContext:
    """Make what trusts the broker; raises ConfigError when a file of `rabbitmq.tls` is no use."""
    tls = settings.tls
    context = load_authorities("rabbitmq.tls.ca_file", tls.ca_file)
    for name, path in (("cert_file", tls.cert_file), ("key_file", tls.key_file)):
        try:
            if path is not None:
                path.open("rb").close()
        except OSError as error:
            raise unreadable(f"rabbitmq.tls.{name}", path, error) from None
    if tls.cert_file is not None:
        try:
            context.load_cert_chain(tls.cert_file, tls.key_file)
        except OSError:  # ssl.SSLError is one
            raise ConfigError(
                f"rabbitmq.tls.cert_file: {tls.cert_file} and rabbitmq.tls.key_file are not a "
                "certificate and its key; they must be PEM files that belong together"
            ) from None
    return context


def host_of(url: SecretStr) -> str:
    """Write the host and port of a broker's URL."""
    parsed = URL(url.get_secret_value())
    return f"{parsed.host}:{_port_of(parsed)}"


def _port_of(url: URL) -> int:
    return url.port or (5671 if url.scheme == "amqps" else 5672)


_LOGIN_FAULTS = (
    aiormq.exceptions.ProbableAuthenticationError,
    aiormq.exceptions.AuthenticationError,
    aiormq.exceptions.ConnectionNotAllowed,
)
# The broker knows no such virtual host, or the user has no right to it (AMQP: access refused, not
# allowed).
_REFUSED_LOGIN: Final = (403, 530)


def _classify(error: BaseException) -> ConnectFault:
    causes = list(causes_of(error))
    if any(isinstance(cause, ssl.SSLError) for cause in causes):
        return "tls_failed"
    if any(isinstance(cause, _LOGIN_FAULTS) for cause in causes):
        return "auth_failed"
    return "timeout" if any(isinstance(cause, TimeoutError) for cause in causes) else "refused"


def _look_closer(error: BaseException, foreign: bytes) -> tuple[str, str] | None:
    """Name the cause and the remedy where more is known than the kind of the fault.

    `foreign` is the start of what answered, when that was no AMQP.
    """
    ports = "it is usually 5672, with TLS 5671"
    if any(isinstance(cause, socket.gaierror) for cause in causes_of(error)):
        return "its name is not found", "check the host in rabbitmq.url and the resolver"
    if any(getattr(cause, "reason", "") in _NO_TLS for cause in causes_of(error)):
        return "no TLS is spoken there", f"write amqp:// in rabbitmq.url, or its port: {ports}"
    if foreign.startswith(b"HTTP/"):
        return "HTTP is spoken there, not AMQP", f"correct the port in rabbitmq.url: {ports}"
    if foreign.startswith(_TLS_ALERT):
        return "TLS is spoken there", f"write amqps:// in rabbitmq.url, or its port: {ports}"
    if foreign:
        return "what answers there is no RabbitMQ", f"correct rabbitmq.url; its port: {ports}"
    return None


# What OpenSSL calls a first answer that is no TLS; the second with Python 3.13.
_NO_TLS: Final = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE")
# The type of an alert and the major version (RFC 8446, 5.1).
_TLS_ALERT: Final = b"\x15\x03"


def _describe(error: BaseException) -> str:
    # The broker's own text names queues and arguments, never a message.
    if isinstance(error, BrokerError):
        return str(error)
    if isinstance(error, asyncio.CancelledError):
        return "the broker sent nothing for too long"
    text = " ".join(str(part) for part in error.args[:2]) if error.args else ""
    return f"{type(error).__name__} {text}".strip()


def wire_of(connection: aio_pika.Connection) -> Wire:
    """Return the frames beneath a connection that `open_connection` has opened."""
    return cast("Wire", connection.kwargs["transport_factory"])


async def open_channel(
    connection: aio_pika.Connection, *, confirms: bool = False
) -> aiormq.Channel:
    """Open a channel and return aiormq's, which has no objects between us and the frames.

    With `confirms` a publish waits for the broker's confirm and raises when it is returned.
    """
    async with asyncio.timeout(RPC_TIMEOUT_SECONDS):
        if connection.transport is None:
            raise BrokerError("the connection closed at once")
        channel = await connection.transport.connection.channel(
            publisher_confirms=confirms, on_return_raises=confirms
        )
    return cast("aiormq.Channel", channel)


def closed_channel(channel: aiormq.Channel, use: str) -> BrokerError:
    """Make the error of a channel that has ended, with the broker's own words if it ended it."""
    closing = channel.closing
    error = None if not closing.done() or closing.cancelled() else closing.exception()
    why = f": {_describe(error)}" if isinstance(error, aiormq.exceptions.ChannelClosed) else ""
    return BrokerError(f"the {use} channel was closed{why}")


async def close_channel(channel: aiormq.Channel) -> None:
    """Close a channel."""
    await channel.close()
    heed_cancellation()


def heed_cancellation() -> None:
    """Raise CancelledError when this task is cancelled.

    Where the connection ends at the same moment, aiormq swallows it or raises an error of its own
    in its place; who goes on after that must ask.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def close_quietly(connection: aio_pika.Connection) -> None:
    """Close within a deadline; a broker that hangs must not hold us up."""
    with contextlib.suppress(Exception):
        async with asyncio.timeout(CLOSE_TIMEOUT_SECONDS):
            await connection.close()
    if not connection.is_closed:
        # It has let go of its transport, so this only marks it as closed. Its finaliser would
        # close it otherwise, in whatever thread collects it.
        await connection.close()
