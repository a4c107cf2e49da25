"""Everything that strangers do to an open port, all at once, as a process of its own.

`python tests/faults/attack.py PORT` attacks until its standard input ends, then prints as JSON
what the port did: for each attack how often, with which last statuses, and how long it took.
"""

import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

UNSIGNED: Final = b"POST /webhooks HTTP/1.1\r\nHost: localhost\r\n"
# Without a signature no body is read.
HEAD: Final = UNSIGNED + b"X-Service-Signature: %s\r\n" % (b"0" * 64)
CHUNKED: Final = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
FORGED: Final = HEAD + b"Content-Length: 2\r\n\r\n{}"
HELLO: Final = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
BLOCK_BYTES: Final = 32768
# Nobody may hold a connection for longer, whatever its limits are.
GUARD_SECONDS: Final = 60.0


def block(unit: bytes) -> bytes:
    """Repeat bytes to what one write takes."""
    return unit * (BLOCK_BYTES // len(unit))


@dataclass
class Attack:
    """What one kind of stranger sends, again and again on new connections.

    `says` is sent first, then `repeats` every `every_seconds`; who `leaves` awaits no answer.
    """

    says: Callable[[], bytes]
    repeats: bytes = b""
    every_seconds: float = 0.0
    leaves: bool = False
    parallel: int = 2
    pause_seconds: float = 0.1
    statuses: Counter[str] = field(default_factory=Counter)
    longest_seconds: float = 0.0


def saying(data: bytes) -> Callable[[], bytes]:
    """Say the same each time."""
    return lambda: data


ATTACKS: Final[dict[str, Attack]] = {
    "silent": Attack(saying(b""), parallel=200),
    "half a request line": Attack(saying(b"POST /web"), parallel=50),
    "half a header": Attack(saying(HEAD + b"X-Half: a"), parallel=50),
    "header, a byte a second": Attack(saying(HEAD + b"X: "), b"a", 1.0, parallel=50),
    "body, a byte a second": Attack(
        saying(HEAD + b"Content-Length: 999\r\n\r\n{"), b"a", 1.0, parallel=100
    ),
    "chunks, a byte a second": Attack(saying(CHUNKED), b"1\r\na\r\n", 1.0, parallel=50),
    "1 GB announced": Attack(saying(HEAD + b"Content-Length: 1000000000\r\n\r\n"), block(b"a")),
    "chunks without end": Attack(saying(CHUNKED), b"7fff\r\n%s\r\n" % (b"a" * 0x7FFF)),
    "chunk of 2^60 bytes": Attack(saying(CHUNKED + b"fffffffffffffff\r\n"), block(b"a")),
    "chunk size beyond 64 bits": Attack(saying(CHUNKED + b"f" * 17 + b"\r\n")),
    "one-byte chunks": Attack(saying(CHUNKED), block(b"1\r\na\r\n"), pause_seconds=0.5),
    "chunk extension without end": Attack(saying(CHUNKED + b"1;"), block(b"a")),
    "trailers without end": Attack(saying(CHUNKED + b"0\r\n"), block(b"X: y\r\n")),
    "header without end": Attack(saying(HEAD + b"X: "), block(b"a")),
    "headers without end": Attack(saying(HEAD), block(b"X: y\r\n")),
    "empty lines without end": Attack(saying(b""), block(b"\r\n")),
    "random bytes": Attack(lambda: b"\x00" + os.urandom(1000)),
    "TLS": Attack(saying(HELLO + os.urandom(500))),
    "length and chunks": Attack(saying(HEAD + b"Content-Length: 5\r\n" + CHUNKED[len(HEAD) :])),
    "100 requests at once": Attack(saying(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 100)),
    "forged": Attack(saying(FORGED.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))),
    "unsigned body without end": Attack(
        saying(UNSIGNED + b"Content-Length: 262144\r\n\r\n"), block(b"a")
    ),
    "leaves before the answer": Attack(saying(FORGED), leaves=True),
    "leaves in the body": Attack(saying(HEAD + b"Content-Length: 9\r\n\r\n{"), leaves=True),
}


async def write(writer: asyncio.StreamWriter, attack: Attack) -> None:
    """Send what the attack sends until it is told otherwise."""
    with suppress(OSError):
        while attack.repeats:
            await asyncio.sleep(attack.every_seconds)
            writer.write(attack.repeats)
            await writer.drain()


async def read(reader: asyncio.StreamReader) -> bytes:
    """Read until the port closes the connection."""
    answers = b""
    with suppress(OSError):
        async with asyncio.timeout(GUARD_SECONDS):
            while data := await reader.read(BLOCK_BYTES):
                answers += data
    return answers


def last_status(answers: bytes) -> str:
    """Find the status of the last answer."""
    _, found, rest = answers.rpartition(b"HTTP/1.1 ")
    return rest[:3].decode() if found else "closed"


async def strike(port: int, attack: Attack) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    started = time.monotonic()
    writer.write(attack.says())
    if attack.leaves:
        writer.close()
        attack.statuses["left"] += 1
        return
    writing = asyncio.create_task(write(writer, attack))
    try:
        attack.statuses[last_status(await read(reader))] += 1
    finally:
        writing.cancel()
        writer.transport.abort()
    attack.longest_seconds = max(attack.longest_seconds, time.monotonic() - started)


async def keep_striking(port: int, attack: Attack, stop: asyncio.Event) -> None:
    """Attack until it is enough."""
    while not stop.is_set():
        try:
            await strike(port, attack)
        except OSError:
            attack.statuses["no connection"] += 1
        with suppress(TimeoutError):
            async with asyncio.timeout(attack.pause_seconds):
                await stop.wait()


async def lines() -> AsyncIterator[bytes]:
    """Yield the lines of the standard input."""
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    while line := await reader.readline():
        yield line


async def main(port: int) -> None:
    """Attack in every way at once, and report."""
    # Real strangers have computers of their own, and take no time from ours.
    os.nice(5)
    stop = asyncio.Event()
    tasks = [
        asyncio.create_task(keep_striking(port, attack, stop))
        for attack in ATTACKS.values()
        for _ in range(attack.parallel)
    ]
    async for _ in lines():
        pass
    stop.set()
    await asyncio.gather(*tasks)
    report = {
        name: {"statuses": attack.statuses, "longest_seconds": attack.longest_seconds}
        for name, attack in ATTACKS.items()
    }
    print(json.dumps(report))  # noqa: T201  this is what it is for


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
