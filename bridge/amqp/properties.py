"""AMQP properties as other clients send them, read so that one message cannot stop all.

Why our own: pamqp ends the connection over a text that is no UTF-8 or a time in milliseconds, so
that one such message stops the queue (`tolerate_broken_properties` has the list); and reading those
of one message takes it almost twice the CPU time, 5.8 µs for 3.3: `python -m tests.bench.wires`. To
swap pamqp in, leave `tolerate_broken_properties` out, and read with `ClientProperties.unmarshal`
and write with `.marshal`; tests/amqp/test_properties.py shows what breaks then.
"""

import functools
import struct
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

import pamqp.decode
import pamqp.encode
from pamqp.commands import Basic

from bridge.amqp.headers import Headers, Written

# What the client library takes and gives.
ClientProperties = Basic.Properties

# A header's value that is nested deeper stays bytes when it is read, and is not written: either
# could overflow the stack, which ends a compiled program without a word.
MAX_HEADER_DEPTH: Final = 32
_FLAGS: Final = struct.Struct(">H")
_LENGTH: Final = struct.Struct(">I")
_OCTET: Final = struct.Struct(">B")
_TIME: Final = struct.Struct(">Q")
# A time in seconds is below this until the year 5138.
_END_OF_SECONDS: Final = 10**11
# All lengths of a short string, written.
_OCTETS: Final = tuple(bytes((length,)) for length in range(256))
# The flags of the properties that a message has, in the order in which they follow (AMQP 0-9-1,
# 4.2.6.1).
_CONTENT_TYPE, _CONTENT_ENCODING, _HEADERS, _DELIVERY_MODE = 1 << 15, 1 << 14, 1 << 13, 1 << 12
_PRIORITY, _CORRELATION_ID, _REPLY_TO, _EXPIRATION = 1 << 11, 1 << 10, 1 << 9, 1 << 8
_MESSAGE_ID, _TIMESTAMP, _MESSAGE_TYPE, _USER_ID = 1 << 7, 1 << 6, 1 << 5, 1 << 4
_APP_ID, _CLUSTER_ID = 1 << 3, 1 << 2
# How many bytes a header's value takes after its type octet. Types that are not here begin with a
# length of four bytes.
_VALUE_BYTES: Final[Mapping[bytes, int]] = {
    **dict.fromkeys((b"V", b"\0"), 0),
    **dict.fromkeys((b"t", b"b", b"B"), 1),
    **dict.fromkeys((b"s", b"u"), 2),
    **dict.fromkeys((b"I", b"i", b"f"), 4),
    b"D": 5,
    **dict.fromkeys((b"l", b"L", b"d", b"T"), 8),
}


def as_they_came(headers: dict[str, Any] | None) -> dict[str, Any]:
    """Return headers to write back, with the bytes and types that they came with.

    The decoded values are not enough for that: 1 may have been one byte or 64 bits.
    """
    if not isinstance(headers, Headers):
        return dict(headers or {})
    table, entries, at = headers.written, {}, 4
    while at < len(table):
        begin = at + 1 + table[at]
        end = _end_of_value(table, begin)
        _, name = _decode_short_string(table[at:begin])
        entries[name] = Written(table[begin:end])
        at = end
    return entries


def _end_of_value(table: bytes, at: int) -> int:
    size = _VALUE_BYTES.get(table[at : at + 1])
    if size is None:
        size = 4 + int.from_bytes(table[at + 1 : at + 5])
    return at + 1 + size


def header_bytes(name: str, value: Any) -> int:  # noqa: ANN401  a header may be anything
    """Return how many bytes a header takes in the properties."""
    return len(encode_short_string(name)) + len(_encode_value(value))


