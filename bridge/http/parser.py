"""Parses HTTP/1.1 requests from a byte stream, strictly, with a limit on every size and count.

The grammar is that of llhttp (httptools), which is strict; this module closes its gaps. It does no
I/O and reads no clock.

Why our own: llhttp delivers a request in pieces and limits none of them. h11 limits the header, but
neither the body nor the number of requests, and takes four times the CPU time: `python -m
bench.parts parsing` measures both. To use h11, feed a `h11.Connection` in `RequestParser.feed`, and
keep the limits of the body and of pipelined requests.
"""

import contextlib
import functools
from collections import deque
from enum import Enum
from typing import Any, Final
from urllib.parse import unquote

import httptools

from bridge.http.listener_state import Limits
from bridge.http.messages import Headers, Judge, Request, Response, problem

# Limit of pipelined requests; senders of webhooks stay far below it.
MAX_PIPELINED: Final = 16
# Memory of a header apart from its text: two bytes objects, a tuple, and a dictionary entry.
HEADER_OVERHEAD_BYTES: Final = 240
# The colon, a space, and the end of the line.
HEADER_FRAMING_BYTES: Final = 4
# Limit of the kept part of a chunk-size line; llhttp accepts at most sixteen digits.
MAX_CHUNK_LINE_BYTES: Final = 64


_MALFORMED: Final = problem(400, "malformed HTTP request")


class ReadPhase(Enum):
    """How much of the next request has arrived."""

    IDLE = "nothing of it has come"
    HEADER = "in its header"
    BODY = "in its body"


# Module constants, because looking up a member of the enum for each read is slower.
IDLE: Final = ReadPhase.IDLE
HEADER: Final = ReadPhase.HEADER
BODY: Final = ReadPhase.BODY


class _RefusedError(Exception):
    """Raised in a callback to stop the parser; `response` is the answer to the client."""

    def __init__(self, response: Response) -> None:
        super().__init__(response.status)
        self.response = response


@functools.lru_cache(maxsize=64)
def _read_target(url: bytes) -> tuple[str, bytes]:
    """Return the path and the query; cached, because a service uses the same target every time."""
    # Any, because the library's types do not show that a part may be None.
    target: Any = httptools.parse_url(url)
    return unquote((target.path or b"").decode("latin-1")), target.query or b""


