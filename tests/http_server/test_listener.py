"""The listener over real sockets: idle connections, malformed HTTP, its port, signals, its end."""

import asyncio
import contextlib
import errno
import gc
import json
import os
import resource
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bridge.http_server.listener
from bridge.errors import BridgeError
from bridge.http_server.connection import END_SECONDS
from bridge.http_server.limits import Limits, fit_open_files
from bridge.http_server.listener import SWEEP_SECONDS, Listener
from bridge.http_server.parser import HEADER_OVERHEAD_BYTES, RequestParser
from bridge.http_server.request import Request, Response, problem
from bridge.http_server.service import Hooks
from tests.ears import Ears

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
        """Refuse one path for its header alone."""
        return problem(404, "nothing is here") if path == "/nowhere" else None

    @property
    def paths(self) -> list[str]:
        """What was asked for."""
        return [request.path for request in self.requests]

    async def answer(self, request: Request) -> Response:
        """Answer one request."""
        self.requests.append(request)
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
        """What reads and writes."""
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
        """Send the same byte again and again."""
        with contextlib.suppress(ConnectionError):
            while data and not self.reader.at_eof():
                self.writer.write(data)
                await self.writer.drain()
                await asyncio.sleep(0.05)


def status_of(answer: bytes) -> int | None:
    """Find the status of the first answer, if there is one."""
    return int(answer.split(b" ", 2)[1]) if answer else None


def length_of(head: bytes) -> int:
    """Find how long the body is."""
    lines = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if line)
    return int(lines.get(b"content-length", 0))


