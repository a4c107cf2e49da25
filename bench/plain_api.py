"""An SMS API that reads requests and answers them with a status: next to no work of its own."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final, cast

_REASONS: Final = {202: "Accepted", 429: "Too Many Requests", 503: "Service Unavailable"}


class Connection(asyncio.Protocol):
    """One connection of a worker, which sends the next request after the answer.

    `take` is called with it for each request, and has it answered.
    """

    def __init__(self, take: Callable[["Connection"], None]) -> None:
        self._take = take
        self._bytes = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note where to answer."""
        # uvloop's transports say of themselves that they are no more than this.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Hand on a request when it is whole."""
        self._bytes += data
        head, end, body = self._bytes.partition(b"\r\n\r\n")
        length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
        if end and len(body) >= int(length):
            self._bytes = b""
            self._take(self)

    def connection_lost(self, _error: Exception | None) -> None:
        """Answer nothing more."""
        self._transport = None

    def answer(self, status: int) -> None:
        """Answer the request, if somebody still waits for it."""
        if self._transport is None:
            return
        later = "Retry-After: 1\r\n" if status == 503 else ""
        text = f"HTTP/1.1 {status} {_REASONS[status]}\r\n{later}Content-Length: 2\r\n\r\n{{}}"
        self._transport.write(text.encode("ascii"))


@asynccontextmanager
async def open_api(take: Callable[[Connection], None]) -> AsyncIterator[str]:
    """Serve on a free port, each request by `take`; return the address."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(take), "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
