"""Measures `worker.concurrency: auto` and fixed values, on an API whose capacity changes.

The API answers after a fixed time, handles some requests in parallel, queues some more, and answers
429 beyond that. It uses little CPU. `auto` gets time to settle, which fixed values do not need.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from typing import Final, NamedTuple, cast

from bench.lineup import MAIN, Task, named
from bench.queues import OUTBOUND
from bench.rig import Rig
from bench.rounds import BenchError, Options, Row, Tell
from bridge.config import ENV_PREFIX
from tests.faults.bench import eventually

LATENCY_SECONDS: Final = 0.2
FIXED: Final = (5, 10, 20, 50, 100, 200)
AUTO: Final = "auto"
# Seconds to settle and to measure in each phase, for `auto` and for fixed values.
AUTO_SECONDS: Final = (15.0, 45.0)
FIXED_SECONDS: Final = (4.0, 10.0)
COMEBACK: Final = (AUTO, "50")
OUTAGE_SECONDS: Final = 20.0
AFTER_SECONDS: Final = 60.0
START_SECONDS: Final = 60.0
_REASONS: Final = {202: "Accepted", 429: "Too Many Requests", 503: "Service Unavailable"}


class Capacity(NamedTuple):
    """Number of requests that the API handles in parallel, and that it accepts in total."""

    slots: int
    most: int

    def __str__(self) -> str:
        """Format the capacity for the table."""
        return f"{self.slots} at once, 429 beyond {self.most}"


PHASES: Final = (Capacity(20, 40), Capacity(5, 10), Capacity(50, 100), Capacity(10, 10))


class _Connection(asyncio.Protocol):
    """A connection of the worker, without pipelining."""

    def __init__(self, api: "Api") -> None:
        self._api = api
        self._bytes = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._bytes += data
        head, end, body = self._bytes.partition(b"\r\n\r\n")
        length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
        if end and len(body) >= int(length):
            self._bytes = b""
            self._api.take(self)

    def connection_lost(self, _error: Exception | None) -> None:
        self._transport = None

    def answer(self, status: int) -> None:
        if self._transport is None:
            return
        later = "Retry-After: 1\r\n" if status == 503 else ""
        text = f"HTTP/1.1 {status} {_REASONS[status]}\r\n{later}Content-Length: 2\r\n\r\n{{}}"
        self._transport.write(text.encode("ascii"))


class Api:
    """An SMS API with a variable capacity. Without a capacity, it answers 503."""

    def __init__(self) -> None:
        self.capacity: Capacity | None = PHASES[0]
        self.answers: Counter[int] = Counter()
        self._busy = 0
        self._waiting: deque[_Connection] = deque()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        """Serve on a free port, and return the address."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _Connection(self), "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()

    def take(self, connection: _Connection) -> None:
        """Accept or refuse a request."""
        if self.capacity is None:
            self._answer(connection, 503)
        elif self._busy + len(self._waiting) >= self.capacity.most:
            self._answer(connection, 429)
        else:
            self._waiting.append(connection)
            self._work()

    def _work(self) -> None:
        slots = 0 if self.capacity is None else self.capacity.slots
        while self._waiting and self._busy < slots:
            self._busy += 1
            loop = asyncio.get_running_loop()
            loop.call_later(LATENCY_SECONDS, self._finish, self._waiting.popleft())

    def _finish(self, connection: _Connection) -> None:
        self._busy -= 1
        self._answer(connection, 202)
        self._work()

    def _answer(self, connection: _Connection, status: int) -> None:
        self.answers[status] += 1
        connection.answer(status)


def adaptive(rig: Rig, options: Options, tell: Tell) -> list[Row]:
    """Measure each concurrency once. With fewer than 5 rounds, phases are shorter."""
    share = min(1.0, options.rounds / 5)
    rows = []
    for name in (AUTO, *map(str, FIXED)):
        row = asyncio.run(_measure(rig, name, share))
        tell(", ".join(f"{key} {value}" for key, value in row.items()))
        rows.append(row)
    return rows


async def _measure(rig: Rig, name: str, share: float) -> Row:
    settle, measured = AUTO_SECONDS if name == AUTO else FIXED_SECONDS
    row: Row = {"name": name, "runs": 1}
    api = Api()
    async with _working(
        rig, name, api, sum(one.slots for one in PHASES) * share * (settle + measured)
    ):
        for phase in PHASES:
            api.capacity, refused = phase, api.answers[429]
            await asyncio.sleep(settle * share)
            before = api.answers[202]
            await asyncio.sleep(measured * share)
            rate = (api.answers[202] - before) / (measured * share)
            row[str(phase)] = f"{rate:.0f}, {api.answers[429] - refused:,}"
    if name not in COMEBACK:
        return row
    api = Api()
    async with _working(rig, name, api, PHASES[0].slots * (OUTAGE_SECONDS + AFTER_SECONDS)):
        await eventually(lambda: api.answers[202] >= 100, what="100 messages")
        api.capacity = None
        await asyncio.sleep(OUTAGE_SECONDS * share)
        api.answers.clear()
        api.capacity = PHASES[-1]
        await asyncio.sleep(AFTER_SECONDS * share)
    return row | {"comeback": f"{api.answers[202]:,}, {api.answers[429]:,}"}


@asynccontextmanager
async def _working(
    rig: Rig, concurrency: str, api: Api, slot_seconds: float
) -> AsyncIterator[None]:
    """Run a worker on a queue that is kept filled."""
    messages = int(slot_seconds / LATENCY_SECONDS * 1.1) + 1000
    await asyncio.to_thread(rig.queues.make_outbound, messages)
    worker = named(MAIN)
    environ = {**worker.environ, f"{ENV_PREFIX}WORKER__CONCURRENCY": concurrency}
    async with api.open() as url:
        task = Task(amqp_url=rig.broker.url, api_url=url)
        stack = ExitStack()
        stack.enter_context(rig.running(replace(worker, environ=environ), task))
        try:
            await eventually(lambda: api.answers, what="a POST", seconds=START_SECONDS)
            yield
            if not await asyncio.to_thread(rig.queues.count, OUTBOUND):
                raise BenchError("the queue ran empty")
        finally:
            # The worker's drain needs the API.
            await asyncio.to_thread(stack.close)