@asynccontextmanager
async def listening(
    app: App, *, drain_timeout_seconds: float = 5, **limits: Any
) -> AsyncIterator[Listener]:
    """Serve on a free port."""
    listener = Listener(
        app.answer,
        replace(LIMITS, **limits),
        section="webhook",
        host="127.0.0.1",
        port=0,
        drain_timeout_seconds=drain_timeout_seconds,
        hooks=Hooks(
            judge=app.judge,
            on_refusal=lambda _method, *refusal: app.refusals.append(refusal),
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
    """Open a raw connection; what hangs on it fails the test."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(GUARD_SECONDS):
            yield Client(reader, writer)
    finally:
        writer.transport.abort()


async def until(condition: Callable[[], object]) -> None:
    """Wait for a condition, and fail when it does not come."""
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
        """Where it listens."""
        return self.listener.port


@pytest.fixture(scope="module")
async def served() -> AsyncIterator[Served]:
    """Serve with a short idle time-out."""
    app = App()
    async with listening(
        app,
        idle_timeout_seconds=IDLE_SECONDS,
        body_timeout_seconds=BODY_SECONDS,
        keep_alive_seconds=IDLE_SECONDS,
    ) as listener:
        yield Served(app, listener)


# --- Connections that bring nothing ---------------------------------------------------------------


@dataclass(frozen=True)
class Idler:
    """A client that gets an answer or not, sends something, and then drips or goes silent."""

    asks: bytes = b""
    says: bytes = b""
    drips: bytes = b""
    # The status of the last word, if there is one.
    hears: int | None = None

    async def meet(self, port: int) -> bytes:
        """Return what comes until the connection is closed."""
        async with connected(port) as client:
            if self.asks:
                await client.ask(self.asks)
            client.writer.write(self.says)
            dripping = asyncio.create_task(client.drip(self.drips))
            try:
                return await client.rest()
            finally:
                dripping.cancel()


HALF_HEADER = b"GET / HTTP/1.1\r\nHost: x\r\nX-Half: "
HALF_BODY = b"POST /half HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nx"
HALF_CHUNK = b"POST /half HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nff\r\nx"
IDLERS: dict[str, Idler] = {
    "silent from the start": Idler(),
    "silent in the request line": Idler(says=b"GET / HT", hears=408),
    "silent in the header": Idler(says=HALF_HEADER, hears=408),
    "silent after an empty line": Idler(says=b"\r\n"),
    "silent after an answer": Idler(GET),
    "silent after an answer and an empty line": Idler(GET, says=b"\r\n"),
    "silent in the second header": Idler(GET, says=HALF_HEADER, hears=408),
    "silent in a body": Idler(says=HALF_BODY, hears=408),
    "silent in a chunk": Idler(says=HALF_CHUNK, hears=408),
    "silent in the second body": Idler(GET, says=HALF_BODY, hears=408),
    "drips the request line": Idler(says=b"GET /", drips=b"x", hears=408),
    "drips a header": Idler(says=HALF_HEADER, drips=b"x", hears=408),
    "drips many headers": Idler(says=b"GET / HTTP/1.1\r\n", drips=b"X: y\r\n", hears=408),
    "drips empty lines": Idler(drips=b"\r\n"),
    "drips empty lines after an answer": Idler(GET, drips=b"\r\n"),
    "drips the second header": Idler(GET, says=HALF_HEADER, drips=b"x", hears=408),
    "drips a body": Idler(says=HALF_BODY, drips=b"x", hears=408),
    "drips a chunk": Idler(says=HALF_CHUNK, drips=b"x", hears=408),
    "drips after the last answer": Idler(says=LAST_GET, drips=b"x", hears=200),
    "drips after malformed HTTP": Idler(says=b"\x00\r\n\r\n", drips=b"x", hears=400),
}


@pytest.fixture(scope="module")
async def met(served: Served) -> AsyncIterator[dict[str, asyncio.Task[bytes]]]:
    """Meet all idlers at the same time, because each of them takes its time."""
    tasks = {name: asyncio.create_task(idler.meet(served.port)) for name, idler in IDLERS.items()}
    yield tasks
    await asyncio.wait(tasks.values())


@pytest.mark.parametrize("name", IDLERS)
async def test_connection_that_brings_nothing_is_closed(
    met: dict[str, asyncio.Task[bytes]], name: str
) -> None:
    """A connection that brings no whole request in time is closed, with 408 if it began one."""
    answer = await met[name]

    assert status_of(answer) == IDLERS[name].hears


@pytest.mark.parametrize("said", [b"", HALF_HEADER, HALF_BODY, GET], ids=str)
async def test_closed_connection_leaves_no_garbage(served: Served, said: bytes) -> None:
    """What a connection held is free when it ends: strangers may open and close many."""
    gc.collect()
    gc.disable()
    try:
        async with connected(served.port) as client:
            client.writer.write(said)
            await until(lambda: served.listener.occupancy.connections)
        await until(lambda: not any(isinstance(one, RequestParser) for one in gc.get_objects()))
    finally:
        gc.enable()


async def test_slow_answer_is_not_cut_off(served: Served) -> None:
    """The idle time-out does not run while a request is being answered."""
    async with connected(served.port) as client:
        answer = await client.ask(GET.replace(b"/ ", b"/slow "))

        assert answer.endswith(b"/slow")


async def test_slow_body_is_not_cut_off(served: Served) -> None:
    """The idle time-out does not run while a body comes in, which has its own."""
    size = 30
    async with connected(served.port) as client:
        client.writer.write(b"POST /body HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size)
        for _ in range(size):
            await asyncio.sleep(IDLE_SECONDS * 1.5 / size)
            client.writer.write(b"x")

        assert (await client.ask(b"")).endswith(b"/body")


async def test_connection_is_kept_between_two_requests() -> None:
    """Between two requests `keep_alive_seconds` count, and no more the time for the first one."""
    limits = {"idle_timeout_seconds": 0.2, "keep_alive_seconds": 15}
    async with listening(App(), **limits) as listener, connected(listener.port) as client:
        await client.ask(GET)
        async with connected(listener.port) as silent:
            await silent.rest()
        answer = await client.ask(GET)

    assert status_of(answer) == 200


@pytest.mark.parametrize(
    ("cut", "is_early"),
    [(0, True), (10, True), (-1, True), (-1, False)],
    ids=["fresh", "in the header", "in the body", "right after"],
)
async def test_stall_makes_nobody_late(served: Served, cut: int, *, is_early: bool) -> None:
    """What comes while we stand still, or right after, is in time: we were not there to read it."""
    data = post_of(100)
    async with connected(served.port) as client:
        client.writer.write(data[:cut])
        occupancy = served.listener.occupancy
        await until(lambda: occupancy.held_bytes if cut else occupancy.connections)
        # Behind the event loop's back, which stands still.
        raw = client.transport.get_extra_info("socket")
        if is_early:
            os.write(raw.fileno(), data[cut:])
        time.sleep(max(IDLE_SECONDS, BODY_SECONDS) + SWEEP_SECONDS)  # noqa: ASYNC251  a stall
        if not is_early:
            await asyncio.sleep(0.01)
            os.write(raw.fileno(), data[cut:])

        assert status_of(await client.ask(b"")) == 200


async def test_what_has_come_is_read_before_its_time_is_up() -> None:
    """A request that waits in the kernel at its deadline is in time, however little is missing."""
    app = App()
    async with listening(app) as listener, connected(listener.port) as client:
        await until(lambda: listener.occupancy.connections)
        raw = client.transport.get_extra_info("socket")
        # Much later, and the sweep before this one was in time.
        now = asyncio.get_running_loop().time() + 1000
        listener._swept_at = now - SWEEP_SECONDS
        os.write(raw.fileno(), GET.replace(b"/ ", b"/wait "))
        await listener._sweep(now)
        app.go.set()

        assert status_of(await client.ask(b"")) == 200


async def test_connection_is_used_again(served: Served) -> None:
    """Requests one after another are answered on one connection."""
    async with connected(served.port) as client:
        answers = [await client.ask(GET.replace(b"/ ", b"/%d " % n)) for n in range(3)]

        assert [answer[-2:] for answer in answers] == [b"/0", b"/1", b"/2"]


async def test_requests_in_one_packet_are_answered_in_order(served: Served) -> None:
    """Pipelined requests get their own answers."""
    async with connected(served.port) as client:
        first = await client.ask(GET.replace(b"/ ", b"/1 ") + GET.replace(b"/ ", b"/2 "))
        second = await client.ask(b"")

        assert (first[-2:], second[-2:]) == (b"/1", b"/2")


async def test_answer_does_not_name_the_server(served: Served) -> None:
    """The answer has no `Server` header."""
    async with connected(served.port) as client:
        assert b"\r\nserver:" not in (await client.ask(GET)).lower()


# --- Malformed HTTP -------------------------------------------------------------------------------


def request(*headers: bytes, line: bytes = b"POST /bad HTTP/1.1", body: bytes = b"") -> bytes:
    """Write a request."""
    return b"\r\n".join((line, b"Host: x", *headers, b"", body))


CHUNKED = b"Transfer-Encoding: chunked"
MALFORMED: dict[str, bytes] = {
    "length before chunks": request(b"Content-Length: 5", CHUNKED, body=b"0\r\n\r\n"),
    "chunks before length": request(CHUNKED, b"Content-Length: 5", body=b"0\r\n\r\n"),
    "two lengths": request(b"Content-Length: 5", b"Content-Length: 6", body=b"hello!"),
    "negative length": request(b"Content-Length: -1"),
    "length of no number": request(b"Content-Length: x"),
    "length with sign": request(b"Content-Length: +5", body=b"hello"),
    "chunked is not last": request(b"Transfer-Encoding: chunked, gzip"),
    "garbage": b"\x00\x01\x02\x03 garbage\r\n\r\n",
    "text": b"hello there\r\n\r\n",
    "TLS": b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03" + bytes(32),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "unknown version": request(line=b"POST /bad HTTP/9.9"),
    "unknown method": request(line=b"BREW /bad HTTP/1.1"),
    "path not ASCII": request(line=b"POST /\xff HTTP/1.1"),
    "header without colon": request(b"no colon"),
    "space before colon": request(b"X-Y : z"),
    "NUL in a header": request(b"X-Y: a\x00b"),
    "folded header": request(b"X-Y: a", b" b"),
    "folded length": request(b"Content-Length:", b" 5", body=b"hello"),
    "header that begins folded": b"GET /bad HTTP/1.1\r\n X-Y: a\r\n\r\n",
    "control character in a header": request(b"X-Y: a\x01b"),
    "NUL in a name": request(b"X\x00Y: a"),
    "bare CR": request(b"X-Y: a\rX-Z: b"),
    "bare LF": request(b"X-Y: a\nX-Z: b"),
    "bare LF everywhere": b"GET /bad HTTP/1.1\nHost: x\n\n",
    "one length twice": request(b"Content-Length: 5", b"Content-Length: 5", body=b"hello"),
    "list of lengths": request(b"Content-Length: 5, 5", body=b"hello"),
    "empty length": request(b"Content-Length:", body=b"hello"),
    "length without end": request(b"Content-Length: " + b"9" * 30),
    "length with a space": request(b"Content-Length: 1 2"),
    "hexadecimal length": request(b"Content-Length: 0x5", body=b"hello"),
    "unknown coding": request(b"Transfer-Encoding: gzip, chunked", body=b"0\r\n\r\n"),
    "identity": request(b"Transfer-Encoding: identity", body=b"hello"),
    "chunked twice": request(CHUNKED, CHUNKED, body=b"0\r\n\r\n"),
    "chunked in HTTP/1.0": request(CHUNKED, line=b"POST /bad HTTP/1.0", body=b"0\r\n\r\n"),
    "HTTP/2.0 in words": request(line=b"POST /bad HTTP/2.0"),
    "HTTP/0.9": request(line=b"POST /bad HTTP/0.9"),
    "no host": b"GET /bad HTTP/1.1\r\n\r\n",
    "two hosts": request(b"Host: y"),
    "tunnel": request(line=b"CONNECT bad:80 HTTP/1.1"),
    "target that is none": request(line=b"GET bad HTTP/1.1"),
    "space in the target": request(line=b"GET /bad bad HTTP/1.1"),
    "lower-case method": request(line=b"get /bad HTTP/1.1"),
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED.keys())
async def test_malformed_request_is_a_problem(served: Served, data: bytes) -> None:
    """Malformed HTTP is answered with 400 as problem+json, and the connection is closed."""
    async with connected(served.port) as client:
        client.writer.write(data)
        answer = await client.rest()

    assert_problem(answer, 400)


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


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED.keys())
async def test_malformed_request_does_not_reach_the_app(served: Served, data: bytes) -> None:
    """What is malformed in its header is never handed on."""
    served.app.requests.clear()
    async with connected(served.port) as client:
        client.writer.write(data)
        await client.rest()

    assert served.app.paths == []


async def test_malformed_chunk_ends_the_request(served: Served) -> None:
    """A body that turns out to be malformed is answered with 400, and closed."""
    async with connected(served.port) as client:
        client.writer.write(request(CHUNKED, body=b"zz\r\n"))
        answer = await client.rest()

        assert answer.startswith(b"HTTP/1.1 400 ")


async def test_malformed_request_closes_after_a_good_one(served: Served) -> None:
    """A malformed request after a good one is answered with 400, and closed."""
    async with connected(served.port) as client:
        await client.ask(GET)
        client.writer.write(b"\x00\r\n\r\n")

        assert_problem(await client.rest(), 400)


@pytest.mark.parametrize("path", [b"/", b"/soon"], ids=["quick", "slow"])
@pytest.mark.parametrize("together", [True, False], ids=["one packet", "two packets"])
async def test_malformed_request_does_not_lose_an_answer(
    served: Served, path: bytes, *, together: bool
) -> None:
    """What a malformed request follows at once is answered first."""
    good = GET.replace(b"/ ", path + b" ")
    async with connected(served.port) as client:
        if together:
            answer = await client.ask(good + b"\x00\r\n\r\n")
        else:
            client.writer.write(good)
            await asyncio.sleep(0.01)
            answer = await client.ask(b"\x00\r\n\r\n")

        assert answer.endswith(path)
        assert_problem(await client.rest(), 400)


async def test_trailer_is_no_header(served: Served) -> None:
    """A header that comes after the body is dropped, and not taken for one of the next request."""
    body = b"1\r\nx\r\n0\r\nX-Service-Signature: forged\r\n\r\n"
    async with connected(served.port) as client:
        await client.ask(request(CHUNKED, line=b"POST /1 HTTP/1.1", body=body) + GET)
        await client.ask(b"")
        first, second = served.app.requests[-2:]

    assert (first.path, first.body, second.path) == ("/1", b"x", "/")
    assert not [name for r in (first, second) for name, _ in r.headers if b"signature" in name]


# --- Limits ---------------------------------------------------------------------------------------


def chunk(data: bytes, extension: bytes = b"") -> bytes:
    """Write a chunk."""
    return b"%x%s\r\n%s\r\n" % (len(data), extension, data)


FLOOD = 1_000_000
TOO_MUCH: dict[str, tuple[int, bytes]] = {
    "long header": (431, request(b"X-Y: " + b"a" * LIMITS.max_header_bytes)),
    "long name": (431, request(b"a" * LIMITS.max_header_bytes + b": x")),
    "long target": (431, request(line=b"GET /" + b"a" * LIMITS.max_header_bytes + b" HTTP/1.1")),
    "many headers": (431, request(*[b"X: y"] * LIMITS.max_headers)),
    "header without end": (431, request(b"X-Y: " + b"a" * FLOOD)),
    "name without end": (431, request(b"a" * FLOOD)),
    "target without end": (431, b"GET /" + b"a" * FLOOD),
    "empty lines without end": (431, b"\r\n" * FLOOD),
    "headers without end": (431, request(*[b"X: y"] * FLOOD)),
    "announced body": (413, request(b"Content-Length: %d" % (LIMITS.max_body_bytes + 1))),
    "announced monster": (413, request(b"Content-Length: 9223372036854775807")),
    "one chunk": (413, request(CHUNKED, body=chunk(bytes(LIMITS.max_body_bytes + 1)))),
    "chunks without end": (413, request(CHUNKED, body=chunk(bytes(1000)) * 1000)),
    "tiny chunks without end": (413, request(CHUNKED, body=chunk(b"x") * FLOOD)),
    "huge chunk": (413, request(CHUNKED, body=b"fffffffffffffff\r\n" + bytes(FLOOD))),
    "chunk beyond counting": (400, request(CHUNKED, body=b"fffffffffffffffff\r\n")),
    "negative chunk": (400, request(CHUNKED, body=b"-1\r\n")),
    "extension without end": (413, request(CHUNKED, body=b"1;" + b"a" * FLOOD)),
    "extensions without end": (413, request(CHUNKED, body=chunk(b"x", b";a" * 500) * 1000)),
    "long trailer": (413, request(CHUNKED, body=b"0\r\nX: " + b"a" * FLOOD)),
    "trailers without end": (431, request(CHUNKED, body=b"0\r\n" + b"X: y\r\n" * FLOOD)),
}


@pytest.mark.parametrize(("status", "data"), TOO_MUCH.values(), ids=TOO_MUCH.keys())
async def test_what_is_too_much_is_refused(served: Served, status: int, data: bytes) -> None:
    """Every part of a request has a limit; a client that sends on and on gets to know it."""
    served.app.requests.clear()
    async with connected(served.port) as client:
        client.writer.write(data)
        answer = await client.rest()

    assert_problem(answer, status)
    assert served.app.requests == []


async def test_limits_can_be_reached(served: Served) -> None:
    """What is exactly as large as it may be is taken."""
    headers = [b"X-%d: y" % n for n in range(LIMITS.max_headers - 3)]
    line = b"POST /full HTTP/1.1"
    size = len(b"/fullHost: x\r\nX-L: \r\nContent-Length: 65536\r\n")
    size += sum(len(header) + 2 for header in headers)
    headers += [
        b"X-L: " + b"a" * (LIMITS.max_header_bytes - size),
        b"Content-Length: %d" % LIMITS.max_body_bytes,
    ]
    async with connected(served.port) as client:
        answer = await client.ask(request(*headers, line=line, body=b"x" * LIMITS.max_body_bytes))

    assert status_of(answer) == 200


async def test_many_requests_at_once_are_cut_off(served: Served) -> None:
    """Of a heap of pipelined requests the first are answered, and then the connection closes."""
    async with connected(served.port) as client:
        client.writer.write(GET * 100)
        answers = [await client.ask(b"") for _ in range(16)]

        assert {status_of(answer) for answer in answers} == {200}
        assert_problem(await client.rest(), 503)


async def test_client_that_does_not_read_is_closed(served: Served) -> None:
    """A client that takes no answer gets no more of them, and is closed after the idle time-out."""
    served.app.requests.clear()
    async with connected(served.port) as client:
        client.transport.pause_reading()
        client.writer.write(GET.replace(b"/ ", b"/large ") * 10)
        await until(lambda: served.app.requests)
        await until(lambda: not served.listener.occupancy.connections)

    assert len(served.app.requests) == 1


async def test_slow_reader_gets_its_answer(served: Served) -> None:
    """A client that reads slowly but in time gets the whole answer, and the next."""
    async with connected(served.port) as client:
        client.transport.pause_reading()
        client.writer.write(GET.replace(b"/ ", b"/large ") + GET)
        await asyncio.sleep(IDLE_SECONDS / 2)
        client.transport.resume_reading()
        sizes = [length_of(await client.reader.readuntil(b"\r\n\r\n"))]
        await client.reader.readexactly(sizes[0])
        last = await client.ask(b"")

    assert (sizes, last[-1:]) == ([LARGE_BYTES], b"/")


async def test_newcomer_takes_the_place_of_who_waited_longest() -> None:
    """When all places are taken, the connection that has waited longest is closed."""
    app = App()
    async with listening(app, max_connections=2) as listener, AsyncExitStack() as stack:
        first, second, third = [
            await stack.enter_async_context(connected(listener.port)) for _ in range(3)
        ]

        assert await first.rest() == b""
        assert status_of(await second.ask(GET)) == 200
        assert status_of(await third.ask(GET)) == 200
        assert len(listener.occupancy.connections) == 2


async def test_half_request_that_is_older_goes_before_a_silent_connection() -> None:
    """A beginning is no way to keep a place: who has waited longer for the rest goes first."""
    app = App()
    async with listening(app, max_connections=2) as listener, AsyncExitStack() as stack:
        half = await stack.enter_async_context(connected(listener.port))
        half.writer.write(HALF_HEADER)
        await until(lambda: listener.occupancy.receiving)
        silent, newcomer = [
            await stack.enter_async_context(connected(listener.port)) for _ in range(2)
        ]
        lost = await half.rest()
        answers = [await silent.ask(GET), await newcomer.ask(GET)]

    assert_problem(lost, 503)
    assert [status_of(answer) for answer in answers] == [200, 200]


async def test_flood_of_connections_does_not_lock_out() -> None:
    """However many connections wait, a request of a new one is answered."""
    app = App()
    async with listening(app, max_connections=20) as listener, AsyncExitStack() as stack:
        idlers = [await stack.enter_async_context(connected(listener.port)) for _ in range(100)]
        for idler in idlers:
            idler.writer.write(HALF_BODY)
        async with connected(listener.port) as client:
            answer = await client.ask(GET)
        lost = [await idler.rest() for idler in idlers[:80]]

    assert status_of(answer) == 200
    assert {status_of(answer) for answer in lost} <= {None, 503}


async def test_connection_that_is_answered_keeps_its_place() -> None:
    """When every connection is being answered, a newcomer is answered 503 and closed."""
    app = App()
    async with listening(app, max_connections=1) as listener, connected(listener.port) as busy:
        busy.writer.write(GET.replace(b"/ ", b"/wait "))
        await until(lambda: app.requests)
        async with connected(listener.port) as newcomer:
            refused = await newcomer.rest()
        app.go.set()
        answer = await busy.ask(b"")

    assert_problem(refused, 503)
    assert b"Retry-After: " in refused
    assert (status_of(answer), app.refusals) == (200, [(None, 503)])


async def test_bodies_together_have_a_limit() -> None:
    """When halves of bodies take up too much, the slowest senders are answered 503."""
    app = App()
    async with listening(app, max_buffered_bytes=150_000) as listener, AsyncExitStack() as stack:
        head = request(b"Content-Length: 60000")
        clients = [await stack.enter_async_context(connected(listener.port)) for _ in range(3)]
        for count, client in enumerate(clients):
            client.writer.write(head + bytes(59999))
            await until(lambda: listener.occupancy.held_bytes > 59999 * min(count, 1))  # noqa: B023
        answers = [await client.ask(b"x") for client in clients[1:]]
        lost = await clients[0].rest()
        left = listener.occupancy.held_bytes

    assert_problem(lost, 503)
    assert ([status_of(answer) for answer in answers], left) == ([200, 200], 0)
    assert app.evictions == ["memory"]


def post_of(size: int) -> bytes:
    """Write a request with a body."""
    return request(b"Content-Length: %d" % size, body=bytes(size))


async def test_age_of_a_connection_does_not_make_a_victim() -> None:
    """Whose request began first has to go, however old the others' connections are."""
    app = App()
    async with (
        listening(app, max_buffered_bytes=60_000) as listener,
        connected(listener.port) as old,
        connected(listener.port) as young,
    ):
        await old.ask(GET)
        young.writer.write(post_of(50_000)[:-1])
        await until(lambda: listener.occupancy.held_bytes > 50_000)
        old.writer.write(post_of(50_000)[:-1])
        lost = await young.rest()
        answer = await old.ask(bytes(1))

    assert_problem(lost, 503)
    assert status_of(answer) == 200


async def test_complete_request_is_no_victim_of_its_own_size() -> None:
    """A request that its last bytes make whole drives halves out, even if it began before them."""
    app = App()
    async with (
        listening(app, max_buffered_bytes=60_000) as listener,
        connected(listener.port) as old,
        connected(listener.port) as young,
    ):
        old.writer.write(post_of(40_000)[:-1_000])
        await until(lambda: listener.occupancy.held_bytes > 39_000)
        young.writer.write(post_of(30_000)[:-10_000])
        await until(lambda: listener.occupancy.held_bytes > 59_000)
        # The beginning of its next one does not make it a half again.
        answer = await old.ask(bytes(1_000) + GET[:10])
        lost = await young.rest()

    assert_problem(lost, 503)
    assert status_of(answer) == 200


async def test_requests_that_are_answered_have_a_limit_together() -> None:
    """While those that are being answered fill the memory, the next one is told to come again."""
    app = App()
    waits = request(b"Content-Length: 40000", line=b"POST /wait HTTP/1.1", body=bytes(40_000))
    async with listening(app, max_buffered_bytes=60_000) as listener, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connected(listener.port)) for _ in range(3)]
        for count, client in enumerate(clients[:2], 1):
            client.writer.write(waits)
            await until(lambda: len(app.requests) == count)  # noqa: B023
        refused = await clients[2].ask(waits)
        app.go.set()
        answers = [await client.ask(b"") for client in clients[:2]]
        again = await clients[2].ask(waits)

    assert [status_of(answer) for answer in (refused, *answers, again)] == [503, 200, 200, 200]
    assert b"Retry-After: " in refused
    assert (app.refusals, app.evictions) == ([("/wait", 503)], [])