class Properties:
    """The properties of one message: None, or empty, is what it has none of.

    The names are the client library's. A delivery mode of 2 is persistent.
    """

    # Where this is compiled an attribute is a place in memory, while the client library's class
    # stays Python.

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

    def __init__(  # noqa: PLR0913  what AMQP knows
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
        """Make others like these; both have the same headers."""
        return Properties(**as_facts(self))


# In the order of their flags.
NAMES: Final = tuple(ClientProperties.__slots__)


def as_facts(properties: Properties) -> dict[str, Any]:
    """Return all properties by their names."""
    return {name: getattr(properties, name) for name in NAMES}


def of_client(properties: ClientProperties) -> Properties:
    """Make the properties of what the client library has delivered."""
    facts: dict[str, Any] = dict(properties)
    return Properties(**facts)


def for_client(properties: Properties) -> ClientProperties:
    """Make the properties of what the client library is to publish."""
    made = ClientProperties()
    for name, value in as_facts(properties).items():
        setattr(made, name, value)
    return made


def read_properties(data: bytes, at: int = 0) -> Properties:
    """Read the properties of a content header, flags first (AMQP 0-9-1, 4.2.6.1).

    They begin at an offset. Raises ValueError, whose text quotes nothing of the message.
    """
    try:
        return _read(data, at)
    except (ValueError, IndexError, struct.error) as error:
        raise ValueError("the properties of a message cannot be read") from error


def _read(data: bytes, at: int) -> Properties:  # noqa: C901, PLR0912  a flat list
    # One by one, as they are written.
    properties = Properties()
    flags = data[at] << 8 | data[at + 1]
    at += 2
    if flags & _CONTENT_TYPE:
        at, properties.content_type = _short_string(data, at)
    if flags & _CONTENT_ENCODING:
        at, properties.content_encoding = _short_string(data, at)
    if flags & _HEADERS:
        used, properties.headers = _decode_table(data[at:])
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
        used, properties.timestamp = _decode_timestamp(data[at : at + _TIME.size])
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
    """Read a short string at an offset; return the offset behind it, too."""
    end = at + 1 + data[at]
    return end, data[at + 1 : end].decode("utf-8", "surrogateescape")


def write_properties(properties: Properties) -> bytes:
    """Write the properties of a content header, flags first; what is None or empty is left out.

    Raises ValueError when AMQP cannot hold one (a text that is too long, a time before 1970), or
    when headers are nested deeper than MAX_HEADER_DEPTH.
    """
    try:
        return _write(properties)
    except struct.error as error:
        raise ValueError("a number of the properties does not fit") from error


def _write(properties: Properties) -> bytes:  # noqa: C901, PLR0912  a flat list
    # One by one, because a loop over them takes half as long again; in the order of their flags.
    flags, parts = 0, [b""]
    if properties.content_type:
        flags |= _CONTENT_TYPE
        parts.append(encode_short_string(properties.content_type))
    if properties.content_encoding:
        flags |= _CONTENT_ENCODING
        parts.append(encode_short_string(properties.content_encoding))
    if properties.headers is not None:
        flags |= _HEADERS
        parts.append(_encode_table(properties.headers))
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
        parts.append(_encode_timestamp(properties.timestamp))
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


def tolerate_broken_properties() -> None:
    """Make pamqp read and write what other clients send, so that one message cannot stop all.

    By default a timestamp in micro- or nanoseconds, or a short string or header name that is not
    UTF-8, or a header nested a thousand levels deep, ends the connection on every delivery; and a
    header value of bytes, a large number or a float cannot be written back as it came. Bytes that
    are no UTF-8 are kept; a timestamp is scaled to seconds.
    """
    decode: Any = pamqp.decode
    encode: Any = pamqp.encode
    decode.METHODS |= {
        "shortstr": _decode_short_string,
        "timestamp": _decode_timestamp,
        "table": _decode_table,
    }
    decode.TABLE_MAPPING |= {b"T": _decode_timestamp}
    encode.METHODS |= {"shortstr": encode_short_string, "table": _encode_table}


def _decode_short_string(value: bytes) -> tuple[int, str]:
    end = value[0] + 1
    return end, bytes(value[1:end]).decode("utf-8", "surrogateescape")


def _decode_timestamp(value: bytes) -> tuple[int, datetime]:
    (number,) = _TIME.unpack_from(value)
    if number < _END_OF_SECONDS:
        return _TIME.size, _moment(number)
    moment = float(number)
    while moment >= _END_OF_SECONDS:
        moment /= 1000
    return _TIME.size, datetime.fromtimestamp(moment, tz=UTC)


# Messages that come together were published in the same few seconds.
@functools.lru_cache(maxsize=64)
def _moment(seconds: int) -> datetime:
    return datetime.fromtimestamp(seconds, tz=UTC)


def _encode_timestamp(moment: datetime) -> bytes:
    # The client library takes one without a zone as UTC, too.
    aware = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
    return _TIME.pack(int(aware.timestamp()))


def _decode_table(value: bytes, depth: int = 0) -> tuple[int, dict[str, Any]]:
    end = _end_within(value)
    table: dict[str, Any] = {}
    offset = 4
    while offset < end:
        used, name = _decode_short_string(value[offset:])
        offset += used
        # A name may reach beyond the table; compiled, no slice may begin behind its end.
        used, table[name] = _decode_value(value[offset : max(offset, end)], depth + 1)
        offset += used
    return end, table if depth else Headers(table, bytes(value[:end]))


def _end_within(value: bytes) -> int:
    end = 4 + int(struct.unpack(">I", value[:4])[0])
    if end > len(value):
        raise ValueError("longer than the properties")
    return end


def _decode_array(value: bytes, depth: int) -> tuple[int, list[Any]]:
    end = _end_within(value)
    array: list[Any] = []
    offset = 4
    while offset < end:
        used, item = _decode_value(value[offset:end], depth + 1)
        offset += used
        array.append(item)
    return end, array


def _decode_value(value: bytes, depth: int) -> tuple[int, Any]:
    kind = bytes(value[:1])
    if kind not in {b"F", b"A"}:
        used, found = pamqp.decode.embedded_value(value)
        return used, found
    if depth > MAX_HEADER_DEPTH:
        end = 5 + int(struct.unpack(">I", value[1:5])[0])
        return end, bytes(value[5:end])
    inner = _decode_table if kind == b"F" else _decode_array
    used, found = inner(value[1:], depth)
    return used + 1, found


def encode_short_string(value: str) -> bytes:
    """Write a text with its length; raises ValueError when it has more than 255 bytes."""
    encoded = value.encode("utf-8", "surrogateescape")
    if len(encoded) >= len(_OCTETS):
        raise ValueError("a short string has at most 255 bytes")
    return _OCTETS[len(encoded)] + encoded


# The names of our own headers, and of those that come back in copies.
_encode_name: Final = functools.lru_cache(maxsize=256)(encode_short_string)


def _encode_table(value: Mapping[str, Any] | None, depth: int = 0) -> bytes:
    entries = b"".join(
        [
            _encode_name(name) + _encode_value(item, depth + 1)
            for name, item in (value or {}).items()
        ]
    )
    return _LENGTH.pack(len(entries)) + entries


def _encode_value(value: Any, depth: int = 1) -> bytes:  # noqa: ANN401  a header may be anything
    # pamqp writes a float in 32 bits, cannot write bytes, and refuses large numbers. A bytearray
    # is a type of its own, which it writes as it came.
    # Texts come first, because most values are texts.
    if isinstance(value, str):
        value = value.encode("utf-8", "replace")
    if isinstance(value, bytes):
        if isinstance(value, Written):
            return value
        return b"S" + _LENGTH.pack(len(value)) + value
    if isinstance(value, float):
        return b"d" + struct.pack(">d", value)
    if isinstance(value, (dict, list)) and depth > MAX_HEADER_DEPTH:
        raise ValueError(f"a header is nested deeper than {MAX_HEADER_DEPTH} levels")
    if isinstance(value, dict):
        return b"F" + _encode_table(value, depth)
    if isinstance(value, list):
        items = b"".join([_encode_value(item, depth + 1) for item in value])
        return b"A" + struct.pack(">I", len(items)) + items
    try:
        return bytes(pamqp.encode.encode_table_value(value))
    except (TypeError, ValueError, OverflowError, struct.error):
        return _encode_value(str(value))
