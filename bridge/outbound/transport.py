"""An HTTP/1.1 POST that knows whether the request left us; what goes wrong is httpx's exception.

The promise: ConnectError, ConnectTimeout and PoolTimeout mean that not one byte of the body was
written; after every other exception it may have arrived. A status line that was read is the
outcome, whatever happens to the body behind it. httpx's own pool cannot promise this, and a
cancelled request can block its slots for ever (httpcore issue 1093).

No redirects, cookies, decompression or proxies from the environment; at most 64 KiB of an answer
are kept; one deadline holds over the whole attempt.
"""

import asyncio
import contextlib
import functools
import re
import select
import ssl
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, cast

import httptools
import httpx

from bridge.config import SmsApiSettings
from bridge.credentials import load_authorities
from bridge.happy_eyeballs import create_connection

MAX_ANSWER_BYTES: Final = 64 * 1024
# Below what servers commonly keep idle connections for (5 s), to avoid the race at the end.
IDLE_SECONDS: Final = 2.0
# Connections are made anew now and then, so that a change of DNS is followed.
MAX_CONNECTION_AGE_SECONDS: Final = 300.0


Header = tuple[bytes, bytes]


class Reply(NamedTuple):
    """An answer. `body` is as it came over the wire, and not more than its start."""

    status: int
    headers: Sequence[Header] = ()
    body: bytes = b""

    def header_values(self, name: str) -> list[str]:
        """Return what a header says, each time that it is there."""
        wanted = name.lower().encode("ascii")
        return [value.decode("latin-1") for key, value in self.headers if key.lower() == wanted]


class ApiTransport(Protocol):
    """What a sender needs: one request, one answer, the promise of this module."""

    async def post(self, url: str, headers: Sequence[Header], body: bytes) -> Reply:
        """POST a body, with these headers beside `Host` and `Content-Length`."""

    async def aclose(self) -> None:
        """Close the connections."""


def open_transport(settings: SmsApiSettings, *, max_connections: int) -> ApiTransport:
    """Make the transport to the SMS API: our own, or httpx's when a proxy is configured.

    Trusts the system's certificate authorities, or only those of `ca_file`.
    Raises ConfigError when that file cannot be used.
    """
    tls = load_authorities("sms_api.ca_file", settings.ca_file)
    if settings.proxy is not None:
        return ProxyTransport(
            settings.proxy.get_secret_value(),
            timeout_seconds=settings.timeout_seconds,
            connect_timeout_seconds=settings.connect_timeout_seconds,
            tls=tls,
        )
    return Transport(
        timeout_seconds=settings.timeout_seconds,
        connect_timeout_seconds=settings.connect_timeout_seconds,
        max_connections=max_connections,
        tls=tls,
    )


_STATUS_LINE: Final = re.compile(rb"^HTTP/1\.[01] ([1-5][0-9]{2})(?: [^\r\n]*)?\r?\n", re.MULTILINE)