async def test_all_that_is_held_is_counted() -> None:
    """Headers count with what Python takes for them, and so does what comes during an answer."""
    app = App()
    names = b"".join(b"X-%d: y\r\n" % n for n in range(50))
    async with listening(app) as listener:
        async with connected(listener.port) as client:
            client.writer.write(HALF_HEADER + b"y\r\n" + names)
            least = 50 * HEADER_OVERHEAD_BYTES + len(names)
            await until(lambda: listener.occupancy.held_bytes >= least)
        await until(lambda: listener.occupancy.held_bytes == 0)
        async with connected(listener.port) as client:
            client.writer.write(post_of(20_000).replace(b"/bad ", b"/wait "))
            await until(lambda: app.requests)
            client.writer.write(post_of(30_000))
            await until(lambda: listener.occupancy.held_bytes > 50_000)
            app.go.set()
            await client.ask(b"")
            await client.ask(b"")
        await until(lambda: not listener.occupancy.connections)
        left = listener.occupancy.held_bytes

    assert left == 0


async def test_good_client_outlives_silent_newcomers() -> None:
    """When all places are taken, who has been answered with success is the last to go."""
    app = App()
    async with listening(app, max_connections=2) as listener, AsyncExitStack() as stack:
        good = await stack.enter_async_context(connected(listener.port))
        await good.ask(GET)
        crowd = [await stack.enter_async_context(connected(listener.port)) for _ in range(5)]
        await asyncio.gather(*(one.rest() for one in crowd[:4]))
        answer = await good.ask(GET)

    assert status_of(answer) == 200
    assert app.evictions == ["connections"] * 4


