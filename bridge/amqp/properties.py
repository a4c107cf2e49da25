"""Reads and writes AMQP properties, and tolerates whatever other clients send.

Hand-written because pamqp closes the connection if a text is not UTF-8 or a timestamp is in
microseconds, so that one such message blocks the queue (list:
`field_values.tolerate_broken_properties`), and takes twice the CPU time: 5.2 µs instead of 2.7 µs
for the properties of one message (`python -m bench.parts wires`). To use pamqp, drop
`tolerate_broken_properties`, read with `ClientProperties.unmarshal` and write with `.marshal`;
tests/unit/amqp/test_properties.py shows what breaks.
"""

import struct
from datetime import datetime
from typing import Any, Final

from pamqp.commands import Basic

from bridge.amqp.field_values import (
    TIMESTAMP_BYTES,
    decode_table,
    decode_timestamp,
    encode_short_string,
    encode_table,
    encode_timestamp,
)

# The class of the client library.
ClientProperties = Basic.Properties

_FLAGS: Final = struct.Struct(">H")
_OCTET: Final = struct.Struct(">B")
# Property flags, in the order of the properties (AMQP 0-9-1, 4.2.6.1).
_CONTENT_TYPE, _CONTENT_ENCODING, _HEADERS, _DELIVERY_MODE = 1 << 15, 1 << 14, 1 << 13, 1 << 12
_PRIORITY, _CORRELATION_ID, _REPLY_TO, _EXPIRATION = 1 << 11, 1 << 10, 1 << 9, 1 << 8
_MESSAGE_ID, _TIMESTAMP, _MESSAGE_TYPE, _USER_ID = 1 << 7, 1 << 6, 1 << 5, 1 << 4
_APP_ID, _CLUSTER_ID = 1 << 3, 1 << 2


class Properties:
    """The properties of one message, under the client library's names.

    Missing properties are None or empty. A delivery mode of 2 is persistent.
    """

    # Not the client library's class: mypyc compiles the attributes of this one to memory offsets.

    __slots__ = (
        "app_id",
        "cluster_id",
        "content_encoding",
        "content_type",
        "correlation_id",
        "delivery_mode",
        "expiration",
        "headers",
        "message_id",
        "message_type",
        "priority",
        "reply_to",
        "timestamp",
        "user_id",
    )

    def __init__(  # noqa: PLR0913  all AMQP properties
        self,
        *,
        content_type: str | None = None,
        content_encoding: str | None = None,
        headers: dict[str, Any] | None = None,
        delivery_mode: int | None = None,
        priority: int | None = None,
        correlation_id: str | None = None,
        reply_to: str | None = None,
        expiration: str | None = None,
        message_id: str | None = None,
        timestamp: datetime | None = None,
        message_type: str | None = None,
        user_id: str | None = None,
        app_id: str | None = None,
        cluster_id: str = "",
    ) -> None:
        self.content_type = content_type
        self.content_encoding = content_encoding
        self.headers = headers
        self.delivery_mode = delivery_mode
        self.priority = priority
        self.correlation_id = correlation_id
        self.reply_to = reply_to
        self.expiration = expiration
        self.message_id = message_id
        self.timestamp = timestamp
        self.message_type = message_type
        self.user_id = user_id
        self.app_id = app_id
        self.cluster_id = cluster_id

    def copy(self) -> "Properties":
        """Return a copy, which shares the headers."""
        return Properties(**as_facts(self))


# In the order of the flags.
NAMES: Final = tuple(ClientProperties.__slots__)


def as_facts(properties: Properties) -> dict[str, Any]:
    """Return all properties as a map from name to value."""
    return {name: getattr(properties, name) for name in NAMES}


def read_properties(data: bytes, at: int = 0) -> Properties:
    """Read the properties of a content header from an offset, flags first (AMQP 0-9-1, 4.2.6.1).

    Raises ValueError, whose text quotes no part of the message.
    """
    try:
        return _read(data, at)
    except (ValueError, IndexError, struct.error) as error:
        raise ValueError("the properties of a message cannot be read") from error


