"""Opens connections to RabbitMQ, tries several URLs in parallel, and explains failures."""

import asyncio
import contextlib
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from importlib.metadata import version
from typing import Any, Final, assert_never

from pydantic import SecretStr
from yarl import URL

from bridge.amqp.client import (
    AuthenticationError,
    Connection,
    ConnectionNotAllowed,
    InvalidFrameError,
    ProbableAuthenticationError,
)
from bridge.amqp.field_values import tolerate_broken_properties
from bridge.amqp.wire import FOREIGN_BYTES, Wire
from bridge.config import RabbitMQSettings
from bridge.credentials import Credential, load_authorities, read_secret, unreadable
from bridge.deadline import Deadline
from bridge.errors import ConfigError, ConnectError, ConnectFault, causes_of


def with_credentials(url: URL, settings: RabbitMQSettings) -> URL:
    """Return a URL with the user and password of the settings or their files, if given there."""
    username, password = settings.username, None
    if settings.username_file is not None:
        username = read_secret("rabbitmq.username_file", settings.username_file)
    if settings.password is not None:
        password = settings.password.get_secret_value()
    if settings.password_file is not None:
        password = read_secret("rabbitmq.password_file", settings.password_file)
    url = url if username is None else url.with_user(username)
    return url if password is None else url.with_password(password)


def login_files(settings: RabbitMQSettings) -> list[Credential]:
    """Read the files with the user and the password, and return them for watching.

    Each connection reads them again by itself. They are watched so that an unreadable file is
    reported before a connection needs it.
    """
    files = {
        "rabbitmq.username_file": settings.username_file,
        "rabbitmq.password_file": settings.password_file,
    }
    return [Credential(key, file=file) for key, file in files.items() if file is not None]


def tls_context(settings: RabbitMQSettings) -> ssl.SSLContext:
    """Create the TLS context; raise ConfigError if a file in `rabbitmq.tls` cannot be used."""
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
        except OSError:  # includes ssl.SSLError
            raise ConfigError(
                f"rabbitmq.tls.cert_file: {tls.cert_file} and rabbitmq.tls.key_file are not a "
                "certificate and its key; they must be PEM files that belong together"
            ) from None
    return context


_CLIENT: Final = ("aio-pika", "aiormq", "pamqp")

# Raised if the interface of an installed client library is incompatible.
OTHER_INTERFACE = (AttributeError, TypeError)
_LOGIN_FAULTS = (ProbableAuthenticationError, AuthenticationError, ConnectionNotAllowed)
# Reply codes `access-refused` and `not-allowed` (AMQP 0-9-1, 1.2): the virtual host does not exist,
# or the user has no permission on it.
_REFUSED_LOGIN: Final = (403, 530)
# OpenSSL's error reasons if the peer does not speak TLS; the second is that of Python 3.13.
_NO_TLS: Final = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE")
# First bytes of a TLS alert: record type and major version (RFC 8446, 5.1).
_TLS_ALERT: Final = b"\x15\x03"


def refusal(error: Exception, host: str, closed: tuple[int, str], foreign: bytes) -> ConnectError:
    """Build the error for a failed connection, with its fault and the remedy.

    `closed` is the broker's close code and text, `foreign` the first bytes of an answer that was
    not AMQP.
    """
    if isinstance(error, OTHER_INTERFACE):
        return unsupported(host)
    code, said = closed
    is_refused = code in _REFUSED_LOGIN or (not code and _is_closed_instead_of_opened(error))
    fault = "auth_failed" if is_refused else _classify(error)
    why = f"{fault}: {said}" if said else fault
    cause, remedy = _look_closer(error, foreign) or (why, _remedy_for(fault))
    return ConnectError(fault, f"no connection to {host} ({cause}); {remedy}")


def _is_closed_instead_of_opened(error: Exception) -> bool:
    """Whether the broker accepted the login, but closed the connection instead of opening it.

    aiormq's error names only the frame that it expected, `Connection.OpenOk`. The only other frame
    that a broker sends at this point is `Connection.Close`.
    """
    return isinstance(error, InvalidFrameError) and "Connection.OpenOk" in str(error)


def unsupported(host: str) -> ConnectError:
    """Build the error for installed client libraries that the bridge does not support."""
    installed = ", ".join(f"{name} {version(name)}" for name in _CLIENT)
    fault: ConnectFault = "client_unsupported"
    cause = f"no connection to {host} ({fault}: {installed})"
    return ConnectError(fault, f"{cause}; {_remedy_for(fault)}")


