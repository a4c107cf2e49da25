"""Reads HTTP/1.1 requests off a stream of bytes: strict, and bounded in every direction.

The grammar is llhttp's (httptools), which is strict by itself; what it leaves open is closed here.
Nothing here does I/O or knows the time.
"""

import functools
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Final, NamedTuple
from urllib.parse import unquote

import httptools

from bridge.logs import dump_json

# Requests that one read may bring behind each other; no sender of webhooks comes near it.
MAX_PIPELINED: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one port takes; `max_buffered_bytes` are the bodies of all its requests together."""

    max_connections: int
    max_header_bytes: int
    max_headers: int
    max_body_bytes: int
    max_buffered_bytes: int
    idle_timeout_seconds: float
    body_timeout_seconds: float


class Request(NamedTuple):
    """A complete request. Names of headers are in lower case; repeated ones are repeated."""

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    keep_alive: bool = True

    def header(self, name: bytes) -> str | None:
        """Return the first value of a header, named in lower case."""
        for each, value in self.headers:
            if each == name:
                return value.decode("latin-1")
        return None


class Answer(NamedTuple):
    """What a request is answered with; the length and the date are added."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = MappingProxyType({})


def problem(status: int, title: str, **headers: str) -> Answer:
    """Make an error answer after RFC 9457 that says nothing about what was compared with what."""
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    return Answer(
        status,
        dump_json({"title": title, "status": status}).encode(),
        {"content-type": "application/problem+json", **fields},
    )


_MALFORMED: Final = problem(400, "malformed HTTP request")


class Phase(Enum):
    """How far the request is that comes next."""

    IDLE = "nothing of it has come"
    HEADER = "in its header"
    BODY = "in its body"


class _RefusedError(Exception):
    """Stops the parser from within; `answer` says why."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.status)
        self.answer = answer


@functools.lru_cache(maxsize=64)
def _read_target(url: bytes) -> tuple[str, bytes]:
    """Return the path and the query; a service uses one target again and again."""
    target = httptools.parse_url(url)
    return unquote((target.path or b"").decode("latin-1")), target.query or b""


class RequestParser:
    """Turns what is fed to it into `requests`, until there is a `refusal`."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._parser = httptools.HttpRequestParser(self)
        self.requests: deque[Request] = deque()
        # The answer to what cannot be read; it comes after those to the requests.
        self.refusal: Answer | None = None
        self._begin()
        self._move(Phase.IDLE)

    def _begin(self) -> None:
        self.path: str | None = None
        self._url = b""
        self._query = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._header_bytes = self._header_count = 0
        self._body = bytearray()
        self.expects_continue = False

    def _move(self, phase: Phase) -> None:
        self.phase = phase
        self._wire_bytes = 0
        self.has_moved = True

    def close(self) -> None:
        """Let go of what it holds; nothing may be fed to it any more."""
        self.requests.clear()
        self._body = bytearray()
        # It refers to this object, and the two would wait for a search for garbage.
        self._parser = httptools.HttpRequestParser(None)

    @property
    def body_bytes(self) -> int:
        """How much of bodies it holds, in whole requests or not."""
        return len(self._body) + sum(len(request.body) for request in self.requests)

    def feed(self, data: memoryview | bytes) -> None:
        """Parse; afterwards `has_moved` says whether a part of a request began or ended."""
        self.has_moved = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(bytes(data[upgrade.args[0] :]))
        except httptools.HttpParserError as error:
            cause = error.__context__
            # What follows a request that is the last one does not matter.
            if not self.requests or self.requests[-1].keep_alive:
                self.refusal = cause.answer if isinstance(cause, _RefusedError) else _MALFORMED
        else:
            self._count_wire(len(data))

    def _count_wire(self, size: int) -> None:
        """Bound what brings no request on: empty lines, half a header, frames of chunks."""
        if not self.has_moved:
            self._wire_bytes += size
        limits = self._limits
        if self.phase is not Phase.BODY:
            if self._wire_bytes > limits.max_header_bytes:
                self.refusal = self._header_too_large()
        elif self._wire_bytes > 2 * limits.max_body_bytes + limits.max_header_bytes:
            # Twice the limit is chunks of five bytes each.
            self.refusal = self._body_too_large()

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Parse a request again without its wish for another protocol (RFC 9110, 7.8).

        Some clients ask for HTTP/2 so, with a body; the parser would not read that.
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

    # httptools' side

    def on_message_begin(self) -> None:
        """Start anew."""
        self._begin()
        self._move(Phase.HEADER)
        if len(self.requests) >= MAX_PIPELINED:
            raise _RefusedError(problem(503, "too many requests at once", Retry_After="1"))

    def on_url(self, url: bytes) -> None:
        """Take a piece of the target."""
        self._url += url
        self._count_header(len(url), 0)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; one that comes after the body is counted only."""
        self._count_header(len(name) + len(value) + 4, 1)
        if self.phase is Phase.HEADER:
            self._headers.append((name.lower(), value))

    def _count_header(self, size: int, count: int) -> None:
        self._header_bytes += size
        self._header_count += count
        if self._header_bytes > self._limits.max_header_bytes:
            raise _RefusedError(self._header_too_large())
        if self._header_count > self._limits.max_headers:
            title = f"there are more than {self._limits.max_headers} headers"
            raise _RefusedError(problem(431, title))

    def on_headers_complete(self) -> None:
        """Judge the header, before anything of the body is taken."""
        if self._parser.should_upgrade():
            return
        self.path, self._query = _read_target(self._url)
        names = [name for name, _ in self._headers]
        length = self._check_framing(names)
        if length > self._limits.max_body_bytes:
            raise _RefusedError(self._body_too_large())
        self.expects_continue = b"expect" in names and not self.requests
        self._move(Phase.BODY)

    def _check_framing(self, names: list[bytes]) -> int:
        """Return the announced length; refuse what another server could read differently.

        llhttp refuses two lengths, and a length beside chunks, by itself.
        """
        version = self._parser.get_http_version()
        hosts = names.count(b"host")
        if version not in {"1.0", "1.1"}:
            raise _RefusedError(_MALFORMED)
        if hosts > 1 or (version == "1.1" and not hosts):
            raise _RefusedError(problem(400, "exactly one Host header is needed"))
        if b"transfer-encoding" in names:
            codings = [
                value.lower() for name, value in self._headers if name == b"transfer-encoding"
            ]
            if version == "1.0" or codings != [b"chunked"]:
                raise _RefusedError(problem(400, "no Transfer-Encoding but chunked is understood"))
        if b"content-length" not in names:
            return 0
        return int(self._headers[names.index(b"content-length")][1])

    def on_body(self, data: bytes) -> None:
        """Take a piece of the body."""
        self._body += data
        if len(self._body) > self._limits.max_body_bytes:
            raise _RefusedError(self._body_too_large())

    def on_message_complete(self) -> None:
        """Put the request in line."""
        parser = self._parser
        if parser.should_upgrade():
            return
        self.requests.append(
            Request(
                parser.get_method().decode(),
                self.path or "",
                self._query,
                self._headers,
                bytes(self._body),
                parser.get_http_version() == "1.1" and parser.should_keep_alive(),
            )
        )
        self._body = bytearray()
        self._move(Phase.IDLE)

    # The answers to what is too large

    def _header_too_large(self) -> Answer:
        return problem(431, f"the header is larger than {self._limits.max_header_bytes} bytes")

    def _body_too_large(self) -> Answer:
        return problem(413, f"the body is larger than {self._limits.max_body_bytes} bytes")