async def test_refusals_are_told() -> None:
    """What the port answers by itself is told to who counts it."""
    app = App()
    async with listening(app) as listener:
        for data in (b"\x00\r\n\r\n", TOO_MUCH["long header"][1], TOO_MUCH["one chunk"][1]):
            async with connected(listener.port) as client:
                client.writer.write(data)
                await client.rest()
        async with connected(listener.port) as client:
            client.writer.write(HALF_BODY)
            await until(lambda: listener.occupancy.held_bytes)
        await until(lambda: not listener.occupancy.connections)

    assert app.refusals == [(None, 400), (None, 431), ("/bad", 413), ("/half", 400)]


SCRAPS = st.sampled_from([GET, LAST_GET, HALF_HEADER, HALF_BODY, *MALFORMED.values(), b"\r\n"])


@settings(max_examples=100, deadline=None)
@given(pieces=st.lists(SCRAPS | st.binary(max_size=100), max_size=8))
async def test_any_bytes_are_answered_or_closed(served: Served, pieces: list[bytes]) -> None:
    """Whatever a client sends before it has no more to say: whole answers, never 500, the end."""
    async with connected(served.port) as client:
        for piece in pieces:
            client.writer.write(piece)
        client.writer.write_eof()
        rest = await client.rest()
    while rest:
        head, _, rest = rest.partition(b"\r\n\r\n")

        assert status_of(head) in {200, 400, 503}
        rest = rest[length_of(head) :]


