"""The transport over real sockets: what an exception promises, deadlines, reuse, cancellation."""

import asyncio
import contextlib
import fcntl
import functools
import gc
import gzip
import itertools
import os
import socket
import ssl
import stat
import struct
import subprocess
import termios
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from bridge.config import SmsApiSettings
from bridge.errors import ConfigError, PostError, PostFault
from bridge.worker.fates import Fate, judge_failure, judge_status
from bridge.worker.service.httpx_transport import HttpxTransport
from bridge.worker.service.lenient_reader import MAX_ANSWER_BYTES
from bridge.worker.service.sender import open_transport
from bridge.worker.service.transport import (
    ApiConnection,
    ApiTransport,
    Reply,
    Transport,
)
from tests.addresses import FullPort, give_addresses, hold_full_port

BODY = b'{"to":"+15550100","from":"ACME","text":"hello"}'
ACCEPTED = b"HTTP/1.1 202 Accepted\r\nContent-Length: 2\r\n\r\n{}"
CLOSING = b"HTTP/1.1 202 Accepted\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"
BROKEN = b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n"
# Hangs end here; no healthy test comes near it.
GUARD_SECONDS = 10.0
SHORT_SECONDS = 0.4
MIB = 1 << 20
# More than a kernel takes into its buffers on both sides together.
FLOOD_BYTES = 16 * MIB


# --- A server that does as it is told ------------------------------------------------------------


class Peer:
    """The server's end of one connection, and everything that was read from it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._begin = 0
        self.received = bytearray()
        self.bodies: list[bytes] = []
        self.heads: list[bytes] = []
        self.sent = 0
        self.is_open = True

    @property
    def number(self) -> int:
        number: int = self._writer.get_extra_info("socket").fileno()
        return number

    async def more(self) -> None:
        """Read what there is; raise EOFError at the end."""
        data = await self._reader.read(65536)
        if not data:
            raise EOFError
        self.received += data

    async def head(self) -> bytes:
        while (end := self.received.find(b"\r\n\r\n", self._begin)) < 0:
            await self.more()
        head = bytes(self.received[self._begin : end + 4])
        self._begin = end + 4
        self.heads.append(head)
        return head

    async def request(self) -> bytes:
        length = int(header(await self.head(), b"content-length") or 0)
        while len(self.received) < self._begin + length:
            await self.more()
        body = bytes(self.received[self._begin : self._begin + length])
        self._begin += length
        self.bodies.append(body)
        return body

    def say(self, data: bytes) -> None:
        self._writer.write(data)

    async def flood(self, piece: bytes) -> None:
        """Send the same again and again, until the client hangs up or it is far too much."""
        while self.sent < FLOOD_BYTES:
            self._writer.write(piece)
            await self._writer.drain()
            self.sent += len(piece)
        self.close()

    async def drip(self, data: bytes) -> None:
        for byte in itertools.cycle(data):
            if self._writer.is_closing():
                raise EOFError
            self._writer.write(bytes([byte]))
            await self._writer.drain()
            await asyncio.sleep(0.01)

    async def is_read(self) -> None:
        """Return when the client's side has read all that was sent."""
        while self._writer.transport.get_write_buffer_size() or unacknowledged(self.number):  # noqa: ASYNC110
            await asyncio.sleep(0)
        for _ in range(10):  # The client polls its socket once in each turn of our common loop.
            await asyncio.sleep(0)

    def close(self) -> None:
        self._writer.close()

    def reset(self) -> None:
        linger = struct.pack("ii", 1, 0)
        self._writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, linger
        )
        self._writer.transport.abort()


Script = Callable[[Peer], Awaitable[None]]


@dataclass
class Site:
    """A server and its connections."""

    port: int
    peers: list[Peer]

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.origin}/v1/messages"

    @property
    def secure_url(self) -> str:
        return f"https://127.0.0.1:{self.port}/v1/messages"

    @property
    def open_connections(self) -> int:
        return sum(peer.is_open for peer in self.peers)

    @property
    def bodies(self) -> list[bytes]:
        return [body for peer in self.peers for body in peer.bodies]


