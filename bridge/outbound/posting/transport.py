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
import contextlib
import functools
import ssl
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import httpx

from bridge.config import SmsApiSettings
from bridge.credentials import load_authorities
from bridge.errors import AttemptError, AttemptFault, causes_of
from bridge.happy_eyeballs import create_connection
from bridge.outbound.posting.connection import MAX_ANSWER_BYTES, Connection, Header, Reply


class ApiTransport(Protocol):
    """What a sender needs: one request, one answer, the promise of this module."""

    async def post(self, url: str, headers: Sequence[Header], body: bytes) -> Reply:
        """POST a body, with these headers beside `Host` and `Content-Length`.

        Raises AttemptError, and nothing else, when there is no answer.
        """

    async def aclose(self) -> None:
        """Close the connections."""


def open_transport(settings: SmsApiSettings, *, max_connections: int) -> ApiTransport:
    """Make the transport to the SMS API: our own, or httpx's when a proxy is configured.

    Trusts the system's certificate authorities, or only those of `ca_file`.
    Raises ConfigError when that file cannot be used.
    """
    tls = load_authorities("sms_api.ca_file", settings.ca_file)
    if settings.proxy is not None:
        return HttpxTransport(
            timeout_seconds=settings.timeout_seconds,
            connect_timeout_seconds=settings.connect_timeout_seconds,
            tls=tls,
            proxy=settings.proxy.get_secret_value(),
        )
    return Transport(
        timeout_seconds=settings.timeout_seconds,
        connect_timeout_seconds=settings.connect_timeout_seconds,
        tls=tls,
        max_connections=max_connections,
    )


class Transport:
    """Keeps connections to one server and sends one request at a time on each."""

    def __init__(
        self,
        *,
        timeout_seconds: float,
        connect_timeout_seconds: float,
        tls: ssl.SSLContext,
        max_connections: int,
    ) -> None:
        self._timeout_seconds = timeout_seconds
        self._connect_timeout_seconds = connect_timeout_seconds
        self._tls = tls
        self._max_connections = max_connections
        self._idle: deque[Connection] = deque()
        self._in_use = 0
        self._closed = False

    async def post(self, url: str, headers: Sequence[Header], body: bytes) -> Reply:
        """Send a request on an idle connection, or on a new one when there is none."""
        target = _target(url)
        request = _write_request(target, headers, body)
        if self._in_use >= self._max_connections:
            raise AttemptError("pool_exhausted")
        self._in_use += 1
        connection = None
        try:
            deadline = time.monotonic() + self._timeout_seconds
            connection = self._idle_connection() or await self._connect(target.url, deadline)
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

    def _idle_connection(self) -> Connection | None:
        while self._idle:
            # The most recently used one, so that the others grow old and are closed.
            connection = self._idle.pop()
            if connection.is_usable and not connection.has_unread_bytes:
                return connection
            connection.close()
        return None

    async def _connect(self, url: httpx.URL, deadline: float) -> Connection:
        secure = url.scheme == "https"
        limit = min(self._connect_timeout_seconds, deadline - time.monotonic())
        try:
            async with asyncio.timeout(limit):
                _, connection = await create_connection(
                    Connection,
                    url.host,
                    url.port or (443 if secure else 80),
                    tls=self._tls if secure else None,
                )
        except TimeoutError as error:
            raise AttemptError("connect_timeout") from error
        except (OSError, UnicodeError) as error:
            # A host name that cannot be one is a UnicodeError.
            raise AttemptError(_connect_fault(error)) from error
        return connection

    def _keep(self, connection: Connection) -> None:
        if connection.is_usable and not self._closed:
            self._idle.append(connection)
        else:
            connection.close()


@dataclass(frozen=True, slots=True)
class _Target:
    url: httpx.URL
    head: bytes


@functools.lru_cache(maxsize=8)
def _target(url: str) -> _Target:
    parsed = httpx.URL(url)
    head = b"POST %s HTTP/1.1\r\nHost: %s" % (parsed.raw_path, parsed.netloc)
    return _Target(parsed, head)


def _write_request(target: _Target, headers: Sequence[Header], body: bytes) -> bytes:
    lines = map(b": ".join, headers)
    length = b"Content-Length: %d" % len(body)
    return b"\r\n".join((target.head, *lines, length, b"", body))


class HttpxTransport:
    """httpx's own transport, through a proxy if any, with a new connection for each request.

    Slower, and what it cannot tell counts as uncertain. Nothing is kept: a cancelled request can
    block a slot of httpx's pool for ever, and bytes that are left of one answer would be taken
    for the next one.
    """

    def __init__(
        self,
        *,
        timeout_seconds: float,
        connect_timeout_seconds: float,
        tls: ssl.SSLContext,
        proxy: str | None = None,
    ) -> None:
        self._timeout_seconds = timeout_seconds
        self._timeouts = httpx.Timeout(timeout_seconds, connect=connect_timeout_seconds).as_dict()
        self._tls = tls
        self._proxy = proxy

    async def aclose(self) -> None:
        """Do nothing: no connection is kept."""

    async def post(self, url: str, headers: Sequence[Header], body: bytes) -> Reply:
        """Send a request; a status that was read is returned in any case.

        That is also the proxy's own 407 to CONNECT (RFC 9110, 15.5.8). What else it answers to
        CONNECT speaks of the way to the server, and is `proxy_failed`.
        """
        request = httpx.Request(
            "POST", url, headers=headers, content=body, extensions={"timeout": self._timeouts}
        )
        connection = httpx.AsyncHTTPTransport(
            proxy=self._proxy, verify=self._tls, trust_env=False, http2=False
        )
        response: httpx.Response | None = None
        start = bytearray()
        try:
            async with asyncio.timeout(self._timeout_seconds):
                response = await connection.handle_async_request(request)
                async for chunk in response.aiter_raw():
                    start += chunk[: MAX_ANSWER_BYTES - len(start)]
                    if len(start) >= MAX_ANSWER_BYTES:
                        break
        except (httpx.HTTPError, OSError) as error:
            # httpx gives the proxy's status only in the error's text.
            if isinstance(error, httpx.ProxyError) and str(error).startswith("407 "):
                return Reply(407)
            if response is None:
                raise AttemptError(_fault_of(error)) from error
        finally:
            with contextlib.suppress(Exception):
                await connection.aclose()
        return Reply(response.status_code, response.headers.raw, bytes(start))


def _fault_of(error: httpx.HTTPError | OSError) -> AttemptFault:
    match error:
        case httpx.ConnectError() | httpx.UnsupportedProtocol():
            return _connect_fault(error)
        case httpx.ConnectTimeout():
            return "connect_timeout"
        case httpx.PoolTimeout():
            return "pool_exhausted"
        case httpx.ProxyError():
            return "proxy_failed"
        case httpx.TimeoutException() | TimeoutError():
            return "answer_timeout"
        case httpx.ProtocolError():
            return "not_http"
        case _:
            return "connection_lost"


def _connect_fault(error: Exception) -> AttemptFault:
    is_tls = any(isinstance(cause, ssl.SSLError) for cause in causes_of(error))
    return "tls_failed" if is_tls else "connect_failed"