def _read(data: bytes, at: int) -> Properties:  # noqa: C901, PLR0912  a flat list
    # Unrolled, like `_write`.
    properties = Properties()
    flags = data[at] << 8 | data[at + 1]
    at += 2
    if flags & _CONTENT_TYPE:
        at, properties.content_type = _short_string(data, at)
    if flags & _CONTENT_ENCODING:
        at, properties.content_encoding = _short_string(data, at)
    if flags & _HEADERS:
        used, properties.headers = decode_table(data[at:])
        at += used
    if flags & _DELIVERY_MODE:
        properties.delivery_mode = data[at]
        at += 1
    if flags & _PRIORITY:
        properties.priority = data[at]
        at += 1
    if flags & _CORRELATION_ID:
        at, properties.correlation_id = _short_string(data, at)
    if flags & _REPLY_TO:
        at, properties.reply_to = _short_string(data, at)
    if flags & _EXPIRATION:
        at, properties.expiration = _short_string(data, at)
    if flags & _MESSAGE_ID:
        at, properties.message_id = _short_string(data, at)
    if flags & _TIMESTAMP:
        used, properties.timestamp = decode_timestamp(data[at : at + TIMESTAMP_BYTES])
        at += used
    if flags & _MESSAGE_TYPE:
        at, properties.message_type = _short_string(data, at)
    if flags & _USER_ID:
        at, properties.user_id = _short_string(data, at)
    if flags & _APP_ID:
        at, properties.app_id = _short_string(data, at)
    if flags & _CLUSTER_ID:
        at, properties.cluster_id = _short_string(data, at)
    return properties


def _short_string(data: bytes, at: int) -> tuple[int, str]:
    """Read a short string at an offset; return the offset after it, and the string."""
    end = at + 1 + data[at]
    return end, data[at + 1 : end].decode("utf-8", "surrogateescape")


def write_properties(properties: Properties) -> bytes:
    """Write the properties of a content header, flags first; None and empty values are left out.

    Raises ValueError if AMQP cannot represent a value (a string too long, a time before 1970), or
    if headers are nested deeper than MAX_HEADER_DEPTH.
    """
    try:
        return _write(properties)
    except struct.error as error:
        raise ValueError("a number of the properties does not fit") from error


def _write(properties: Properties) -> bytes:  # noqa: C901, PLR0912  a flat list
    # Unrolled, because a loop takes 1.5 times as long; in the order of the flags.
    flags, parts = 0, [b""]
    if properties.content_type:
        flags |= _CONTENT_TYPE
        parts.append(encode_short_string(properties.content_type))
    if properties.content_encoding:
        flags |= _CONTENT_ENCODING
        parts.append(encode_short_string(properties.content_encoding))
    if properties.headers is not None:
        flags |= _HEADERS
        parts.append(encode_table(properties.headers))
    if properties.delivery_mode is not None:
        flags |= _DELIVERY_MODE
        parts.append(_OCTET.pack(properties.delivery_mode))
    if properties.priority is not None:
        flags |= _PRIORITY
        parts.append(_OCTET.pack(properties.priority))
    if properties.correlation_id:
        flags |= _CORRELATION_ID
        parts.append(encode_short_string(properties.correlation_id))
    if properties.reply_to:
        flags |= _REPLY_TO
        parts.append(encode_short_string(properties.reply_to))
    if properties.expiration:
        flags |= _EXPIRATION
        parts.append(encode_short_string(properties.expiration))
    if properties.message_id:
        flags |= _MESSAGE_ID
        parts.append(encode_short_string(properties.message_id))
    if properties.timestamp is not None:
        flags |= _TIMESTAMP
        parts.append(encode_timestamp(properties.timestamp))
    if properties.message_type:
        flags |= _MESSAGE_TYPE
        parts.append(encode_short_string(properties.message_type))
    if properties.user_id:
        flags |= _USER_ID
        parts.append(encode_short_string(properties.user_id))
    if properties.app_id:
        flags |= _APP_ID
        parts.append(encode_short_string(properties.app_id))
    if properties.cluster_id:
        flags |= _CLUSTER_ID
        parts.append(encode_short_string(properties.cluster_id))
    parts[0] = _FLAGS.pack(flags)
    return b"".join(parts)
