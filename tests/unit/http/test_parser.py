"""The parser alone: whatever comes in, in whatever pieces, it neither raises nor holds too much."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.http.listener_state import Limits
from bridge.http.messages import Request, Response
from bridge.http.parser import HEADER_OVERHEAD_BYTES, MAX_PIPELINED, ReadPhase, RequestParser

LIMITS = Limits(
    max_connections=1,
    max_header_bytes=1024,
    max_headers=10,
    max_body_bytes=256,
    max_buffered_bytes=1024,
    idle_timeout_seconds=1,
    body_timeout_seconds=1,
    keep_alive_seconds=1,
)

# What requests are made of, so that random bytes get past the first line.
PIECES = st.sampled_from(
    [
        *(b"GET / HTTP/1.1\r\n", b"POST /a?b HTTP/1.1\r\n", b"POST /old HTTP/1.0\r\n", b"\r\n"),
        *(b"Host: x\r\n", b"Content-Length: 5\r\n", b"Content-Length: 0\r\n", b"hello", b"\n"),
        *(b"Transfer-Encoding: chunked\r\n", b"5\r\nhello\r\n", b"0\r\n\r\n", b"5;a=b\r\n", b" "),
        *(b"X-Long: " + b"a" * 600 + b"\r\n", b"Connection: close\r\n", b"\x00", b"\xff", b"\r"),
        *(
            b"Connection: upgrade\r\n",
            b"Upgrade: h2c\r\n",
            b"Expect: 100-continue\r\n",
            b"X: y\r\n",
        ),
        *(b"CONNECT x:1 HTTP/1.1\r\n", b"OPTIONS * HTTP/1.1\r\n", b"X: y\r\n", b"ffffffff\r\n"),
    ]
)
STREAMS = st.lists(PIECES | st.binary(max_size=20), max_size=40).map(b"".join)
GOOD = st.builds(
    lambda path, body, chunked, pad: _write(path, body, pad=pad, chunked=chunked),
    st.from_regex(rb"/[a-z]{0,20}", fullmatch=True),
    st.binary(max_size=200),
    st.booleans(),
    st.binary(max_size=50).map(bytes.hex).map(str.encode),
)


def _write(path: bytes, body: bytes, *, pad: bytes, chunked: bool) -> tuple[bytes, bytes, bytes]:
    """Write a good request; return it with its path and its body."""
    framing, content = b"Content-Length: %d" % len(body), body
    if chunked:
        framing = b"Transfer-Encoding: chunked"
        pieces = [body[:100], body[100:]]
        content = b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in pieces if p) + b"0\r\n\r\n"
    lines = (b"POST " + path + b" HTTP/1.1", b"Host: x", b"X-Pad: " + pad, framing, b"")
    return b"\r\n".join((*lines, content)), path, body


def read(data: bytes, cuts: list[int], limits: Limits = LIMITS) -> RequestParser:
    """Feed the bytes in pieces, as a connection would: not after a refusal or the last request."""
    parser = RequestParser(limits)
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    for start, end in itertools.pairwise(places):
        is_last = parser.requests and not parser.requests[-1].keep_alive
        if parser.refusal is not None or is_last:
            break
        parser.feed(memoryview(data)[start:end])
    return parser


def seen(parser: RequestParser) -> tuple[list[dict[str, object]], int | None, ReadPhase]:
    """Return every field of each request, the status of the refusal, and the phase."""
    status = None if parser.refusal is None else parser.refusal.status
    return [fields_of(request) for request in parser.requests], status, parser.phase


def fields_of(request: Request) -> dict[str, object]:
    return {name: getattr(request, name) for name in Request.__slots__}


@given(data=STREAMS, cuts=st.lists(st.integers(min_value=0), max_size=10))
def test_no_bytes_raise(data: bytes, cuts: list[int]) -> None:
    """Any bytes become requests within the limits, and a refusal of the closed set or none."""
    parser = read(data, cuts)
    requests = parser.requests
    _, status, _ = seen(parser)

    assert status in {None, 400, 413, 431, 503}
    assert len(requests) <= MAX_PIPELINED
    assert all(len(request.body) <= LIMITS.max_body_bytes for request in requests)
    assert all(len(request.headers) <= LIMITS.max_headers for request in requests)


@given(data=STREAMS, cuts=st.lists(st.integers(min_value=0), max_size=10))
def test_cuts_do_not_matter(data: bytes, cuts: list[int]) -> None:
    """Where packets begin and end changes nothing of what is read."""
    # Limits of what brings no request on are counted by the packet.
    limits = replace(LIMITS, max_header_bytes=100_000, max_headers=1000)

    assert seen(read(data, cuts, limits)) == seen(read(data, [], limits))


@given(
    good=st.lists(GOOD, max_size=MAX_PIPELINED),
    rest=STREAMS,
    cuts=st.lists(st.integers(min_value=0), max_size=10),
)
def test_good_requests_are_read_whatever_follows(
    good: list[tuple[bytes, bytes, bytes]], rest: bytes, cuts: list[int]
) -> None:
    """What is well-formed is read byte for byte, in order, also before what is not."""
    requests = list(read(b"".join(data for data, _, _ in good) + rest, cuts).requests)

    found = [(request.path.encode(), request.body) for request in requests[: len(good)]]
    assert found == [(path, body) for _, path, body in good]


@given(data=GOOD, place=st.integers(min_value=0), junk=st.sampled_from([b"\x00", b"\r", b"\n"]))
def test_junk_in_a_header_is_never_read_over(
    data: tuple[bytes, bytes, bytes], place: int, junk: bytes
) -> None:
    """A request with a NUL or a bare line end anywhere in its header is no request."""
    text, _, _ = data
    where = place % text.index(b"\r\n\r\n")
    requests = list(read(text[:where] + junk + text[where:], []).requests)

    # Line ends in front of a request are skipped.
    assert requests == [] or (where == 0 and junk != b"\x00")


CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "chunks",
    [b"fffffffffffffff\r\n", b"101\r\n", b"101;a=b\r\nxx", b"5\r\nhello\r\n0fc\r\nab"],
    ids=["2^60", "one too many", "extension", "second"],
)
def test_chunk_that_says_it_is_too_large_is_refused_at_once(chunks: bytes) -> None:
    """The size of a chunk is enough to refuse it, wherever the packets are cut."""
    data = CHUNKED + chunks
    found = {seen(read(data, [cut]))[1] for cut in range(len(CHUNKED) - 20, len(data))}

    assert found == {413}


@pytest.mark.parametrize(
    "chunks",
    [b"100\r\n", b"0000100;a=b\r\nx", b"5\r\nhello\r\n0fb\r\nab", b"0\r\nfeed", b"0\r\nfeed: ff"],
    ids=["full", "zeros", "second", "trailer", "whole trailer"],
)
def test_chunk_that_fits_is_waited_for(chunks: bytes) -> None:
    """A chunk that may fit is not refused, nor is a trailer that looks like a size."""
    data = CHUNKED + chunks
    found = {seen(read(data, [cut]))[1] for cut in range(len(CHUNKED) - 20, len(data))}

    assert found == {None}


@pytest.mark.parametrize("coding", [b"\tChunked", b" CHUNKED ", b"chunked", b"\t chunked"], ids=str)
def test_space_and_case_of_a_coding_mean_nothing(coding: bytes) -> None:
    """`Transfer-Encoding` may be written as HTTP allows it: spaces, tabs, any case."""
    head = CHUNKED.replace(b" chunked", coding)
    parser = read(head + b"5\r\nhello\r\n0\r\n\r\n", [])

    assert parser.refusal is None
    assert [request.body for request in parser.requests] == [b"hello"]


def test_body_that_is_refused_for_its_header_is_not_kept() -> None:
    """Nothing of a body is held once its header is judged, and the verdict waits for none of it."""
    parser = RequestParser(LIMITS, judge=lambda *_: Response(404))
    parser.feed(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 200\r\n\r\n" + bytes(100))

    assert parser.refusal == Response(404)
    assert parser.held_bytes < 100 + 2 * HEADER_OVERHEAD_BYTES


@pytest.mark.parametrize("size", [1, 7, 4096], ids=str)
@pytest.mark.parametrize(
    "unit",
    [b"a", b"X: y\r\n", b"\r\n"],
    ids=["name", "headers", "empty lines"],
)
def test_flood_is_refused_soon(unit: bytes, size: int) -> None:
    """A header without end is refused before much more than its limit has come."""
    parser = RequestParser(LIMITS)
    if unit != b"\r\n":
        parser.feed(b"GET / HTTP/1.1\r\n")
    data = unit * (20_000 // len(unit))
    fed = 0
    while parser.refusal is None:
        parser.feed(data[fed : fed + size])
        fed += size

    assert parser.refusal.status == 431
    assert fed <= LIMITS.max_header_bytes + 2 * size
