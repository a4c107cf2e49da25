"""An HTTP/1.1 POST that knows whether the request was sent; connections are kept alive.

A PostError with `connect_failed`, `connect_timeout`, `proxy_failed`, `pool_exhausted` or
`tls_failed` guarantees that no byte of the body was written. With every other fault the request may
have arrived. If a status line was read, it is the answer, whatever happens to the body after it.

There are no redirects, cookies, decompression or proxies from the environment. At most 64 KiB of an
answer are kept, and one deadline covers the whole POST. The parser is strict and fast; an answer
that it refuses is parsed again by `LenientReader`, and its connection is not used again.

Why not httpx: a cancelled request can block a slot of httpx's pool for ever (httpcore issue 1093),
so httpx's transport is safe only with a new connection for each request. Each request also costs
fifty times the CPU time, even with kept connections: `make bench SCENES=post` measures it, and
docs/evidence/benchmarks.md has the figures. The tests of this promise run with both transports.
"""

import asyncio
import functools
import math
import select
import ssl
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, cast
from urllib.parse import quote, urlsplit

import httptools
from yarl import URL

from bridge.errors import PostError, PostFault, causes_of
from bridge.happy_eyeballs import create_connection
from bridge.worker.service.lenient_reader import MAX_ANSWER_BYTES, LenientReader

# Characters that stay unescaped in a request's target (RFC 3986, section 3.3), including those of
# existing percent-encoding.
_IN_TARGET: Final = "/?:@!$&'()*+,;=%"
# Shorter than servers commonly keep idle connections (5 s), so that none closes under a new
# request. These two are not Final, because a compiled module would inline them and tests shorten
# them.
IDLE_SECONDS = 2.0
# Connections are replaced after this time, so that a change of DNS takes effect.
MAX_CONNECTION_AGE_SECONDS = 300.0

Header = tuple[bytes, bytes]


class Reply:
    """An answer of the SMS API; `body` is the start of the body, undecoded."""

    __slots__ = ("_headers", "body", "status")

    def __init__(self, status: int, headers: Sequence[Header] = (), body: bytes = b"") -> None:
        self.status = status
        self._headers = headers
        self.body = body

    def header_values(self, name: str) -> list[str]:
        """Return all values of a header, one for each time it occurs."""
        wanted = name.lower().encode("ascii")
        return [value.decode("latin-1") for key, value in self._headers if key.lower() == wanted]


class Expiring(Protocol):
    """Anything that `Deadlines` can expire."""

    def expire(self) -> None:
        """End with a time-out: the deadline has passed."""


