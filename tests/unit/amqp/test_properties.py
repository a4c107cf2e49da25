"""Properties as other clients send them: read as the client library does, and where it cannot."""

import itertools
import math
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from unittest.mock import patch

import pamqp.decode
import pamqp.encode
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pamqp.header import ContentHeader

from bridge.amqp.field_values import (
    MAX_HEADER_DEPTH,
    as_they_came,
    header_bytes,
    tolerate_broken_properties,
)
from bridge.amqp.properties import (
    NAMES,
    ClientProperties,
    Properties,
    as_facts,
    read_properties,
    write_properties,
)

MOMENT = datetime(2026, 11, 21, 12, 34, 56, tzinfo=UTC)
# Behind class, weight and body size.
BEFORE_FLAGS = 12


@pytest.fixture(autouse=True)
def tolerant() -> None:
    tolerate_broken_properties()


@contextmanager
def library_alone() -> Iterator[None]:
    """Let the client library read and write as it does by itself."""
    decode: Any = pamqp.decode
    encode: Any = pamqp.encode
    alone = [
        (decode.METHODS, {"shortstr": decode.short_str, "table": decode.field_table}),
        (decode.METHODS, {"timestamp": decode.timestamp}),
        (decode.TABLE_MAPPING, {b"T": decode.timestamp}),
        (encode.METHODS, {"shortstr": encode.short_string, "table": encode.field_table}),
    ]
    with ExitStack() as stack:
        for methods, own in alone:
            stack.enter_context(patch.dict(methods, own))
        yield


def write(properties: Properties) -> bytes:
    theirs = ClientProperties()
    for name, value in as_facts(properties).items():
        setattr(theirs, name, value)
    return ContentHeader(properties=theirs).marshal()[BEFORE_FLAGS:]


def read_by_library(data: bytes) -> dict[str, Any]:
    header = ContentHeader()
    header.unmarshal(struct.pack(">HHQ", 60, 0, 0) + data)
    return dict(header.properties)


def with_headers(table: bytes) -> bytes:
    """Write properties that are headers alone, from the entries of their table."""
    return struct.pack(">HI", ClientProperties.flags["headers"], len(table)) + table


def entry(value: bytes, name: bytes = b"x") -> bytes:
    return bytes([len(name)]) + name + value


def headers_of(data: bytes) -> dict[str, Any]:
    return read_properties(data).headers or {}


# What the client library reads

EACH: dict[str, Any] = {
    "content_type": "application/json",
    "content_encoding": "gzip",
    "headers": {"one": 1, "two": "zwei"},
    "delivery_mode": 2,
    "priority": 255,
    "correlation_id": "correlation",
    "reply_to": "amq.rabbitmq.reply-to",
    "expiration": "60000",
    "message_id": "größe 👋",
    "timestamp": MOMENT,
    "message_type": "type",
    "user_id": "guest",
    "app_id": "x" * 255,
    "cluster_id": "cluster",
}


def test_every_combination_is_read_and_written_as_by_the_client_library() -> None:
    """Whichever of the 14 properties are there, they are read and written, and no others are.

    Each is there alone, is missing alone, and is there with each other one.
    """
    assert tuple(EACH) == NAMES
    names = set(EACH)
    some = [set[str](), names, *({name} for name in EACH), *(names - {name} for name in EACH)]
    differ = []
    for chosen in [*some, *map(set, itertools.combinations(EACH, 2))]:
        properties = Properties()
        for name in chosen:
            setattr(properties, name, EACH[name])
        with library_alone():
            data, read = write(properties), read_by_library(write(properties))
        if (as_facts(read_properties(data)), write_properties(properties)) != (read, data):
            differ.append(chosen)

    assert differ == []


# The client library reads what is greater as milliseconds.
SECONDS = st.integers(0, 2**32 - 1).map(lambda second: datetime.fromtimestamp(second, tz=UTC))
HEADER_NAMES = st.text(max_size=30)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(width=32, allow_nan=False),
    st.decimals(0, 1000, places=3),
    st.text(max_size=300),
    st.binary(max_size=300).map(bytearray),
    SECONDS,
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(HEADER_NAMES, inner, max_size=4),
    max_leaves=12,
)


@given(headers=st.dictionaries(HEADER_NAMES, VALUES, max_size=5), timestamp=SECONDS)
def test_headers_are_read_as_by_the_client_library(
    headers: dict[str, Any], timestamp: datetime
) -> None:
    with library_alone():
        data = write(Properties(headers=headers, timestamp=timestamp))
        expected = read_by_library(data)

    assert as_facts(read_properties(data)) == expected
    assert read_by_library(data) == expected


def test_flags_that_mean_nothing_are_passed_over() -> None:
    """The two flags that no property has change nothing, as on the broker."""
    (flags,) = struct.unpack(">H", write(Properties(message_id="a"))[:2])

    assert read_properties(struct.pack(">H", flags | 0b11) + b"\x01a").message_id == "a"


