"""One connection to the SMS API: it writes a request and parses the answer to it.

A status line that was read is the outcome, whatever happens to the header and the body behind it.
The parser is strict and quick; an answer that it refuses is read again by `LenientReader`, and its
connection is not used again.
"""

import asyncio
import select
import ssl
import time
from collections.abc import Sequence
from typing import Final, cast

import httptools

from bridge.errors import AttemptError, AttemptFault, causes_of
from bridge.worker.service.deadlines import Deadlines
from bridge.worker.service.lenient_reader import LenientReader

# How much is kept of a body, and how long a header may be, with all 1xx answers before it.
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


# Of an answer that has not ended yet, in case that it has to be read again; framing adds to the
# header and the body.
_MAX_UNENDED_BYTES: Final = 4 * MAX_ANSWER_BYTES


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
        # What has come of an answer that has not ended; one that comes in one piece is never here.
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
        """Give the request up: the answer is not there by the deadline."""
        self._reusable = False
        self._finish(AttemptError("answer_timeout"))

    def _knows_status(self) -> bool:
        """Whether a status line was read, even if the header behind it never ended."""
        if self._lenient is None and self._status is None:
            self._read_leniently(b"")
        if (reader := self._lenient) is not None and reader.status is not None:
            self._status, self._headers = reader.status, reader.headers
            self._body = [bytes(reader.body)]
        return self._status is not None

    def _read_leniently(self, data: bytes) -> bool:
        """Read what has come of the answer as well as it can be; return whether that is all."""
        reader = self._lenient
        if reader is None:
            self._lenient = reader = LenientReader(MAX_ANSWER_BYTES)
            reader.feed(b"".join(self._unended))
        reader.feed(data)
        return reader.is_complete

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
        if self._lenient is None:
            try:
                self._parser.feed_data(data)
            except (httptools.HttpParserError, httptools.HttpParserUpgrade):
                self._reusable = False
            else:
                if not self._complete:
                    self._keep(data)
                return
        # Never both: behind a 101 the parser would begin anew in the middle of the answer.
        if not self._complete and self._read_leniently(data):
            self._finish(AttemptError("not_http"))

    def _keep(self, data: bytes) -> None:
        self._unended.append(data)
        self._unended_bytes += len(data)
        is_long = self._unended_bytes > MAX_ANSWER_BYTES and self._status is None
        if is_long or self._unended_bytes > _MAX_UNENDED_BYTES:
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
        elif self._headers:
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
