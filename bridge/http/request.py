"""A request as a handler sees it, and what may answer it."""

import asyncio
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from bridge.http.response import Response

# Names are in lower case; repeated headers are repeated.
Headers = list[tuple[bytes, bytes]]

_NO_HEADERS: Final[Mapping[bytes, bytes]] = MappingProxyType({})


class Request:
    """A complete request; `size_bytes` is the memory it takes up, headers included.

    `first` is the first value of each header, where who made it has found them already.
    """

    # No named tuple: even where this is compiled, to make one would stay a call of Python.

    __slots__ = ("body", "first", "headers", "keep_alive", "method", "path", "query", "size_bytes")

    def __init__(  # noqa: PLR0913, PLR0917  what a request is
        self,
        method: str,
        path: str,
        query: bytes,
        headers: Headers,
        body: bytes,
        keep_alive: bool = True,  # noqa: FBT001, FBT002  as the others, by its place
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


# Given method, path and headers: the answer to a request whose body need not be read, or None.
Judge = Callable[[str, str, Headers], Response | None]

# The answer to a request, at once or later.
Answer = Response | asyncio.Future[Response]

# Answers one complete request; what it answers later has a deadline of its own.
Handler = Callable[[Request], Answer]