# --- What clients do ------------------------------------------------------------------------------


@pytest.mark.parametrize("wish", [b"h2c", b"websocket"])
@pytest.mark.parametrize(
    "framing",
    [(b"Content-Length: 5", b"hello"), (CHUNKED, chunk(b"hello") + chunk(b""))],
    ids=["length", "chunks"],
)
async def test_wish_for_another_protocol_is_ignored(
    served: Served, wish: bytes, framing: tuple[bytes, bytes]
) -> None:
    """A request that would rather be HTTP/2 is answered as it is, with its body."""
    header, body = framing
    upgrade = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: " + wish, header)
    async with connected(served.port) as client:
        first = await client.ask(request(*upgrade, line=b"POST /up HTTP/1.1", body=body) + GET)
        second = await client.ask(b"")

    assert (first[-3:], second[-1:]) == (b"/up", b"/")
    assert served.app.requests[-2].body == b"hello"


async def test_client_that_asks_first_is_told_to_go_on(served: Served) -> None:
    """`Expect: 100-continue` is answered before the body, unless it would be too large."""
    headers = (b"Expect: 100-continue", b"Content-Length: 5")
    async with connected(served.port) as client:
        client.writer.write(request(*headers, line=b"POST /100 HTTP/1.1"))
        interim = await client.reader.readuntil(b"\r\n\r\n")
        answer = await client.ask(b"hello")
        client.writer.write(request(headers[0], b"Content-Length: 999999"))
        refused = await client.rest()

    assert (status_of(interim), answer[-4:]) == (100, b"/100")
    assert_problem(refused, 413)


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_only_who_knows_and_needs_it_is_told_to_go_on(served: Served, version: bytes) -> None:
    """HTTP/1.0 knows no `100 Continue`, and who is refused for its header gets that at once."""
    path = b"/old" if version == b"1.0" else b"/nowhere"
    line = b"POST %s HTTP/%s" % (path, version)
    async with connected(served.port) as client:
        head = request(b"Expect: 100-continue", b"Content-Length: 5", line=line)
        client.writer.write(head)
        if version == b"1.0":
            await until(lambda: served.listener.occupancy.receiving)
            client.writer.write(b"hello")
        answer = await client.rest()

    assert (status_of(answer), answer.count(b"HTTP/1.1 ")) == (200 if path == b"/old" else 404, 1)


