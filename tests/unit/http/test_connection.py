"""One connection over real sockets: clients that are silent, slow, odd or gone."""

import asyncio
import gc
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime

import pytest

from bridge.http.parser import RequestParser
from tests.ears import Ears
from tests.unit.http.raw import (
    CHUNKED,
    GET,
    HALF_BODY,
    HALF_CHUNK,
    HALF_HEADER,
    IDLE_SECONDS,
    LARGE_BYTES,
    LAST_GET,
    App,
    Served,
    assert_problem,
    chunk,
    connected,
    length_of,
    listening,
    request,
    status_of,
    until,
)


@dataclass(frozen=True)
class Idler:
    """A client that gets an answer or not, sends something, and then drips or goes silent."""

    asks: bytes = b""
    says: bytes = b""
    drips: bytes = b""
    # The status of the last word, if there is one.
    hears: int | None = None

    async def meet(self, port: int) -> bytes:
        async with connected(port) as client:
            if self.asks:
                await client.ask(self.asks)
            client.writer.write(self.says)
            dripping = asyncio.create_task(client.drip(self.drips))
            try:
                return await client.rest()
            finally:
                dripping.cancel()


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
    answer = await met[name]

    assert status_of(answer) == IDLERS[name].hears


@pytest.mark.parametrize("said", [HALF_BODY, GET], ids=["half a body", "whole"])
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


async def test_requests_in_one_packet_are_answered_in_order(served: Served) -> None:
    """Pipelined requests get their own answers, whether those come at once or later."""
    paths = [b"/1", b"/at-once/2", b"/at-once/3", b"/soon", b"/at-once/5"]
    async with connected(served.port) as client:
        client.writer.write(b"".join(GET.replace(b"/ ", path + b" ") for path in paths))
        answers = [await client.ask(b"") for _ in paths]

    assert [answer.rpartition(b"\r\n")[2] for answer in answers] == paths


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


@pytest.mark.parametrize(
    ("wish", "header", "body"),
    [
        (b"h2c", b"Content-Length: 5", b"hello"),
        (b"websocket", CHUNKED, chunk(b"hello") + chunk(b"")),
    ],
    ids=["length", "chunks"],
)
async def test_wish_for_another_protocol_is_ignored(
    served: Served, wish: bytes, header: bytes, body: bytes
) -> None:
    """A request that would rather be HTTP/2 is answered as it is, with its body."""
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
    async with connected(served.port) as client:
        client.writer.write(b"HEAD /head HTTP/1.1\r\nHost: x\r\n\r\n")
        head = await client.reader.readuntil(b"\r\n\r\n")
        answer = await client.ask(GET)

    assert (length_of(head), status_of(answer)) == (5, 200)


@pytest.mark.parametrize("keep", [b"", b"Connection: keep-alive\r\n"], ids=["plain", "keep"])
async def test_http_1_0_is_answered_and_closed(served: Served, keep: bytes) -> None:
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
    async with connected(served.port) as client:
        client.writer.write(GET.replace(b"/ ", b"/soon ") + GET.replace(b"/ ", b"/2 "))
        client.writer.write_eof()
        answers = await client.rest()

    assert (answers.count(b"HTTP/1.1 200 OK"), answers[-2:]) == (2, b"/2")


async def test_connection_without_an_answer_to_come_is_closed() -> None:
    """When the answer of a request is cancelled, its client is not left waiting."""
    async with listening(App()) as listener, connected(listener.port) as client:
        client.writer.write(GET.replace(b"/ ", b"/wait "))
        await until(lambda: listener.occupancy.answers)
        for answer in listener.occupancy.answers:
            answer.cancel()

        assert await client.rest() == b""
        await until(lambda: not listener.occupancy.answers and not listener.occupancy.connections)


async def test_client_that_leaves_does_not_stop_the_answer() -> None:
    """A complete request is worked on to its end, whether or not the client waits for it."""
    app = App()
    async with listening(app) as listener:
        async with connected(listener.port) as client:
            client.writer.write(GET.replace(b"/ ", b"/wait "))
            await until(lambda: app.requests)
        app.go.set()
        await until(lambda: not listener.occupancy.answers and not listener.occupancy.connections)

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


@pytest.mark.parametrize("path", [b"/bug", b"/at-once/bug"])
async def test_bug_is_an_answer(served: Served, ears: Ears, path: bytes) -> None:
    """A handler that fails, now or later, is logged and answered 500; the connection goes on."""
    async with connected(served.port) as client:
        answer = await client.ask(GET.replace(b"/ ", path + b" "))
        second = await client.ask(GET)

    assert (status_of(answer), status_of(second)) == (500, 200)
    assert ears.heard("internal_error")


async def test_answer_has_a_date(served: Served) -> None:
    """Every answer says when it was made, and does not name the server."""
    async with connected(served.port) as client:
        head = (await client.ask(GET)).split(b"\r\n")

    dates = [line.partition(b": ")[2].decode() for line in head if line.startswith(b"date: ")]
    age = datetime.now(UTC) - parsedate_to_datetime(dates[0])
    assert timedelta(seconds=-1) <= age < timedelta(seconds=10)
    assert not any(line.lower().startswith(b"server:") for line in head)