def is_unreachable(error: BaseException) -> bool:
    """Whether nothing answered at all: the connection was refused, or it timed out."""
    return _classify(error) in {"refused", "timeout"}


def _classify(error: BaseException) -> ConnectFault:
    causes = list(causes_of(error))
    if any(isinstance(cause, ssl.SSLError) for cause in causes):
        return "tls_failed"
    if any(isinstance(cause, _LOGIN_FAULTS) for cause in causes):
        return "auth_failed"
    return "timeout" if any(isinstance(cause, TimeoutError) for cause in causes) else "refused"


def _remedy_for(fault: ConnectFault) -> str:
    match fault:
        case "auth_failed":
            return "check rabbitmq.username, rabbitmq.password and the vhost in rabbitmq.url"
        case "refused":
            return "check that RabbitMQ runs and that rabbitmq.url names its host and port"
        case "tls_failed":
            return "check rabbitmq.tls and the broker's certificate"
        case "timeout":
            return "check the network to the broker, and the port in rabbitmq.url: nothing answered"
        case "client_unsupported":
            versions = "install those in uv.lock, or use the released image"
            return f"the bridge cannot receive messages with these versions; {versions}"
        case _:
            assert_never(fault)


def _look_closer(error: BaseException, foreign: bytes) -> tuple[str, str] | None:
    """Return a cause and a remedy that are more specific than the fault's own, or None.

    `foreign` is the first bytes of an answer that was not AMQP.
    """
    ports = "it is usually 5672, with TLS 5671"
    if any(isinstance(cause, socket.gaierror) for cause in causes_of(error)):
        return "its name cannot be resolved", "check the host in rabbitmq.url and the resolver"
    if any(getattr(cause, "reason", "") in _NO_TLS for cause in causes_of(error)):
        return "the port does not use TLS", f"write amqp:// in rabbitmq.url, or its port: {ports}"
    if foreign.startswith(b"HTTP/"):
        return "the port speaks HTTP, not AMQP", f"correct the port in rabbitmq.url: {ports}"
    if foreign.startswith(_TLS_ALERT):
        return "the port uses TLS", f"write amqps:// in rabbitmq.url, or its port: {ports}"
    if foreign:
        return "the server there is not RabbitMQ", f"correct rabbitmq.url; its port: {ports}"
    return None


CLOSE_TIMEOUT_SECONDS: Final = 3.0
# Timeout of the HTTP request that shows whether a port speaks HTTP.
ASK_HTTP_SECONDS: Final = 1.0
# Delay before the next URL is tried in parallel. It is longer than a login on a busy broker takes,
# because each URL tried in parallel costs another login.
NEXT_LOGIN_SECONDS: Final = 1.0


async def open_connection(
    settings: RabbitMQSettings, url: SecretStr, *, name: str, ask_http: bool = False
) -> Connection:
    """Open one connection; read user, password and certificate files again each time.

    Raises ConnectError within `connect_timeout_seconds`; its text names the fault and the remedy.
    With `ask_http`, a port that sends nothing is also sent an HTTP request, which takes up to one
    second more. That recognises RabbitMQ's management port, which does not answer AMQP.
    """
    try:
        tolerate_broken_properties()
        connection = _new_connection(settings, url, name)
    except ConfigError as error:  # an unreadable credentials file
        raise ConnectError("auth_failed", str(error)) from error
    except OTHER_INTERFACE as error:
        raise unsupported(host_of(url)) from error
    try:
        async with Deadline(settings.connect_timeout_seconds):
            await connection.connect()
    except BaseException as error:
        await close_quietly(connection)
        if not isinstance(error, Exception):
            raise
        # Any exception, because aiormq does not raise only its own.
        wire = connection.wire
        foreign, closed = wire.foreign, wire.closed
        is_silent = not foreign and closed is None
        if ask_http and is_silent and is_unreachable(error):
            foreign = await _ask_http(settings, URL(url.get_secret_value()))
        raise refusal(error, host_of(url), closed or (0, ""), foreign) from error
    if not connection.wire.is_open:
        # aiormq did not use our `Wire`: the connection would stay open, but no delivery and no
        # confirm would arrive.
        await close_quietly(connection)
        raise unsupported(host_of(url))
    return connection