async def test_refused_request_that_is_whole_keeps_its_connection(served: Served) -> None:
    """A request that its header condemns, with all of its body there, ends no connection."""
    whole = request(b"Content-Length: 5", line=b"POST /nowhere HTTP/1.1", body=b"hello")
    async with connected(served.port) as client:
        first = await client.ask(whole)
        second = await client.ask(GET)

    assert (status_of(first), status_of(second)) == (404, 200)
    assert b"connection: close" not in first


async def test_body_that_nobody_reads_is_not_waited_for(served: Served) -> None:
    """A request that its header condemns is answered at once, and its connection is closed."""
    half = request(b"Content-Length: 50000", line=b"POST /nowhere HTTP/1.1", body=bytes(10_000))
    async with connected(served.port) as client:
        client.writer.write(half)
        answer = await client.rest()

    assert_problem(answer, 404)


async def test_answer_to_head_has_no_body(served: Served) -> None:
    """HEAD is answered with the length, and without the body."""
    async with connected(served.port) as client:
        client.writer.write(b"HEAD /head HTTP/1.1\r\nHost: x\r\n\r\n")
        head = await client.reader.readuntil(b"\r\n\r\n")
        answer = await client.ask(GET)

    assert (length_of(head), status_of(answer)) == (5, 200)


@pytest.mark.parametrize("keep", [b"", b"Connection: keep-alive\r\n"], ids=["plain", "keep"])
async def test_http_1_0_is_answered_and_closed(served: Served, keep: bytes) -> None:
    """HTTP/1.0 gets one answer for each connection."""
    async with connected(served.port) as client:
        client.writer.write(b"GET /old HTTP/1.0\r\n%s\r\n" % keep)
        answer = await client.rest()

    assert (answer[-4:], b"connection: close" in answer) == (b"/old", True)


async def test_what_follows_the_last_request_is_ignored(served: Served) -> None:
    """After `Connection: close` nothing more is answered."""
    async with connected(served.port) as client:
        client.writer.write(LAST_GET + b"\x00" + GET)
        answer = await client.rest()

    assert (status_of(answer), answer.count(b"HTTP/1.1")) == (200, 1)


async def test_half_closed_client_gets_its_answers(served: Served) -> None:
    """A client that has said all, and says so, is answered all."""
    async with connected(served.port) as client:
        client.writer.write(GET.replace(b"/ ", b"/soon ") + GET.replace(b"/ ", b"/2 "))
        client.writer.write_eof()
        answers = await client.rest()

    assert (answers.count(b"HTTP/1.1 200 OK"), answers[-2:]) == (2, b"/2")


