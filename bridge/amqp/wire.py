"""Carries deliveries, acks, publishes and confirms past aiormq, on the connection's byte stream.

Frames of deliveries, returns and confirms are taken from the stream as they arrive; acks and
publishes are written past aiormq. Everything else on the connection reaches aiormq unchanged.

Hand-written because aiormq needs three frame objects, six queue operations and a task for each
delivery, and as much for each publish: more than all other work of the bridge on a message. A
publish with its confirm takes a twelfth of the CPU time here, a delivery with its ack an eighth (5
µs instead of 65, 6 µs instead of 52; `python -m bench.parts wires`). Also, aiormq reads without a
limit. Backpressure, which stops reading while too many bytes are unsettled, is possible only below
it.
"""

import asyncio
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from aiormq import Channel
from aiormq.abc import ConsumerCallback
from aiormq.connection import SSLContextProvider, TransportFactory
from aiormq.exceptions import AMQPConnectionError
from yarl import URL

from bridge.amqp.frames import (
    CONTENT_HEADER_START,
    FRAME_END,
    FRAME_HEADER,
    FRAME_OVERHEAD_BYTES,
    FRAME_TYPES,
    HEARTBEAT,
    LARGE_BODY_BYTES,
    NO_HANDLERS,
    Body,
    Confirms,
    Deliveries,
    DeliveryHandler,
    FrameTaker,
    Notices,
    Piece,
    ack_frame,
    publish_pieces,
)
from bridge.amqp.properties import Properties
from bridge.errors import Confirm
from bridge.happy_eyeballs import create_connection

# Interval of the heartbeats shown to aiormq while all other frames bypass it.
SIGN_OF_LIFE_SECONDS: Final = 1.0
# Enough bytes of a foreign answer to recognise its protocol.
FOREIGN_BYTES: Final = 8


