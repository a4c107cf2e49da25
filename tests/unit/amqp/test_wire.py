"""The wire alone: it takes deliveries out of the stream, and leaves the rest unchanged."""

import asyncio
import itertools
import socket
import ssl
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, SupportsIndex, cast

import pytest
from aiormq.abc import SSLCerts
from aiormq.connection import SSLContextProvider
from aiormq.exceptions import AMQPConnectionError
from hypothesis import example, given
from hypothesis import strategies as st
from pamqp import commands
from pamqp.body import ContentBody
from pamqp.frame import marshal
from pamqp.header import ContentHeader, ProtocolHeader
from pamqp.heartbeat import Heartbeat
from yarl import URL

from bridge.amqp.client import Channel
from bridge.amqp.frames import LARGE_BODY_BYTES, Body, Piece, publish_pieces
from bridge.amqp.properties import ClientProperties, Properties
from bridge.amqp.wire import SIGN_OF_LIFE_SECONDS, Demultiplexer, Wire
from tests.certificates import make_certificate
from tests.clock import Clock

TAKEN = 1


def numbered(number: int) -> Channel:
    return cast("Channel", SimpleNamespace(number=number))


CHANNEL = numbered(TAKEN)
HEARTBEAT = marshal(Heartbeat(), 0)
HEARTBEAT_SECONDS = 10
SECONDS = 10

Delivered = tuple[int, bool, str | None, Body]


@dataclass(frozen=True)
class Message:
    """A message as a broker sends it."""

    tag: int = 1
    redelivered: bool = False
    name: str | None = None
    parts: tuple[bytes, ...] = (b"hello",)

    @property
    def delivered(self) -> Delivered:
        return self.tag, self.redelivered, self.name, b"".join(self.parts)

    def content(self, channel: int) -> list[bytes]:
        size = sum(map(len, self.parts))
        header = ContentHeader(body_size=size, properties=ClientProperties(message_id=self.name))
        return [marshal(header, channel), *(marshal(ContentBody(p), channel) for p in self.parts)]

    def frames(self, channel: int = TAKEN) -> list[bytes]:
        deliver = commands.Basic.Deliver("consumer", self.tag, self.redelivered, "", "queue")
        return [marshal(deliver, channel), *self.content(channel)]


class Reader(asyncio.StreamReader):
    """Writes down what reaches the client library."""

    passed = b""

    def feed_data(self, data: Iterable[SupportsIndex]) -> None:
        self.passed += bytes(data)