@asynccontextmanager
async def serving(
    script: Script,
    *,
    tls: ssl.SSLContext | None = None,
    listening: socket.socket | None = None,
) -> AsyncIterator[Site]:
    """Run a script for each connection; afterwards keep it open and read until the client ends."""
    site = Site(0, [])
    tasks: set[asyncio.Task[None]] = set()

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(reader, writer)
        site.peers.append(peer)
        try:
            with contextlib.suppress(OSError, EOFError):
                await script(peer)
                while True:
                    await peer.more()
        finally:
            peer.is_open = False
            writer.close()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(meet(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    listening = listening or socket.create_server(("127.0.0.1", 0), backlog=100)
    site.port = listening.getsockname()[1]
    server = await asyncio.start_server(accept, sock=listening, ssl=tls)
    try:
        yield site
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def header(head: bytes, name: bytes) -> bytes | None:
    for line in head.split(b"\r\n")[1:]:
        key, _, value = line.partition(b":")
        if key.strip().lower() == name:
            return value.strip()
    return None


def unacknowledged(number: int) -> int:
    """Count the bytes that have not reached the other side's kernel."""
    answer = fcntl.ioctl(number, termios.TIOCOUTQ, bytes(4))
    count: int = struct.unpack("i", answer)[0]
    return count


async def until(condition: Callable[[], object], *, seconds: float = GUARD_SECONDS) -> None:
    """Wait for a condition, and fail when it does not come."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  a condition of any kind has no event
            await asyncio.sleep(0.001)


def open_sockets() -> int:
    count = 0
    for entry in Path("/dev/fd").iterdir():
        with contextlib.suppress(OSError):
            count += stat.S_ISSOCK(os.fstat(int(entry.name)).st_mode)
    return count


# --- Scripts -------------------------------------------------------------------------------------


async def accept_all(peer: Peer) -> None:
    while True:
        await peer.request()
        peer.say(ACCEPTED)


async def say_nothing(peer: Peer) -> None:
    await peer.request()


async def never_read(_peer: Peer) -> None:
    await asyncio.Event().wait()


async def hang_up(peer: Peer) -> None:
    peer.close()


async def hang_up_hard(peer: Peer) -> None:
    peer.reset()


def answering(*pieces: bytes, then: str = "stay") -> Script:
    """Make a script that reads a request, sends each piece in a packet of its own, and ends.

    One that stays answers all further requests in good order.
    """

    async def script(peer: Peer) -> None:
        await peer.request()
        for piece in pieces:
            peer.say(piece)
            await peer.is_read()
        if then != "stay":
            getattr(peer, then)()
        await accept_all(peer)

    return script


def dripping(first: bytes, rest: bytes) -> Script:
    """Make a script that answers the start at once and the rest for ever."""

    async def script(peer: Peer) -> None:
        await peer.request()
        peer.say(first)
        await peer.drip(rest)

    return script


def flooding(first: bytes, rest: bytes) -> Script:
    async def script(peer: Peer) -> None:
        await peer.request()
        peer.say(first)
        await peer.flood(rest)

    return script


def first_then_accept(first: Script, connections: int = 1) -> Script:
    """Make a script that plays another one on the first connections and answers on all others."""
    count = itertools.count()

    async def script(peer: Peer) -> None:
        await (first if next(count) < connections else accept_all)(peer)

    return script


# --- The two ways ---------------------------------------------------------------------------------


@functools.cache
def any_tls() -> ssl.SSLContext:
    """Load the system's authorities, which takes a while, once."""
    return ssl.create_default_context()


def new_transport(
    *,
    timeout_seconds: float = GUARD_SECONDS,
    connect_timeout_seconds: float = GUARD_SECONDS,
    max_connections: int = 10,
) -> ApiTransport:
    """Make a transport that is not in a hurry, unless the test is about that."""
    return Transport(
        timeout_seconds=timeout_seconds,
        connect_timeout_seconds=connect_timeout_seconds,
        tls=any_tls(),
        max_connections=max_connections,
    )


def httpx_transport(
    *,
    proxy: str | None = None,
    timeout_seconds: float = GUARD_SECONDS,
    connect_timeout_seconds: float = GUARD_SECONDS,
) -> ApiTransport:
    return HttpxTransport(
        timeout_seconds=timeout_seconds,
        connect_timeout_seconds=connect_timeout_seconds,
        tls=any_tls(),
        proxy=proxy,
    )


Way = Callable[..., tuple[ApiTransport, str]]


def direct(site: Site, *, host: str = "127.0.0.1", **limits: float) -> tuple[ApiTransport, str]:
    transport = new_transport(**limits)  # type: ignore[arg-type]  # only times are given
    return transport, f"http://{host}:{site.port}/v1/messages"


def proxied(site: Site, *, host: str = "127.0.0.1", **limits: float) -> tuple[ApiTransport, str]:
    """Post through the site as a proxy, which for plain HTTP gives the answers itself."""
    proxy = f"http://{host}:{site.port}"
    return httpx_transport(proxy=proxy, **limits), "http://api.test/v1/messages"


@asynccontextmanager
async def posting(
    way: Way, script: Script, **limits: float
) -> AsyncIterator[tuple[ApiTransport, str, Site]]:
    """Serve a script, and give a transport and the address with which to post to it."""
    async with serving(script) as site:
        transport, url = way(site, **limits)
        async with aclosing(transport):
            yield transport, url, site


every_way = pytest.mark.parametrize("way", [direct, proxied], ids=["direct", "proxied"])


async def post(transport: ApiTransport, url: str, body: bytes = BODY) -> Reply:
    """Post once; a request that outlives the guard fails the test."""
    async with asyncio.timeout(GUARD_SECONDS):
        return await transport.post(url, [(b"Accept-Encoding", b"identity")], body)


async def fate_of(transport: ApiTransport, url: str, body: bytes = BODY) -> int | Fate:
    """Post once and return the status, or what the failure means."""
    try:
        return (await post(transport, url, body)).status
    except PostError as error:
        return judge_failure(error.fault).fate


@pytest.fixture
def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


@pytest.fixture
def full_port() -> Iterator[FullPort]:
    with hold_full_port() as port:
        yield port


# --- What was written -----------------------------------------------------------------------------


async def test_request_arrives_as_it_was_built() -> None:
    """The server reads the method, path, headers and body that the caller built, nothing more."""
    async with serving(accept_all) as site, aclosing(new_transport()) as transport:
        await post(transport, site.url)

        assert bytes(site.peers[0].received) == (
            b"POST /v1/messages HTTP/1.1\r\n"
            b"Host: 127.0.0.1:%d\r\n"
            b"Accept-Encoding: identity\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (site.port, len(BODY), BODY)
        )


@pytest.mark.parametrize(
    ("written", "posted"),
    [
        ("", b"/"),
        ("/accounts/a%40b%2Fc/messages", b"/accounts/a%40b%2Fc/messages"),
        ("/accounts/a@b:c;d=e,f+g/$1!*'()&", b"/accounts/a@b:c;d=e,f+g/$1!*'()&"),
        ("/v1/nachrichten für alle", b"/v1/nachrichten%20f%C3%BCr%20alle"),
        ("//v1//messages?kind=a b&to=%20", b"//v1//messages?kind=a%20b&to=%20"),
    ],
)
async def test_path_is_posted_to_as_it_was_written(written: str, posted: bytes) -> None:
    """What is percent-encoded stays so, and only what may not stand in a request's head is so."""
    async with serving(accept_all) as site, aclosing(new_transport()) as transport:
        await post(transport, f"{site.origin}{written}")

        assert bytes(site.peers[0].received).startswith(b"POST %s HTTP/1.1\r\n" % posted)


async def test_name_in_another_alphabet_is_asked_for_in_ascii(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The resolver and the server get the same form of a name."""
    give_addresses(monkeypatch, "xn--bcher-kva.example", "127.0.0.1")
    async with serving(accept_all) as site, aclosing(new_transport()) as transport:
        await post(transport, f"http://bücher.example:{site.port}/v1")

        host = header(bytes(site.peers[0].received), b"host")
        assert host == b"xn--bcher-kva.example:%d" % site.port


async def test_nothing_is_posted_in_the_clear_that_was_to_be_encrypted() -> None:
    """A transport that was made for a plain address has no authorities, and trusts no server."""
    async with serving(accept_all) as site:
        settings = SmsApiSettings(base_url=site.origin)
        async with aclosing(open_transport(settings, max_connections=1)) as transport:
            with pytest.raises(PostError, match="tls_failed"):
                await post(transport, site.secure_url)

        assert site.peers == []


async def test_closed_connection_leaves_no_garbage() -> None:
    """What a connection held is free when it ends, and waits for no search for garbage."""
    gc.collect()
    gc.disable()
    try:
        async with serving(accept_all) as site, aclosing(new_transport()) as transport:
            await post(transport, site.url)
        async with asyncio.timeout(GUARD_SECONDS):
            while left := [one for one in gc.get_objects() if isinstance(one, ApiConnection)]:
                del left
                await asyncio.sleep(0)
    finally:
        gc.enable()


@every_way
async def test_refused_connection_is_not_sent(way: Way, closed_port: int) -> None:
    """A refused connection fails before the request leaves."""
    transport, url = way(Site(closed_port, []))
    async with aclosing(transport):
        with pytest.raises(PostError, match="connect_failed"):
            await post(transport, url)


@every_way
async def test_connection_that_is_not_accepted_is_not_sent(way: Way, full_port: FullPort) -> None:
    """A connection that does not come about in time is told as that."""
    transport, url = way(Site(full_port.port, []), connect_timeout_seconds=SHORT_SECONDS)
    async with aclosing(transport):
        with pytest.raises(PostError, match="connect_timeout"):
            await post(transport, url)


# A name is asked for each connection, so that the ways have to meet it in what they are given.
NAME = "sms.test"


@every_way
@pytest.mark.parametrize("silent", [["::1"], ["127.0.0.2", "127.0.0.3"]], ids=["IPv6", "two"])
async def test_silent_address_is_overtaken(
    way: Way, silent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a name with several addresses one that answers is used, within the time to connect."""
    async with AsyncExitStack() as stack:
        site = await stack.enter_async_context(serving(accept_all))
        for address in silent:
            stack.enter_context(hold_full_port(address, site.port))
        give_addresses(monkeypatch, NAME, *silent, "127.0.0.1")
        transport, url = way(site, host=NAME, connect_timeout_seconds=GUARD_SECONDS / 2)
        await stack.enter_async_context(aclosing(transport))

        assert [await fate_of(transport, url) for _ in range(2)] == [202, 202]


@every_way
async def test_name_whose_addresses_are_all_silent_is_not_sent(
    way: Way, full_port: FullPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time to connect holds over all addresses together."""
    with hold_full_port("127.0.0.2", full_port.port):
        give_addresses(monkeypatch, NAME, "127.0.0.1", "127.0.0.2")
        site = Site(full_port.port, [])
        transport, url = way(site, host=NAME, connect_timeout_seconds=SHORT_SECONDS)
        sockets = open_sockets()
        async with aclosing(transport):
            with pytest.raises(PostError, match="connect_timeout"):
                await post(transport, url)
        await until(lambda: open_sockets() <= sockets)


@every_way
async def test_request_leaves_on_one_connection_only(
    way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An address that answers too late has received nothing of the request."""
    async with AsyncExitStack() as stack:
        site = await stack.enter_async_context(serving(accept_all))
        late = stack.enter_context(hold_full_port("127.0.0.2", site.port))
        give_addresses(monkeypatch, NAME, "127.0.0.2", "127.0.0.1")
        transport, url = way(site, host=NAME)
        await stack.enter_async_context(aclosing(transport))
        sending = asyncio.create_task(fate_of(transport, url))
        other = await stack.enter_async_context(serving(accept_all, listening=late.free()))

        assert await sending == 202
        assert site.bodies + other.bodies == [BODY]


@pytest.mark.parametrize(
    "host",
    ["no-such-host.invalid", "127..0.1", f"{'a' * 64}.invalid"],
    ids=["unknown", "empty label", "label too long"],
)
async def test_name_without_address_is_not_sent(host: str) -> None:
    """A host name that leads nowhere means that the request never left."""
    async with aclosing(new_transport(connect_timeout_seconds=2)) as transport:
        assert await fate_of(transport, f"http://{host}/v1/messages") is Fate.NOT_SENT


@pytest.mark.parametrize("script", [hang_up, hang_up_hard], ids=["close", "reset"])
async def test_not_sent_is_never_said_of_a_request_that_arrived(script: Script) -> None:
    """When a server hangs up at once, `not sent` is said only if it received not one byte."""
    async with serving(script) as site, aclosing(new_transport()) as transport:
        fates = [await fate_of(transport, site.url) for _ in range(100)]
        await until(lambda: len(site.peers) == 100 and not site.open_connections)
        arrived = [bytes(peer.received) for peer in site.peers]

    assert [
        (fate, data)
        for fate, data in zip(fates, arrived, strict=True)
        if not (fate is Fate.UNCERTAIN or (fate is Fate.NOT_SENT and not data))
    ] == []


FAULTS: dict[str, Script] = {
    "read then close": answering(then="close"),
    "read then reset": answering(then="reset"),
    "100 then close": answering(b"HTTP/1.1 100 Continue\r\n\r\n", then="close"),
    "cut status line": answering(b"HTTP/1.1 20", then="close"),
    "garbage": answering(b"SSH-2.0-OpenSSH_9.9\r\n\r\n"),
    "switching protocols": answering(
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n",
        then="close",
    ),
    "HTTP/2": answering(b"\x00\x00\x12\x04\x00\x00\x00\x00\x00" + bytes(18)),
    "empty answer": answering(b"\r\n", then="close"),
}


@every_way
@pytest.mark.parametrize("script", FAULTS.values(), ids=FAULTS.keys())
async def test_no_answer_to_a_request_that_arrived_is_uncertain(way: Way, script: Script) -> None:
    """A request that the server read, and that got no status, is uncertain and not `not sent`."""
    async with posting(way, script, timeout_seconds=SHORT_SECONDS * 5) as (transport, url, site):
        fate = await fate_of(transport, url)

        assert (fate if site.bodies == [BODY] else "not read") in {Fate.UNCERTAIN, 101}


async def test_server_that_speaks_first_gets_no_wrong_outcome() -> None:
    """A server of another protocol makes a failure, and `not sent` only if it received nothing."""

    async def greet(peer: Peer) -> None:
        peer.say(b"220 mail.example ESMTP\r\n")

    async with serving(greet) as site, aclosing(new_transport()) as transport:
        fate = await fate_of(transport, site.url)
        await until(lambda: not site.open_connections)
        arrived = bytes(site.peers[0].received)

    assert fate is (Fate.UNCERTAIN if arrived else Fate.NOT_SENT)


# --- The status decides ---------------------------------------------------------------------------

HEAD = b"HTTP/1.1 202 Accepted\r\n"
BODIES: dict[str, Script] = {
    "whole": answering(ACCEPTED),
    "no reason phrase": answering(b"HTTP/1.1 202 \r\nContent-Length: 0\r\n\r\n"),
    "one byte at a time": answering(*(bytes([byte]) for byte in ACCEPTED)),
    "cut": answering(HEAD + b'Content-Length: 100\r\n\r\n{"id"', then="close"),
    "reset in the body": answering(HEAD + b'Content-Length: 100\r\n\r\n{"id"', then="reset"),
    "reset after the body": answering(ACCEPTED, then="reset"),
    "garbage gzip": answering(HEAD + b"Content-Encoding: gzip\r\nContent-Length: 5\r\n\r\nhello"),
    "no length, close": answering(HEAD + b"\r\n{}", then="close"),
    "chunked with trailer": answering(
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n2;a=b\r\n{}\r\n0\r\nX: y\r\n\r\n"
    ),
    "cut chunks": answering(HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{", then="close"),
    "bad chunk": answering(HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n"),
    "bomb": flooding(HEAD + b"Content-Length: 10000000000\r\n\r\n", bytes(65536)),
    "bomb of chunks": flooding(
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"10000\r\n%s\r\n" % bytes(65536)
    ),
    "bomb without length": flooding(HEAD + b"\r\n", bytes(65536)),
    "connection close": answering(CLOSING, then="close"),
    "connection close, stays open": answering(CLOSING),
    "offers an upgrade": answering(
        HEAD + b"Upgrade: h2c\r\nConnection: Upgrade\r\nContent-Length: 2\r\n\r\n{}"
    ),
    "HTTP/1.0": answering(b"HTTP/1.0 202 Accepted\r\nContent-Length: 2\r\n\r\n{}", then="close"),
    "HTTP/1.0 kept alive": answering(
        b"HTTP/1.0 202 Accepted\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\n{}"
    ),
    "after 100 and 103": answering(
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + ACCEPTED
    ),
    "two answers": answering(ACCEPTED + BROKEN),
    "answer and garbage": answering(ACCEPTED + b"garbage"),
}

YES = b'{"id":"m1"}'
LENGTH = b"Content-Length: %d\r\n" % len(YES)
CHUNKED = b"Transfer-Encoding: chunked\r\n"
CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(YES), YES)
# Each with a body that is plainly YES.
SLOPPY: dict[str, bytes] = {
    "blanks behind a chunk's size": CHUNKED + b"\r\n%x  \r\n%s\r\n0 \r\n\r\n" % (len(YES), YES),
    "blanks before a chunk's size": CHUNKED + b"\r\n %x\r\n%s\r\n 0\r\n\r\n" % (len(YES), YES),
    "no line between chunks": CHUNKED + b"\r\n4\r\n%s7\r\n%s0\r\n\r\n" % (YES[:4], YES[4:]),
    "chunks ended by LF": CHUNKED + b"\r\n" + CHUNKS.replace(b"\r", b""),
    "chunked, and no chunk": CHUNKED + LENGTH + b"\r\n" + YES,
    "length before chunked": LENGTH + CHUNKED + b"\r\n" + CHUNKS,
    "length behind chunked": CHUNKED + b"Content-Length: 3\r\n\r\n" + CHUNKS,
    "length twice": LENGTH * 2 + b"\r\n" + YES,
    "length twice in one line": b"Content-Length: %d, %d\r\n\r\n" % (len(YES), len(YES)) + YES,
    "a length that is none": b"Content-Length: x\r\n" + LENGTH + b"\r\n" + YES,
    "identity": b"Transfer-Encoding: identity\r\n" + LENGTH + b"\r\n" + YES,
    "bare LF": LENGTH.replace(b"\r", b"") + b"\n" + YES,
    "a folded header": b"X: a\r\n\tb\r\n" + LENGTH + b"\r\n" + YES,
    "a blank before a colon": LENGTH.replace(b":", b" :") + b"\r\n" + YES,
    "a control character": b"X: a\x01b\r\n" + LENGTH + b"\r\n" + YES,
    "NUL": b"X: a\x00b\r\n" + LENGTH + b"\r\n" + YES,
    "a line that is no header": b"nonsense\r\n" + LENGTH + b"\r\n" + YES,
    "a name that is none": b"X\xe9(y): a\r\n" + LENGTH + b"\r\n" + YES,
    "a status line in the header": b"HTTP/1.1 500 Oh\r\n" + LENGTH + b"\r\n" + YES,
}


@pytest.mark.parametrize(
    ("way", "size"),
    [(direct, 1 << 16), (direct, 1), (proxied, 1 << 16)],
    ids=["in one piece", "byte by byte", "proxied"],
)
@pytest.mark.parametrize("rest", SLOPPY.values(), ids=SLOPPY)
async def test_sloppy_answer_is_read(way: Way, rest: bytes, size: int) -> None:
    """Bad framing changes neither status nor body, nor has it anybody wait for more."""
    said = HEAD + rest
    pieces = [said[begin : begin + size] for begin in range(0, len(said), size)]
    async with (
        posting(way, first_then_accept(answering(*pieces))) as (transport, url, site),
        asyncio.timeout(GUARD_SECONDS / 2),
    ):
        first, second = await post(transport, url), await post(transport, url)

    assert (first.status, first.body) == (202, YES)
    # Where such an answer ends, the two sides may not agree.
    assert (second.status, second.body, len(site.peers)) == (202, b"{}", 2)


QUOTES = b"HTTP/1.1 202 Accepted\r\n"
NO_STATUS_LINES: dict[str, tuple[bytes, int | Fate]] = {
    "behind a 500": (b"HTTP/1.1 500 Oh\r\n" + QUOTES + b"Content-Length: 0\r\n\r\n", 500),
    "behind a 500 whose header is odd": (b"HTTP/1.1 500 Oh\r\nA b\r\n" + QUOTES + b"\r\n", 500),
    "in a folded header": (b"HTTP/1.1 500 Oh\r\nX: a\r\n " + QUOTES + b"\r\n", 500),
    "in a body": (b"HTTP/1.1 500 Oh\nX: y\n\n<pre>\n" + QUOTES + b"\r\n</pre>", 500),
    "in a header of a 100": (
        b"HTTP/1.1 100 Continue\r\n" + QUOTES + b"\r\nHTTP/1.1 500 Oh\r\nA b\r\n\r\n",
        500,
    ),
    "in a page without any": (b"<html>\r\n" + QUOTES + b"\r\n</html>\r\n", Fate.UNCERTAIN),
    "behind a greeting": (b"220 mail.example\r\n" + QUOTES + b"\r\n", Fate.UNCERTAIN),
    "in a 100 without end": (b"HTTP/1.1 100 Continue\r\n" + QUOTES, Fate.UNCERTAIN),
    "of a status that is none": (b"HTTP/1.1 20 OK\r\n" + QUOTES + b"\r\n", Fate.UNCERTAIN),
}


async def test_no_status_line_in_the_middle_is_one_behind_a_101() -> None:
    """The parser begins anew behind a 101, wherever the next packet begins; the answer does not."""
    upgrade = b"HTTP/1.1 101 Oh\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n"
    pieces = (upgrade + b"HTTP/1.1 500 Oh\r\n", QUOTES + b"Content-Length: 0\r\n\r\n")
    async with serving(answering(*pieces)) as site:
        transport, url = direct(site)
        async with aclosing(transport), asyncio.timeout(GUARD_SECONDS / 2):
            assert await fate_of(transport, url) == 500


@every_way
@pytest.mark.parametrize(("said", "fate"), NO_STATUS_LINES.values(), ids=NO_STATUS_LINES)
async def test_what_looks_like_a_status_line_is_none(
    way: Way, said: bytes, fate: int | Fate
) -> None:
    """Only the first line is, or the one behind a complete 1xx; no 500 becomes a yes."""
    async with posting(way, answering(said, then="close")) as (transport, url, _):
        assert await fate_of(transport, url) == fate


ENDLESS: dict[str, Script] = {
    "drip": dripping(HEAD + b"Content-Length: 1000000\r\n\r\n", b"x"),
    "dripping chunks": dripping(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
    "silence": answering(HEAD + b"Content-Length: 100\r\n\r\n"),
    "silence without length": answering(HEAD + b"\r\n{}"),
}


@every_way
@pytest.mark.parametrize("script", BODIES.values(), ids=BODIES.keys())
async def test_status_is_the_outcome_whatever_its_body_does(way: Way, script: Script) -> None:
    """A 202 that was read is the outcome, before any body and after any interim answer.

    Whatever is left of one answer is no part of the next one.
    """
    async with posting(way, first_then_accept(script)) as (transport, url, _):
        assert await fate_of(transport, url) == 202
        assert await fate_of(transport, url) in {202, Fate.UNCERTAIN}


@every_way
@pytest.mark.parametrize("status", [204, 299, 307, 404, 599])
async def test_every_status_is_an_outcome(way: Way, status: int) -> None:
    """Every status is read as it is, and nothing is waited for behind it."""
    answer = b"HTTP/1.1 %d Said\r\nContent-Length: 0\r\n\r\n" % status
    async with (
        posting(way, answering(answer)) as (transport, url, _),
        asyncio.timeout(GUARD_SECONDS / 2),
    ):
        assert await fate_of(transport, url) == status


@pytest.mark.parametrize("name", ["two answers", "answer and garbage"])
async def test_connection_that_said_too_much_is_not_used_again(name: str) -> None:
    """A server that sends more than was asked for is met on a new connection."""
    async with serving(BODIES[name]) as site, aclosing(new_transport()) as transport:
        fates = [await fate_of(transport, site.url) for _ in range(2)]

        assert (fates, len(site.peers)) == ([202, 202], 2)


@every_way
@pytest.mark.parametrize("script", ENDLESS.values(), ids=ENDLESS.keys())
async def test_status_is_the_outcome_at_the_deadline(way: Way, script: Script) -> None:
    """A 202 whose body does not end is the outcome when the time is up, and the connection ends."""
    async with posting(way, script, timeout_seconds=SHORT_SECONDS) as (transport, url, site):
        assert await fate_of(transport, url) == 202
        await until(lambda: not site.open_connections)


@every_way
@pytest.mark.parametrize("name", ["bomb", "bomb of chunks", "bomb without length"])
async def test_long_body_is_kept_up_to_its_limit(way: Way, name: str) -> None:
    """Of a long body no more than 64 KiB are kept, and its server is hung up on."""
    async with posting(way, BODIES[name]) as (transport, url, site):
        response = await post(transport, url)
        await until(lambda: not site.open_connections)

        assert len(response.body) == MAX_ANSWER_BYTES
        assert site.peers[0].sent < FLOOD_BYTES


@pytest.mark.parametrize(
    "script",
    [
        flooding(HEAD, b"X-Filler: %s\r\n" % (b"x" * 1000) * 60),
        flooding(HEAD + b"X-Filler: ", b"x" * 65536),
    ],
    ids=["many headers", "one long header"],
)
async def test_endless_header_is_cut_off(script: Script) -> None:
    """A server whose header never ends is hung up on before it has sent megabytes."""
    async with serving(script) as site, aclosing(new_transport(timeout_seconds=3)) as transport:
        await fate_of(transport, site.url)
        await until(lambda: not site.open_connections)

        assert site.peers[0].sent < FLOOD_BYTES


# --- One deadline ---------------------------------------------------------------------------------

SLOW: dict[str, Script] = {
    "silent": say_nothing,
    "never reads": never_read,
    "dripping status line": dripping(b"HTTP/1.1 202 A", b"c"),
    "endless 102": dripping(b"", b"HTTP/1.1 102 Processing\r\n\r\n"),
    "endless 100": flooding(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
}


SLOW_BOTH_WAYS = [
    *((direct, script) for script in SLOW.values()),
    *((proxied, SLOW[name]) for name in ("silent", "endless 102")),
]


@pytest.mark.parametrize(
    ("way", "script"),
    SLOW_BOTH_WAYS,
    ids=[*SLOW, "silent, proxied", "endless 102, proxied"],
)
async def test_deadline_holds_over_the_whole_attempt(way: Way, script: Script) -> None:
    """However a server keeps an attempt alive, it ends as uncertain when the time is up."""
    async with posting(way, script, timeout_seconds=SHORT_SECONDS) as (transport, url, _):
        with pytest.raises(PostError) as caught:
            await post(transport, url, BODY + b" " * 8 * MIB)

    assert judge_failure(caught.value.fault).fate is Fate.UNCERTAIN


@every_way
@pytest.mark.parametrize(
    "interim", [b"", b"HTTP/1.1 100 Continue\r\n\r\n"], ids=["alone", "after 100"]
)
async def test_header_without_end_does_not_undo_the_status(way: Way, interim: bytes) -> None:
    """A status line that was read is the outcome, though the header drips until the deadline."""
    async with posting(
        way, dripping(interim + HEAD + b"A: b\r\nX-Filler: ", b"x"), timeout_seconds=SHORT_SECONDS
    ) as (transport, url, _):
        assert (await post(transport, url)).status == 202


async def test_headers_of_an_interim_answer_are_not_those_of_the_answer() -> None:
    """A wait that a 103 names is none that the answer behind it asks for."""
    interim = b"HTTP/1.1 103 Early Hints\r\nRetry-After: 60\r\n\r\n"
    async with serving(answering(interim, ACCEPTED)) as site, aclosing(new_transport()) as ours:
        for _ in range(2):
            assert (await post(ours, site.url)).header_values("Retry-After") == []


async def test_each_request_on_a_connection_has_its_own_deadline() -> None:
    """The deadline of a request that was answered does not end the next one on its connection."""
    timeout_seconds = SHORT_SECONDS * 4

    async def slow(peer: Peer) -> None:
        while True:
            await peer.request()
            # So long that the second answer comes between the two deadlines.
            await asyncio.sleep(timeout_seconds * 0.6)
            peer.say(ACCEPTED)

    async with (
        serving(slow) as site,
        aclosing(new_transport(timeout_seconds=timeout_seconds)) as transport,
    ):
        fates = [await fate_of(transport, site.url) for _ in range(2)]

        assert (fates, len(site.peers)) == ([202, 202], 1)


@pytest.mark.parametrize(
    ("timeout_seconds", "connect_timeout_seconds"),
    [(GUARD_SECONDS * 2, SHORT_SECONDS), (SHORT_SECONDS, GUARD_SECONDS * 2)],
    ids=["connect time-out", "deadline"],
)
async def test_deadline_holds_in_the_handshake(
    timeout_seconds: float, connect_timeout_seconds: float
) -> None:
    """A server that accepts and never shakes hands gives no connection in time."""
    transport = new_transport(
        timeout_seconds=timeout_seconds, connect_timeout_seconds=connect_timeout_seconds
    )
    async with serving(never_read) as site, aclosing(transport):
        with pytest.raises(PostError, match="connect_timeout"):
            await post(transport, site.secure_url)


async def test_late_answer_is_not_the_next_one() -> None:
    """The answer to a request that timed out is never taken for that of another."""
    first = asyncio.Event()

    async def late(peer: Peer) -> None:
        await peer.request()
        await first.wait()
        peer.say(BROKEN)
        await accept_all(peer)

    async with (
        serving(late) as site,
        aclosing(new_transport(timeout_seconds=SHORT_SECONDS)) as transport,
    ):
        with pytest.raises(PostError, match="answer_timeout"):
            await post(transport, site.url)
        first.set()

        assert (await post(transport, site.url)).status in {202, 500}
        assert len(site.peers) == 2


# --- What a client library adds -------------------------------------------------------------------


@every_way
async def test_redirect_is_not_followed(way: Way) -> None:
    """A redirect is an answer, and nobody else is called."""
    async with serving(accept_all) as other:
        redirect = b"HTTP/1.1 307 Go\r\nLocation: %s\r\nContent-Length: 0\r\n\r\n"
        async with serving(answering(redirect % other.url.encode())) as site:
            transport, url = way(site)
            async with aclosing(transport):
                assert await fate_of(transport, url) == 307

        assert other.peers == []


@every_way
async def test_cookie_is_not_kept(way: Way) -> None:
    """A cookie that the server sets does not come back."""
    cookie = b"HTTP/1.1 202 Accepted\r\nSet-Cookie: a=b\r\nContent-Length: 0\r\n\r\n"

    async def script(peer: Peer) -> None:
        while True:
            await peer.request()
            peer.say(cookie)

    async with posting(way, script) as (transport, url, site):
        for _ in range(2):
            await post(transport, url)

        heads = [head for peer in site.peers for head in peer.heads]

        assert [header(head, b"cookie") for head in heads] == [None, None]


@every_way
async def test_body_is_not_inflated(way: Way) -> None:
    """A compressed body that nobody asked for is handed on as it came."""
    packed = gzip.compress(b'{"id":"m1"}')
    head = HEAD + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed)
    async with posting(way, answering(head + packed)) as (transport, url, _):
        assert (await post(transport, url)).body == packed


@every_way
async def test_proxy_of_the_environment_is_not_used(
    way: Way, closed_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proxy variables in the environment change nothing."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{closed_port}")
        monkeypatch.setenv(name.lower(), f"http://127.0.0.1:{closed_port}")
    async with posting(way, accept_all) as (transport, url, _):
        assert await fate_of(transport, url) == 202


async def test_exception_of_the_environment_does_not_bypass_the_proxy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NO_PROXY in the environment does not overrule the proxy that is configured."""
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "*")
    async with (
        serving(accept_all) as site,
        aclosing(httpx_transport(proxy=site.origin)) as transport,
    ):
        assert await fate_of(transport, "http://api.test/v1/messages") == 202


# --- Reuse ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("way", "bodies"),
    [(direct, [BODY] * 10), (proxied, [BODY])],
    ids=["direct", "proxied"],
)
async def test_connection_is_used_again_only_without_a_proxy(way: Way, bodies: list[bytes]) -> None:
    """Requests one after another share one connection; through a proxy each has its own."""
    async with posting(way, accept_all) as (transport, url, site):
        for _ in range(10):
            await post(transport, url)

        assert [peer.bodies for peer in site.peers] == [bodies] * (10 // len(bodies))


@every_way
async def test_requests_at_the_same_time_have_connections_of_their_own(way: Way) -> None:
    """Two requests are never on one connection at the same time."""
    together = asyncio.Barrier(5)

    async def script(peer: Peer) -> None:
        body = await peer.request()
        await together.wait()
        peer.say(b"HTTP/1.1 202 Accepted\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

    async with posting(way, script) as (transport, url, _):
        bodies = [b'{"n":%d}' % n for n in range(5)]
        answers = await asyncio.gather(*(post(transport, url, body) for body in bodies))

        assert [answer.body for answer in answers] == bodies


@pytest.mark.parametrize("limit", ["IDLE_SECONDS", "MAX_CONNECTION_AGE_SECONDS"])
async def test_connection_over_its_limit_is_not_used_again(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that idled too long or is too old is closed, and a new one made.

    Be it that it was still young when its request ended, or over its limit then already.
    """
    async with serving(accept_all) as site, aclosing(new_transport()) as transport:
        await post(transport, site.url)
        monkeypatch.setattr(f"bridge.worker.service.transport.{limit}", 0.0)
        for _ in range(2):
            await post(transport, site.url)
        await until(lambda: not site.open_connections)

        assert [len(peer.bodies) for peer in site.peers] == [1, 1, 1]


@every_way
@pytest.mark.parametrize(
    "answer",
    [CLOSING, b"HTTP/1.0 202 Accepted\r\nContent-Length: 2\r\n\r\n{}"],
    ids=["connection close", "HTTP/1.0"],
)
async def test_connection_that_ends_with_its_answer_is_not_used_again(
    way: Way, answer: bytes
) -> None:
    """After `Connection: close`, or HTTP/1.0 without keep-alive, a new connection is made."""

    async def script(peer: Peer) -> None:
        while True:
            await peer.request()
            peer.say(answer)

    async with posting(way, script) as (transport, url, site):
        for _ in range(3):
            await post(transport, url)

        assert [len(peer.bodies) for peer in site.peers] == [1, 1, 1]


@every_way
async def test_idle_connection_that_was_seen_to_close_is_replaced(way: Way) -> None:
    """A request after the server's goodbye was noticed goes out on a new connection."""
    async with posting(way, answering(ACCEPTED, then="close")) as (transport, url, site):
        fates = []
        for _ in range(5):
            fates.append(await fate_of(transport, url))
            await until(lambda: not site.open_connections)
            for _ in range(10):
                await asyncio.sleep(0)

        assert fates == [202] * 5


async def test_race_with_a_closing_server_is_never_not_sent() -> None:
    """A request that meets a server's goodbye is answered on a new connection or uncertain."""

    async def answer_and_close(peer: Peer) -> None:
        await peer.request()
        peer.say(ACCEPTED)
        peer.close()

    async with serving(answer_and_close) as site, aclosing(new_transport()) as transport:
        fates = {await fate_of(transport, site.url) for _ in range(200)}

    assert fates <= {202, Fate.UNCERTAIN}


async def test_answer_that_came_too_early_is_nobodys() -> None:
    """What an idle connection received before the request was written is not its outcome."""
    async with serving(accept_all) as site, aclosing(new_transport()) as transport:
        await post(transport, site.url)
        number = site.peers[0].number
        # Like a server that gives up on an idle connection, while our loop has other work to do.
        os.write(number, b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        while unacknowledged(number):
            pass

        assert await fate_of(transport, site.url) in {202, Fate.UNCERTAIN}


@every_way
@pytest.mark.parametrize("resets", [False, True], ids=["answers", "answers and resets"])
async def test_answer_before_the_request_was_read_counts(way: Way, *, resets: bool) -> None:
    """A 413 that comes before the body was read is the outcome; behind a reset, or uncertain."""

    async def refuse(peer: Peer) -> None:
        await peer.head()
        peer.say(b"HTTP/1.1 413 Content Too Large\r\nContent-Length: 0\r\n\r\n")
        if resets:
            peer.reset()

    async with posting(way, refuse) as (transport, url, _):
        fate = await fate_of(transport, url, bytes(MIB))

    assert fate == 413 or (resets and fate is Fate.UNCERTAIN)


@every_way
async def test_closed_transport_keeps_no_idle_connection(way: Way) -> None:
    """Closing the transport closes the connections that wait for work."""
    async with serving(accept_all) as site:
        transport, url = way(site)
        async with aclosing(transport):
            await asyncio.gather(*(post(transport, url) for _ in range(5)))
        await until(lambda: not site.open_connections)


@every_way
async def test_connection_in_use_ends_with_its_request_after_closing(way: Way) -> None:
    """A request that is under way when the transport is closed leaves no connection behind."""
    go = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await go.wait()
        peer.say(ACCEPTED)

    async with serving(script) as site:
        transport, url = way(site)
        sending = asyncio.create_task(post(transport, url))
        await until(lambda: site.bodies)
        await transport.aclose()
        go.set()
        await asyncio.wait([sending])
        sending.exception()
        try:
            await until(lambda: not site.open_connections, seconds=1)
        finally:
            await transport.aclose()


# --- The limit and cancellation -------------------------------------------------------------------


async def test_request_over_the_limit_is_not_sent() -> None:
    """With every connection in use the next request is refused, and leaves nothing."""
    async with (
        serving(say_nothing) as site,
        aclosing(new_transport(max_connections=2)) as transport,
    ):
        busy = [asyncio.create_task(post(transport, site.url)) for _ in range(2)]
        await until(lambda: len(site.bodies) == 2)
        with pytest.raises(PostError, match="pool_exhausted"):
            await post(transport, site.url, b'{"n":3}')
        for task in busy:
            task.cancel()
        await asyncio.wait(busy)

        assert site.bodies == [BODY, BODY]


async def half_an_answer(peer: Peer) -> None:
    await peer.request()
    peer.say(HEAD + b"Content-Length: 100\r\n\r\n{")
    await peer.is_read()
    peer.bodies.append(b"")


async def cancelled(
    transport: ApiTransport, url: str, count: int, ready: Callable[[], object]
) -> None:
    """Begin requests, wait for the moment, and cancel them all."""
    tasks = [asyncio.create_task(post(transport, url)) for _ in range(count)]
    await until(ready)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def cancelled_at_any_moment(transport: ApiTransport, url: str) -> None:
    """Cancel requests after no, one, two ... turns of the loop."""
    tasks = []
    for turns in range(10):
        tasks.append(asyncio.create_task(post(transport, url)))
        for _ in range(turns):
            await asyncio.sleep(0)
        tasks[-1].cancel()
    await asyncio.wait(tasks)


cancelled_often = pytest.mark.parametrize(
    ("way", "count"), [(direct, 50), (proxied, 30)], ids=["direct", "proxied"]
)


async def is_sound(transport: ApiTransport, url: str, sockets: int) -> bool:
    """Whether every further request works and, once closed, no socket is left."""
    for _ in range(5):
        answers = await asyncio.gather(*(post(transport, url) for _ in range(10)))
        if {answer.status for answer in answers} != {202}:
            return False
    await transport.aclose()
    await until(lambda: open_sockets() <= sockets)
    return True


@cancelled_often
@pytest.mark.parametrize(
    ("script", "marks"),
    [(say_nothing, 1), (half_an_answer, 2)],
    ids=["waiting for the answer", "reading the body"],
)
async def test_cancelled_requests_leave_nothing(
    way: Way, count: int, script: Script, marks: int
) -> None:
    """After many requests cancelled at one moment all others work, and no socket is left."""
    async with serving(first_then_accept(script, count)) as site:
        sockets = open_sockets()
        transport, url = way(site)
        for done in range(10, count + 1, 10):
            marked = functools.partial(_has_marks, site, done, marks)
            await cancelled(transport, url, 10, marked)

        assert await is_sound(transport, url, sockets)


def _has_marks(site: Site, connections: int, marks: int) -> bool:
    return len(site.peers) == connections and len(site.bodies) == connections * marks


@cancelled_often
async def test_requests_cancelled_at_any_moment_leave_nothing(way: Way, count: int) -> None:
    """After many requests cancelled here and there all others work, and no socket is left."""
    async with serving(accept_all) as site:
        sockets = open_sockets()
        transport, url = way(site)
        for _ in range(count // 10):
            await cancelled_at_any_moment(transport, url)

        assert await is_sound(transport, url, sockets)


@cancelled_often
async def test_requests_cancelled_while_connecting_leave_nothing(
    way: Way, count: int, full_port: FullPort
) -> None:
    """After many requests cancelled in the connect all others work, and no socket is left."""
    transport, url = way(Site(full_port.port, []))
    for turn in range(count // 10):
        turns = iter(range(turn % 5 + 1))
        await cancelled(transport, url, 10, functools.partial(_is_over, turns))
    async with serving(accept_all, listening=full_port.free()) as site:
        await until(lambda: site.open_connections == 0)
        sockets = open_sockets()

        assert await is_sound(transport, url, sockets)


def _is_over(turns: Iterator[int]) -> bool:
    return next(turns, None) is None


@every_way
async def test_cancellation_is_not_swallowed(way: Way) -> None:
    """A cancelled request ends as cancelled, and not with an answer or another exception."""
    async with posting(way, say_nothing) as (transport, url, site):
        sending = asyncio.create_task(post(transport, url))
        await until(lambda: site.bodies)
        sending.cancel()
        await asyncio.wait([sending])

        assert sending.cancelled()


@every_way
async def test_failed_requests_leave_nothing(way: Way) -> None:
    """After many requests that failed in many ways further ones work, and no socket is left."""
    scripts = itertools.cycle([*FAULTS.values(), hang_up, hang_up_hard])
    failures = itertools.count()

    async def script(peer: Peer) -> None:
        await (next(scripts) if next(failures) < 60 else accept_all)(peer)

    async with serving(script) as site:
        sockets = open_sockets()
        transport, url = way(site, timeout_seconds=SHORT_SECONDS * 5)

        async def fail_in_turn() -> None:
            while len(site.peers) < 60:
                await fate_of(transport, url)

        await asyncio.gather(*(fail_in_turn() for _ in range(10)))

        assert await is_sound(transport, url, sockets)


# --- TLS ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Certificates:
    """An authority and what it signed."""

    folder: Path

    @property
    def ca_file(self) -> Path:
        return self.folder / "ca.pem"

    def server(self, name: str) -> ssl.SSLContext:
        """Make a server's context with one of the certificates."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.folder / f"{name}.pem", self.folder / "server.key")
        return context


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Make an authority with certificates for this host, its name and another, with openssl."""
    folder = tmp_path_factory.mktemp("certificates")
    (folder / "openssl.cnf").write_text(
        "[req]\nprompt=no\ndistinguished_name=name\n[name]\nCN=Test\n"
        "[ca]\nbasicConstraints=critical,CA:TRUE\nkeyUsage=critical,keyCertSign,cRLSign\n"
        "subjectKeyIdentifier=hash\n"
        "[here]\nsubjectAltName=IP:127.0.0.1\nauthorityKeyIdentifier=keyid\n"
        "[elsewhere]\nsubjectAltName=DNS:elsewhere.invalid\nauthorityKeyIdentifier=keyid\n"
        f"[named]\nsubjectAltName=DNS:{NAME}\nauthorityKeyIdentifier=keyid\n"
    )

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    for name in ("ca", "server"):
        openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", f"{name}.key")
    config = ("-config", "openssl.cnf")
    openssl(
        *("req", "-x509", "-new", "-key", "ca.key", "-days", "2", "-out", "ca.pem"),
        *(*config, "-extensions", "ca"),
    )
    openssl("req", "-new", "-key", "server.key", "-subj", "/CN=server", "-out", "csr", *config)
    for name in ("here", "elsewhere", "named"):
        openssl(
            *("x509", "-req", "-in", "csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-days", "2"),
            *("-CAcreateserial", "-extfile", "openssl.cnf", "-extensions", name),
            *("-out", f"{name}.pem"),
        )
    return Certificates(folder)


def tunnel_to(site: Site, answer: bytes = b"HTTP/1.1 200 OK\r\n\r\n") -> Script:
    """Make the script of a proxy that connects everybody to one site."""

    async def script(peer: Peer) -> None:
        await peer.head()
        reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
        peer.say(answer)
        back = asyncio.create_task(_copy(reader, peer))
        try:
            while True:
                await peer.more()
                writer.write(peer.received[peer._begin :])
                peer._begin = len(peer.received)
        finally:
            back.cancel()
            writer.close()

    return script


async def _copy(reader: asyncio.StreamReader, peer: Peer) -> None:
    while data := await reader.read(65536):
        peer.say(data)
    peer.close()


@asynccontextmanager
async def secure(
    kind: str, certificates: Certificates, *, server: str, trusted: bool, script: Script
) -> AsyncIterator[tuple[ApiTransport, Site]]:
    """Serve over TLS, and give a transport that reaches it directly or through a tunnel."""
    settings: dict[str, Any] = {"ca_file": certificates.ca_file if trusted else None}
    async with AsyncExitStack() as stack:
        site = await stack.enter_async_context(serving(script, tls=certificates.server(server)))
        if kind == "tunnel":
            proxy = await stack.enter_async_context(serving(tunnel_to(site)))
            settings["proxy"] = proxy.origin
        transport = open_transport(SmsApiSettings(**settings), max_connections=10)
        yield await stack.enter_async_context(aclosing(transport)), site


both_kinds = pytest.mark.parametrize("kind", ["direct", "tunnel"])


@both_kinds
async def test_trusted_server_is_served(kind: str, certificates: Certificates) -> None:
    """A server with a certificate of the authority in the file gets the request."""
    setup = secure(kind, certificates, server="here", trusted=True, script=accept_all)
    async with setup as (transport, site):
        fates = [await fate_of(transport, site.secure_url) for _ in range(3)]

        assert (fates, site.bodies) == ([202] * 3, [BODY] * 3)


@both_kinds
async def test_silent_address_is_overtaken_over_tls(
    kind: str, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over TLS too, of a name with a silent address the other one is used, and its name checked."""
    settings: dict[str, Any] = {"ca_file": certificates.ca_file}
    async with AsyncExitStack() as stack:
        serving_site = serving(accept_all, tls=certificates.server("named"))
        site = entrance = await stack.enter_async_context(serving_site)
        if kind == "tunnel":
            entrance = await stack.enter_async_context(serving(tunnel_to(site)))
            settings["proxy"] = f"http://{NAME}:{entrance.port}"
        stack.enter_context(hold_full_port("127.0.0.2", entrance.port))
        give_addresses(monkeypatch, NAME, "127.0.0.2", "127.0.0.1")
        transport = open_transport(SmsApiSettings(**settings), max_connections=10)
        await stack.enter_async_context(aclosing(transport))

        assert await fate_of(transport, f"https://{NAME}:{site.port}/v1/messages") == 202


@both_kinds
@pytest.mark.parametrize(
    ("server", "trusted"),
    [("here", False), ("elsewhere", True)],
    ids=["unknown authority", "other host's certificate"],
)
async def test_untrusted_server_pauses_the_worker(
    kind: str,
    certificates: Certificates,
    server: str,
    *,
    trusted: bool,
) -> None:
    """A certificate that does not convince is a fault of the set-up, and is sent nothing."""
    setup = secure(kind, certificates, server=server, trusted=trusted, script=accept_all)
    async with setup as (transport, site):
        with pytest.raises(PostError, match="tls_failed"):
            await post(transport, site.secure_url)

        assert site.bodies == []


async def test_server_without_tls_pauses_the_worker() -> None:
    """A server that answers a handshake with plain HTTP is a fault of the set-up."""

    async def plain(peer: Peer) -> None:
        await peer.more()
        peer.say(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

    async with serving(plain) as site, aclosing(new_transport()) as transport:
        with pytest.raises(PostError, match="tls_failed"):
            await post(transport, site.secure_url)


@pytest.mark.parametrize("script", [hang_up, hang_up_hard], ids=["close", "reset"])
async def test_goodbye_in_the_handshake_is_not_sent(script: Script) -> None:
    """A server that hangs up in the handshake has received no byte of the request."""
    async with serving(script) as site, aclosing(new_transport()) as transport:
        with pytest.raises(PostError, match="connect_failed"):
            await post(transport, site.secure_url)


@both_kinds
async def test_silence_over_tls_is_uncertain(kind: str, certificates: Certificates) -> None:
    """Over TLS too, a server that reads the request and hangs up is uncertain."""
    setup = secure(kind, certificates, server="here", trusted=True, script=answering(then="close"))
    async with setup as (transport, site):
        assert await fate_of(transport, site.secure_url) is Fate.UNCERTAIN


@both_kinds
async def test_requests_cancelled_over_tls_leave_nothing(
    kind: str, certificates: Certificates
) -> None:
    """After many requests cancelled here and there over TLS further ones work, none is left."""
    sockets = open_sockets()
    setup = secure(kind, certificates, server="here", trusted=True, script=accept_all)
    async with setup as (transport, site):
        listening = 1 if kind == "direct" else 2
        for _ in range(20):
            await cancelled_at_any_moment(transport, site.secure_url)

        assert await is_sound(transport, site.secure_url, sockets + listening)


def test_missing_authority_stops_the_start(tmp_path: Path) -> None:
    """A file of authorities that is not there is told at the start, by the setting's name."""
    with pytest.raises(ConfigError, match=r"sms_api\.ca_file"):
        open_transport(SmsApiSettings(ca_file=tmp_path / "none.pem"), max_connections=1)


# --- httpx's exceptions ---------------------------------------------------------------------------

BEFORE_THE_BODY: dict[type[Exception], PostFault] = {
    httpx.ConnectError: "connect_failed",
    httpx.ConnectTimeout: "connect_timeout",
    httpx.PoolTimeout: "pool_exhausted",
    httpx.ProxyError: "proxy_failed",
    httpx.UnsupportedProtocol: "connect_failed",
}


def subclasses(kind: type[Exception]) -> Iterator[type[Exception]]:
    yield kind
    for derived in kind.__subclasses__():
        yield from subclasses(derived)


# But for the one that a status is made into, on request.
HTTPX_ERRORS = sorted(
    {kind for kind in subclasses(httpx.HTTPError) if kind is not httpx.HTTPStatusError},
    key=lambda kind: kind.__name__,
)
SYSTEM_ERRORS: list[type[Exception]] = [OSError, ConnectionResetError, TimeoutError, ssl.SSLError]


async def failing(error: Exception, monkeypatch: pytest.MonkeyPatch) -> PostError:
    """Post over httpx, which raises this while it posts, and return what comes of it."""

    async def fail(_: object, request: httpx.Request) -> httpx.Response:
        begun = {"request": SimpleNamespace(method=b"POST")}
        await request.extensions["trace"]("http11.send_request_headers.started", begun)
        raise error

    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", fail)
    with pytest.raises(PostError) as caught:
        await post(httpx_transport(), "http://api.test/v1/messages")
    return caught.value


def after_the_body(kind: type[Exception]) -> PostFault:
    """Say what a failure is that promises nothing about the request."""
    if issubclass(kind, httpx.TimeoutException | TimeoutError):
        return "answer_timeout"
    return "not_http" if issubclass(kind, httpx.ProtocolError) else "connection_lost"


@pytest.mark.parametrize("kind", [*HTTPX_ERRORS, *SYSTEM_ERRORS], ids=lambda kind: kind.__name__)
async def test_only_what_fails_before_the_body_is_told_as_such(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of httpx's exceptions those of connecting left nothing; any other may have sent it all."""
    error = await failing(kind("x"), monkeypatch)

    assert error.fault == BEFORE_THE_BODY.get(kind, after_the_body(kind))


def caused_by(cause: Exception, kind: type[Exception] = httpx.ConnectError) -> Exception:
    error = kind("x")
    error.__cause__ = cause
    return error


def wrapped(cause: Exception) -> Exception:
    error = OSError("wrapped")
    error.__context__ = cause
    return error


TLS_FAULTS: dict[str, Exception] = {
    "TLS": ssl.SSLError("handshake"),
    "certificate": ssl.SSLCertVerificationError("expired"),
    "two levels down": wrapped(ssl.SSLCertVerificationError("expired")),
}


@pytest.mark.parametrize("cause", TLS_FAULTS.values(), ids=TLS_FAULTS)
async def test_distrust_is_found_among_the_causes(
    cause: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed handshake is told from other failures to connect, however deep it lies."""
    assert (await failing(caused_by(cause), monkeypatch)).fault == "tls_failed"


@pytest.mark.parametrize(
    "kind", [httpx.ReadError, httpx.WriteError], ids=lambda kind: kind.__name__
)
async def test_tls_fault_of_an_open_connection_may_have_sent_it(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A TLS fault on an open connection says nothing about what arrived before it."""
    error = await failing(caused_by(ssl.SSLError("record"), kind), monkeypatch)

    assert error.fault == "connection_lost"


# --- The tunnel's own faults ----------------------------------------------------------------------


def refusing_tunnels(status: int) -> Script:
    async def script(peer: Peer) -> None:
        await peer.head()
        peer.say(b"HTTP/1.1 %d No\r\nContent-Length: 0\r\n\r\n" % status)

    return script


@pytest.mark.parametrize("status", [403, 502, 503])
async def test_refused_tunnel_is_not_sent(status: int) -> None:
    """A proxy that refuses to connect has not seen the request."""
    script = refusing_tunnels(status)
    async with serving(script) as proxy, aclosing(httpx_transport(proxy=proxy.origin)) as transport:
        fate = await fate_of(transport, "https://api.test/v1/messages")

        assert (fate, BODY in proxy.peers[0].received) == (Fate.NOT_SENT, False)


async def test_tunnel_that_wants_a_login_pauses_the_worker() -> None:
    """A proxy that wants another login answers 407, to CONNECT as to any request."""
    script = refusing_tunnels(407)
    async with serving(script) as proxy, aclosing(httpx_transport(proxy=proxy.origin)) as transport:
        reply = await post(transport, "https://api.test/v1/messages")

        assert BODY not in proxy.peers[0].received
    assert judge_status(reply.status, retry_after_seconds=None).pause == "credentials_rejected"


async def talk_nonsense(peer: Peer) -> None:
    await peer.head()
    peer.say(b"SSH-2.0-nonsense\r\n")


@pytest.mark.parametrize(
    "script",
    [never_read, hang_up, hang_up_hard, talk_nonsense],
    ids=["silent", "close", "reset", "nonsense"],
)
async def test_tunnel_that_does_not_come_about_is_not_sent(script: Script) -> None:
    """Before the POST is begun nothing of it can have arrived, whatever the proxy does."""
    async with serving(script) as proxy:
        transport = httpx_transport(proxy=proxy.origin, timeout_seconds=SHORT_SECONDS)
        async with aclosing(transport):
            fate = await fate_of(transport, "https://api.test/v1/messages")

        assert all(BODY not in peer.received for peer in proxy.peers)
    assert fate is Fate.NOT_SENT
