"""What careless publishers and strangers send: no send requests, and bytes that are no HTTP."""

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from random import Random
from typing import Any, Final

from tests.faults.attack import BLOCK_BYTES, CHUNKED, FORGED, HEAD

READ_SECONDS: Final = 2.0
MAX_EDITS: Final = 6
MAX_PIECES: Final = 5
# No header that is refused holds a number of this range.
_NUMBER: Final = "+491713920000"
_REQUEST: Final = {"to": _NUMBER, "from": "Soak", "text": "never sent"}

_BODIES: Final[Sequence[Callable[[Random], bytes]]] = (
    lambda _rng: b"",
    lambda _rng: b"{",
    lambda _rng: b"[]",
    lambda _rng: b"null",
    lambda _rng: b"[" * 100_000,
    lambda _rng: b"\xef\xbb\xbf" + json.dumps(_REQUEST).encode(),
    lambda _rng: json.dumps(_REQUEST).encode("utf-16"),
    lambda _rng: b'{"to": "%s", "to": "%s"}' % (_NUMBER.encode(), _NUMBER.encode()),
    lambda _rng: json.dumps({**_REQUEST, "text": "\ud800"}).encode(),
    lambda _rng: json.dumps({**_REQUEST, "text": "x" * 100_000}).encode(),
    lambda _rng: json.dumps({**_REQUEST, "to": 491713920000}).encode(),
    lambda _rng: json.dumps({**_REQUEST, "to": float("inf")}).encode(),
    lambda _rng: json.dumps({**_REQUEST, "from": None, "text": [1]}).encode(),
    lambda _rng: json.dumps({**_REQUEST, "mesage": "?"}).encode(),
    lambda rng: rng.randbytes(rng.randrange(1, 5000)),
    lambda rng: _cut(rng, json.dumps(_REQUEST).encode()),
)
_VALUES: Final[Sequence[object]] = (
    *(
        True,
        bytearray(b"\xff\xfe"),
        [1, [2, [3]]],
        {"a": {"b": bytearray(b"c")}},
        "yesterday",
        "",
        "9" * 200,
    ),
    *(10**13, -(10**15), -1.5, "2026-02-30T00:00:00Z", "x" * 20_000),
)
_HEADERS: Final = (
    *("sms-bridge-expires-at", "sms-bridge-not-before", "sms-bridge-on-uncertain"),
    *("sms-bridge-ordering-key", "sms-bridge-expire-at"),
)
# What ids begin with; none is longer than 255 bytes with a number behind it.
_MESSAGE_IDS: Final = ("", "x" * 245, "é" * 122, "\x00\r\n", "%00", "a b")
# Moments of publishing begin here, in unix seconds.
_FIRST_SECOND: Final = 1_700_000_000

_TOKENS: Final = (
    *(b"\r\n", b"\n", b"\r", b"\0", b" ", b":", b"\r\n\r\n", b"\xff" * 10, b"A" * 70_000),
    *(b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: gzip, chunked\r\n"),
    *(b"Content-Length: -1\r\n", b"Content-Length: 99999999999999999999\r\n"),
    *(b"Content-Length: 2, 2\r\n", b"Content-Length: +2\r\n", b"Content-Length: \r\n"),
    *(b"Expect: 100-continue\r\n", b"Connection: Upgrade\r\nUpgrade: websocket\r\n"),
    *(b"X-Service-Signature: \xc3\xa9\r\n", b"X: y\r\n" * 300, b" folded\r\n"),
    *(b"ffffffffffffffff\r\n", b"-1\r\n", b"0x2\r\n", b"1;a=b\r\n", b"HTTP/9.9"),
)
_CHUNKS: Final = b"2\r\n{}\r\n0\r\nX-Trailer: y\r\n\r\n"
_GENUINE_FORMS: Final = (
    FORGED,
    FORGED * 20,
    CHUNKED + _CHUNKS,
    (CHUNKED + _CHUNKS) * 3 + FORGED,
    HEAD + b"Content-Length: 5000\r\n\r\n" + b"a" * 5000,
    b"GET /webhooks HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST http://x/webhooks HTTP/1.0\r\n\r\n",
)


def _cut(rng: Random, data: bytes) -> bytes:
    return data[: rng.randrange(1, len(data))]


def make_malformed(rng: Random, number: int) -> tuple[bytes, dict[str, Any]]:
    """Make the body and the properties of a message that is no send request.

    No two numbers make the same message: those of the same id and body are one, and without an id
    those that were published at the same moment.
    """
    begin = rng.choice(_MESSAGE_IDS)
    properties: dict[str, Any] = {
        "message_id": begin and f"{begin}{number}",
        "timestamp": datetime.fromtimestamp(_FIRST_SECOND + number, UTC),
    }
    if rng.random() < 0.5:
        return rng.choice(_BODIES)(rng), properties
    headers = {rng.choice(_HEADERS): rng.choice(_VALUES), "x-any": rng.choice(_VALUES)}
    return json.dumps(_REQUEST).encode(), properties | {"headers": headers}


def fuzz(rng: Random) -> list[bytes]:
    """Make a request that nobody signed, edit it, and cut it into what is written at once."""
    data = bytearray(rng.choice(_GENUINE_FORMS))
    for _ in range(rng.randrange(MAX_EDITS + 1)):
        place = rng.randrange(len(data) + 1)
        end = place + rng.randrange(1, 40)
        match rng.randrange(4):
            case 0:
                data[place:place] = rng.choice(_TOKENS)
            case 1:
                del data[place:end]
            case 2:
                data[place:place] = data[place:end]
            case _:
                data[place : place + 1] = rng.randbytes(1)
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(MAX_PIECES)))
    return [bytes(data[a:b]) for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


async def visit(port: int, rng: Random) -> None:
    """Send one fuzzed request; half of the visitors then say no more, and wait for an answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(READ_SECONDS):
                for piece in fuzz(rng):
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
                if rng.random() < 0.5:
                    writer.write_eof()
                while rng.random() < 0.9 and await reader.read(BLOCK_BYTES):
                    pass
    finally:
        writer.transport.abort()
