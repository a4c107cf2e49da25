"""An HTTP/1.1 POST that knows whether the request left us, over kept connections or a proxy.

The promise: AttemptError with `connect_failed`, `connect_timeout`, `proxy_failed`, `pool_exhausted`
or `tls_failed` means that not one byte of the body was written; with every other fault it may have
arrived. A status line that was read is the outcome, whatever happens to the body behind it.

No redirects, cookies, decompression or proxies from the environment; at most 64 KiB of an answer
are kept; one deadline holds over the whole attempt.

Why our own: a cancelled request can block a slot of httpx's pool for ever (httpcore issue 1093), so
that httpx's transport is safe only with a new connection for each request; and each costs fifty
times the CPU time, with kept connections too: `make bench SCENES=post` measures it, and
docs/benchmarks.md has the figures. To swap httpx's in, have `open_transport` return HttpxTransport
always; the tests of what both promise run with it.
"""

import asyncio
import functools
import ssl
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol
from urllib.parse import quote, urlsplit

from yarl import URL

from bridge.config import SmsApiSettings
from bridge.credentials import load_authorities
from bridge.errors import AttemptError
from bridge.happy_eyeballs import create_connection
from bridge.worker.service.connection import Connection, Header, Reply, connect_fault
from bridge.worker.service.deadlines import Deadlines

# What may stand in a request's target as it is (RFC 3986, section 3.3); what is percent-encoded
# already stays so.
_IN_TARGET: Final = "/?:@!$&'()*+,;=%"


class ApiTransport(Protocol):
    """What a sender needs: one request, one answer, the promise of this module."""

    async def post(
        self, url: str, headers: Sequence[Header], body: bytes, common: Sequence[Header] = ()
    ) -> Reply:
        """POST a body, with these headers beside `Host` and `Content-Length`.

        `common` come before them: what all have for a while, which is written once. Raises
        AttemptError, and nothing else, when there is no answer.
        """

    async def aclose(self) -> None:
        """Close the connections."""


def open_transport(settings: SmsApiSettings, *, max_connections: int) -> ApiTransport:
    """Make the transport to the SMS API: our own, or httpx's when a proxy is configured.

    Trusts the system's certificate authorities, or only those of `ca_file`; a plain address needs
    none. Raises ConfigError when that file cannot be used.
    """
    authorities = functools.partial(load_authorities, "sms_api.ca_file", settings.ca_file)
    if settings.proxy is not None:
        # Takes a tenth of the time of all imports, and is imported only where it is wanted.
        from bridge.worker.service.httpx_transport import HttpxTransport  # noqa: PLC0415

        return HttpxTransport(
            timeout_seconds=settings.timeout_seconds,
            connect_timeout_seconds=settings.connect_timeout_seconds,
            tls=authorities(),
            proxy=settings.proxy.get_secret_value(),
        )
    # Reading the system's takes as long as connecting to the broker.
    is_plain = URL(settings.base_url or "").scheme == "http"
    return Transport(
        timeout_seconds=settings.timeout_seconds,
        connect_timeout_seconds=settings.connect_timeout_seconds,
        tls=None if is_plain else authorities(),
        max_connections=max_connections,
    )


class Transport:
    """Keeps connections to one server and sends one request at a time on each.

    Without `tls` it posts to no https URL: `tls_failed`.
    """

    def __init__(
        self,
        *,
        timeout_seconds: float,
        connect_timeout_seconds: float,
        tls: ssl.SSLContext | None,
        max_connections: int,
    ) -> None:
        self._timeout_seconds = timeout_seconds
        self._connect_timeout_seconds = connect_timeout_seconds
        self._tls = tls
        self._max_connections = max_connections
        self._deadlines = Deadlines()
        self._target: _Target | None = None
        self._idle: deque[Connection] = deque()
        self._in_use = 0
        self._closed = False

    async def post(
        self, url: str, headers: Sequence[Header], body: bytes, common: Sequence[Header] = ()
    ) -> Reply:
        """Send a request on an idle connection, or on a new one when there is none."""
        target = self._target
        if target is None or target.written != url or target.common is not common:
            self._target = target = _target(url, common)
        request = _write_request(target, headers, body)
        if self._in_use >= self._max_connections:
            raise AttemptError("pool_exhausted")
        self._in_use += 1
        connection = None
        try:
            now = time.monotonic()
            deadline = now + self._timeout_seconds
            connection = self._idle_connection(now) or await self._connect(target, deadline)
            return await connection.exchange(request, deadline)
        except OSError as error:
            raise AttemptError("connection_lost") from error
        finally:
            self._in_use -= 1
            if connection is not None:
                self._keep(connection)

    async def aclose(self) -> None:
        """Close the idle connections; those in use end with their request."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()

    def _idle_connection(self, now: float) -> Connection | None:
        while self._idle:
            # The most recently used one, so that the others grow old and are closed.
            connection = self._idle.pop()
            if connection.is_usable(now) and not connection.has_unread_bytes:
                return connection
            connection.close()
        return None

    async def _connect(self, target: "_Target", deadline: float) -> Connection:
        if target.is_secure and self._tls is None:
            raise AttemptError("tls_failed")
        limit = min(self._connect_timeout_seconds, deadline - time.monotonic())
        try:
            async with asyncio.timeout(limit):
                _, connection = await create_connection(
                    functools.partial(Connection, self._deadlines),
                    target.host,
                    target.port,
                    tls=self._tls if target.is_secure else None,
                )
        except TimeoutError as error:
            raise AttemptError("connect_timeout") from error
        except (OSError, UnicodeError) as error:
            # A host name that cannot be one is a UnicodeError.
            raise AttemptError(connect_fault(error)) from error
        return connection

    def _keep(self, connection: Connection) -> None:
        if connection.is_usable(connection.idle_since) and not self._closed:
            self._idle.append(connection)
        else:
            connection.close()


@dataclass(frozen=True, slots=True)
class _Target:
    """Where requests go; `head` is what all to it begin with, `common` their first headers."""

    written: str
    common: Sequence[Header]
    host: str
    port: int
    is_secure: bool
    head: bytes


def _target(url: str, common: Sequence[Header]) -> _Target:
    server = URL(url)
    is_secure = server.scheme == "https"
    _, _, path, query, _ = urlsplit(url)
    target = quote(f"{path or '/'}?{query}" if query else path or "/", safe=_IN_TARGET)
    start = f"POST {target} HTTP/1.1\r\nHost: {server.host_port_subcomponent}\r\n"
    head = start.encode("ascii") + _write_headers(common)
    port = server.port or (443 if is_secure else 80)
    return _Target(url, common, server.raw_host or "", port, is_secure, head)


def _write_request(target: _Target, headers: Sequence[Header], body: bytes) -> bytes:
    lines = _write_headers(headers)
    return b"%s%sContent-Length: %d\r\n\r\n%s" % (target.head, lines, len(body), body)


def _write_headers(headers: Sequence[Header]) -> bytes:
    return b"".join([b"%s: %s\r\n" % header for header in headers])
