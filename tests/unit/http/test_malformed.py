"""Requests that are malformed or too large: refused over real sockets, whatever they are."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.http.raw import (
    CHUNKED,
    GET,
    HALF_BODY,
    HALF_HEADER,
    LAST_GET,
    LIMITS,
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
    "malformed chunk": request(CHUNKED, body=b"zz\r\n"),
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED.keys())
async def test_malformed_request_is_a_problem(served: Served, data: bytes) -> None:
    """It is answered with 400 as problem+json and closed, and never reaches the application."""
    served.app.requests.clear()
    async with connected(served.port) as client:
        client.writer.write(data)
        answer = await client.rest()

    assert_problem(answer, 400)
    assert served.app.paths == []


@pytest.mark.parametrize("path", [b"/", b"/soon"], ids=["quick", "slow"])
@pytest.mark.parametrize("together", [True, False], ids=["one packet", "two packets"])
async def test_malformed_request_does_not_lose_an_answer(
    served: Served, path: bytes, *, together: bool
) -> None:
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
