"""Encodes and decodes the AMQP frames of deliveries, acks, publishes and confirms. No I/O.

Terms are those of AMQP 0-9-1, 2.3.5 and 4.2; confirms are an extension of RabbitMQ.

Hand-written because pamqp creates an object for each frame, three for each message; the docstring
of `wire` has the figures (`python -m bench.parts wires`). To use pamqp, pass the result of
`pamqp.frame.unmarshal` to `feed`, and write with `pamqp.frame.marshal`; the tests of this module
compare with both.
"""

import asyncio
import functools
import itertools
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from bridge.amqp.field_values import encode_short_string
from bridge.amqp.properties import Properties, read_properties, write_properties
from bridge.errors import Confirm

Body = bytes | bytearray
# Arguments: delivery tag, redelivered flag, properties, body.
DeliveryHandler = Callable[[int, bool, Properties, Body], None]
# Default of a map from consumer tag to handler.
NO_HANDLERS: Final[Mapping[bytes, DeliveryHandler]] = {}
# No send request is this large. Larger bodies are copied as little as possible, and published one
# at a time.
LARGE_BODY_BYTES: Final = 1024 * 1024

# Frame header: type, channel, payload size. A frame ends with the frame-end octet.
FRAME_HEADER: Final = struct.Struct(">BHI")
FRAME_END: Final = 0xCE
_FRAME_END: Final = bytes((FRAME_END,))
FRAME_OVERHEAD_BYTES: Final = FRAME_HEADER.size + len(_FRAME_END)
# Types: method frame, content header frame, content body frame, heartbeat frame.
METHOD, CONTENT_HEADER, CONTENT_BODY, _HEARTBEAT = 1, 2, 3, 8
FRAME_TYPES: Final = frozenset({METHOD, CONTENT_HEADER, CONTENT_BODY, _HEARTBEAT})
HEARTBEAT: Final = FRAME_HEADER.pack(_HEARTBEAT, 0, 0) + _FRAME_END

# A method payload begins with class id and method id. The arguments follow.
_METHOD_ID: Final = struct.Struct(">HH")
_CONNECTION, _CHANNEL, _BASIC = 10, 20, 60
_OPEN_OK, _CLOSE = _METHOD_ID.pack(_CONNECTION, 41), _METHOD_ID.pack(_CONNECTION, 50)
_CHANNEL_CLOSE: Final = _METHOD_ID.pack(_CHANNEL, 40)
_BLOCKED, _UNBLOCKED = _METHOD_ID.pack(_CONNECTION, 60), _METHOD_ID.pack(_CONNECTION, 61)
_PUBLISH, _RETURN = _METHOD_ID.pack(_BASIC, 40), _METHOD_ID.pack(_BASIC, 50)
_DELIVER = _METHOD_ID.pack(_BASIC, 60)
_ACK, _NACK = _METHOD_ID.pack(_BASIC, 80), _METHOD_ID.pack(_BASIC, 120)
_ARGUMENTS: Final = _METHOD_ID.size
# Offset of the reply text in `Connection.Close`: after the reply code, a 16-bit integer.
_CLOSE_TEXT: Final = _ARGUMENTS + 2

# A delivery tag and an octet of bits: `redelivered` of a delivery, `multiple` of a confirm.
_TAG_AND_BITS: Final = struct.Struct(">QB")
_MULTIPLE: Final = 1
# A complete ack frame; its length is fixed.
_ACK_FRAME: Final = struct.Struct(">BHI4sQBB")
_ACK_BYTES: Final = _METHOD_ID.size + _TAG_AND_BITS.size
# A content header payload begins with class id, weight, body size. Property flags and property list
# follow.
CONTENT_HEADER_START: Final = struct.Struct(">HHQ")

# Prefix of direct reply-to routing keys: the reply goes to a client without a queue.
_DIRECT_REPLY: Final = "amq.rabbitmq.reply-to"

# Part of the frames to write. A sequence of pieces always makes up whole frames.
Piece = bytes | memoryview


class FrameTaker(ABC):
    """Receives the frames of one channel before the client library does.

    `is_closed` means that the broker has closed the channel. The client library answers the close,
    and any frame written on the channel after that answer would end the connection.
    """

    def __init__(self) -> None:
        self.is_closed = False

    @abstractmethod
    def feed(self, frame_type: int, payload: bytes) -> bool:
        """Take a frame, or return False to leave it to the client library."""


class Progress(NamedTuple):
    """How far the broker has answered the publishes of a channel.

    `oldest` is the delivery tag of the oldest unanswered publish, or None.
    """

    oldest: int | None
    confirmed: int
    nacked: int


