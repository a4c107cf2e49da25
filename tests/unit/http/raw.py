"""A listener with an application behind it, and raw clients that say anything to it."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

from bridge.http.listener import Listener
from bridge.http.listener_state import Hooks, Limits
from bridge.http.messages import Request, Response, ResponseOrFuture, problem

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
LAST_GET = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
IDLE_SECONDS = 1
BODY_SECONDS = 2
# More than the sockets' buffers on both sides hold.
LARGE_BYTES = 32 * 1024 * 1024
# Hangs end here; far from the idle time-out, and no healthy test comes near it.
GUARD_SECONDS = 6.0
LIMITS = Limits(
    max_connections=64,
    max_header_bytes=16384,
    max_headers=100,
    max_body_bytes=65536,
    max_buffered_bytes=1_000_000,
    idle_timeout_seconds=15,
    body_timeout_seconds=10,
    keep_alive_seconds=15,
)


@dataclass
class App:
    """Answers every request with its path, or as its path says."""

    requests: list[Request] = field(default_factory=list)
    refusals: list[tuple[str | None, int]] = field(default_factory=list)
    evictions: list[str] = field(default_factory=list)
    go: asyncio.Event = field(default_factory=asyncio.Event)
    is_cancelled: bool = False

    def judge(self, _method: str, path: str, _headers: object) -> Response | None:
        return problem(404, "nothing is here") if path == "/nowhere" else None

    @property
    def paths(self) -> list[str]:
        return [request.path for request in self.requests]

    def answer(self, request: Request) -> ResponseOrFuture:
        self.requests.append(request)
        if request.path == "/at-once/bug":
            raise ZeroDivisionError
        if request.path.startswith("/at-once"):
            return Response(200, request.path.encode())
        return asyncio.ensure_future(self._answer_later(request))

    async def _answer_later(self, request: Request) -> Response:
        try:
            if request.path == "/wait":
                await self.go.wait()
            if request.path == "/soon":
                await asyncio.sleep(0.1)
            if request.path == "/slow":
                await asyncio.sleep(IDLE_SECONDS * 1.5)
        except asyncio.CancelledError:
            self.is_cancelled = True
            raise
        if request.path == "/bug":
            raise ZeroDivisionError
        if request.path == "/nowhere":
            return problem(404, "nothing is here")
        if request.path == "/large":
            return Response(200, bytes(LARGE_BYTES))
        return Response(200, request.path.encode(), {"content-type": "text/plain"})


@dataclass
class Client:
    """A raw connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @property
    def transport(self) -> asyncio.Transport:
        return cast("asyncio.Transport", self.writer.transport)

    async def ask(self, data: bytes) -> bytes:
        """Send a request and return its answer, which the app's echo ends."""
        self.writer.write(data)
        head = await self.reader.readuntil(b"\r\n\r\n")
        return head + await self.reader.readexactly(length_of(head))

    async def rest(self) -> bytes:
        """Read until the other side closes; a reset is an end, too."""
        data = b""
        with contextlib.suppress(ConnectionError):
            while piece := await self.reader.read(65536):
                data += piece
        return data

    async def drip(self, data: bytes) -> None:
        with contextlib.suppress(ConnectionError):
            while data and not self.reader.at_eof():
                self.writer.write(data)
                await self.writer.drain()
                await asyncio.sleep(0.05)


def status_of(answer: bytes) -> int | None:
    return int(answer.split(b" ", 2)[1]) if answer else None


def length_of(head: bytes) -> int:
    lines = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if line)
    return int(lines.get(b"content-length", 0))


@asynccontextmanager
async def listening(
    app: App, *, drain_timeout_seconds: float = 5, **limits: Any
) -> AsyncIterator[Listener]:
    listener = Listener(
        app.answer,
        replace(LIMITS, **limits),
        section="webhook",
        host="127.0.0.1",
        port=0,
        drain_timeout_seconds=drain_timeout_seconds,
        hooks=Hooks(
            judge=app.judge,
            on_refusal=lambda _, path, response: app.refusals.append((path, response.status)),
            on_eviction=app.evictions.append,
        ),
    )
    running = asyncio.create_task(listener.run())
    await until(lambda: listener.is_accepting)
    try:
        yield listener
    finally:
        listener.stop()
        await asyncio.wait_for(running, GUARD_SECONDS)


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(GUARD_SECONDS):
            yield Client(reader, writer)
    finally:
        writer.transport.abort()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(GUARD_SECONDS):
        while not condition():  # noqa: ASYNC110  a condition of any kind has no event
            await asyncio.sleep(0.001)


@dataclass
class Served:
    """A listener, and the app behind it."""

    app: App
    listener: Listener

    @property
    def port(self) -> int:
        return self.listener.port


HALF_HEADER = b"GET / HTTP/1.1\r\nHost: x\r\nX-Half: "
HALF_BODY = b"POST /half HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nx"
HALF_CHUNK = b"POST /half HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nff\r\nx"


def request(*headers: bytes, line: bytes = b"POST /bad HTTP/1.1", body: bytes = b"") -> bytes:
    return b"\r\n".join((line, b"Host: x", *headers, b"", body))


CHUNKED = b"Transfer-Encoding: chunked"


def assert_problem(answer: bytes, status: int) -> None:
    """Check that an answer is a problem, whole, the last and the only one."""
    head, _, body = answer.partition(b"\r\n\r\n")
    found = json.loads(body or b"null")

    assert (
        head.split(b" ")[:2],
        b"content-type: application/problem+json\r\n" in head,
        b"connection: close" in head,
        found,
    ) == ([b"HTTP/1.1", str(status).encode()], True, True, found | {"status": status})
    assert found.keys() == {"title", "status"}


def chunk(data: bytes, extension: bytes = b"") -> bytes:
    return b"%x%s\r\n%s\r\n" % (len(data), extension, data)


def post_of(size: int) -> bytes:
    return request(b"Content-Length: %d" % size, body=bytes(size))
