"""The frames beneath the client library: deliveries leave the stream before it, acks pass it by.

aiormq makes three frame objects, six queue passes and a task of each delivery, and one more pass
of each ack. That costs more than all that a worker does with the message, so the frames of
`basic.deliver` are read here as they arrive. Everything else on the connection is aiormq's, and
reaches it unchanged.
"""

import asyncio
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from aiormq.connection import SSLContextProvider, TransportFactory
from aiormq.exceptions import AMQPConnectionError, InvalidFrameError
from yarl import URL

from bridge.properties import Properties, read_properties

# A frame (AMQP 0-9-1, 4.2.3): type, channel and size, the payload, the end.
_HEAD: Final = struct.Struct(">BHI")
_AROUND: Final = 8
_END: Final = 0xCE
_METHOD, _HEADER, _BODY = 1, 2, 3
_KINDS: Final = frozenset({_METHOD, _HEADER, _BODY, 8})
_DELIVER: Final = b"\x00\x3c\x00\x3c"
_TAG: Final = struct.Struct(">QB")
_BODY_SIZE: Final = struct.Struct(">4xQ")
_FLAGS_AT: Final = 12
# Basic.Ack: the frame's head, class, method, tag, not multiple, the end.
_ACK: Final = struct.Struct(">BHIHHQBB")
_HEARTBEAT: Final = b"\x08\x00\x00\x00\x00\x00\x00\xce"
# How often aiormq is told that the broker lives while there is nothing else for it.
SIGN_OF_LIFE_SECONDS: Final = 1.0

# Called with the tag, whether it was delivered before, the properties and the body.
Take = Callable[[int, bool, Properties, bytes], None]


class Wire(TransportFactory):
    """The stream of one connection, which aiormq opens and shares."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._deliveries: dict[int, _Deliveries] = {}
        self._clock = clock
        self._transport: asyncio.Transport | None = None

    async def create(
        self,
        url: URL,
        **kwargs: Any,  # noqa: ANN401  aiormq's, and asyncio's
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect; aiormq calls it. Raises AMQPConnectionError."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(loop=loop)
        protocol = _Protocol(reader, self._deliveries, self._clock)
        context: SSLContextProvider = kwargs.pop("ssl_context_provider")
        tls = await context.get_context() if url.scheme == "amqps" else None
        try:
            transport, _ = await loop.create_connection(
                lambda: protocol, url.host or "", url.port or 0, ssl=tls, **kwargs
            )
        except OSError as error:
            raise AMQPConnectionError(*error.args) from error
        self._transport = transport
        return reader, asyncio.StreamWriter(transport, protocol, reader, loop)

    @contextmanager
    def deliveries(self, channel: int, take: Take) -> Iterator[None]:
        """Hand what is delivered on a channel to `take`, past aiormq.

        `take` is called as the frames arrive and must not raise: the connection would end. So
        does a message end it whose properties cannot be read.
        """
        self._deliveries[channel] = _Deliveries(take)
        try:
            yield
        finally:
            del self._deliveries[channel]

    def ack(self, channel: int, tags: Iterable[int]) -> None:
        """Write the acks of these deliveries.

        They wait for the broker without a limit of their own: it has given us no more deliveries
        than the prefetch, and gives more only for acks that it has read.
        """
        if self._transport is not None and not self._transport.is_closing():
            frames = [_ACK.pack(_METHOD, channel, 13, 60, 80, tag, 0, _END) for tag in tags]
            self._transport.write(b"".join(frames))


class _Deliveries:
    """Puts the frames of one channel's deliveries together."""

    def __init__(self, take: Take) -> None:
        self._take = take
        self._is_open = False
        self._tag = 0
        self._redelivered = False
        self._properties: Properties | None = None
        self._missing_bytes = 0
        self._parts: list[bytes] = []

    def feed(self, kind: int, payload: bytes) -> bool:
        """Take a frame; returns False for one that is no part of a delivery.

        Raises InvalidFrameError when one comes between the frames of a delivery, ValueError when
        its properties cannot be read.
        """
        if not self._is_open:
            return kind == _METHOD and self._begin(payload)
        if kind == _BODY and self._properties is not None:
            self._parts.append(payload)
            self._missing_bytes -= len(payload)
        elif kind == _HEADER and self._properties is None:
            (self._missing_bytes,) = _BODY_SIZE.unpack_from(payload)
            self._properties = read_properties(payload[_FLAGS_AT:])
        else:
            raise InvalidFrameError("a delivery was interrupted")
        if self._missing_bytes <= 0:
            self._end(self._properties)
        return True

    def _begin(self, payload: bytes) -> bool:
        if not payload.startswith(_DELIVER):
            return False
        # Behind the consumer's tag, a short string; exchange and routing key follow.
        self._tag, redelivered = _TAG.unpack_from(payload, len(_DELIVER) + 1 + payload[4])
        self._redelivered = bool(redelivered)
        self._is_open = True
        return True

    def _end(self, properties: Properties) -> None:
        body = b"".join(self._parts)
        self._parts.clear()
        self._is_open, self._properties = False, None
        self._take(self._tag, self._redelivered, properties, body)


class _Protocol(asyncio.StreamReaderProtocol):
    """Sorts the frames of a connection: deliveries are taken out, the others go to the reader."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        deliveries: dict[int, _Deliveries],
        clock: Callable[[], float],
    ) -> None:
        super().__init__(reader, loop=asyncio.get_running_loop())
        self._clock = clock
        self._deliveries = deliveries
        # The start of a frame, and how many bytes are missing until its end.
        self._held: list[bytes] = []
        self._missing_bytes = 0
        self._is_amqp = True
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
            data = self._take_deliveries(data)
        if data:
            self._passed_on_at = self._clock()
            super().data_received(data)

    def _take_deliveries(self, data: bytes) -> bytes:
        """Return the frames that are not part of a delivery."""
        others: list[bytes] = []
        begin = at = 0
        while at + _AROUND <= len(data):
            kind, channel, size = _HEAD.unpack_from(data, at)
            end = at + _AROUND + size
            if end > len(data):
                break
            if data[end - 1] != _END or kind not in _KINDS:
                self._is_amqp = False
                break
            deliveries = self._deliveries.get(channel)
            if deliveries is not None and deliveries.feed(kind, data[at + 7 : end - 1]):
                others.append(data[begin:at])
                begin = end
            at = end
        else:
            end = at + _AROUND
        if at < len(data):
            at = self._hold(data, at, end)
        others.append(data[begin:at])
        return b"".join(others) or self._sign_of_life(at)

    def _hold(self, data: bytes, at: int, end: int) -> int:
        """Keep the start of a frame back; return to where all else may pass."""
        if self._is_amqp and data[at] in _KINDS:
            self._held.append(data[at:])
            self._missing_bytes = end - len(data)
            return at
        # No AMQP, such as the version that another one asks for. aiormq says so.
        self._is_amqp = False
        return len(data)

    def _sign_of_life(self, taken_bytes: int) -> bytes:
        # aiormq gives a connection up on which it reads nothing for three heartbeats.
        silent = self._clock() - self._passed_on_at
        return _HEARTBEAT if taken_bytes and silent > SIGN_OF_LIFE_SECONDS else b""