class Wire(TransportFactory):
    """The byte stream of one connection, opened by aiormq and shared with it.

    The broker sends something at least every `heartbeat_seconds`.
    """

    def __init__(
        self,
        *,
        heartbeat_seconds: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._heartbeat_seconds = heartbeat_seconds
        self._clock = clock
        self._gaps_proved = 0
        self._notices = Notices()
        self._takers: dict[int, FrameTaker] = {0: self._notices}
        self._transport: asyncio.Transport | None = None
        self._unwritten: list[Piece] = []
        self._is_reading = True
        self._protocol: Demultiplexer | None = None

    async def create(
        self,
        url: URL,
        **kwargs: Any,  # noqa: ANN401  aiormq's
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect. Called by aiormq. Raises AMQPConnectionError."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(loop=loop)
        protocol = Demultiplexer(reader, self._takers, self._clock, self._heartbeat_seconds)
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
    def is_open(self) -> bool:
        """Whether the broker has opened the connection over this stream."""
        return self._notices.is_open

    @property
    def closed(self) -> tuple[int, str] | None:
        """Code and text with which the broker ended the connection, if it did."""
        return self._notices.closed

    @property
    def foreign(self) -> bytes:
        """First bytes of an answer that was not AMQP; empty if it was."""
        return b"" if self._protocol is None else self._protocol.foreign

    @property
    def is_blocked(self) -> bool:
        """Whether the broker accepts no publishes on this connection (a memory or disk alarm)."""
        return self._notices.is_blocked

    def on_blocked(self, notify: Callable[[str | None], object]) -> None:
        """Call `notify` with the reason when the broker blocks the connection, then with None."""
        self._notices.on_blocked = notify

    @contextmanager
    def deliveries(
        self,
        channel: Channel,
        take: DeliveryHandler,
        by_tag: Mapping[bytes, DeliveryHandler] = NO_HANDLERS,
    ) -> Iterator[ConsumerCallback]:
        """Pass the deliveries of a channel to `take` while the block lasts.

        Deliveries to a consumer whose tag is in `by_tag` go to the handler given there. Yields the
        callback for `basic_consume`. The connection ends if `take` raises, or if the properties of
        a message cannot be read.
        """
        with self._taken(channel, Deliveries(take, by_tag)):
            yield _ignore_delivery

    @contextmanager
    def publishing(self, channel: Channel) -> Iterator["PublishingChannel"]:
        """Publish on a channel with confirms while the block lasts; aiormq must not publish on it.

        At the end of the block, every open confirm is resolved as `error`.
        """
        publishing = PublishingChannel(self, channel)
        try:
            with self._taken(channel, publishing):
                yield publishing
        finally:
            publishing.close()

    @contextmanager
    def _taken(self, channel: Channel, taker: FrameTaker) -> Iterator[None]:
        self._takers[channel.number] = taker
        try:
            yield
        finally:
            del self._takers[channel.number]

    def ack(self, channel: Channel, delivery_tag: int) -> None:
        """Write the ack of a delivery; it is sent at the end of this event loop iteration.

        Nothing is written on a channel that the broker has closed; the broker redelivers the
        message. The prefetch limits unsent acks, because the broker stops delivering until it has
        read acks.
        """
        taker = self._takers.get(channel.number)
        if taker is not None and taker.is_closed:
            return
        self.write(ack_frame(channel.number, delivery_tag))

    async def acks_read(self, channel: Channel) -> None:
        """Return when the broker has read every ack that was written on a channel.

        The broker answers the methods of a channel in order, so the answer to a later method proves
        that it has read the acks. That method is `channel.flow`, which changes nothing: a
        `basic.qos` would set the prefetch of a consumer that registers meanwhile. Has no deadline.
        Raises aiormq's error if the channel ends.
        """
        gaps = 0 if self._protocol is None else self._protocol.gaps
        await channel.flow(active=True)
        # Not those since: this answer may be older.
        self._gaps_proved = gaps

    def write(self, *frames: Piece) -> None:
        """Write whole frames; all frames of one event loop iteration are sent together."""
        if not self._unwritten:
            asyncio.get_running_loop().call_soon(self._write_out)
        self._unwritten += frames

    def write_large(self, frames: Sequence[Piece]) -> None:
        """Write whole frames immediately and in order, without copying them."""
        self._write_out()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.writelines(frames)

    def _write_out(self) -> None:
        data = b"".join(self._unwritten)
        self._unwritten.clear()
        if data and self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    @property
    def unwritten_bytes(self) -> int:
        """Written bytes that the broker has not read, except those of this event loop iteration."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    @property
    def is_reading(self) -> bool:
        return self._is_reading

    def set_reading(self, *, enabled: bool) -> None:
        """Pause reading, so that TCP backpressure stops the broker, or resume it.

        Call `keep_alive` while reading is paused.
        """
        if enabled is not self._is_reading and self._transport is not None:
            self._is_reading = enabled
            (self._transport.resume_reading if enabled else self._transport.pause_reading)()
            if self._protocol is not None:
                # A pause in reading that this process chose is no gap.
                self._protocol.heard_at = self._clock()

    def keep_alive(self) -> None:
        """Show aiormq a heartbeat while reading is off; call every few seconds."""
        if not self._is_reading and self._protocol is not None:
            self._protocol.pretend(HEARTBEAT)

    @property
    def silent_seconds(self) -> float:
        """Seconds since the broker last sent something; 0 while reading is off."""
        if self._protocol is None or not self._is_reading:
            return 0.0
        return self._clock() - self._protocol.heard_at

    @property
    def is_in_doubt(self) -> bool:
        """Whether the broker may have given this connection up without this process noticing.

        Nothing was read for longer than the heartbeat interval, because the broker is silent or
        this process was frozen. What is read afterwards may be older than the end of the
        connection; only the answer to `acks_read` proves that it lives.
        """
        protocol = self._protocol
        if protocol is None or not self._is_reading:
            return False
        is_proved = protocol.gaps == self._gaps_proved
        return not is_proved or self._clock() - protocol.heard_at > self._heartbeat_seconds

    def abort(self) -> None:
        """Abort the connection without a regular close."""
        if self._transport is not None:
            self._transport.abort()


async def _ignore_delivery(_message: object) -> None:
    """Do nothing. aiormq requires a callback to consume."""


class PublishingChannel(Confirms):
    """A channel with confirms whose publishes bypass aiormq."""

    def __init__(self, wire: Wire, channel: Channel) -> None:
        super().__init__()
        self._wire = wire
        self._number = channel.number
        # aiormq computes a negative size if there is no limit.
        self._max_payload_bytes = (
            channel.max_content_size if channel.max_content_size > 0 else sys.maxsize
        )

    @property
    def is_blocked(self) -> bool:
        """Whether the broker accepts no publishes now (a memory or disk alarm)."""
        return self._wire.is_blocked

    @property
    def unwritten_bytes(self) -> int:
        """Bytes of the connection that the broker has not read."""
        return self._wire.unwritten_bytes

    @property
    def max_properties_bytes(self) -> int:
        """Bytes of properties that fit a frame, because a content header cannot be split."""
        return self._max_payload_bytes - CONTENT_HEADER_START.size

    def publish(
        self, body: Body, *, exchange: str, routing_key: str, properties: Properties
    ) -> "asyncio.Future[Confirm]":
        """Write a mandatory message, and return its confirm as a future.

        A returned message is recognised by its message id, so ids in flight must be unique. Raises
        ValueError if exchange, routing key or properties do not fit AMQP. Nothing is written on a
        channel that the broker has closed: the confirm is `error` at the end of the block.
        """
        pieces = publish_pieces(
            self._number,
            body,
            exchange=exchange,
            routing_key=routing_key,
            properties=properties,
            max_payload_bytes=self._max_payload_bytes,
        )
        confirm = self.expect(properties.message_id)
        if self.is_closed:
            return confirm
        if len(body) > LARGE_BODY_BYTES:
            self._wire.write_large(pieces)
        else:
            self._wire.write(*pieces)
        return confirm


class Demultiplexer(asyncio.StreamReaderProtocol):
    """Passes each received frame to the taker of its channel, else to aiormq's reader."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        takers: dict[int, FrameTaker],
        clock: Callable[[], float],
        heartbeat_seconds: float = math.inf,
    ) -> None:
        super().__init__(reader, loop=asyncio.get_running_loop())
        self._heartbeat_seconds = heartbeat_seconds
        self._clock = clock
        # How often nothing was read for longer than the heartbeat interval.
        self.gaps = 0
        self._takers = takers
        # The start of an incomplete frame, and the number of missing bytes.
        self._held: list[bytes] = []
        self._missing_bytes = 0
        self._is_amqp = True
        self.foreign = b""
        self._passed_on_at = self.heard_at = self._clock()

    def data_received(self, data: bytes) -> None:
        """Distribute received frames; keep an incomplete one until its end arrives."""
        now = self._clock()
        if now - self.heard_at > self._heartbeat_seconds:
            self.gaps += 1
        self.heard_at = now
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
        """Pass bytes to aiormq that did not come from the broker."""
        super().data_received(data)

    def _sort(self, data: bytes) -> bytes:
        """Return the frames that no taker took."""
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
                others += [data[begin:at]] if begin < at else []
                begin = end
            at = end
        if at < len(data):
            at = self._hold(data, at, end)
        others.append(data[begin:at])
        return b"".join(others) or self._sign_of_life(at)

    def _hold(self, data: bytes, at: int, end: int) -> int:
        """Keep an incomplete frame, and return the offset at which it begins.

        If the data is not AMQP, note that, and return its end: all of it goes to aiormq.
        """
        if self._is_amqp and data[at] in FRAME_TYPES:
            # If the frame header is incomplete, the size is unknown; parsing is retried with the
            # next bytes.
            self._held.append(data[at:])
            self._missing_bytes = end - len(data)
            return at
        # Not AMQP frames, for example the protocol header with which a broker demands another
        # version. aiormq reports the error.
        self._is_amqp = False
        self.foreign = data[at : at + FOREIGN_BYTES]
        return len(data)

    def _sign_of_life(self, taken_bytes: int) -> bytes:
        # aiormq closes a connection after three heartbeats without data.
        silent = self._clock() - self._passed_on_at
        return HEARTBEAT if taken_bytes and silent > SIGN_OF_LIFE_SECONDS else b""