class Stream:
    """A connection without a network: what comes in is either taken or reaches the reader."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.taken: list[Delivered] = []
        self.wire = Wire(heartbeat_seconds=HEARTBEAT_SECONDS, clock=self.clock)
        self.reader = Reader()
        self._protocol = Demultiplexer(
            self.reader, self.wire._takers, self.clock, HEARTBEAT_SECONDS
        )
        self.wire._protocol = self._protocol

    def take(self, tag: int, redelivered: bool, properties: Properties, body: Body) -> None:  # noqa: FBT001
        self.taken.append((tag, redelivered, properties.message_id, body))

    def feed(self, *pieces: bytes) -> bytes:
        """Let bytes arrive; return what has reached the reader up to now."""
        for piece in pieces:
            self._protocol.data_received(piece)
        return self.reader.passed


@pytest.fixture
async def stream() -> AsyncIterator[Stream]:
    """Give a connection on which the deliveries of one channel are taken."""
    ours = Stream()
    with ours.wire.deliveries(CHANNEL, ours.take):
        yield ours


def cut(data: bytes, at: Iterable[int]) -> list[bytes]:
    places = [0, *sorted({place for place in at if 0 < place < len(data)}), len(data)]
    return [data[begin:end] for begin, end in itertools.pairwise(places)]


# What a broker may send

METHODS = [
    marshal(commands.Basic.ConsumeOk("consumer"), TAKEN),
    marshal(commands.Basic.QosOk(), TAKEN),
    marshal(commands.Basic.CancelOk("consumer"), TAKEN),
    marshal(commands.Basic.Cancel("consumer"), TAKEN),
    marshal(commands.Basic.GetEmpty(), TAKEN),
    marshal(commands.Basic.Ack(7), TAKEN),
    marshal(commands.Channel.Close(404, "NOT_FOUND", 60, 40), TAKEN),
    marshal(commands.Channel.CloseOk(), TAKEN),
]
RETURN = marshal(commands.Basic.Return(312, "NO_ROUTE", "", "queue"), TAKEN)
GET_OK = marshal(commands.Basic.GetOk(1, False, "", "queue", 0), TAKEN)
OF_CHANNEL_0 = [
    HEARTBEAT,
    marshal(commands.Connection.Blocked("low on memory"), 0),
    marshal(commands.Connection.Unblocked(), 0),
    marshal(commands.Connection.Close(320, "CONNECTION_FORCED", 0, 0), 0),
]
# A body may look like anything, such as the end or the whole of a frame.
PARTS = st.binary(min_size=1, max_size=30) | st.sampled_from(
    [b"\xce", b"\xce" * 9, HEARTBEAT, b"".join(Message().frames()), b"AMQP\x00\x00\x09\x01"]
)
MESSAGES = st.builds(
    Message,
    tag=st.integers(1, 2**63 - 1),
    redelivered=st.booleans(),
    name=st.none() | st.text(min_size=1, max_size=10),
    parts=st.lists(PARTS, max_size=4).map(tuple),
)
# Of a channel's frames, those of one message stay together; its deliveries are marked.
Unit = tuple[Message | None, list[bytes]]
UNITS = st.one_of(
    MESSAGES.map(lambda one: (one, one.frames())),
    st.sampled_from(METHODS).map(lambda frame: (None, [frame])),
    MESSAGES.map(lambda one: (None, [RETURN, *one.content(TAKEN)])),
    MESSAGES.map(lambda one: (None, [GET_OK, *one.content(TAKEN)])),
)


@dataclass(frozen=True)
class Sent:
    """A stream in pieces, and what should become of it."""

    pieces: list[bytes]
    deliveries: list[Delivered]
    others: bytes


@st.composite
def streams(draw: st.DrawFn) -> Sent:
    """Make a stream: the frames of three channels, merged in any order and cut at any places."""
    units = draw(st.lists(UNITS, max_size=6))
    channels = [
        [(frame, message is None) for message, frames in units for frame in frames],
        [(f, True) for message in draw(st.lists(MESSAGES, max_size=3)) for f in message.frames(2)],
        [(frame, True) for frame in draw(st.lists(st.sampled_from(OF_CHANNEL_0), max_size=4))],
    ]
    order = draw(st.permutations([n for n, channel in enumerate(channels) for _ in channel]))
    left = [iter(channel) for channel in channels]
    merged = [next(left[n]) for n in order]
    data = b"".join(frame for frame, _ in merged)
    places = draw(st.lists(st.integers(0, len(data)), max_size=12))
    return Sent(
        pieces=cut(data, places),
        deliveries=[message.delivered for message, _ in units if message is not None],
        others=b"".join(frame for frame, passes in merged if passes),
    )


@given(sent=streams())
async def test_any_stream_is_sorted_however_it_is_cut(sent: Sent) -> None:
    """Deliveries of the taken channel are taken; every other frame passes, unchanged, in order."""
    stream = Stream()
    with stream.wire.deliveries(CHANNEL, stream.take):
        passed = stream.feed(*sent.pieces)

    assert stream.taken == sent.deliveries
    assert passed == sent.others


async def test_only_a_channel_that_is_taken_is_taken() -> None:
    """Before and behind the block, deliveries reach the reader like everything else."""
    stream = Stream()
    data = b"".join(Message().frames())
    stream.feed(data)
    with stream.wire.deliveries(CHANNEL, stream.take):
        stream.feed(data)
    passed = stream.feed(data)

    assert stream.taken == [Message().delivered]
    assert passed == data * 2


# The sign of life


async def test_deliveries_alone_are_a_sign_of_life(stream: Stream) -> None:
    """While there are only deliveries, the reader sees a heartbeat now and then, and no more."""
    delivery = b"".join(Message().frames())
    seen: list[bool] = []
    for elapsed in (0.0, SIGN_OF_LIFE_SECONDS, 0.1, 0.1, SIGN_OF_LIFE_SECONDS):
        stream.clock.now += elapsed
        seen.append(stream.feed(delivery) == HEARTBEAT * (1 + sum(seen)))

    assert seen == [False, False, True, False, True]
    assert len(stream.taken) == 5


async def test_what_passes_is_a_sign_of_life_itself(stream: Stream) -> None:
    """No heartbeat is added to what the broker sends to the reader."""
    stream.clock.now += SIGN_OF_LIFE_SECONDS + 1
    stream.feed(METHODS[0] + b"".join(Message().frames()))
    stream.feed(b"".join(Message().frames()))

    assert stream.feed() == METHODS[0]


async def test_half_a_frame_is_no_sign_of_life(stream: Stream) -> None:
    """A broker of which no frame comes to its end is as silent as it was to aiormq."""
    for byte in Message().frames()[0][:-1]:
        stream.clock.now += SIGN_OF_LIFE_SECONDS + 1
        stream.feed(bytes([byte]))

    assert stream.feed() == b""


async def test_a_gap_puts_the_connection_in_doubt_until_the_broker_answers(stream: Stream) -> None:
    """What is read after a freeze may be older than it; only the answer to a question is not."""
    answered = asyncio.Event()

    def is_in_doubt() -> bool:
        return stream.wire.is_in_doubt

    async def flow(*, active: bool) -> None:
        assert active
        await answered.wait()

    channel = cast("Channel", SimpleNamespace(number=TAKEN, flow=flow))
    stream.clock.now += HEARTBEAT_SECONDS
    stream.feed(HEARTBEAT)
    assert not is_in_doubt()
    stream.clock.now += HEARTBEAT_SECONDS + 0.1
    assert is_in_doubt()
    stream.feed(HEARTBEAT)
    assert is_in_doubt()
    asking = asyncio.ensure_future(stream.wire.acks_read(channel))
    await asyncio.sleep(0)
    # Frozen once more before the answer was read, which may be older than the second freeze.
    stream.clock.now += HEARTBEAT_SECONDS + 0.1
    stream.feed(HEARTBEAT)
    answered.set()
    await asking
    assert is_in_doubt()
    await stream.wire.acks_read(channel)
    assert not is_in_doubt()


# What no broker sends

NO_AMQP = {
    "another-version": ProtocolHeader(0, 10, 0).marshal(),
    "its-version": ProtocolHeader().marshal(),
    "http": b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n",
    "tls": b"\x15\x03\x03\x00\x02\x02\x16",
    "ssh": b"SSH-2.0-OpenSSH_9.9\r\n",
    "one-byte": b"\x00",
    "another-kind-of-frame": b"\x04\x00\x00\x00\x00\x00\x00\xce\x01",
}
ALIEN = st.one_of(
    st.sampled_from(sorted(NO_AMQP.values())),
    st.binary(min_size=1, max_size=40).filter(lambda data: data[0] not in {1, 2, 3, 8}),
)


@example(alien=NO_AMQP["another-kind-of-frame"], first=b"", data=b"")
@given(alien=ALIEN, first=st.sampled_from([b"", HEARTBEAT, METHODS[0]]), data=st.binary())
async def test_what_is_no_amqp_passes_at_once(alien: bytes, first: bytes, data: bytes) -> None:
    """Bytes that begin no frame, and all that follow, reach the reader as they come."""
    stream = Stream()
    with stream.wire.deliveries(CHANNEL, stream.take):
        seen = [stream.feed(piece) for piece in (first, alien, data, *Message().frames())]

    assert seen[1:3] == [first + alien, first + alien + data]
    assert seen[-1] == first + alien + data + b"".join(Message().frames())


async def test_a_frame_without_its_end_passes(stream: Stream) -> None:
    delivery = b"".join(Message().frames())
    broken = Message().frames()[0][:-1] + b"\xcd" + delivery
    passed = stream.feed(delivery + METHODS[0] + broken, delivery)

    assert stream.taken == [Message().delivered]
    assert passed == METHODS[0] + broken + delivery


async def test_a_delivery_that_is_interrupted_is_an_error(stream: Stream) -> None:
    """What does not belong between the frames of a delivery is not taken for a part of it."""
    method, header, body = Message().frames()
    for frames in (
        (method, METHODS[0]),
        (method, method),
        (method, body),
        (method, header, header),
    ):
        ours = Stream()
        with (
            ours.wire.deliveries(CHANNEL, ours.take),
            pytest.raises(ValueError, match="interrupted"),
        ):
            ours.feed(*frames)

    assert stream.taken == []


async def test_a_body_that_is_too_long_is_not_waited_for(stream: Stream) -> None:
    """A body of more bytes than were announced comes to its end, as it does with aiormq."""
    method, header, _ = Message().frames()
    stream.feed(method, header, marshal(ContentBody(b"hello, world"), TAKEN))

    assert [body for *_, body in stream.taken] == [b"hello, world"]


async def test_large_frames_are_copied_once(stream: Stream) -> None:
    """A broker may allow frames of any size: in small pieces one costs no more than its bytes."""
    message = Message(parts=(bytes(16 << 20),))
    data = b"".join(message.frames())
    pieces = cut(data, range(0, len(data), 1448))
    started = time.process_time()
    stream.feed(*pieces)

    # A fraction of a second; ten and more where each piece copies all that were before it.
    assert time.process_time() - started < 4
    assert stream.taken == [message.delivered]


# Over a network


@dataclass
class Peer:
    """The broker's end of a connection, and what our event loop had to report of ours."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    faults: list[str] = field(default_factory=list)


