"""Encodes and decodes the values of properties and headers (AMQP 0-9-1, 4.2.5).

Any value from another client can be decoded, and encoded again with its original bytes.
"""

import functools
import struct
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

import pamqp.decode
import pamqp.encode

from bridge.amqp.headers import HeaderTable, Written

# A header value that is nested deeper than this stays bytes when read, and is rejected when
# written. Unlimited recursion could overflow the stack, which ends a compiled program without an
# error message.
MAX_HEADER_DEPTH: Final = 32
_LENGTH: Final = struct.Struct(">I")
_TIME: Final = struct.Struct(">Q")
TIMESTAMP_BYTES: Final = _TIME.size
# A timestamp below this is in seconds (up to the year 5138).
_END_OF_SECONDS: Final = 10**11
# The length octets of short strings.
_OCTETS: Final = tuple(bytes((length,)) for length in range(256))
# Size of a header value after its type octet. Other types begin with a length of four bytes.
_VALUE_BYTES: Final[Mapping[bytes, int]] = {
    **dict.fromkeys((b"V", b"\0"), 0),
    **dict.fromkeys((b"t", b"b", b"B"), 1),
    **dict.fromkeys((b"s", b"u"), 2),
    **dict.fromkeys((b"I", b"i", b"f"), 4),
    b"D": 5,
    **dict.fromkeys((b"l", b"L", b"d", b"T"), 8),
}


def as_they_came(headers: dict[str, Any] | None) -> dict[str, Any]:
    """Return headers that are encoded again with their original bytes and types.

    Decoded values lose the type: a 1 may have been one byte or 64 bits.
    """
    if not isinstance(headers, HeaderTable):
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
    """Return the encoded size of a header in bytes."""
    return len(encode_short_string(name)) + len(_encode_value(value))


def tolerate_broken_properties() -> None:
    """Patch pamqp so that it reads and writes whatever other clients send.

    Without the patch, some values close the connection at each delivery, so that one message blocks
    the queue: a timestamp in micro- or nanoseconds, a short string or header name that is not
    UTF-8, a header nested a thousand levels deep. Others cannot be written back unchanged: bytes,
    large numbers and floats in headers. The patch preserves invalid UTF-8, and scales timestamps to
    seconds.
    """
    decode: Any = pamqp.decode
    encode: Any = pamqp.encode
    decode.METHODS |= {
        "shortstr": _decode_short_string,
        "timestamp": decode_timestamp,
        "table": decode_table,
    }
    decode.TABLE_MAPPING |= {b"T": decode_timestamp}
    encode.METHODS |= {"shortstr": encode_short_string, "table": encode_table}


def _decode_short_string(value: bytes) -> tuple[int, str]:
    end = value[0] + 1
    return end, bytes(value[1:end]).decode("utf-8", "surrogateescape")


def decode_timestamp(value: bytes) -> tuple[int, datetime]:
    """Decode a timestamp in seconds or a smaller unit; return its size in bytes, and the time.

    Raises struct.error if it is truncated.
    """
    (number,) = _TIME.unpack_from(value)
    if number < _END_OF_SECONDS:
        return _TIME.size, _moment(number)
    moment = float(number)
    while moment >= _END_OF_SECONDS:
        moment /= 1000
    return _TIME.size, datetime.fromtimestamp(moment, tz=UTC)


# Cached, because messages that arrive together were published within a few seconds.
@functools.lru_cache(maxsize=64)
def _moment(seconds: int) -> datetime:
    return datetime.fromtimestamp(seconds, tz=UTC)


def encode_timestamp(moment: datetime) -> bytes:
    """Encode a time in whole seconds; raises struct.error before 1970."""
    # A naive time counts as UTC, as in the client library.
    aware = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
    return _TIME.pack(int(aware.timestamp()))


def decode_table(value: bytes, depth: int = 0) -> tuple[int, dict[str, Any]]:
    """Decode headers; return their size in bytes, and the headers (with their bytes at depth 0).

    Raises ValueError, IndexError or struct.error if they are truncated or contain an unknown type.
    """
    end = _end_within(value)
    table: dict[str, Any] = {}
    offset = 4
    while offset < end:
        used, name = _decode_short_string(value[offset:])
        offset += used
        # The length of a malformed name may exceed the table. In compiled code, a slice must not
        # start after its end.
        used, table[name] = _decode_value(value[offset : max(offset, end)], depth + 1)
        offset += used
    return end, table if depth else HeaderTable(table, bytes(value[:end]))


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
    inner = decode_table if kind == b"F" else _decode_array
    used, found = inner(value[1:], depth)
    return used + 1, found


def encode_short_string(value: str) -> bytes:
    """Encode a short string; raises ValueError if it exceeds 255 bytes."""
    encoded = value.encode("utf-8", "surrogateescape")
    if len(encoded) >= len(_OCTETS):
        raise ValueError("a short string has at most 255 bytes")
    return _OCTETS[len(encoded)] + encoded


# Cached, because most messages have the same header names.
_encode_name: Final = functools.lru_cache(maxsize=256)(encode_short_string)


def encode_table(value: Mapping[str, Any] | None, depth: int = 0) -> bytes:
    """Encode headers; raises ValueError if a name is too long or a value nested too deep."""
    entries = b"".join(
        [
            _encode_name(name) + _encode_value(item, depth + 1)
            for name, item in (value or {}).items()
        ]
    )
    return _LENGTH.pack(len(entries)) + entries


def _encode_value(value: Any, depth: int = 1) -> bytes:  # noqa: ANN401  a header may be anything
    # Strings come first, because most values are strings. pamqp truncates a float to 32 bits,
    # cannot write bytes, and rejects large numbers. A bytearray is left to pamqp, which writes it
    # unchanged, as a type of its own.
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
        return b"F" + encode_table(value, depth)
    if isinstance(value, list):
        items = b"".join([_encode_value(item, depth + 1) for item in value])
        return b"A" + struct.pack(">I", len(items)) + items
    try:
        return bytes(pamqp.encode.encode_table_value(value))
    except (TypeError, ValueError, OverflowError, struct.error):
        return _encode_value(str(value))
