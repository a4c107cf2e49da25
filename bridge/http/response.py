"""A response as a handler makes it, and the bytes that leave."""

from collections.abc import Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Final, NamedTuple

from bridge.telemetry.log_lines import dump_json

_STATUS_LINES: Final = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode() for s in HTTPStatus}


class Response(NamedTuple):
    """A response; Content-Length and Date are added when it is sent.

    A success shows that the client is no stranger, unless anybody gets it (`for_anybody`).
    """

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = MappingProxyType({})
    for_anybody: bool = False


def problem(status: int, title: str, **headers: str) -> Response:
    """Make an error response (RFC 9457); its title must not help a forger."""
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    return Response(
        status,
        dump_json({"title": title, "status": status}).encode(),
        {"content-type": "application/problem+json", **fields},
    )


def render(
    response: Response, date_line: bytes, *, keep_alive: bool, has_body: bool = True
) -> bytes:
    """Return all of a response; without `has_body` the head alone, as HEAD asks for."""
    parts = [_STATUS_LINES[response.status], date_line]
    parts += [f"{name}: {value}\r\n".encode("latin-1") for name, value in response.headers.items()]
    parts.append(b"content-length: %d\r\n" % len(response.body))
    parts.append(b"\r\n" if keep_alive else b"connection: close\r\n\r\n")
    if has_body:
        parts.append(response.body)
    return b"".join(parts)