# What it cannot


@pytest.mark.parametrize("scale", [1, 10**3, 10**6, 10**9], ids=["s", "ms", "us", "ns"])
def test_a_timestamp_is_scaled_to_seconds(scale: int) -> None:
    """A timestamp in any unit is read as the moment that it means, also in a header."""
    raw = struct.pack(">Q", int(MOMENT.timestamp()) * scale)
    data = struct.pack(">H", ClientProperties.flags["timestamp"]) + raw

    assert read_properties(data).timestamp == MOMENT
    assert headers_of(with_headers(entry(b"T" + raw))) == {"x": MOMENT}
    assert read_by_library(data)["timestamp"] == MOMENT


@given(st.integers(0, 2**64 - 1))
def test_any_timestamp_is_a_moment(raw: int) -> None:
    """No eight bytes are refused as a timestamp."""
    data = struct.pack(">HQ", ClientProperties.flags["timestamp"], raw)

    assert isinstance(read_properties(data).timestamp, datetime)


@given(name=st.binary(max_size=255), text=st.binary(max_size=255), long=st.binary(max_size=300))
def test_any_bytes_are_kept(name: bytes, text: bytes, long: bytes) -> None:
    """A short string, a header's name and its text come and go as bytes of any kind."""
    flags = ClientProperties.flags["headers"] | ClientProperties.flags["message_id"]
    table = entry(b"S" + struct.pack(">I", len(long)) + long, name)
    data = struct.pack(">HI", flags, len(table)) + table + bytes([len(text)]) + text
    if not text:
        # An empty one is written as none.
        flags = ClientProperties.flags["headers"]

    written = struct.pack(">HI", flags, len(table)) + table
    assert write(read_properties(data)) == written + (bytes([len(text)]) + text if text else b"")
    assert read_by_library(data) == as_facts(read_properties(data))


@pytest.mark.parametrize("kind", [b"F", b"A"], ids=["table", "array"])
def test_deep_nesting_is_left_as_bytes(kind: bytes) -> None:
    """What is nested a thousand levels deep is read to a depth, and below it stays bytes."""
    value = b"V"
    for _ in range(1000):
        inner = entry(value) if kind == b"F" else value
        value = kind + struct.pack(">I", len(inner)) + inner
    headers = headers_of(with_headers(entry(value)))
    found: Any = headers["x"]
    depth = 0
    while isinstance(found, dict | list):
        found = found["x"] if isinstance(found, dict) else found[0]
        depth += 1

    assert depth == MAX_HEADER_DEPTH
    assert isinstance(found, bytes)
    assert len(found) > 1000


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b"\xff\xfe", b"\xff\xfe"),
        (bytearray(b"a"), bytearray(b"a")),
        (math.pi, math.pi),
        (2**70, str(2**70)),
        (Decimal("NaN"), "NaN"),
        ({"a": [b"\xff", 2**64]}, {"a": [b"\xff", str(2**64)]}),
        ("lone \ud800", "lone ?"),
    ],
    ids=["bytes", "bytearray", "double", "large", "not-a-number", "nested", "surrogate"],
)
def test_a_header_of_any_value_is_written(value: Any, expected: object) -> None:
    """What the client library cannot write is written as what is nearest to it."""
    properties = Properties(headers={})
    properties.headers = {"x": value}

    assert headers_of(write(properties)) == {"x": expected}


@pytest.mark.parametrize("levels", [MAX_HEADER_DEPTH, MAX_HEADER_DEPTH + 1, 100_000])
@pytest.mark.parametrize(
    "nest", [lambda value: {"x": value}, lambda value: [value]], ids=["table", "array"]
)
def test_no_header_is_nested_too_deep(levels: int, nest: Callable[[Any], Any]) -> None:
    """What can be read again is written, and what is deeper is refused, compiled or not."""
    value: Any = "x"
    for _ in range(levels):
        value = nest(value)
    properties = Properties(headers={})
    properties.headers = {"x": value}

    if levels > MAX_HEADER_DEPTH:
        with pytest.raises(ValueError, match="nested deeper than 32 levels"):
            write(properties)
    else:
        assert headers_of(write(properties)) == {"x": value}


def test_a_short_string_that_is_too_long_is_refused() -> None:
    """A name that has no place in its byte of length is an error, and is not cut."""
    longest = "ä" * 127 + "a"
    assert write_properties(Properties(message_id=longest))[2:] == b"\xff" + longest.encode()
    with pytest.raises(ValueError, match="255"):
        write(Properties(message_id="ä" * 128))


# What nobody can