class Deadlines:
    """The deadlines of all exchanges in flight, with one shared timer. Times are of `clock`.

    A timer per exchange would cost more than parsing the answer, and almost all exchanges end in
    time. Each added exchange must be removed.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: dict[Expiring, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._looks_at = math.inf

    def add(self, waiting: Expiring, deadline: float) -> None:
        """Add a deadline; call `remove` when the exchange is over or has expired."""
        self._open[waiting] = deadline
        if deadline < self._looks_at:
            self._look_at(deadline)

    def remove(self, waiting: Expiring) -> None:
        del self._open[waiting]

    def _look_at(self, moment: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._looks_at = moment
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(0.0, moment - self._clock()), self._look)

    def _look(self) -> None:
        self._timer, self._looks_at = None, math.inf
        now = self._clock()
        due = [waiting for waiting, deadline in self._open.items() if deadline <= now]
        next_deadline = min((at for at in self._open.values() if at > now), default=None)
        if next_deadline is not None:
            self._look_at(next_deadline)
        for waiting in due:
            waiting.expire()


# Limit of an incomplete answer, kept in case it must be parsed again; framing adds to the header
# and the body.
_MAX_UNENDED_BYTES: Final = 4 * MAX_ANSWER_BYTES


class ApiConnection(asyncio.Protocol):
    """A connection that sends one request at a time and keeps what the parser reads of the answer.

    `idle_since` is the time when it was opened, or when its last request ended.
    """

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._made_at = time.monotonic()
        self.idle_since = self._made_at
        self._transport: asyncio.Transport | None = None
        self._unread = select.poll()
        self._parser: httptools.HttpResponseParser | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._busy = False
        self._reusable = True
        # The data of an incomplete answer; an answer that arrives in one piece is never stored
        # here.
        self._unended: list[bytes] = []
        self._unended_bytes = 0
        self._lenient: LenientReader | None = None
        self._reset()

    def _reset(self) -> None:
        self._complete = False
        self._status: int | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._body: list[bytes] = []
        self._room_bytes = MAX_ANSWER_BYTES

    def is_usable(self, now: float) -> bool:
        """Whether another request may be sent: clean, open, not idle for too long, not too old.

        `now` is of the monotonic clock.
        """
        return (
            self._reusable
            and not self._busy
            and self._transport is not None
            and not self._transport.is_closing()
            and now - self.idle_since < IDLE_SECONDS
            and now - self._made_at < MAX_CONNECTION_AGE_SECONDS
        )

    @property
    def has_unread_bytes(self) -> bool:
        """Whether bytes have arrived that would be read as the answer to the next request."""
        return bool(self._unread.poll(0))

    def close(self) -> None:
        """Close the connection at once."""
        self._reusable = False
        if self._transport is not None:
            self._transport.abort()

    async def exchange(self, request: bytes, deadline: float) -> Reply:
        """Write the request and wait for the answer until the deadline (monotonic clock).

        Raises PostError: `connect_failed` if nothing was written.
        """
        if self._transport is None or self._transport.is_closing():
            raise PostError("connect_failed")
        self._busy = True
        self._reset()
        if self._unended:
            self._unended, self._unended_bytes = [], 0
        self._waiter = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        self._deadlines.add(self, deadline)
        try:
            await self._waiter
            self._busy = False
            self.idle_since = time.monotonic()
        finally:
            self._deadlines.remove(self)
            self._waiter = None
        return Reply(self._status or 0, self._headers, b"".join(self._body))

    def expire(self) -> None:
        """End the request with a time-out."""
        self._reusable = False
        self._finish(PostError("answer_timeout"))

    def _read_status(self) -> bool:
        """Read the status, even if the header after it is incomplete; False if there is none."""
        if self._lenient is None and self._status is None:
            self._read_leniently(b"")
        if (reader := self._lenient) is not None and reader.status is not None:
            self._status, self._headers = reader.status, reader.headers
            self._body = [bytes(reader.body)]
        return self._status is not None

    def _read_leniently(self, data: bytes) -> bool:
        """Parse the answer received so far leniently; return whether it is complete."""
        reader = self._lenient
        if reader is None:
            self._lenient = reader = LenientReader()
            reader.feed(b"".join(self._unended))
        reader.feed(data)
        return reader.is_complete

    def _finish(self, error: Exception | None) -> None:
        if self._waiter is None or self._waiter.done():
            return
        if error is None or self._read_status():
            self._waiter.set_result(None)
        else:
            self._waiter.set_exception(error)

    # Called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not derive from asyncio's classes.
        self._transport = cast("asyncio.Transport", transport)
        self._unread.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
        # One parser for all answers, because creating it costs more than parsing an answer. It
        # always starts in a clean state: a connection whose last answer was incomplete is not used
        # again.
        self._parser = httptools.HttpResponseParser(self)

    def data_received(self, data: bytes) -> None:
        """Feed the parser; unexpected bytes close the connection."""
        if self._parser is None or self._waiter is None:
            self.close()
            return
        if self._lenient is None:
            try:
                self._parser.feed_data(data)
            except (httptools.HttpParserError, httptools.HttpParserUpgrade):
                self._reusable = False
            else:
                if not self._complete:
                    self._keep(data)
                return
        # Never both parsers: after a 101, the strict one would restart in the middle of the answer.
        if not self._complete and self._read_leniently(data):
            self._finish(PostError("not_http"))

    def _keep(self, data: bytes) -> None:
        self._unended.append(data)
        self._unended_bytes += len(data)
        is_long = self._unended_bytes > MAX_ANSWER_BYTES and self._status is None
        if is_long or self._unended_bytes > _MAX_UNENDED_BYTES:
            self._reusable = False
            self._finish(PostError("not_http"))

    def eof_received(self) -> bool:
        """Let asyncio close our side too."""
        self._reusable = False
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """End a request that has no answer; if a status was read, it stays the answer."""
        self._reusable = False
        error = PostError("connection_lost")
        error.__cause__ = exc
        self._finish(error)
        # Breaks a reference cycle, which would stay in memory until the next garbage collection.
        self._parser = None

    # Called by httptools

    def on_message_begin(self) -> None:
        """Start anew after a 1xx answer; no data may follow the final answer."""
        if self._complete:
            self._reusable = False
        elif self._headers:
            self._reset()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._complete:
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Keep the status; it is the answer from here on."""
        if self._parser is None or self._complete:
            return
        status = self._parser.get_status_code()
        if status >= 200:  # noqa: PLR2004  a 1xx is followed by the answer
            self._status = status
            self._reusable = self._reusable and self._parser.should_keep_alive()

    def on_body(self, data: bytes) -> None:
        """Keep the start of the body; a longer one is not read, and ends the connection."""
        if self._complete:
            return
        self._body.append(data[: self._room_bytes])
        if len(data) > self._room_bytes:
            self._reusable = False
            self._finish(None)
        self._room_bytes = max(0, self._room_bytes - len(data))

    def on_message_complete(self) -> None:
        if self._status is not None:
            self._complete = True
            self._finish(None)


