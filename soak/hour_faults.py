"""Faults of the soak of an hour, beside those that the nemesis knows of itself.

Both roles reach the broker through one proxy, the worker the service through another one.
"""

import asyncio
import struct
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, Final, TypeAlias

from soak.bench import Bench
from soak.nemesis import Act, Card
from tests.faults.amqp_proxy import ACK, DELIVER, Alter, AmqpProxy, Method, Sender, misnumber
from tests.faults.http_proxy import HttpProxy, Spoil

# How long to wait for a frame that is to be spoiled.
TRAP_SECONDS: Final = 10.0
MAX_NTH: Final = 20
# The bridge tells of a frame that its own length contradicts as of an error that it did not expect.
CUT_SHORT: Final = "cut short"

HALVES, GARBAGE = "API cuts its answers", "API answers garbage"
# While one of these is on, an answer that the service has logged need not reach the worker.
SPOILING: Final = frozenset({HALVES, GARBAGE})

_HEAD_BYTES: Final = 7
_GARBAGE: Final = (
    b"",
    b"\x00\xff\xfe not HTTP\r\n\r\n",
    b"HTTP/1.1 2000 OK\r\n\r\n",
    b"HTTP/1.1 202 OK\r\nContent-Length: -5\r\n\r\n",
    b"HTTP/1.1 202 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"HTTP/1.1 200 OK\r\nX: " + b"a" * 200_000,
    b"HTTP/1.1 100 Continue\r\n\r\n" * 50,
)

_AsyncAct: TypeAlias = Callable[[], Coroutine[Any, Any, tuple[float, str]]]


def _break_end(frame: bytes) -> bytes:
    return frame[:-1] + b"\x00"


def _name_unknown_method(frame: bytes) -> bytes:
    return frame[:_HEAD_BYTES] + struct.pack(">HH", 60, 199) + frame[_HEAD_BYTES + 4 :]


def _cut_short(frame: bytes) -> bytes:
    payload = frame[_HEAD_BYTES:-1]
    kept = payload[: len(payload) // 2]
    return frame[:3] + struct.pack(">I", len(kept)) + kept + frame[-1:]


# One such frame ends its channel or its connection: the broker closes it, or the bridge.
_BAD_FRAMES: Final[Mapping[str, tuple[Sender, Method, Alter]]] = {
    "channel closed": ("client", ACK, misnumber),
    "delivery without its end": ("broker", DELIVER, _break_end),
    "confirm without its end": ("broker", ACK, _break_end),
    "unknown method": ("broker", DELIVER, _name_unknown_method),
    f"delivery {CUT_SHORT}": ("broker", DELIVER, _cut_short),
    f"confirm {CUT_SHORT}": ("broker", ACK, _cut_short),
}


class HourFaults:
    """Brings them on; `acts` are for the nemesis, which is a thread of its own.

    `spoiled` has the keys of the POSTs whose answer was spoiled, `keys` counts the API keys that
    the worker was given.
    """

    def __init__(
        self, bench: Bench, amqp: AmqpProxy, http: HttpProxy, key_file: Path, rng: Random
    ) -> None:
        self.spoiled: set[str] = set()
        self.keys = 0
        self._bench = bench
        self._amqp = amqp
        self._http = http
        self._key_file = key_file
        self._random = rng
        self._loop = asyncio.get_running_loop()

    @property
    def acts(self) -> dict[Card, Act]:
        """All of them, by their group and kind."""
        acts: dict[Card, _AsyncAct] = {
            ("broker", "connections cut"): self._cut_connections,
            ("api", HALVES): lambda: self._spoil_answers(self._halve),
            ("api", GARBAGE): lambda: self._spoil_answers(self._garble),
            ("api", "API key rotated"): self._rotate_key,
        }
        for kind, (sender, method, alter) in _BAD_FRAMES.items():
            acts["broker", kind] = self._spoiling(sender, method, alter)
        return {card: self._in_loop(act) for card, act in acts.items()}

    def _in_loop(self, act: _AsyncAct) -> Act:
        return lambda: asyncio.run_coroutine_threadsafe(act(), self._loop).result()

    async def _cut_connections(self) -> tuple[float, str]:
        self._amqp.cut(self._random.choice(["", *self._amqp.names]))
        return time.time(), ""

    def _spoiling(self, sender: Sender, method: Method, alter: Alter) -> _AsyncAct:
        async def spoil_one() -> tuple[float, str]:
            trap = self._amqp.trap(sender, method, alter, nth=self._random.randrange(1, MAX_NTH))
            with suppress(TimeoutError):
                async with asyncio.timeout(TRAP_SECONDS):
                    await trap.sprung.wait()
            self._amqp.traps.remove(trap)
            return time.time(), "" if trap.sprung.is_set() else "(no such frame came)"

        return spoil_one

    async def _spoil_answers(self, spoil: Spoil) -> tuple[float, str]:
        seconds = self._random.uniform(2, 8)
        self._http.spoil = spoil
        await asyncio.sleep(seconds)
        self._http.spoil = None
        return time.time(), f"{seconds:.0f} s"

    def _halve(self, request: bytes, answer: bytes) -> bytes:
        self._note_spoiled(request)
        return answer[: self._random.randrange(len(answer))]

    def _garble(self, request: bytes, _answer: bytes) -> bytes:
        self._note_spoiled(request)
        return self._random.choice(_GARBAGE)

    def _note_spoiled(self, request: bytes) -> None:
        head, _, _ = request.partition(b"\r\n\r\n")
        for line in head.split(b"\r\n"):
            name, _, value = line.partition(b":")
            if name.lower() == b"idempotency-key":
                self.spoiled.add(value.strip().decode("ascii"))

    async def _rotate_key(self) -> tuple[float, str]:
        """Have the service refuse the key for some seconds, then give the worker another."""
        await asyncio.to_thread(self._bench.set_faults, {"status": 401})
        await asyncio.sleep(self._random.uniform(1, 4))
        self.keys += 1
        fresh = self._key_file.with_suffix(".new")
        fresh.write_text(f"key-{self.keys}\n", encoding="ascii")
        fresh.replace(self._key_file)
        await asyncio.to_thread(self._bench.set_faults)
        return time.time(), ""
