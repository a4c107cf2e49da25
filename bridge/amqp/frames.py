"""AMQP frames of the hot path as bytes: deliveries and acks, publishes and their confirms.

Nothing here does I/O. AMQP 0-9-1, 2.3.5 and 4.2, and RabbitMQ's confirms extension.
"""

import asyncio
import functools
import itertools
import struct
from collections.abc import Callable
from typing import Final, Protocol

from aiormq.exceptions import InvalidFrameError

from bridge.amqp.properties import (
    Properties,
    encode_short_string,
    read_properties,
    write_properties,
)
from bridge.errors import Confirm

# A frame: type, channel and size, the payload, the end.
HEAD: Final = struct.Struct(">BHI")
AROUND_BYTES: Final = 8
END: Final = 0xCE
_END: Final = bytes((END,))
METHOD, HEADER, BODY, _HEARTBEAT = 1, 2, 3, 8
KINDS: Final = frozenset({METHOD, HEADER, BODY, _HEARTBEAT})
HEARTBEAT: Final = HEAD.pack(_HEARTBEAT, 0, 0) + bytes((END,))

# Class and method.
_OPEN_OK, _CLOSE = b"\x00\x0a\x00\x29", b"\x00\x0a\x00\x32"
_BLOCKED, _UNBLOCKED = b"\x00\x0a\x00\x3c", b"\x00\x0a\x00\x3d"
_PUBLISH, _RETURN, _DELIVER = b"\x00\x3c\x00\x28", b"\x00\x3c\x00\x32", b"\x00\x3c\x00\x3c"
_ACK, _NACK = b"\x00\x3c\x00\x50", b"\x00\x3c\x00\x78"
_METHOD_BYTES: Final = 4
# Where the text begins with which a connection is closed, behind the code.
_CLOSE_TEXT: Final = _METHOD_BYTES + 2

# A delivery tag, and bits: `redelivered` of a delivery, `multiple` of a confirm.
_TAG: Final = struct.Struct(">QB")
_MULTIPLE: Final = 1
# A content header: class, weight, size of the body; then the properties.
CONTENT: Final = struct.Struct(">HHQ")
_BASIC: Final = 60

# To whom RabbitMQ hands a reply without a queue; what names the client follows.
_DIRECT_REPLY: Final = "amq.rabbitmq.reply-to"

Body = bytes | bytearray
Piece = bytes | memoryview
# Called with the tag, whether it was delivered before, the properties and the body.
Take = Callable[[int, bool, Properties, Body], None]


class Feedable(Protocol):
    """Whoever wants the frames of a channel."""

    def feed(self, kind: int, payload: bytes) -> bool:
        """Take a frame; returns False for one that the client library is to have."""


# A body of more bytes than any request is put together as a bytearray and written piece by piece:
# each copy would take as much memory once more.
LARGE_BODY_BYTES: Final = 1024 * 1024


class _Content:
    """Puts the header and the body of one message together."""

    def __init__(self) -> None:
        self.is_open = False
        self._properties: Properties | None = None
        self._missing_bytes = 0
        self._parts: list[bytes] = []
        self._large: bytearray | None = None

    def add(self, kind: int, payload: bytes) -> tuple[Properties, Body] | None:
        """Take the next frame, and return the message when it was the last.

        Raises InvalidFrameError when it is none of the message, ValueError when its properties
        cannot be read.
        """
        if kind == BODY and self._properties is not None:
            if self._large is None:
                self._parts.append(payload)
            else:
                self._large += payload
            self._missing_bytes -= len(payload)
        elif kind == HEADER and self._properties is None:
            _, _, self._missing_bytes = CONTENT.unpack_from(payload)
            self._properties = read_properties(payload[CONTENT.size :])
            self._large = bytearray() if self._missing_bytes > LARGE_BODY_BYTES else None
        else:
            raise InvalidFrameError("a message was interrupted")
        if self._missing_bytes > 0:
            return None
        body = b"".join(self._parts) if self._large is None else self._large
        message = self._properties, body
        self.is_open, self._properties, self._large = False, None, None
        self._parts.clear()
        return message


class Deliveries:
    """What is delivered on one channel."""

    def __init__(self, take: Take) -> None:
        self._take = take
        self._content = _Content()
        self._tag = 0
        self._redelivered = False

    def feed(self, kind: int, payload: bytes) -> bool:
        """Take a frame; returns False for one that is no part of a delivery."""
        if not self._content.is_open:
            return kind == METHOD and self._begin(payload)
        message = self._content.add(kind, payload)
        if message is not None:
            self._take(self._tag, self._redelivered, *message)
        return True

    def _begin(self, payload: bytes) -> bool:
        if not payload.startswith(_DELIVER):
            return False
        # Behind the consumer's tag, a short string; exchange and routing key follow.
        self._tag, bits = _TAG.unpack_from(payload, _METHOD_BYTES + 1 + payload[_METHOD_BYTES])
        self._redelivered = bool(bits)
        self._content.is_open = True
        return True