class Transport:
    """Keeps connections to one server and sends one request at a time on each."""

    def __init__(
        self,
        *,
        timeout_seconds: float,
        connect_timeout_seconds: float,
        max_connections: int,
        tls: ssl.SSLContext,
    ) -> None:
        self._timeout_seconds = timeout_seconds
        self._connect_timeout_seconds = connect_timeout_seconds
        self._max_connections = max_connections
        self._tls = tls
        self._idle: deque[_Connection] = deque()
        self._in_use = 0
        self._closed = False

    async def post(self, url: str, headers: Sequence[Header], body: bytes) -> Reply:
        """Send a request and return its answer; see the module for what an exception promises."""
        target = _target(url)
        request = _write_request(target, headers, body)
        if self._in_use >= self._max_connections:
            raise httpx.PoolTimeout("every connection is in use")
        self._in_use += 1
        connection = None
        try:
            deadline = time.monotonic() + self._timeout_seconds
            connection = self._idle_connection() or await self._connect(target.url, deadline)
            return await connection.exchange(request, deadline)
        finally:
            self._in_use -= 1
            if connection is not None:
                self._keep(connection)

    async def aclose(self) -> None:
        """Close the idle connections; those in use end with their request."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()

    def _idle_connection(self) -> "_Connection | None":
        while self._idle:
            # The one used last: the others grow old and are closed.
            connection = self._idle.pop()
            if connection.is_usable and not connection.has_unread_bytes:
                return connection
            connection.close()
        return None

    async def _connect(self, url: httpx.URL, deadline: float) -> "_Connection":
        secure = url.scheme == "https"
        limit = min(self._connect_timeout_seconds, deadline - time.monotonic())
        try:
            async with asyncio.timeout(limit):
                _, connection = await create_connection(
                    _Connection,
                    url.host,
                    url.port or (443 if secure else 80),
                    tls=self._tls if secure else None,
                )
        except TimeoutError as error:
            raise httpx.ConnectTimeout("no connection in time") from error
        except (OSError, UnicodeError) as error:
            # A host name that cannot be one is a UnicodeError.
            raise httpx.ConnectError("no connection") from error
        return connection

    def _keep(self, connection: "_Connection") -> None:
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


class _Connection(asyncio.Protocol):
    """One connection: writes a request, parses one answer."""

    def __init__(self) -> None:
        self._made_at = time.monotonic()
        self._idle_since = self._made_at
        self._transport: asyncio.Transport | None = None
        self._unread = select.poll()
        self._parser: httptools.HttpResponseParser | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._busy = False
        self._reusable = True
        self._reset()

    def _reset(self) -> None:
        self._complete = False
        self._head = bytearray()
        self._status: int | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._body = bytearray()

    @property
    def is_usable(self) -> bool:
        """Whether another request may be sent: clean, open, not idle for too long, not too old."""
        now = time.monotonic()
        return (
            self._reusable
            and not self._busy
            and self._transport is not None
            and not self._transport.is_closing()
            and now - self._idle_since < IDLE_SECONDS
            and now - self._made_at < MAX_CONNECTION_AGE_SECONDS
        )

    @property
    def has_unread_bytes(self) -> bool:
        """Whether something came that would be taken for the answer to the next request."""
        return bool(self._unread.poll(0))

    def close(self) -> None:
        """Drop the connection at once."""
        self._reusable = False
        if self._transport is not None:
            self._transport.abort()

    async def exchange(self, request: bytes, deadline: float) -> Reply:
        """Write the request, wait for the answer until the deadline (of the monotonic clock)."""
        if self._transport is None or self._transport.is_closing():
            raise httpx.ConnectError("the connection was closed before the request")
        self._busy = True
        self._reset()
        self._parser = httptools.HttpResponseParser(self)
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        self._transport.write(request)
        # A timer of its own costs a third of `asyncio.timeout`.
        timer = loop.call_later(max(0.0, deadline - time.monotonic()), self._expire)
        try:
            await self._waiter
            self._busy = False
            self._idle_since = time.monotonic()
        finally:
            timer.cancel()
            self._waiter = None
        return Reply(self._status or 0, self._headers, bytes(self._body))

    def _expire(self) -> None:
        self._reusable = False
        self._finish(httpx.ReadTimeout("no answer in time"))

    def _knows_status(self) -> bool:
        """Whether a status line was read, be it that the header behind it never ended."""
        if self._status is None and (lines := _STATUS_LINE.findall(self._head)):
            status = int(lines[-1])
            self._status = status if status >= 200 else None  # noqa: PLR2004  1xx is no answer
        return self._status is not None

    def _finish(self, error: Exception | None) -> None:
        if self._waiter is None or self._waiter.done():
            return
        if error is None or self._knows_status():
            self._waiter.set_result(None)
        else:
            self._waiter.set_exception(error)

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember the transport."""
        # uvloop's transports are none of asyncio's classes.
        self._transport = cast("asyncio.Transport", transport)
        self._unread.register(transport.get_extra_info("socket").fileno(), select.POLLIN)

    def data_received(self, data: bytes) -> None:
        """Feed the parser; bytes that nobody waits for end the connection."""
        if self._parser is None or self._waiter is None:
            self.close()
            return
        fault = None
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            fault = "the answer is not HTTP/1.1"
        if self._status is None:
            self._head += data
        if len(self._head) > MAX_ANSWER_BYTES:
            fault = "the header of the answer is too long"
        if fault is not None:
            self._reusable = False
            self._finish(httpx.RemoteProtocolError(fault))

    def eof_received(self) -> bool:
        """Let asyncio close our side too."""
        self._reusable = False
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Give up on an answer that is not there; a status that was read stays."""
        self._reusable = False
        fault = httpx.ReadError("the connection ended before an answer")
        fault.__cause__ = exc
        self._finish(fault)
        # It refers to this object, and the two would wait for a search for garbage.
        self._parser = None

    # httptools' side

    def on_message_begin(self) -> None:
        """Start anew, because after a 1xx another answer follows; nothing may follow the last."""
        if self._complete:
            self._reusable = False
        else:
            self._reset()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header."""
        if not self._complete:
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Take the status; the outcome is known from here on."""
        if self._parser is None or self._complete:
            return
        status = self._parser.get_status_code()
        if status >= 200:  # noqa: PLR2004  a 1xx is followed by the answer
            self._status = status
            self._reusable = self._reusable and self._parser.should_keep_alive()

    def on_body(self, data: bytes) -> None:
        """Keep the start of the body; what is longer is not worth the connection."""
        if self._complete:
            return
        room = MAX_ANSWER_BYTES - len(self._body)
        self._body += data[:room]
        if len(data) > room:
            self._reusable = False
            self._finish(None)

    def on_message_complete(self) -> None:
        """Hand the answer over."""
        if self._status is not None:
            self._complete = True
            self._finish(None)


class ProxyTransport:
    """httpx's own transport through a proxy, a new connection for each request.

    Slower, and what it cannot tell counts as uncertain. Nothing is kept: a cancelled request can
    block a slot of httpx's pool for ever, and bytes that are left of one answer would be taken
    for the next one.
    """

    def __init__(
        self,
        proxy: str,
        *,
        timeout_seconds: float,
        connect_timeout_seconds: float,
        tls: ssl.SSLContext,
    ) -> None:
        self._proxy = proxy
        self._timeout_seconds = timeout_seconds
        self._timeouts = httpx.Timeout(timeout_seconds, connect=connect_timeout_seconds).as_dict()
        self._tls = tls

    async def aclose(self) -> None:
        """Do nothing: no connection is kept."""

    async def post(self, url: str, headers: Sequence[Header], body: bytes) -> Reply:
        """Send a request through the proxy; a status that was read is returned in any case.

        That is also the proxy's own 407 to CONNECT (RFC 9110, 15.5.8). What else it answers to
        CONNECT speaks of the way to the server, and raises httpx.ProxyError.
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
        except httpx.ProxyError as error:
            # The status is in its text only.
            if not str(error).startswith("407 "):
                raise
            return Reply(407)
        except httpx.HTTPError:
            if response is None:
                raise
        except TimeoutError as error:
            if response is None:
                raise httpx.ReadTimeout("no answer in time") from error
        finally:
            with contextlib.suppress(Exception):
                await connection.aclose()
        return Reply(response.status_code, response.headers.raw, bytes(start))
