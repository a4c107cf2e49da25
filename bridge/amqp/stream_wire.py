"""The stream beneath the client library: what is hot leaves it early, the rest is aiormq's.

The frames of deliveries, publishes and confirms are taken out of the stream as they arrive, and
those of acks and publishes are written past aiormq. Everything else on the connection reaches it
unchanged.

Why our own: of each delivery aiormq makes three frame objects, six passes through queues and a
task, of each publish as much, which costs more than all that the bridge does with the message.
A publish with its confirm takes a tenth of the CPU time here, a delivery with its ack an eighth
(10 µs for 103, 8 µs for 66; `python -m tests.bench.wires`). And aiormq reads whatever comes: only
below it can reading stop while too many bytes are held. To swap it for `PlainWire`, set
`SMS_BRIDGE_WIRE=plain`.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal

from yarl import URL

from bridge.amqp.channels import max_payload_bytes
from bridge.amqp.client import (
    AMQPConnectionError,
    Channel,
    ConsumerCallback,
    SSLContextProvider,
    TransportFactory,
)
from bridge.amqp.frames import (
    CONTENT_HEADER_START,
    FRAME_END,
    FRAME_HEADER,
    FRAME_OVERHEAD_BYTES,
    FRAME_TYPES,
    HEARTBEAT,
    Confirms,
    Deliveries,
    FrameTaker,
    Notices,
    Piece,
    ack_frame,
    publish_pieces,
)
from bridge.amqp.properties import Properties
from bridge.amqp.wire import LARGE_BODY_BYTES, Body, Take
from bridge.errors import Confirm
from bridge.happy_eyeballs import create_connection

# How often aiormq is told that the broker lives while there is nothing else for it.
SIGN_OF_LIFE_SECONDS: Final = 1.0
# Enough to tell another protocol by.
FOREIGN_BYTES: Final = 8


class StreamWire(TransportFactory):
    """The stream of one connection, which aiormq opens and shares."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._notices = Notices()
        self._takers: dict[int, FrameTaker] = {0: self._notices}
        self._transport: asyncio.Transport | None = None
        self._unwritten: list[Piece] = []
        self._is_reading = True
        self._protocol: _Protocol | None = None

    async def create(
        self,
        url: URL,
        **kwargs: Any,  # noqa: ANN401  aiormq's
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect; aiormq calls it. Raises AMQPConnectionError."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(loop=loop)
        protocol = _Protocol(reader, self._takers, self._clock)
        context: SSLContextProvider = kwargs["ssl_context_provider"]
        try:
            transport, _ = await create_connection(
                lambda: protocol,
                url.host or "",
                url.port or 0,
                tls=await context.get_context() if url.scheme == "amqps" else None,
                server_hostname=kwargs.get("server_hostname"),
            )
        except OSError as error:
            raise AMQPConnectionError(*error.args) from error
        self._transport, self._protocol = transport, protocol
        return reader, asyncio.StreamWriter(transport, protocol, reader, loop)

    @property
    def name(self) -> Literal["stream"]:
        """Which wire it is."""
        return "stream"

    @property
    def foreign(self) -> bytes:
        """What came that is no AMQP frame, or the start of it: another program is there."""
        return b"" if self._protocol is None else self._protocol.foreign

    @property
    def is_open(self) -> bool:
        """Whether the broker has opened the connection over this stream, and no other."""
        return self._notices.is_open

    @property
    def is_blocked(self) -> bool:
        """Whether the broker takes no messages on this connection (a memory or disk alarm)."""
        return self._notices.is_blocked

    def on_blocked(self, tell: Callable[[str | None], object]) -> None:
        """Call `tell` with the broker's reason when it blocks the connection, None at the end."""
        self._notices.on_blocked = tell

    @property
    def closed(self) -> tuple[int, str] | None:
        """The code and the text with which the broker ended the connection, if it did."""
        return self._notices.closed

    @contextmanager
    def deliveries(self, channel: Channel, take: Take) -> Iterator[ConsumerCallback]:
        """Hand what is delivered on a channel to `take`, past aiormq.

        `take` is called as the frames arrive and must not raise: the connection would end. So
        does a message end it whose properties cannot be read.
        """
        with self._taken(channel, Deliveries(take)):
            yield _sees_no_delivery

    @contextmanager
    def publishing(self, channel: Channel) -> Iterator["StreamPublishing"]:
        """Publish on a channel with confirms, on which aiormq must publish nothing then."""
        confirms = Confirms()
        try:
            with self._taken(channel, confirms):
                yield StreamPublishing(self, channel, confirms)
        finally:
            confirms.close()

    @contextmanager
    def _taken(self, channel: Channel, taker: FrameTaker) -> Iterator[None]:
        self._takers[channel.number] = taker
        try:
            yield
        finally:
            del self._takers[channel.number]

    def ack(self, channel: Channel, delivery_tag: int) -> None:
        """Write the ack of a delivery; it leaves at the end of this turn of the event loop."""
        self.write(ack_frame(channel.number, delivery_tag))

    async def acks_read(self, channel: Channel) -> None:
        """Return when the broker has read each ack that was written on a channel."""
        await channel.basic_qos(prefetch_count=1)

    def write(self, *frames: Piece) -> None:
        """Write whole frames; those of one turn of the event loop leave together."""
        if not self._unwritten:
            asyncio.get_running_loop().call_soon(self._write_out)
        self._unwritten += frames

    def write_large(self, frames: Sequence[Piece]) -> None:
        """Write whole frames at once, behind those before, without a copy of them."""
        self._write_out()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.writelines(frames)

    def read(self, *, go_on: bool) -> None:
        """Read no more of the connection, or go on.

        The broker keeps what it has not sent, and hears of it by TCP alone. For as long as
        nothing is read, aiormq must be told that the broker lives: `keep_alive`.
        """
        if go_on is not self._is_reading and self._transport is not None:
            self._is_reading = go_on
            (self._transport.resume_reading if go_on else self._transport.pause_reading)()

    @property
    def is_reading(self) -> bool:
        """Whether what the broker sends is read."""
        return self._is_reading

    def keep_alive(self) -> None:
        """Tell aiormq that the broker lives, when it is we who do not read."""
        if not self._is_reading and self._protocol is not None:
            self._protocol.pretend(HEARTBEAT)

    @property
    def unwritten_bytes(self) -> int:
        """How much the broker has not read, that of this turn of the event loop left out."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def _write_out(self) -> None:
        data = b"".join(self._unwritten)
        self._unwritten.clear()
        if data and self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)


async def _sees_no_delivery(_message: object) -> None:
    """Do nothing: aiormq wants a callback to consume with."""


class StreamPublishing:
    """A channel whose publishes are written, and their confirms read, past aiormq."""

    def __init__(self, wire: StreamWire, channel: Channel, confirms: Confirms) -> None:
        self._wire = wire
        self._number = channel.number
        self._confirms = confirms
        self._max_payload_bytes = max_payload_bytes(channel)

    @property
    def is_blocked(self) -> bool:
        """Whether the broker takes no messages now (a memory or disk alarm)."""
        return self._wire.is_blocked

    @property
    def unconfirmed(self) -> int:
        """How many messages the broker has said nothing of, those that nobody waits for too."""
        return len(self._confirms)

    @property
    def max_properties_bytes(self) -> int:
        """How many bytes of properties one frame holds, which cannot be split."""
        return self._max_payload_bytes - CONTENT_HEADER_START.size

    @property
    def unwritten_bytes(self) -> int:
        """How much the broker has not read of the connection."""
        return self._wire.unwritten_bytes

    def awaited(self, message_id: str | None) -> "asyncio.Future[Confirm] | None":
        """Return what will become of the message in flight that has this id."""
        return self._confirms.awaited(message_id or None)

    def publish(
        self, body: Body, *, exchange: str, routing_key: str, properties: Properties
    ) -> "asyncio.Future[Confirm]":
        """Write a mandatory message, and return what will become of it.

        A returned message is told by its id: no two in flight may have the same.
        Raises ValueError when the exchange, the routing key or the properties do not fit AMQP.
        """
        pieces = publish_pieces(
            self._number,
            body,
            exchange=exchange,
            routing_key=routing_key,
            properties=properties,
            max_payload_bytes=self._max_payload_bytes,
        )
        confirm = self._confirms.expect(properties.message_id or None)
        if len(body) > LARGE_BODY_BYTES:
            self._wire.write_large(pieces)
        else:
            self._wire.write(*pieces)
        return confirm


class _Protocol(asyncio.StreamReaderProtocol):
    """Sorts the frames of a connection: each goes to the taker of its channel, or to the reader."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        takers: dict[int, FrameTaker],
        clock: Callable[[], float],
    ) -> None:
        super().__init__(reader, loop=asyncio.get_running_loop())
        self._clock = clock
        self._takers = takers
        # The start of a frame, and how many bytes are missing until its end.
        self._held: list[bytes] = []
        self._missing_bytes = 0
        self._is_amqp = True
        self.foreign = b""
        self._passed_on_at = self._clock()

    def data_received(self, data: bytes) -> None:
        """Sort what has arrived; the start of a frame waits for its end."""
        if self._held:
            self._held.append(data)
            self._missing_bytes -= len(data)
            if self._missing_bytes > 0:
                return
            data = b"".join(self._held)
            self._held.clear()
        if self._is_amqp:
            data = self._sort(data)
        if data:
            self._passed_on_at = self._clock()
            super().data_received(data)

    def pretend(self, data: bytes) -> None:
        """Hand on what did not come from the broker."""
        super().data_received(data)

    def _sort(self, data: bytes) -> bytes:
        """Return the frames that nobody has taken."""
        others: list[bytes] = []
        begin = at = end = 0
        while at + FRAME_OVERHEAD_BYTES <= len(data):
            frame_type, channel, size = FRAME_HEADER.unpack_from(data, at)
            end = at + FRAME_OVERHEAD_BYTES + size
            if end > len(data):
                break
            if data[end - 1] != FRAME_END or frame_type not in FRAME_TYPES:
                self._is_amqp = False
                break
            taker = self._takers.get(channel)
            if taker is not None and taker.feed(frame_type, data[at + FRAME_HEADER.size : end - 1]):
                others.append(data[begin:at])
                begin = end
            at = end
        if at < len(data):
            at = self._hold(data, at, end)
        others.append(data[begin:at])
        return b"".join(others) or self._sign_of_life(at)

    def _hold(self, data: bytes, at: int, end: int) -> int:
        """Keep the start of a frame back; return to where all else may pass."""
        if self._is_amqp and data[at] in FRAME_TYPES:
            # Of less than its header the end is not known yet: the next piece is tried in any case.
            self._held.append(data[at:])
            self._missing_bytes = end - len(data)
            return at
        # No AMQP, such as the version that another one asks for. aiormq says so.
        self._is_amqp = False
        self.foreign = data[at : at + FOREIGN_BYTES]
        return len(data)

    def _sign_of_life(self, taken_bytes: int) -> bytes:
        # aiormq gives a connection up on which it reads nothing for three heartbeats.
        silent = self._clock() - self._passed_on_at
        return HEARTBEAT if taken_bytes and silent > SIGN_OF_LIFE_SECONDS else b""