Connected = tuple[Wire, asyncio.StreamReader, asyncio.StreamWriter, Peer]


@asynccontextmanager
async def connected(certificate: Path | None = None) -> AsyncIterator[Connected]:
    """Connect a wire with a peer, over TLS where there is a certificate."""
    loop = asyncio.get_running_loop()
    accepted: asyncio.Future[Peer] = loop.create_future()
    context = None
    if certificate is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate, certificate.with_name("key.pem"))
    server = await asyncio.start_server(
        lambda *ends: accepted.set_result(Peer(*ends)), "127.0.0.1", 0, ssl=context
    )
    scheme = "amqp" if certificate is None else "amqps"
    url = URL(f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}/")
    trust = None if certificate is None else ssl.create_default_context(cafile=certificate)
    certificates = SSLCerts(None, None, None, None, None, True)
    provider = SSLContextProvider(ssl_context=trust, ssl_certs=certificates, loop=loop)
    ours = Wire()
    async with server, asyncio.timeout(SECONDS):
        reader, writer = await ours.create(url, ssl_context_provider=provider)
        peer = await accepted
        handler = loop.get_exception_handler()
        loop.set_exception_handler(lambda _, context: peer.faults.append(context["message"]))
        try:
            yield ours, reader, writer, peer
        finally:
            loop.set_exception_handler(handler)
            for end in (writer, peer.writer):
                end.transport.abort()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.mark.parametrize("secure", [False, True], ids=["tcp", "tls"])
