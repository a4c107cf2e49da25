"""The listener over real sockets: idle connections, malformed HTTP, its port, signals, its end."""

import asyncio
import contextlib
import json
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from bridge.errors import BridgeError
from bridge.listener import Listener, problem

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
LAST_GET = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
IDLE_SECONDS = 1
# Hangs end here; far from the idle time-out, and no healthy test comes near it.
GUARD_SECONDS = 6.0


@dataclass
class App:
    """Answers every request after it has read the body, or as its path says."""

    paths: list[str] = field(default_factory=list)
    go: asyncio.Event = field(default_factory=asyncio.Event)
    is_cancelled: bool = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        path = scope["path"]
        self.paths.append(path)
        try:
            if path == "/wait":
                await self.go.wait()
            if path == "/slow":
                await asyncio.sleep(IDLE_SECONDS * 1.5)
            if path != "/early":
                while (await receive()).get("more_body"):
                    pass
        except asyncio.CancelledError:
            self.is_cancelled = True
            raise
        body = path.encode()
        length = str(len(body)).encode()
        headers = [(b"content-type", b"text/plain"), (b"content-length", length)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


@dataclass
class Client:
    """A raw connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

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


def length_of(head: bytes) -> int:
    """Find how long the body is."""
    lines = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if line)
    return int(lines.get(b"content-length", 0))


@asynccontextmanager
async def listening(app: App, **limits: float) -> AsyncIterator[Listener]:
    """Serve on a free port."""
    listener = Listener(app, setting="webhook.port", host="127.0.0.1", port=0, **limits)
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
    port: int


@pytest.fixture(scope="module")
async def served() -> AsyncIterator[Served]:
    """Serve with a short idle time-out."""
    app = App()
    async with listening(app, idle_timeout_seconds=IDLE_SECONDS) as listener:
        yield Served(app, listener.port)


# --- Connections that bring nothing ---------------------------------------------------------------


@dataclass(frozen=True)
class Idler:
    """A client that gets an answer or not, sends something, and then drips or goes silent."""

    asks: bytes = b""
    says: bytes = b""
    drips: bytes = b""

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
EARLY = b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"
IDLERS: dict[str, Idler] = {
    "silent from the start": Idler(),
    "silent in the request line": Idler(says=b"GET / HT"),
    "silent in the header": Idler(says=HALF_HEADER),
    "silent after an empty line": Idler(says=b"\r\n"),
    "silent after an answer": Idler(GET),
    "silent after an answer and an empty line": Idler(GET, says=b"\r\n"),
    "silent in the second header": Idler(GET, says=HALF_HEADER),
    "silent after an answer that came before the body": Idler(EARLY),
    "silent in a body that nobody waits for": Idler(EARLY, says=b"x"),
    "drips the request line": Idler(says=b"GET /", drips=b"x"),
    "drips a header": Idler(says=HALF_HEADER, drips=b"x"),
    "drips many headers": Idler(says=b"GET / HTTP/1.1\r\n", drips=b"X: y\r\n"),
    "drips empty lines": Idler(drips=b"\r\n"),
    "drips empty lines after an answer": Idler(GET, drips=b"\r\n"),
    "drips the second header": Idler(GET, says=HALF_HEADER, drips=b"x"),
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
    """A connection without a whole header is closed after the idle time-out, with no word."""
    assert await met[name] == b""


async def test_slow_answer_is_not_cut_off(served: Served) -> None:
    """The idle time-out does not run while a request is being answered."""
    async with connected(served.port) as client:
        answer = await client.ask(GET.replace(b"/ ", b"/slow "))

        assert answer.endswith(b"/slow")


async def test_slow_body_is_not_cut_off(served: Served) -> None:
    """The idle time-out does not run while a body comes in, which the app has a limit for."""
    size = 30
    async with connected(served.port) as client:
        client.writer.write(b"POST /body HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size)
        for _ in range(size):
            await asyncio.sleep(IDLE_SECONDS * 1.5 / size)
            client.writer.write(b"x")

        assert (await client.ask(b"")).endswith(b"/body")


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
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED.keys())
async def test_malformed_request_is_a_problem(served: Served, data: bytes) -> None:
    """Malformed HTTP is answered with 400 as problem+json, and the connection is closed."""
    async with connected(served.port) as client:
        client.writer.write(data)
        head, _, body = (await client.rest()).partition(b"\r\n\r\n")

        assert (
            head.split(b"\r\n")[0].split(b" ")[:2],
            b"content-type: application/problem+json" in head.lower(),
            json.loads(body or b"null"),
        ) == ([b"HTTP/1.1", b"400"], True, {"title": "malformed HTTP request", "status": 400})


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED.keys())
async def test_malformed_request_does_not_reach_the_app(served: Served, data: bytes) -> None:
    """What is malformed in its header is never handed on."""
    served.app.paths.clear()
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

        assert (await client.rest()).startswith(b"HTTP/1.1 400 ")


def test_problem_says_status_and_title() -> None:
    """An error answer is problem+json with a title, its status and the headers given."""
    answer = problem(503, "busy", Retry_After="3")

    assert (
        answer.status_code,
        json.loads(bytes(answer.body)),
        answer.headers["content-type"],
        answer.headers["retry-after"],
    ) == (503, {"title": "busy", "status": 503}, "application/problem+json", "3")


# --- The port -------------------------------------------------------------------------------------


def listen(host: str, port: int) -> Listener:
    """Try to take a port."""
    return Listener(App(), setting="webhook.port", host=host, port=port)


def test_port_in_use_names_the_setting() -> None:
    """A port that is taken is told by the setting's name and the reason."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BridgeError) as caught:
            listen("127.0.0.1", port)

    assert str(caught.value) == f"webhook.port: cannot listen on 127.0.0.1:{port} (EADDRINUSE)"


@pytest.mark.parametrize(
    "host",
    ["192.0.2.1", "no-such-host.invalid", "127..0.1", "::zz"],
    ids=["not ours", "unknown", "empty label", "malformed"],
)
def test_address_that_cannot_be_had_names_the_setting(host: str) -> None:
    """An address that this machine does not have is told by the setting's name."""
    with pytest.raises(BridgeError, match=r"^webhook\.port: cannot listen on "):
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
    """Connections without a request do not hold up the end."""
    server = listening(App(), drain_timeout_seconds=60)
    async with server as listener, connected(listener.port) as client:
        if data == GET:
            await client.ask(data)
        else:
            client.writer.write(data)
        listener.stop()

        assert await client.rest() == b""


async def test_stop_gives_up_after_its_time() -> None:
    """A request that does not end is cancelled when the time to drain is over."""
    app = App()
    server = listening(app, drain_timeout_seconds=1)
    async with server as listener, connected(listener.port) as client:
        client.writer.write(GET.replace(b"/ ", b"/wait "))
        await until(lambda: app.paths)
        listener.stop()
        await until(lambda: app.is_cancelled)

    assert app.is_cancelled