async def test_client_that_leaves_does_not_stop_the_answer() -> None:
    """A complete request is worked on to its end, whether or not the client waits for it."""
    app = App()
    async with listening(app) as listener:
        async with connected(listener.port) as client:
            client.writer.write(GET.replace(b"/ ", b"/wait "))
            await until(lambda: app.requests)
        app.go.set()
        await until(lambda: not listener.occupancy.tasks and not listener.occupancy.connections)

    assert not app.is_cancelled


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        (b"/a%20b?c=%20d", "/a b", b"c=%20d"),
        (b"http://example.com:80/a?b", "/a", b"b"),
        (b"http://example.com", "", b""),
        (b"//a", "//a", b""),
        (b"/%ff", "/\ufffd", b""),
        (b"*", "*", b""),
    ],
)
async def test_target_is_read(served: Served, target: bytes, path: str, query: bytes) -> None:
    """The path is decoded; the query is left as it is, because it may be signed."""
    async with connected(served.port) as client:
        await client.ask(request(line=b"GET %s HTTP/1.1" % target))
        found = served.app.requests[-1]

    assert (found.path, found.query) == (path, query)


async def test_bug_is_an_answer(served: Served, ears: Ears) -> None:
    """A handler that fails is logged and answered 500, and the connection goes on."""
    async with connected(served.port) as client:
        answer = await client.ask(GET.replace(b"/ ", b"/bug "))
        second = await client.ask(GET)

    assert (status_of(answer), status_of(second)) == (500, 200)
    assert ears.heard("internal_error")


async def test_answer_has_a_date(served: Served) -> None:
    """Every answer says when it was made."""
    async with connected(served.port) as client:
        head = (await client.ask(GET)).split(b"\r\n")

    dates = [line.partition(b": ")[2].decode() for line in head if line.startswith(b"date: ")]
    age = datetime.now(UTC) - parsedate_to_datetime(dates[0])
    assert timedelta(seconds=-1) <= age < timedelta(seconds=10)


def test_problem_says_status_and_title() -> None:
    """An error answer is problem+json with a title, its status and the headers given."""
    answer = problem(503, "busy", Retry_After="3")

    assert (
        answer.status,
        json.loads(answer.body),
        answer.headers["content-type"],
        answer.headers["Retry-After"],
    ) == (503, {"title": "busy", "status": 503}, "application/problem+json", "3")


# --- The port -------------------------------------------------------------------------------------


def listen(host: str, port: int) -> Listener:
    """Try to take a port."""
    return Listener(App().answer, LIMITS, section="webhook", host=host, port=port)


def test_port_in_use_names_the_setting() -> None:
    """A port that is taken is told by the setting's name, the reason and the remedy."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BridgeError) as caught:
            listen("127.0.0.1", port)

    assert str(caught.value) == (
        f"webhook.port: cannot listen on 127.0.0.1:{port}: it is in use; "
        "stop what listens there, or set another port"
    )


def test_port_that_is_not_allowed_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that the system keeps for the superuser is told by the setting's name."""

    def refuse(*_address: object, **_options: object) -> socket.socket:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket, "create_server", refuse)
    with pytest.raises(BridgeError, match=r"^webhook\.port: .*:80: .* set a port above 1023$"):
        listen("127.0.0.1", 80)


@pytest.mark.parametrize(
    "host",
    ["192.0.2.1", "no-such-host.invalid", "127..0.1", "::zz", "a" * 64],
    ids=["not ours", "unknown", "empty label", "malformed", "long label"],
)
def test_address_that_cannot_be_had_names_the_setting(host: str) -> None:
    """An address that this machine does not have is told by the setting's name."""
    with pytest.raises(BridgeError, match=r"^webhook\.host: .*: this computer has no such"):
        listen(host, 0)


async def test_port_is_free_again_afterwards() -> None:
    """The port can be taken again as soon as the listener has ended, used connections or not."""
    async with listening(App()) as listener, connected(listener.port) as client:
        await client.ask(LAST_GET)
        await client.rest()
    again = listen("127.0.0.1", listener.port)
    again.stop()
    await again.run()

    assert again.port == listener.port


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this computer has no IPv6")
async def test_every_address_is_every_address() -> None:
    """`::` takes the port for IPv4 too."""
    listener = listen("::", 0)
    running = asyncio.create_task(listener.run())
    await until(lambda: listener.is_accepting)
    try:
        for host in ("127.0.0.1", "::1"):
            reader, writer = await asyncio.open_connection(host, listener.port)
            answer = await Client(reader, writer).ask(LAST_GET)
            writer.close()

            assert status_of(answer) == 200
    finally:
        listener.stop()
        await asyncio.wait_for(running, GUARD_SECONDS)


@pytest.mark.parametrize(
    ("limits", "places"),
    [((1500, 1500), 500), ((512, 2048), 1000), ((1024, 1024), 256), ((-1, -1), 1000)],
    ids=["too few", "may ask for more", "hardly any", "no limit"],
)
def test_places_fit_the_open_files(
    monkeypatch: pytest.MonkeyPatch, ears: Ears, limits: tuple[int, int], places: int
) -> None:
    """Connections leave the open files that others need, and the log says what that costs."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    fitted = fit_open_files(replace(LIMITS, max_connections=1000), reserved=1000, setting="a.b")
    told = [(line["setting"], line["connections"]) for line in ears.heard("connections_limited")]

    assert fitted.max_connections == places
    assert told == ([("a.b", places)] if places < 1000 else [])


# --- Its end --------------------------------------------------------------------------------------


async def test_signals_are_left_alone() -> None:
    """The handlers of signals are the same before, during and after."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def handlers() -> list[Any]:
        return [signal.getsignal(number) for number in numbers]

    seen = [handlers()]
    async with listening(App()):
        seen.append(handlers())
    seen.append(handlers())

    assert seen == [seen[0]] * 3