class Confirms:
    """What the broker says of the messages that are published on one channel, all of them here."""

    def __init__(self) -> None:
        self._last_tag = 0
        self._waiting: dict[int, asyncio.Future[Confirm]] = {}
        self._by_id: dict[str | None, asyncio.Future[Confirm]] = {}
        self._returned = _Content()

    def __len__(self) -> int:
        """Return how many the broker has said nothing of."""
        return len(self._waiting)

    def awaited(self, message_id: str | None) -> "asyncio.Future[Confirm] | None":
        """Return what somebody waits for under this id."""
        return self._by_id.get(message_id)

    def expect(self, message_id: str | None) -> "asyncio.Future[Confirm]":
        """Await the confirm of the next publish on the channel.

        A returned message is told by its id, so no two at a time should have the same.
        """
        self._last_tag += 1
        confirm = self._waiting[self._last_tag] = asyncio.get_running_loop().create_future()
        self._by_id[message_id] = confirm
        confirm.add_done_callback(lambda _: self._forget(message_id, confirm))
        return confirm

    def close(self) -> None:
        """End the waiting for what no confirm can come of any more."""
        for confirm in self._waiting.values():
            _resolve(confirm, "error")
        self._waiting.clear()

    def feed(self, kind: int, payload: bytes) -> bool:
        """Take a frame; returns False for one that says nothing of a publish."""
        if self._returned.is_open:
            message = self._returned.add(kind, payload)
            if message is not None:
                _resolve(self._by_id.get(message[0].message_id), "returned")
            return True
        if kind != METHOD:
            return False
        if payload.startswith(_ACK):
            self._settle(payload, "confirmed")
        elif payload.startswith(_NACK):
            self._settle(payload, "nacked")
        elif payload.startswith(_RETURN):
            # The ack of the returned message comes after it.
            self._returned.is_open = True
        else:
            return False
        return True

    def _settle(self, payload: bytes, confirm: Confirm) -> None:
        tag, bits = _TAG.unpack_from(payload, _METHOD_BYTES)
        if bits & _MULTIPLE:
            # The oldest come first: however many are open, only those that end are looked at.
            for earlier in list(itertools.takewhile(tag.__gt__, self._waiting)):
                _resolve(self._waiting.pop(earlier), confirm)
        _resolve(self._waiting.pop(tag, None), confirm)

    def _forget(self, message_id: str | None, confirm: "asyncio.Future[Confirm]") -> None:
        if self._by_id.get(message_id) is confirm:
            del self._by_id[message_id]


def _resolve(waiting: "asyncio.Future[Confirm] | None", confirm: Confirm) -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(confirm)


class Notices:
    """What the broker says of the connection itself, which the client library hears as well.

    `is_open`: it has opened the connection. `is_blocked`: it takes no messages now, because of a
    memory or disk alarm; `on_blocked` is called with the reason, or None when that ends. `closed`:
    the code and the text with which it ended the connection.
    """

    def __init__(self) -> None:
        self.is_open = False
        self.is_blocked = False
        self.on_blocked: Callable[[str | None], object] = lambda _reason: None
        self.closed: tuple[int, str] | None = None

    def feed(self, _kind: int, payload: bytes) -> bool:
        """Look at a frame of channel 0, and leave it to the client library."""
        if payload.startswith((_BLOCKED, _UNBLOCKED)):
            is_blocked = payload.startswith(_BLOCKED)
            if is_blocked != self.is_blocked:
                self.is_blocked = is_blocked
                self.on_blocked(_short_string(payload, _METHOD_BYTES) if is_blocked else None)
        elif payload.startswith(_OPEN_OK):
            self.is_open = True
        elif payload.startswith(_CLOSE):
            code = int.from_bytes(payload[_METHOD_BYTES:_CLOSE_TEXT])
            self.closed = code, _short_string(payload, _CLOSE_TEXT)
        return False


def _short_string(payload: bytes, at: int) -> str:
    size = payload[at] if at < len(payload) else 0
    return payload[at + 1 : at + 1 + size].decode("utf-8", "replace")


def ack_frame(channel: int, tag: int) -> bytes:
    """Write the ack of one delivery."""
    return _frame(METHOD, channel, _ACK + _TAG.pack(tag, 0))


def publish_pieces(
    channel: int,
    body: Body,
    *,
    exchange: str,
    routing_key: str,
    properties: Properties,
    max_payload_bytes: int,
) -> list[Piece]:
    """Write a message that the broker is to return when no queue takes it (`mandatory`).

    A direct reply is in no queue: RabbitMQ would return it although it delivers it.
    Its pieces are to be written one after the other; none is a copy of the body.

    Raises ValueError when the exchange, the routing key or the properties do not fit: the broker
    would end the connection, and with it every other publish.
    """
    header = CONTENT.pack(_BASIC, 0, len(body)) + write_properties(properties)
    if len(header) > max_payload_bytes:
        raise ValueError("the properties have more bytes than a frame")
    pieces: list[Piece] = [
        _publish_frame(channel, exchange, routing_key),
        _frame(HEADER, channel, header),
    ]
    whole = memoryview(body)
    for at in range(0, len(body), max_payload_bytes):
        payload = whole[at : at + max_payload_bytes]
        pieces += (HEAD.pack(BODY, channel, len(payload)), payload, _END)
    return pieces


@functools.lru_cache(maxsize=256)
def _publish_frame(channel: int, exchange: str, routing_key: str) -> bytes:
    names = encode_short_string(exchange) + encode_short_string(routing_key)
    is_mandatory = exchange != "" or not routing_key.startswith(_DIRECT_REPLY)
    return _frame(METHOD, channel, b"%s\x00\x00%s%c" % (_PUBLISH, names, is_mandatory))


def _frame(kind: int, channel: int, payload: bytes) -> bytes:
    return b"%s%s\xce" % (HEAD.pack(kind, channel, len(payload)), payload)
