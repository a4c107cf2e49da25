"""One connection to the SMS API: it writes a request and parses the answer to it.

A status line that was read is the outcome, whatever happens to the header and the body behind it.
"""

import asyncio
import re
import select
import ssl
import time
from collections.abc import Sequence
from typing import Final, cast

import httptools

from bridge.errors import AttemptError, AttemptFault, causes_of
from bridge.outbound.posting.deadlines import Deadlines

# How much is kept of a body, and how long a header may be.
MAX_ANSWER_BYTES: Final = 64 * 1024
# Shorter than servers commonly keep idle connections (5 s), so that none closes under a new
# request. Neither is Final, which a compiled module would bind: tests shorten them.
IDLE_SECONDS = 2.0
# Connections are made anew now and then, so that a change of DNS is followed.
MAX_CONNECTION_AGE_SECONDS = 300.0

Header = tuple[bytes, bytes]


class Reply:
    """What the SMS API answered; `body` is as it came over the wire, and its start only."""

    __slots__ = ("_headers", "body", "status")

    def __init__(self, status: int, headers: Sequence[Header] = (), body: bytes = b"") -> None:
        self.status = status
        self._headers = headers
        self.body = body

    def header_values(self, name: str) -> list[str]:
        """Return what a header says, each time that it is there."""
        wanted = name.lower().encode("ascii")
        return [value.decode("latin-1") for key, value in self._headers if key.lower() == wanted]


_STATUS_LINE: Final = re.compile(rb"^HTTP/1\.[01] ([1-5][0-9]{2})(?: [^\r\n]*)?\r?\n", re.MULTILINE)


class Connection(asyncio.Protocol):
    """Sends one request at a time, and keeps what the parser reads of its answer.

    `idle_since` is when it was made, or its last request ended.
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
        self._reset()

    def _reset(self) -> None:
        self._complete = False
        self._head = bytearray()
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
        """Drop the connection at once."""
        self._reusable = False
        if self._transport is not None:
            self._transport.abort()

    async def exchange(self, request: bytes, deadline: float) -> Reply:
        """Write the request, wait for the answer until the deadline (of the monotonic clock).

        Raises AttemptError: `connect_failed` when nothing was written.
        """
        if self._transport is None or self._transport.is_closing():
            raise AttemptError("connect_failed")
        self._busy = True
        self._reset()
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
        """Give the request up: the answer is not there by the deadline."""
        self._reusable = False
        self._finish(AttemptError("answer_timeout"))

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
        # One for all answers: to make it costs more than to parse one. A connection whose last
        # answer was not complete is not used again, so that each begins where it has to.
        self._parser = httptools.HttpResponseParser(self)

    def data_received(self, data: bytes) -> None:
        """Feed the parser; bytes that nobody waits for end the connection."""
        if self._parser is None or self._waiter is None:
            self.close()
            return
        is_http = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            is_http = False
        if self._status is None:
            self._head += data
        if not is_http or len(self._head) > MAX_ANSWER_BYTES:
            self._reusable = False
            self._finish(AttemptError("not_http"))

    def eof_received(self) -> bool:
        """Let asyncio close our side too."""
        self._reusable = False
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Give up on an answer that is not there; a status that was read stays."""
        self._reusable = False
        error = AttemptError("connection_lost")
        error.__cause__ = exc
        self._finish(error)
        # The two refer to each other, and would stay in memory until the next search for cycles.
        self._parser = None

    # httptools' side

    def on_message_begin(self) -> None:
        """Start anew, because after a 1xx another answer follows; nothing may follow the last."""
        if self._complete:
            self._reusable = False
        elif self._headers or self._head:
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
        """Keep the start of the body; a longer one is not read, and ends the connection."""
        if self._complete:
            return
        self._body.append(data[: self._room_bytes])
        if len(data) > self._room_bytes:
            self._reusable = False
            self._finish(None)
        self._room_bytes = max(0, self._room_bytes - len(data))

    def on_message_complete(self) -> None:
        """Hand the answer over."""
        if self._status is not None:
            self._complete = True
            self._finish(None)


def connect_fault(error: BaseException) -> AttemptFault:
    """Say what kept a connection from being made: its TLS handshake, or anything before it."""
    is_tls = any(isinstance(cause, ssl.SSLError) for cause in causes_of(error))
    return "tls_failed" if is_tls else "connect_failed"
