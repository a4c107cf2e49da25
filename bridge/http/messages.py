"""HTTP requests, responses, and the encoding of a response."""

import asyncio
from collections.abc import Callable, Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Final, NamedTuple

from bridge.telemetry.log_format import dump_json

_STATUS_LINES: Final = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode() for s in HTTPStatus}


class Response(NamedTuple):
    """A response; Content-Length and Date are added when it is sent.

    A success marks the client as trusted, unless any client can get it (`for_anybody`).
    """

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = MappingProxyType({})
    for_anybody: bool = False


def problem(status: int, title: str, **headers: str) -> Response:
    """Build an error response (RFC 9457); its title must not help to forge a request."""
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    return Response(
        status,
        dump_json({"title": title, "status": status}).encode(),
        {"content-type": "application/problem+json", **fields},
    )


def render(
    response: Response, date_line: bytes, *, keep_alive: bool, has_body: bool = True
) -> bytes:
    """Encode a response; without `has_body` only its head, as for HEAD."""
    parts = [_STATUS_LINES[response.status], date_line]
    parts += [f"{name}: {value}\r\n".encode("latin-1") for name, value in response.headers.items()]
    parts.append(b"content-length: %d\r\n" % len(response.body))
    parts.append(b"\r\n" if keep_alive else b"connection: close\r\n\r\n")
    if has_body:
        parts.append(response.body)
    return b"".join(parts)


# Names are in lower case; a repeated header has several entries.
Headers = list[tuple[bytes, bytes]]

_NO_HEADERS: Final[Mapping[bytes, bytes]] = MappingProxyType({})


class Request:
    """A complete request; `size_bytes` is the memory it takes up, headers included.

    `first` holds the first value of each header if the parser has found them already.
    """

    # Not a named tuple, because creating one is an interpreted call even in compiled code.

    __slots__ = ("body", "first", "headers", "keep_alive", "method", "path", "query", "size_bytes")

    def __init__(  # noqa: PLR0913, PLR0917  all parts of a request
        self,
        method: str,
        path: str,
        query: bytes,
        headers: Headers,
        body: bytes,
        keep_alive: bool = True,  # noqa: FBT001, FBT002  positional
        size_bytes: int = 0,
        first: Mapping[bytes, bytes] = _NO_HEADERS,
    ) -> None:
        self.method = method
        self.path = path
        self.query = query
        self.headers = headers
        self.body = body
        self.keep_alive = keep_alive
        self.size_bytes = size_bytes
        self.first = first

    def header(self, name: bytes) -> str | None:
        """Return the first value of a header, named in lower case."""
        value = (self.first or dict(reversed(self.headers))).get(name)
        return None if value is None else value.decode("latin-1")


# Takes method, path and headers; returns a response if the body need not be read, else None.
Judge = Callable[[str, str, Headers], Response | None]

# The response to a request, at once or later.
ResponseOrFuture = Response | asyncio.Future[Response]

# Answers one complete request; it sets the deadline of a later response itself.
Handler = Callable[[Request], ResponseOrFuture]