BEYOND = struct.pack(">I", 100)
UNREADABLE = {
    "nothing": b"",
    "half-the-flags": b"\x80",
    "no-string": struct.pack(">H", ClientProperties.flags["message_id"]),
    "no-octet": struct.pack(">H", ClientProperties.flags["priority"]),
    "half-a-timestamp": struct.pack(">HI", ClientProperties.flags["timestamp"], 1),
    "table-without-end": struct.pack(">H", ClientProperties.flags["headers"])
    + BEYOND
    + entry(b"V"),
    "unknown-type": with_headers(entry(b"q")),
    "inner-table-without-end": with_headers(entry(b"F" + BEYOND)),
    "array-without-end": with_headers(entry(b"A" + BEYOND)),
    "array-with-half-a-length": with_headers(entry(b"A\x00\x00")),
}


@pytest.mark.parametrize("data", UNREADABLE.values(), ids=UNREADABLE)
def test_what_cannot_be_read_is_an_error(data: bytes) -> None:
    """The error is always the same and quotes nothing, and reading comes to its end."""
    with pytest.raises(ValueError, match=r"^the properties of a message cannot be read$"):
        read_properties(data)


@given(flags=st.integers(0, 2**16 - 1), data=st.binary(max_size=200))
def test_any_bytes_are_read_or_an_error(flags: int, data: bytes) -> None:
    """Whatever a header holds, it is read or refused."""
    try:
        read = read_properties(struct.pack(">H", flags) + data)
    except ValueError:
        return
    assert isinstance(read, Properties)


# Headers to be written back

TEXT = struct.pack(">I", 4) + b"\xffabc"
KINDS: dict[str, bytes] = {
    "boolean": b"t\x01",
    "int8": b"b\xff",
    "uint8": b"B\xff",
    "int16": b"s\xff\xfe",
    "uint16": b"u\xff\xfe",
    "int32": b"I\xff\xff\xff\xfe",
    "uint32": b"i\xff\xff\xff\xfe",
    "int64": b"l" + bytes(7) + b"\x01",
    "uint64": b"L" + bytes(7) + b"\x01",
    "float32": b"f" + struct.pack(">f", 0.1),
    "float64": b"d" + struct.pack(">d", 0.1),
    "decimal": b"D\x02" + struct.pack(">I", 314),
    "text": b"S" + TEXT,
    "bytes": b"x" + TEXT,
    "microseconds": b"T" + struct.pack(">Q", 1_795_323_149_123_456),
    "nothing": b"V",
    "another_nothing": b"\0",
    "array": b"A" + struct.pack(">I", 8) + b"f" + struct.pack(">f", 0.1) + b"B\x01V",
    "empty_array": b"A" + bytes(4),
    "table": b"F" + struct.pack(">I", 7) + entry(b"f" + struct.pack(">f", 0.1)),
    "empty_table": b"F" + bytes(4),
}


@pytest.mark.parametrize("kind", KINDS)
def test_headers_are_written_back_as_they_came(kind: str) -> None:
    data = with_headers(entry(b"t\x01", b"a") + entry(KINDS[kind], b"gr\xf6\xdfe") + entry(b"V"))
    properties = read_properties(data)
    properties.headers = as_they_came(properties.headers)

    assert write_properties(properties) == data


def test_every_type_is_written_back() -> None:
    """The types above are all that the client library reads."""
    assert {value[:1] for value in KINDS.values()} == pamqp.decode.TABLE_MAPPING.keys()


def test_headers_that_were_not_read_are_as_they_are() -> None:
    """Headers that we have made are copied by value; none are none."""
    own = {"a": 1}
    copied = as_they_came(own)

    assert (copied, as_they_came(None)) == ({"a": 1}, {})
    assert copied is not own


@given(headers=st.dictionaries(HEADER_NAMES, VALUES, max_size=5))
def test_size_of_a_header(headers: dict[str, Any]) -> None:
    """A header takes as many bytes as are counted."""
    without = len(write_properties(Properties(headers={}, message_id="m")))
    counted = sum(header_bytes(name, value) for name, value in headers.items())

    assert len(write_properties(Properties(headers=headers, message_id="m"))) == without + counted


def test_a_name_that_reaches_beyond_its_table_has_no_value() -> None:
    """The table ends where it says, and what stands behind it is read as ever."""
    flags = ClientProperties.flags["headers"] | ClientProperties.flags["message_id"]
    table = b"\x08abc"
    read = read_properties(struct.pack(">HI", flags, len(table)) + table + b"\x0dan-id-of-ours")

    assert read.headers == {"abc\ran-i": None}
    assert read.message_id == "an-id-of-ours"


@given(table=st.binary(max_size=60))
@example(table=b"\xffabc")
def test_whatever_is_read_can_be_written_back(table: bytes) -> None:
    """No table that can be read, however broken, keeps a copy from being made."""
    try:
        headers = headers_of(with_headers(table))
    except ValueError:
        return

    assert write_properties(Properties(headers=as_they_came(headers), message_id="m"))