async def open_first_connection(settings: RabbitMQSettings, *, name: str) -> Connection:
    """Try each URL of `rabbitmq.url` once; return the first connection that opens.

    Raises ConnectError with the fault of each URL.
    """
    faults: dict[SecretStr, ConnectError] = {}

    async def open_one(url: SecretStr) -> Connection:
        try:
            return await open_connection(settings, url, name=name, ask_http=True)
        except ConnectError as error:
            faults[url] = error
            raise

    try:
        _, connection = await open_quickest(settings.url, open_one)
    except ConnectError as error:
        each = (str(faults[url]) for url in dict.fromkeys(settings.url))
        raise ConnectError(error.fault, "; ".join(each)) from error
    return connection


async def open_quickest(
    urls: Sequence[SecretStr], open_one: Callable[[SecretStr], Awaitable[Connection]]
) -> tuple[SecretStr, Connection]:
    """Try the URLs in turn with `open_one`; return the first that connects, and its connection.

    The next URL is tried after a failure, or in parallel if no login has succeeded within one
    second: a hung node accepts connections and never answers. If all logins fail, raises the
    error of the last URL.
    """
    logins: list[asyncio.Task[Connection]] = []
    won: asyncio.Task[Connection] | None = None
    try:
        while won is None and (pending := _start_next(logins, urls, open_one)):
            is_last = len(logins) == len(urls)
            await asyncio.wait(
                pending,
                timeout=None if is_last else NEXT_LOGIN_SECONDS,
                return_when=asyncio.FIRST_COMPLETED,
            )
            opened = (one for one in logins if one.done() and not one.cancelled())
            won = next((one for one in opened if one.exception() is None), None)
        last = logins[-1] if won is None else won
        return urls[logins.index(last)], last.result()
    finally:
        await _abandon([login for login in logins if login is not won])


def _start_next(
    logins: list[asyncio.Task[Connection]],
    urls: Sequence[SecretStr],
    open_one: Callable[[SecretStr], Awaitable[Connection]],
) -> list[asyncio.Task[Connection]]:
    """Start a login at the next URL, if there is one; return the unfinished logins."""
    if len(logins) < len(urls):
        logins.append(asyncio.ensure_future(open_one(urls[len(logins)])))
    return [login for login in logins if not login.done()]


async def _abandon(logins: Sequence[asyncio.Task[Connection]]) -> None:
    """Cancel these logins, and close the connections that they have opened."""
    for login in logins:
        login.cancel()
    for opened in await asyncio.gather(*logins, return_exceptions=True):
        if isinstance(opened, Connection):
            await close_quietly(opened)


async def _ask_http(settings: RabbitMQSettings, url: URL) -> bytes:
    """Return the first bytes of the answer to an HTTP request; empty if it is not HTTP.

    A slow AMQP broker also answers this request, but with its AMQP version.
    """
    secure = url.scheme == "amqps"
    with contextlib.suppress(OSError, TimeoutError):
        async with Deadline(ASK_HTTP_SECONDS):
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


def _new_connection(settings: RabbitMQSettings, url: SecretStr, name: str) -> Connection:
    target = URL(url.get_secret_value()).update_query(
        heartbeat=settings.heartbeat_seconds, name=f"sms-bridge {name}"
    )
    target = with_credentials(target, settings)
    try:
        context = tls_context(settings) if target.scheme == "amqps" else None
    except ConfigError as error:
        raise ConnectError("tls_failed", str(error)) from error
    connection = Connection(target, ssl_context=context)
    connection.wire = connection.kwargs["transport_factory"] = Wire(
        heartbeat_seconds=settings.heartbeat_seconds
    )
    if settings.tls.server_name is not None and target.scheme == "amqps":
        connection.kwargs["server_hostname"] = settings.tls.server_name
    return connection


def host_of(url: SecretStr) -> str:
    parsed = URL(url.get_secret_value())
    return f"{parsed.host}:{_port_of(parsed)}"


def _port_of(url: URL) -> int:
    return url.port or (5671 if url.scheme == "amqps" else 5672)


def version_of(connection: Connection) -> tuple[int, ...]:
    """Return RabbitMQ's version, such as (4, 0, 5); empty if it is not known."""
    transport = connection.transport
    told: Any = {} if transport is None else transport.connection.server_properties
    numbers = re.match("[0-9.]*", str(told.get("version", "")))
    return tuple(int(part) for part in numbers[0].split(".") if part) if numbers else ()


async def close_quietly(connection: Connection) -> None:
    """Close a connection within a deadline, even if the broker hangs."""
    with contextlib.suppress(Exception):
        async with Deadline(CLOSE_TIMEOUT_SECONDS):
            await connection.close()
    if not connection.is_closed:
        # The transport is gone, so this only marks the connection as closed. Otherwise its
        # finaliser would close it, in whatever thread the garbage collector runs.
        await connection.close()