class _Content:
    """Assembles the content of one message from its content header and body frames."""

    def __init__(self) -> None:
        self.is_open = False
        self._properties: Properties | None = None
        self._missing_bytes = 0
        self._parts: list[bytes] = []
        self._large: bytearray | None = None

    def add(self, frame_type: int, payload: bytes) -> tuple[Properties, Body] | None:
        """Add the next frame; return the message when it is complete.

        Raises ValueError if the frame does not belong to the message, or if its properties cannot
        be read.
        """
        if frame_type == CONTENT_BODY and self._properties is not None:
            if self._large is None:
                self._parts.append(payload)
            else:
                self._large += payload
            self._missing_bytes -= len(payload)
        elif frame_type == CONTENT_HEADER and self._properties is None:
            _, _, self._missing_bytes = CONTENT_HEADER_START.unpack_from(payload)
            self._properties = read_properties(payload, CONTENT_HEADER_START.size)
            self._large = bytearray() if self._missing_bytes > LARGE_BODY_BYTES else None
        else:
            raise ValueError("a message was interrupted")
        if self._missing_bytes > 0:
            return None
        body = b"".join(self._parts) if self._large is None else self._large
        message = self._properties, body
        self.is_open, self._properties, self._large = False, None, None
        self._parts.clear()
        return message


class Deliveries(FrameTaker):
    """Passes each delivery on a channel to the handler of its consumer tag, else to `take`."""

    def __init__(
        self, take: DeliveryHandler, by_tag: Mapping[bytes, DeliveryHandler] = NO_HANDLERS
    ) -> None:
        super().__init__()
        self._take = self._hand_on = take
        self._by_tag = by_tag
        self._content = _Content()
        self._delivery_tag = 0
        self._redelivered = False

    def feed(self, frame_type: int, payload: bytes) -> bool:
        """Take a frame; return False if it is not part of a delivery."""
        if not self._content.is_open:
            return frame_type == METHOD and self._begin(payload)
        message = self._content.add(frame_type, payload)
        if message is not None:
            self._hand_on(self._delivery_tag, self._redelivered, *message)
        return True

    def _begin(self, payload: bytes) -> bool:
        if not payload.startswith(_DELIVER):
            self.is_closed = self.is_closed or payload.startswith(_CHANNEL_CLOSE)
            return False
        # The delivery tag comes after the consumer tag, a short string. Exchange and routing key
        # come later, and are not needed.
        at = _ARGUMENTS + 1 + payload[_ARGUMENTS]
        if self._by_tag:
            self._hand_on = self._by_tag.get(payload[_ARGUMENTS + 1 : at], self._take)
        self._delivery_tag, bits = _TAG_AND_BITS.unpack_from(payload, at)
        self._redelivered = bool(bits)
        self._content.is_open = True
        return True


class Confirms(FrameTaker):
    """Matches the broker's confirms and returns to the publishes of one channel."""

    def __init__(self) -> None:
        super().__init__()
        self._last_tag = 0
        self._nacked = 0
        # By delivery tag; `_by_id` has the same futures by message id.
        self._waiting: dict[int, tuple[str | None, asyncio.Future[Confirm]]] = {}
        self._by_id: dict[str | None, asyncio.Future[Confirm]] = {}
        self._returned = _Content()

    @property
    def unconfirmed(self) -> int:
        """Number of unconfirmed publishes, abandoned ones included."""
        return len(self._waiting)

    @property
    def progress(self) -> Progress:
        """How far the broker has answered the publishes."""
        confirmed = self._last_tag - len(self._waiting) - self._nacked
        return Progress(next(iter(self._waiting), None), confirmed, self._nacked)

    def awaited(self, message_id: str | None) -> "asyncio.Future[Confirm] | None":
        """Return the open confirm of a message in flight with this id, or None."""
        confirm = self._by_id.get(message_id or None)
        # The entry outlives a caller that gave up; the broker's answer removes it.
        return None if confirm is None or confirm.done() else confirm

    def expect(self, message_id: str | None) -> "asyncio.Future[Confirm]":
        """Register the next publish on the channel, and return its confirm as a future.

        A returned message is recognised by its message id alone, so ids in flight must be unique.
        """
        self._last_tag += 1
        confirm: asyncio.Future[Confirm] = asyncio.get_running_loop().create_future()
        message_id = message_id or None
        self._waiting[self._last_tag] = message_id, confirm
        self._by_id[message_id] = confirm
        return confirm

    def close(self) -> None:
        """Resolve every open confirm as `error`, because the channel has ended."""
        for tag in list(self._waiting):
            self._end(tag, "error")

    def feed(self, frame_type: int, payload: bytes) -> bool:
        """Take a frame; return False if it is neither a confirm nor part of a returned message."""
        if self._returned.is_open:
            message = self._returned.add(frame_type, payload)
            if message is not None:
                _resolve(self._by_id.get(message[0].message_id), "returned")
            return True
        if frame_type != METHOD:
            return False
        if payload.startswith(_ACK):
            self._resolve_up_to(payload, "confirmed")
        elif payload.startswith(_NACK):
            before = len(self._waiting)
            self._resolve_up_to(payload, "nacked")
            self._nacked += before - len(self._waiting)
        elif payload.startswith(_RETURN):
            # The ack of the returned message comes after it.
            self._returned.is_open = True
        else:
            self.is_closed = self.is_closed or payload.startswith(_CHANNEL_CLOSE)
            return False
        return True

    def _resolve_up_to(self, payload: bytes, confirm: Confirm) -> None:
        tag, bits = _TAG_AND_BITS.unpack_from(payload, _ARGUMENTS)
        if bits & _MULTIPLE:
            # Tags are in order, so the search stops at the confirmed one.
            for earlier in list(itertools.takewhile(tag.__gt__, self._waiting)):
                self._end(earlier, confirm)
        self._end(tag, confirm)

    def _end(self, tag: int, confirm: Confirm) -> None:
        found = self._waiting.pop(tag, None)
        if found is None:
            return
        message_id, waiting = found
        # A later message may have the same id.
        if self._by_id.get(message_id) is waiting:
            del self._by_id[message_id]
        _resolve(waiting, confirm)