async def test_acks_are_those_of_the_client_library(
    secure: bool,  # noqa: FBT001  a parameter of the test
    certificate: Path,
) -> None:
    """Acks are the frames that pamqp writes, in the order in which they were given."""
    tags = [1, 2, 255, 2**31, 2**63 - 1]
    channels = (1, 65535)
    frames = [commands.Basic.Ack(tag) for tag in tags]
    expected = b"".join(marshal(frame, ch) for ch in channels for frame in frames)
    async with connected(certificate if secure else None) as (ours, _, _, peer):
        for number in channels:
            for tag in tags:
                ours.ack(numbered(number), tag)
        assert await peer.reader.readexactly(len(expected)) == expected


@pytest.mark.parametrize("size", [LARGE_BODY_BYTES, LARGE_BODY_BYTES + 1])
async def test_a_large_body_is_never_copied(size: int) -> None:
    """A body of more than a request has comes as it was put together, and is written as it is."""
    source = bytes(range(256)) * (size // 256) + b"!" * (size % 256)
    ours = Stream()
    delivery = [
        marshal(commands.Basic.Deliver("tag", 1, False, "", "queue"), TAKEN),
        *(bytes(piece) for piece in written(source)[1:]),
    ]
    with ours.wire.deliveries(CHANNEL, ours.take):
        ours.feed(b"".join(delivery))
    ((*_, body),) = ours.taken
    pieces = written(body)

    assert body == source
    assert isinstance(body, bytearray) is (size > LARGE_BODY_BYTES)
    views = [piece for piece in pieces if isinstance(piece, memoryview)]
    assert all(view.obj is body for view in views)
    assert sum(map(len, views)) == size


def written(body: Body) -> list[Piece]:
    return publish_pieces(
        TAKEN,
        body,
        exchange="",
        routing_key="queue",
        properties=Properties(),
        max_payload_bytes=131_064,
    )


async def test_what_is_large_is_written_in_its_turn_and_not_joined() -> None:
    """A large body leaves behind what was written before it, piece by piece."""

    class Transport:
        """Where a connection writes to."""

        def __init__(self) -> None:
            self.written: list[object] = []

        def is_closing(self) -> bool:
            return False

        def write(self, data: bytes) -> None:
            self.written.append(data)

        def writelines(self, pieces: Iterable[Piece]) -> None:
            self.written += pieces

    ours, transport = Wire(), Transport()
    ours._transport = cast("asyncio.Transport", transport)
    pieces: list[Piece] = [b"head", memoryview(bytearray(b"body")), b"end"]
    ours.write(b"first")
    ours.write_large(pieces)
    ours.write(b"last")
    await asyncio.sleep(0)

    assert transport.written == [b"first", *pieces, b"last"]
    assert transport.written[2] is pieces[1]


async def test_nothing_is_read_for_a_while(certificate: Path) -> None:
    """While nothing is read what the broker sends stays with it, and aiormq hears that it lives."""
    for secure in (None, certificate):
        async with connected(secure) as (ours, reader, _, peer):
            ours.set_reading(enabled=False)
            peer.writer.write(HEARTBEAT * 1000)
            await peer.writer.drain()
            ours.keep_alive()
            assert await reader.readexactly(len(HEARTBEAT)) == HEARTBEAT
            assert (ours.is_reading, reader._buffer) == (False, b"")  # type: ignore[attr-defined]
            ours.set_reading(enabled=True)
            ours.keep_alive()
            assert await reader.readexactly(1000 * len(HEARTBEAT)) == HEARTBEAT * 1000


@given(
    body=st.binary(max_size=400),
    exchange=st.sampled_from(["", "sms.inbound"]),
    routing_key=st.text(max_size=20),
    name=st.none() | st.text(max_size=10),
    max_payload_bytes=st.integers(64, 500),
)
def test_publishes_are_those_of_the_client_library(
    body: bytes, exchange: str, routing_key: str, name: str | None, max_payload_bytes: int
) -> None:
    """A publish is the frames that pamqp writes, its body in frames that are no larger."""
    properties = Properties(message_id=name, delivery_mode=2)
    theirs = ClientProperties(message_id=name, delivery_mode=2)
    publish = commands.Basic.Publish(0, exchange, routing_key, mandatory=True)
    starts = range(0, len(body), max_payload_bytes)
    expected = [
        marshal(publish, TAKEN),
        marshal(ContentHeader(body_size=len(body), properties=theirs), TAKEN),
        *(marshal(ContentBody(body[at : at + max_payload_bytes]), TAKEN) for at in starts),
    ]

    pieces = publish_pieces(
        TAKEN,
        body,
        exchange=exchange,
        routing_key=routing_key,
        properties=properties,
        max_payload_bytes=max_payload_bytes,
    )

    assert b"".join(pieces) == b"".join(expected)


async def test_an_ack_without_a_connection_is_nothing() -> None:
    Wire().ack(CHANNEL, 1)
    async with connected() as (ours, _, writer, peer):
        writer.close()
        ours.ack(CHANNEL, 1)
        await writer.wait_closed()
        ours.ack(CHANNEL, 1)

        assert await peer.reader.read() == b""
        assert peer.faults == []


async def test_nothing_is_written_on_a_channel_that_the_broker_closes() -> None:
    """Aiormq answers the close; an ack or a publish after that would end the connection."""
    close = marshal(commands.Channel.Close(406, "unknown delivery tag", 60, 80), TAKEN)
    channel = cast("Channel", SimpleNamespace(number=TAKEN, max_content_size=131_064))
    other = numbered(TAKEN + 1)
    async with connected() as (ours, reader, _, peer):
        with ours.deliveries(channel, _refuse), ours.deliveries(other, _refuse):
            peer.writer.write(close)
            assert await reader.readexactly(len(close)) == close
            ours.ack(channel, 1)
            ours.ack(other, 1)
            ack = marshal(commands.Basic.Ack(1), other.number)
            assert await peer.reader.readexactly(len(ack)) == ack
        with ours.publishing(channel) as publishing:
            peer.writer.write(close)
            assert await reader.readexactly(len(close)) == close
            confirm = publishing.publish(
                b"", exchange="", routing_key="queue", properties=Properties()
            )
            ours.ack(other, 1)
            assert await peer.reader.readexactly(len(ack)) == ack
            assert not confirm.done()
        assert confirm.result() == "error"


UNREADABLE = marshal(ContentHeader(body_size=1), TAKEN)[:-3] + b"\x80\x00\xce"


def _refuse(*_: object) -> None:
    raise RuntimeError("not this one")


@pytest.mark.parametrize("secure", [False, True], ids=["tcp", "tls"])
@pytest.mark.parametrize(
    ("take", "header", "error"),
    [
        (lambda *_: None, UNREADABLE, ValueError),
        (_refuse, Message(parts=()).content(TAKEN)[0], RuntimeError),
    ],
    ids=["unreadable", "refused"],
)
async def test_a_delivery_that_fails_ends_its_connection(
    secure: bool,  # noqa: FBT001  a parameter of the test
    certificate: Path,
    take: Any,
    header: bytes,
    error: type[Exception],
) -> None:
    """The reader learns of it, the peer sees the end, the loop goes on."""
    async with connected(certificate if secure else None) as (ours, reader, _, peer):
        with ours.deliveries(CHANNEL, take):
            peer.writer.write(METHODS[0] + Message().frames()[0])
            assert await reader.readexactly(len(METHODS[0])) == METHODS[0]
            peer.writer.write(header)
            with pytest.raises(error):
                await reader.read()
            with suppress(ConnectionResetError):
                assert await peer.reader.read() == b""
            ours.ack(CHANNEL, 1)

        assert len(peer.faults) == 1


@pytest.mark.parametrize("secure", [False, True], ids=["tcp", "tls"])
async def test_a_reader_that_is_slow_loses_nothing(
    secure: bool,  # noqa: FBT001  a parameter of the test
    certificate: Path,
) -> None:
    """Reading stops while the client library does not read, and deliveries go on behind it."""
    taken: list[bytes] = []
    parts = [b"%08d" % number * 10_000 for number in range(20)]
    returned = [b"".join([RETURN, *Message(parts=(part,)).content(TAKEN)]) for part in parts]
    async with connected(certificate if secure else None) as (ours, reader, _, peer):
        with ours.deliveries(CHANNEL, lambda *delivered: taken.append(delivered[-1])):
            for part, frames in zip(parts, returned, strict=True):
                peer.writer.write(frames + b"".join(Message(parts=(part,)).frames()))
            peer.writer.write_eof() if not secure else peer.writer.close()
            passed = await reader.read()

    assert passed == b"".join(returned)
    assert taken == parts


async def test_a_port_where_nobody_listens_is_a_connection_error() -> None:
    """What the operating system says becomes the error that aiormq knows."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(AMQPConnectionError):
        await Wire().create(URL(f"amqp://127.0.0.1:{port}/"), ssl_context_provider=None)