async def test_accepting_begins_and_ends() -> None:
    """`is_accepting` is true from the start until stop is asked for."""
    listener = listen("127.0.0.1", 0)
    before = listener.is_accepting
    running = asyncio.create_task(listener.run())
    await until(lambda: listener.is_accepting)
    listener.stop()
    after = listener.is_accepting
    await asyncio.wait_for(running, GUARD_SECONDS)

    assert (before, after, listener.is_accepting) == (False, False, False)


async def test_stop_finishes_open_requests() -> None:
    """A request that is being answered when stop is asked for gets its whole answer."""
    app = App()
    async with listening(app) as listener, connected(listener.port) as client:
        asking = asyncio.create_task(client.ask(GET.replace(b"/ ", b"/wait ")))
        await until(lambda: app.paths)
        listener.stop()
        await until_refused(listener.port)
        app.go.set()

        assert (await asking).endswith(b"/wait")


async def until_refused(port: int) -> None:
    """Wait until nobody listens; who came in the very moment is reset."""
    async with asyncio.timeout(GUARD_SECONDS):
        with contextlib.suppress(ConnectionError):
            while True:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.transport.abort()
                await asyncio.sleep(0.01)


async def test_last_answer_says_that_the_connection_closes() -> None:
    """After stop the client is told, and made, to leave."""
    app = App()
    async with listening(app) as listener, connected(listener.port) as client:
        client.writer.write(GET.replace(b"/ ", b"/wait "))
        await until(lambda: app.paths)
        listener.stop()
        await until_refused(listener.port)
        app.go.set()
        answer = await client.rest()

        assert b"connection: close" in answer.lower()


@pytest.mark.parametrize("data", [b"", HALF_HEADER, GET], ids=["silent", "half", "idle"])
async def test_stop_does_not_wait_for_idle_connections(data: bytes) -> None:
    """Connections without a request do not hold up the end, but for a moment if one may come."""
    server = listening(App(), drain_timeout_seconds=60)
    async with server as listener, connected(listener.port) as client:
        if data == GET:
            await client.ask(data)
        else:
            client.writer.write(data)
        listener.stop()
        rest = await client.rest()

    assert status_of(rest) == (408 if data == HALF_HEADER else None)


async def test_stop_serves_who_is_not_accepted_yet() -> None:
    """Who waits in the kernel's queue when stop is asked for is accepted, and answered."""
    app = App()
    async with listening(app) as listener:
        # Without a turn of the event loop, which would accept it.
        with socket.create_connection(("127.0.0.1", listener.port)) as queued:
            queued.sendall(GET.replace(b"/ ", b"/wait "))
            listener.stop()
            await until(lambda: app.requests)
            has_ended = listener.occupancy.is_over.is_set()
            app.go.set()
            queued.setblocking(False)
            loop = asyncio.get_running_loop()
            answer = await asyncio.wait_for(loop.sock_recv(queued, 65536), GUARD_SECONDS)

    assert (has_ended, status_of(answer), b"connection: close" in answer) == (False, 200, True)


@pytest.mark.parametrize("turns", range(3))
async def test_stop_serves_who_is_not_accepted_yet_when_all_others_leave(turns: int) -> None:
    """Who waits in the kernel's queue is answered, even if the last other client leaves then."""
    async with listening(App()) as listener:
        with socket.create_connection(("127.0.0.1", listener.port)):
            await until(lambda: listener.occupancy.connections)
        for _ in range(turns):
            await asyncio.sleep(0)
        with socket.create_connection(("127.0.0.1", listener.port)) as queued:
            queued.sendall(GET.replace(b"/ ", b"/soon "))
            listener.stop()
            queued.setblocking(False)
            loop = asyncio.get_running_loop()
            answer = await asyncio.wait_for(loop.sock_recv(queued, 65536), GUARD_SECONDS)

    assert status_of(answer) == 200


async def test_stop_resets_nobody_who_comes_as_the_port_closes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who comes when the queue was empty is refused: a connection that is made is not reset."""
    came: list[str] = []
    read_all = bridge.http_server.listener._read_all

    async def come_and_read_all() -> None:
        with contextlib.suppress(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", listener.port)).close()
            came.append("connected")
        await read_all()

    async with listening(App()) as listener:
        monkeypatch.setattr("bridge.http_server.listener._read_all", come_and_read_all)
        listener.stop()
        await until_refused(listener.port)

    assert came == []


async def test_stop_waits_for_a_request_on_its_way() -> None:
    """Who has connected before the port closes gets an answer, even if the request comes later."""
    async with listening(App()) as listener, connected(listener.port) as client:
        client.writer.write(GET[:10])
        await until(lambda: listener.occupancy.receiving)
        listener.stop()
        await until_refused(listener.port)
        answer = await client.ask(GET[10:])

    assert (status_of(answer), b"connection: close" in answer) == (200, True)


async def test_stop_answers_who_asks_again_and_again() -> None:
    """The next request on a connection that is in use may be on its way: it is answered too."""
    async with listening(App()) as listener, connected(listener.port) as client:
        await client.ask(GET)
        listener.stop()
        await until_refused(listener.port)
        answer = await client.ask(GET)

    assert (status_of(answer), b"connection: close" in answer) == (200, True)


async def test_stop_does_not_wait_for_who_has_been_silent_for_long() -> None:
    """A connection that has brought nothing for a second is closed at once."""
    loop = asyncio.get_running_loop()
    async with listening(App()) as listener, connected(listener.port) as client:
        await client.ask(GET)
        (connection,) = listener.occupancy.trusted
        connection.since -= END_SECONDS
        started = loop.time()
        listener.stop()
        rest = await client.rest()

    assert rest == b""
    assert connection.deadline <= started


async def test_stop_gives_up_after_its_time() -> None:
    """A request that does not end is cancelled when the time to drain is over."""
    app = App()
    server = listening(app, drain_timeout_seconds=1)
    async with server as listener, connected(listener.port) as client:
        client.writer.write(GET.replace(b"/ ", b"/wait "))
        await until(lambda: app.paths)
        listener.stop()
        await until(lambda: app.is_cancelled)

    assert listener.has_cut_off
