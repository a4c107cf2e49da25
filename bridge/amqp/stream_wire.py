"""Carries deliveries, acks, publishes and confirms past aiormq, on the connection's byte stream.

Frames of deliveries, returns and confirms are taken from the stream as they arrive; acks and
publishes are written past aiormq. Everything else on the connection reaches aiormq unchanged.

Hand-written because aiormq needs three frame objects, six queue operations and a task for each
delivery, and as much for each publish: more than all other work of the bridge on a message. A
publish with its confirm takes a twelfth of the CPU time here, a delivery with its ack an eighth
(5 µs instead of 65, 6 µs instead of 52; `python -m bench.wires`). Also, aiormq reads without bound;
only below it can reading stop while too many bytes are held. `SMS_BRIDGE_WIRE=plain` selects
`PlainWire` instead.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from yarl import URL

from bridge.amqp.channels import max_payload_bytes
from bridge.amqp.client import (
    AMQPConnectionError,
    Channel,
    ConsumerCallback,
    SSLContextProvider,
    TransportFactory,
)
from bridge.amqp.demultiplexer import Demultiplexer
from bridge.amqp.frames import (
    CONTENT_HEADER_START,
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
from bridge.amqp.wire import LARGE_BODY_BYTES, NO_HANDLERS, Body, DeliveryHandler, Progress
from bridge.errors import Confirm
from bridge.happy_eyeballs import create_connection


class StreamWire(TransportFactory):
    """The byte stream of one connection, opened by aiormq and shared with it."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
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
        protocol = Demultiplexer(reader, self._takers, self._clock)
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
        """How the answer began if it was not AMQP, because another program is there; else empty."""
        return b"" if self._protocol is None else self._protocol.foreign

    @property
    def is_open(self) -> bool:
        """Whether the broker has opened the connection over this very stream."""
        return self._notices.is_open

    @property
    def is_blocked(self) -> bool:
        """Whether the broker takes no messages on this connection (a memory or disk alarm)."""
        return self._notices.is_blocked

    def on_blocked(self, notify: Callable[[str | None], object]) -> None:
        """Call `notify` with the broker's reason when it blocks the connection, None at the end."""
        self._notices.on_blocked = notify

    @property
    def closed(self) -> tuple[int, str] | None:
        """The code and the text with which the broker ended the connection, if it did."""
        return self._notices.closed

    @contextmanager
    def deliveries(
        self,
        channel: Channel,
        take: DeliveryHandler,
        by_tag: Mapping[bytes, DeliveryHandler] = NO_HANDLERS,
    ) -> Iterator[ConsumerCallback]:
        """Hand what is delivered on a channel to `take`, past aiormq.

        `take` is called as the frames arrive and must not raise: the connection would end. So
        does a message end it whose properties cannot be read.
        """
        with self._taken(channel, Deliveries(take, by_tag)):
            yield _sees_no_delivery

    @contextmanager
    def publishing(self, channel: Channel) -> Iterator["StreamPublishing"]:
        """Publish on a channel with confirms; aiormq must publish nothing on it meanwhile."""
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
        """Write the ack of a delivery; it is sent at the end of this event loop iteration.

        Nothing is written on a channel that the broker has closed; it delivers the message again.
        """
        taker = self._takers.get(channel.number)
        if taker is not None and taker.is_closed:
            return
        self.write(ack_frame(channel.number, delivery_tag))

    async def acks_read(self, channel: Channel) -> None:
        """Return when the broker has read every ack that was written on a channel."""
        await channel.basic_qos(prefetch_count=1)

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

    def set_reading(self, *, enabled: bool) -> None:
        """Stop reading, so that TCP stops the broker, or resume; call `keep_alive` meanwhile."""
        if enabled is not self._is_reading and self._transport is not None:
            self._is_reading = enabled
            (self._transport.resume_reading if enabled else self._transport.pause_reading)()

    @property
    def is_reading(self) -> bool:
        """Whether what the broker sends is read."""
        return self._is_reading

    def keep_alive(self) -> None:
        """Show aiormq a heartbeat while reading is off."""
        if not self._is_reading and self._protocol is not None:
            self._protocol.pretend(HEARTBEAT)

    @property
    def silent_seconds(self) -> float:
        """For how long the broker has sent nothing, while it was read."""
        read = self._protocol if self._is_reading else None
        return 0.0 if read is None else self._clock() - read.heard_at

    def abort(self) -> None:
        """End the connection without a word to the broker."""
        if self._transport is not None:
            self._transport.abort()

    @property
    def unwritten_bytes(self) -> int:
        """How many bytes the broker has not read, but for those that `write` has just taken."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def _write_out(self) -> None:
        data = b"".join(self._unwritten)
        self._unwritten.clear()
        if data and self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)


async def _sees_no_delivery(_message: object) -> None:
    """Do nothing. aiormq requires a callback to consume."""


class StreamPublishing:
    """A channel whose publishes and confirms bypass aiormq."""

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
        """How many publishes have no confirm yet, abandoned ones included."""
        return len(self._confirms)

    @property
    def progress(self) -> Progress:
        """How far the broker has come with what was published."""
        return self._confirms.progress

    @property
    def max_properties_bytes(self) -> int:
        """How many bytes of properties fit into a frame: a content header cannot be split."""
        return self._max_payload_bytes - CONTENT_HEADER_START.size

    @property
    def unwritten_bytes(self) -> int:
        """How many bytes the broker has not read of the connection."""
        return self._wire.unwritten_bytes

    def awaited(self, message_id: str | None) -> "asyncio.Future[Confirm] | None":
        """Return the confirm of the message in flight that has this id, or None."""
        return self._confirms.awaited(message_id or None)

    def publish(
        self, body: Body, *, exchange: str, routing_key: str, properties: Properties
    ) -> "asyncio.Future[Confirm]":
        """Write a mandatory message, and return its confirm as a future.

        No two in flight may share a message id. Raises ValueError for what does not fit AMQP.
        Nothing is written on a channel that the broker has closed: the confirm is `error` at the
        end of the block.
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
        if self._confirms.is_closed:
            return confirm
        if len(body) > LARGE_BODY_BYTES:
            self._wire.write_large(pieces)
        else:
            self._wire.write(*pieces)
        return confirm