def connect_fault(error: BaseException) -> PostFault:
    """Classify a failure to connect: the TLS handshake, or anything before it."""
    is_tls = any(isinstance(cause, ssl.SSLError) for cause in causes_of(error))
    return "tls_failed" if is_tls else "connect_failed"


class ApiTransport(Protocol):
    """Sends one request and returns its answer, as this module's docstring promises."""

    async def post(
        self, url: str, headers: Sequence[Header], body: bytes, common: Sequence[Header] = ()
    ) -> Reply:
        """POST a body, with these headers in addition to `Host` and `Content-Length`.

        `common` headers precede the others; they stay the same for a while and are encoded once.
        Raises PostError, and nothing else, if there is no answer.
        """

    async def aclose(self) -> None:
        """Close the connections."""


class Transport:
    """Keeps connections to one server and sends one request at a time on each.

    Without `tls`, a POST to an https URL fails with `tls_failed`.
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
        self._idle: deque[ApiConnection] = deque()
        self._in_use = 0
        self._closed = False

    async def post(
        self, url: str, headers: Sequence[Header], body: bytes, common: Sequence[Header] = ()
    ) -> Reply:
        """Send a request on an idle connection, or on a new one if there is none."""
        target = self._target
        if target is None or target.written != url or target.common is not common:
            self._target = target = _target(url, common)
        own = _write_headers(headers)
        request = b"%s%sContent-Length: %d\r\n\r\n%s" % (target.head, own, len(body), body)
        if self._in_use >= self._max_connections:
            raise PostError("pool_exhausted")
        self._in_use += 1
        connection = None
        try:
            now = time.monotonic()
            deadline = now + self._timeout_seconds
            connection = self._idle_connection(now) or await self._connect(target, deadline)
            return await connection.exchange(request, deadline)
        except OSError as error:
            raise PostError("connection_lost") from error
        finally:
            self._in_use -= 1
            if connection is not None:
                self._keep(connection)

    async def aclose(self) -> None:
        """Close the idle connections; those in use are closed after their request."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()

    def _idle_connection(self, now: float) -> ApiConnection | None:
        while self._idle:
            # The most recently used one, so that the others age and are closed.
            connection = self._idle.pop()
            if connection.is_usable(now) and not connection.has_unread_bytes:
                return connection
            connection.close()
        return None

    async def _connect(self, target: "_Target", deadline: float) -> ApiConnection:
        if target.is_secure and self._tls is None:
            raise PostError("tls_failed")
        limit = min(self._connect_timeout_seconds, deadline - time.monotonic())
        try:
            async with asyncio.timeout(limit):
                _, connection = await create_connection(
                    functools.partial(ApiConnection, self._deadlines),
                    target.host,
                    target.port,
                    tls=self._tls if target.is_secure else None,
                )
        except TimeoutError as error:
            raise PostError("connect_timeout") from error
        except (OSError, UnicodeError) as error:
            # An invalid host name raises UnicodeError.
            raise PostError(connect_fault(error)) from error
        return connection

    def _keep(self, connection: ApiConnection) -> None:
        if connection.is_usable(connection.idle_since) and not self._closed:
            self._idle.append(connection)
        else:
            connection.close()


@dataclass(frozen=True, slots=True)
class _Target:
    """Destination of requests; `head` starts all of them and includes the `common` headers."""

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


def _write_headers(headers: Sequence[Header]) -> bytes:
    return b"".join([b"%s: %s\r\n" % header for header in headers])