def _resolve(waiting: "asyncio.Future[Confirm] | None", confirm: Confirm) -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(confirm)


class Notices(FrameTaker):
    """Observes channel 0, whose frames the client library handles.

    `is_open`: the broker has opened the connection. `is_blocked`: the broker accepts no publishes
    because of a memory or disk alarm; `on_blocked` is called with the reason, and with None when
    the alarm ends. `closed`: code and text with which the broker ended the connection.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_open = False
        self.is_blocked = False
        self.on_blocked: Callable[[str | None], object] = lambda _reason: None
        self.closed: tuple[int, str] | None = None

    def feed(self, _frame_type: int, payload: bytes) -> bool:
        """Observe a frame of channel 0, and leave it to the client library."""
        if payload.startswith((_BLOCKED, _UNBLOCKED)):
            is_blocked = payload.startswith(_BLOCKED)
            if is_blocked != self.is_blocked:
                self.is_blocked = is_blocked
                self.on_blocked(_short_string(payload, _ARGUMENTS) if is_blocked else None)
        elif payload.startswith(_OPEN_OK):
            self.is_open = True
        elif payload.startswith(_CLOSE):
            code = int.from_bytes(payload[_ARGUMENTS:_CLOSE_TEXT])
            self.closed = code, _short_string(payload, _CLOSE_TEXT)
        return False


def _short_string(payload: bytes, at: int) -> str:
    size = payload[at] if at < len(payload) else 0
    return payload[at + 1 : at + 1 + size].decode("utf-8", "replace")


def ack_frame(channel: int, delivery_tag: int) -> bytes:
    return _ACK_FRAME.pack(METHOD, channel, _ACK_BYTES, _ACK, delivery_tag, 0, FRAME_END)


def publish_pieces(
    channel: int,
    body: Body,
    *,
    exchange: str,
    routing_key: str,
    properties: Properties,
    max_payload_bytes: int,
) -> list[Piece]:
    """Encode a publish as pieces to be written in order, without copying the body.

    The message is mandatory, except for direct replies (`is_mandatory`). Raises ValueError if
    exchange, routing key or properties are too long for AMQP, because the broker would close the
    connection.
    """
    size = len(body)
    header = content_header(size, properties, max_payload_bytes)
    pieces: list[Piece] = [
        _publish_frame(channel, exchange, routing_key),
        FRAME_HEADER.pack(CONTENT_HEADER, channel, len(header)),
        header,
        _FRAME_END,
    ]
    for part in _parts(body, max_payload_bytes):
        pieces += (FRAME_HEADER.pack(CONTENT_BODY, channel, len(part)), part, _FRAME_END)
    return pieces


def _parts(body: Body, max_payload_bytes: int) -> list[Piece]:
    size = len(body)
    if size <= max_payload_bytes and isinstance(body, bytes):
        # The usual case, for which no memoryview is needed.
        return [body] if size else []
    whole = memoryview(body)
    return [whole[at : at + max_payload_bytes] for at in range(0, size, max_payload_bytes)]


@functools.lru_cache(maxsize=256)
def _publish_frame(channel: int, exchange: str, routing_key: str) -> bytes:
    names = encode_short_string(exchange) + encode_short_string(routing_key)
    mandatory = is_mandatory(exchange, routing_key)
    # A reserved 16-bit field precedes the names, and the flags follow them.
    return _frame(METHOD, channel, b"%s\x00\x00%s%c" % (_PUBLISH, names, mandatory))


def content_header(body_size: int, properties: Properties, max_payload_bytes: int) -> bytes:
    """Encode the payload of a content header; raises ValueError if it does not fit a frame."""
    header = CONTENT_HEADER_START.pack(_BASIC, 0, body_size) + write_properties(properties)
    if len(header) > max_payload_bytes:
        raise ValueError("the properties have more bytes than a frame")
    return header


def is_mandatory(exchange: str, routing_key: str) -> bool:
    """Whether the broker should return an unroutable message.

    A direct reply does not go through a queue: RabbitMQ would deliver it, and also return it as
    unroutable.
    """
    return exchange != "" or not routing_key.startswith(_DIRECT_REPLY)


def _frame(frame_type: int, channel: int, payload: bytes) -> bytes:
    header = FRAME_HEADER.pack(frame_type, channel, len(payload))
    return b"%s%s\xce" % (header, payload)