class RequestParser:
    """Parses the bytes that are fed to it into `requests`, until there is a `refusal`.

    If `judge` answers a request by its header, its body is neither kept nor awaited.
    """

    def __init__(self, limits: Limits, judge: Judge = lambda *_: None) -> None:
        self._limits = limits
        self._max_headers = limits.max_headers
        self._judge = judge
        self._parser = httptools.HttpRequestParser(self)
        self.requests: deque[Request] = deque()
        # The response to bytes that cannot be parsed; it is sent after the responses to `requests`.
        self.refusal: Response | None = None
        self._begin()
        self._move(IDLE)

    def _begin(self) -> None:
        self.method: str | None = None
        self.path: str | None = None
        self._url = b""
        self._query = b""
        self._headers: Headers = []
        self._first: dict[bytes, bytes] = {}
        self._header_bytes = self._header_count = 0
        self._verdict: Response | None = None
        self._body = bytearray()
        self._is_continue_due = False
        self._is_http_1_1 = self._is_chunked = False
        # Length of the body at the start of the current chunk; None before its first byte. Until
        # then, `_chunk_line` is the received part of its chunk-size line.
        self._chunk_start: int | None = None
        self._chunk_line = b""
        self._has_new_chunk = False

    def _move(self, phase: ReadPhase) -> None:
        self.phase = phase
        self._first_bytes = self._wire_bytes = 0
        self.has_moved = True

    def close(self) -> None:
        """Free the buffers; nothing may be fed afterwards."""
        self.requests.clear()
        self._headers, self._url, self._body = [], b"", bytearray()
        # The parser and this object reference each other, and would stay in memory until the next
        # garbage collection.
        self._parser = httptools.HttpRequestParser(None)

    @property
    def held_bytes(self) -> int:
        """Memory of its requests in bytes, complete or not."""
        held = 0
        for request in self.requests:
            held += request.size_bytes
        if self.phase is HEADER:
            # llhttp buffers an unknown part of the header, so all received bytes count.
            read = self._first_bytes + self._wire_bytes
            held += self._size(min(read, self._limits.max_header_bytes))
        elif self.phase is BODY:
            held += self._size(self._header_bytes) + len(self._body)
        return held

    def _size(self, header_bytes: int) -> int:
        return header_bytes + HEADER_OVERHEAD_BYTES * self._header_count

    def feed(self, data: memoryview | bytes) -> None:
        """Parse bytes; afterwards `has_moved` shows whether a part of a request began or ended."""
        self.has_moved = self._has_new_chunk = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(bytes(data[upgrade.args[0] :]))
        except httptools.HttpParserError as error:
            cause = error.__context__
            # Bytes after the last request of a connection do not matter.
            if not self.requests or self.requests[-1].keep_alive:
                self.refusal = cause.response if isinstance(cause, _RefusedError) else _MALFORMED
        else:
            self._count_wire(len(data))
            if self.phase is BODY:
                self._look_ahead(data)
            elif self.phase is HEADER and self.refusal is None:
                self.refusal = self._measure_header()

    def _look_ahead(self, data: memoryview | bytes) -> None:
        """Refuse early if the rest of the body cannot change the verdict."""
        if self._verdict is not None:
            self.refusal = self._verdict
        elif self._is_chunked and self._chunk_start is None:
            *_, line = (self._chunk_line + data).rsplit(b"\n", 1)
            self._chunk_line = line[:MAX_CHUNK_LINE_BYTES]
        elif self._has_new_chunk:
            self._check_chunk(bytes(data))

    def _check_chunk(self, data: bytes) -> None:
        """Refuse a chunk by its announced size; llhttp reports only the bytes that have arrived."""
        came = len(self._body) - (self._chunk_start or 0)
        line = self._chunk_line + data[: len(data) - came]
        if not line.endswith(b"\n"):  # in the trailers
            return
        size = line.rstrip(b"\r\n").rpartition(b"\n")[2].partition(b";")[0]
        with contextlib.suppress(ValueError):  # a trailer
            if int(size, 16) - came > self._limits.max_body_bytes - len(self._body):
                self.refusal = self._body_too_large()

    def _count_wire(self, size: int) -> None:
        """Limit the bytes since a part of a request began or ended: empty lines, header, or body.

        In a body, its own bytes and the framing of its chunks count.
        """
        if self.has_moved:
            self._first_bytes = size
        else:
            self._wire_bytes += size
        limits = self._limits
        if self.phase is not BODY:
            if self._wire_bytes > limits.max_header_bytes:
                self.refusal = self._header_too_large()
        elif self._wire_bytes > 2 * limits.max_body_bytes + limits.max_header_bytes:
            # Twice the limit allows for chunks of only five bytes each.
            self.refusal = self._body_too_large()

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Parse a request again without its Upgrade header (RFC 9110, 7.8).

        Some clients ask for HTTP/2 this way, with a body, which the parser would not read.
        """
        method = self._parser.get_method()
        if method == b"CONNECT":
            self.refusal = _MALFORMED
            return
        version = self._parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (method, self._url, version)]
        lines += [b"%s: %s" % pair for pair in self._headers if pair[0] != b"upgrade"]
        self._parser = httptools.HttpRequestParser(self)
        self.feed(b"\r\n".join((*lines, b"", rest)))

    # Called by httptools

    def on_message_begin(self) -> None:
        """Begin a request; refuse it if too many are waiting."""
        self._begin()
        self._move(HEADER)
        if len(self.requests) >= MAX_PIPELINED:
            raise _RefusedError(problem(503, "too many requests at once", Retry_After="1"))

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header; a trailer after the body is only counted."""
        if self.phase is HEADER:
            headers = self._headers
            headers.append((name.lower(), value))
            if len(headers) > self._max_headers:
                raise _RefusedError(self._too_many_headers())
        else:
            self._header_bytes += len(name) + len(value) + HEADER_FRAMING_BYTES
            self._header_count += 1
            if (fault := self._header_fault()) is not None:
                raise _RefusedError(fault)

    def _measure_header(self) -> Response | None:
        """Measure the received part of the header; return the refusal if it is too large."""
        headers = self._headers
        size = len(self._url) + HEADER_FRAMING_BYTES * len(headers)
        for name, value in headers:
            size += len(name) + len(value)
        self._header_count = len(headers)
        self._header_bytes = size
        return self._header_fault()

    def _header_fault(self) -> Response | None:
        if self._header_bytes > self._limits.max_header_bytes:
            return self._header_too_large()
        return self._too_many_headers() if self._header_count > self._max_headers else None

    def on_headers_complete(self) -> None:
        """Judge the header before the body is read."""
        parser = self._parser
        if parser.should_upgrade():
            return
        if (fault := self._measure_header()) is not None:
            raise _RefusedError(fault)
        self.method = parser.get_method().decode()
        self.path, self._query = _read_target(self._url)
        # The first value of a repeated header wins.
        self._first = dict(reversed(self._headers))
        version = parser.get_http_version()
        self._is_http_1_1 = version == "1.1"
        length = self._read_framing(version)
        if length > self._limits.max_body_bytes:
            raise _RefusedError(self._body_too_large())
        self._verdict = self._judge(self.method, self.path, self._headers)
        # HTTP/1.0 has no 100 Continue (RFC 9110, 10.1.1), and a refused client need not continue.
        self._is_continue_due = (
            b"expect" in self._first
            and self._is_http_1_1
            and self._verdict is None
            and not self.requests
        )
        self._move(BODY)

    def take_continue(self) -> bool:
        """Whether the client waits for 100 Continue; true at most once for each request."""
        is_due = self._is_continue_due and self.phase is BODY and not self._body
        self._is_continue_due = False
        return is_due

    def _read_framing(self, version: str) -> int:
        """Return the announced body length; refuse framing that another server could misread.

        llhttp itself refuses two lengths, and a length together with chunks.
        """
        first = self._first
        if version not in {"1.0", "1.1"}:
            raise _RefusedError(_MALFORMED)
        if b"host" not in first:
            is_wrong_host = version == "1.1"
        else:
            has_repeated = len(first) < len(self._headers)
            is_wrong_host = has_repeated and [name for name, _ in self._headers].count(b"host") > 1
        if is_wrong_host:
            raise _RefusedError(problem(400, "exactly one Host header is needed"))
        if b"transfer-encoding" in first:
            codings = [
                value.strip(b" \t").lower()
                for name, value in self._headers
                if name == b"transfer-encoding"
            ]
            self._is_chunked = version != "1.0" and codings == [b"chunked"]
            if not self._is_chunked:
                raise _RefusedError(problem(400, "only Transfer-Encoding: chunked is supported"))
        return int(first.get(b"content-length", 0))

    def on_chunk_header(self) -> None:
        self._chunk_start = len(self._body)
        self._has_new_chunk = True

    def on_chunk_complete(self) -> None:
        self._chunk_start = None
        self._chunk_line = b""

    def on_body(self, data: bytes) -> None:
        """Append a piece of the body, unless the request is answered without it."""
        if self._verdict is None:
            self._body += data
        if len(self._body) > self._limits.max_body_bytes:
            raise _RefusedError(self._body_too_large())

    def on_message_complete(self) -> None:
        parser = self._parser
        if parser.should_upgrade():
            return
        self.requests.append(
            Request(
                self.method or "",
                self.path or "",
                self._query,
                self._headers,
                bytes(self._body),
                self._is_http_1_1 and parser.should_keep_alive(),
                self._size(self._header_bytes) + len(self._body),
                self._first,
            )
        )
        self._headers, self._body = [], bytearray()
        self._move(IDLE)

    # Responses to requests that are too large

    def _too_many_headers(self) -> Response:
        return problem(431, f"there are more than {self._max_headers} headers")

    def _header_too_large(self) -> Response:
        return problem(431, f"the header is larger than {self._limits.max_header_bytes} bytes")

    def _body_too_large(self) -> Response:
        return problem(413, f"the body is larger than {self._limits.max_body_bytes} bytes")
