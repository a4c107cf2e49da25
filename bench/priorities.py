"""One-time codes behind a campaign: how long from publishing to the POST, beside an idle queue.

    python bench/priorities.py --write

The worker and the broker are real, with `worker.priorities: on`. The API answers after 20 to 50 ms,
chosen at random. 100,000 texts are queued before the worker starts; codes are published at an even
rate, first without them, then from the moment at which the worker has sorted them. The same worker
then empties a queue with priorities off and on. Every message is accounted for. `--write` puts the
table into docs/scaling.md. Exit code 1: the codes' p99 is more than three times the idle one, or a
message was lost or accepted twice, or a worker did not end in time, or it took too long. A message
that was posted again because its first POST had no answer is told, and no fault of the sorting.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final, NamedTuple, cast

import aiormq

from bench.queues import OUTBOUND, TEXT
from bench.usage import read_run_delay
from bridge.amqp.properties import ClientProperties
from bridge.sandbox.broker import private_broker
from bridge.sandbox.processes import Child, Guard, guarded
from bridge.topology.declarations import QUORUM
from soak.figures import conclude, format_table, tell
from soak.rig import Process, run
from tests.faults.bench import PROGRAM, eventually, make_environ

PAGE: Final = Path(__file__).parents[1] / "docs" / "scaling.md"
MARK: Final = "priorities"
CAMPAIGN: Final = 100_000
EMPTIED: Final = 10_000
# So many in all that a p99 is the thirteenth-slowest, and not the whim of three.
CODES_PER_SECOND: Final = 40
CODES_SECONDS: Final = 30
IN_FLIGHT: Final = 50
FASTEST_SECONDS, SLOWEST_SECONDS = 0.02, 0.05
MOST_TIMES: Final = 3
CODES: Final = CODES_PER_SECOND * CODES_SECONDS
HEAD: Final = ("codes published while", "p50", "p99", "slowest", "the worker waited for a CPU")
# Publishes that wait for their confirm at a time.
WINDOW: Final = 1000
# Of all of it: two minutes on an idle machine of two cores.
MAX_SECONDS: Final = 230
SORTED_IN_SECONDS: Final = 100
# More than a worker gives itself for its drain.
GRACE_SECONDS: Final = 30
BACK_SECONDS: Final = 5
QUEUES: Final = (OUTBOUND, f"{OUTBOUND}.urgent", f"{OUTBOUND}.normal")
URGENT: Final[dict[str, Any]] = {"sms-bridge-priority": "urgent"}


class Codes(NamedTuple):
    """How long each code took from publishing to the POST.

    `cpu_wait`: the part of the time for which the worker was ready to run and had no CPU.
    """

    seconds: list[float]
    cpu_wait: float

    @property
    def p99(self) -> float:
        """The time that 99 of 100 do not exceed."""
        return quantiles(self.seconds, n=100)[98]


class Api(asyncio.Protocol):
    """One connection of the worker.

    `posts` has when each key was first posted, in unix seconds, `times` how often it was, and
    `answered` how often the worker was still there for the answer.
    """

    posts: dict[str, float]
    times: Counter[str]
    answered: Counter[str]

    def __init__(self) -> None:
        self._bytes = b""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep what to answer on."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Note a whole request, and answer it a little later."""
        self._bytes += data
        head, end, body = self._bytes.partition(b"\r\n\r\n")
        fields = dict(
            line.partition(": ")[::2] for line in head.decode("latin-1").lower().splitlines()[1:]
        )
        if end and len(body) >= int(fields["content-length"]):
            self._bytes = b""
            key = fields["idempotency-key"]
            self.posts.setdefault(key, time.time())
            self.times[key] += 1
            seconds = random.uniform(FASTEST_SECONDS, SLOWEST_SECONDS)
            asyncio.get_running_loop().call_later(seconds, self._answer, key)

    def _answer(self, key: str) -> None:
        if not self._transport.is_closing():
            self.answered[key] += 1
            self._transport.write(b"HTTP/1.1 202 Accepted\r\nContent-Length: 0\r\n\r\n")


class Bench:
    """A broker, an API, and workers between them."""

    def __init__(self, url: str, api_url: str, folder: Path, guard: Guard) -> None:
        self._url = url
        self._api_url = api_url
        self._folder = folder
        self._guard = guard
        self.posts = Api.posts = {}
        self.times = Api.times = Counter()
        self.answered = Api.answered = Counter()
        self.problems: list[str] = []

    @asynccontextmanager
    async def worker(self, priorities: str) -> AsyncIterator[Process]:
        """Run a worker with this setting."""
        values = {
            "rabbitmq.url": [self._url],
            "sms_api.base_url": self._api_url,
            "sms_api.key": "an-api-key",
            "worker.concurrency": IN_FLIGHT,
            "worker.priorities": priorities,
            "admin.port": 0,
            "log.format": "json",
            "log.level": "warning",
        }
        environ = make_environ(values)
        log = self._folder / f"{time.time()}.log"
        child = Child([*PROGRAM, "worker"], guard=self._guard, log=log, environ=environ)
        try:
            yield Process(child)
        finally:
            # In a thread: the API, which is on this event loop, has to answer what is in flight.
            await asyncio.to_thread(child.end, grace_seconds=GRACE_SECONDS)
            if child.exit_code:
                self.problems.append(f"a worker ended with {child.exit_code}: {child.tail()}")

    @asynccontextmanager
    async def channel(self) -> AsyncIterator[aiormq.abc.AbstractChannel]:
        """Open a channel whose publishes are confirmed."""
        connection = await aiormq.connect(self._url)
        try:
            yield await connection.channel()
        finally:
            await connection.close()

    async def fill(self, name: str, count: int) -> None:
        """Put so many texts into an empty queue."""
        async with self.channel() as channel:
            for queue in QUEUES:
                await channel.queue_delete(queue)
            await channel.queue_declare(OUTBOUND, durable=True, arguments=dict(QUORUM))
            for start in range(0, count, WINDOW):
                keys = (f"{name}-{number}" for number in range(start, min(start + WINDOW, count)))
                await asyncio.gather(*(publish(channel, key) for key in keys))

    async def count(self, queue: str) -> int:
        """Count what is ready in a queue."""
        async with self.channel() as channel:
            return (await channel.queue_declare(queue, passive=True)).message_count or 0

    async def count_left(self, most: int) -> int:
        """Count what is in the queues, once all is back that a worker had when it ended."""
        left = 0

        async def is_back() -> bool:
            nonlocal left
            left = sum([await self.count(queue) for queue in QUEUES])
            return left >= most

        with suppress(AssertionError):
            await eventually(is_back, what="all back", seconds=BACK_SECONDS)
        return left

    async def publish_codes(self, name: str, worker: Process) -> Codes:
        """Publish codes at an even rate to a worker that has begun to send."""
        published: dict[str, float] = {}
        waited, began = read_run_delay(worker.child.pid), time.monotonic()
        async with self.channel() as channel, asyncio.TaskGroup() as group:
            for number in range(CODES):
                key = f"{name}-{number}"
                await asyncio.sleep(began + number / CODES_PER_SECOND - time.monotonic())
                published[key] = time.time()
                group.create_task(publish(channel, key, headers=URGENT))
        await eventually(lambda: published.keys() <= self.posts.keys(), what="all codes posted")
        waited = read_run_delay(worker.child.pid) - waited
        seconds = [self.posts[key] - at for key, at in published.items()]
        return Codes(seconds, waited / (time.monotonic() - began))

    async def send_one(self, name: str) -> None:
        """Publish a text, and return when it was posted: the worker is at work."""
        async with self.channel() as channel:
            await publish(channel, name)
        await eventually(lambda: name in self.posts, what="a worker at work")

    async def empty(self, priorities: str) -> float:
        """Have a full queue emptied; return messages a second, from the first POST on."""
        name = f"rate-{priorities}"
        await self.fill(name, EMPTIED)
        async with self.worker(priorities):
            await eventually(
                lambda: (
                    f"{name}-{EMPTIED - 1}" in self.posts and self.count_posted(name) >= EMPTIED
                ),
                what="all posted",
                seconds=MAX_SECONDS,
            )
        posted = [at for key, at in self.posts.items() if key.startswith(f"{name}-")]
        return EMPTIED / (max(posted) - min(posted))

    def count_posted(self, name: str) -> int:
        """Count the messages of a name that were posted."""
        return sum(key.startswith(f"{name}-") for key in self.posts)

    def account(self, name: str, count: int, *, left: int = 0) -> list[str]:
        """Say what is wrong with messages of which `left` are not posted yet."""
        problems = []
        lost = count - left - self.count_posted(name)
        if lost > 0:
            problems.append(f"{name}: {lost} of {count:,} messages are lost")
        elif lost < 0:
            problems.append(f"{name}: {-lost} of {count:,} messages would be posted once more")
        twice = self._count_repeated(self.answered, name)
        if twice:
            problems.append(f"{name}: {twice} of {count:,} messages were accepted more than once")
        if again := self._count_repeated(self.times, name) - twice:
            tell(f"{name}: {again} of {count:,} messages were posted again for want of an answer")
        return problems

    def _count_repeated(self, times: Counter[str], name: str) -> int:
        return sum(n > 1 for key, n in times.items() if key.startswith(f"{name}-"))


async def publish(
    channel: aiormq.abc.AbstractChannel, key: str, headers: dict[str, Any] | None = None
) -> None:
    """Publish one request and see it confirmed."""
    body = json.dumps({"to": "+491713920001", "from": "Acme", "text": TEXT}).encode()
    properties = ClientProperties(
        message_id=key, delivery_mode=2, timestamp=datetime.now(UTC), headers=headers
    )
    await channel.basic_publish(body, routing_key=OUTBOUND, properties=properties)


async def measure(bench: Bench) -> tuple[str, list[str]]:
    """Measure all of it; return the table, and what is wrong."""
    await bench.fill("none", 0)
    async with bench.worker("on") as worker:
        await bench.send_one("first")
        idle = await bench.publish_codes("idle", worker)
    tell(" ".join(_row("idle", idle)))
    await bench.fill("campaign", CAMPAIGN)
    async with bench.worker("on") as worker:
        began = time.monotonic()
        await eventually(lambda: bench.posts.get("campaign-0"), what="a start")

        async def is_sorted() -> bool:
            return not await bench.count(OUTBOUND)

        await eventually(is_sorted, what="a sorted queue", seconds=SORTED_IN_SECONDS)
        sorted_in = time.monotonic() - began
        posted_meanwhile = bench.count_posted("campaign")
        loaded = await bench.publish_codes("loaded", worker)
        left = await bench.count(f"{OUTBOUND}.normal")
    unposted = await bench.count_left(CAMPAIGN - bench.count_posted("campaign"))
    rates = {which: await bench.empty(which) for which in ("off", "on")}
    rows = [
        _row("nothing else waits", idle),
        _row(f"behind {CAMPAIGN:,} texts, of which {left:,} were left at the end", loaded),
    ]
    table = format_table(HEAD, rows)
    table += (
        f"\n\nThe {CAMPAIGN:,} were there before the worker, which sorted them in "
        f"{sorted_in:.0f} s and posted {posted_meanwhile:,} meanwhile. A queue of {EMPTIED:,} "
        f"was emptied at {rates['off']:,.0f} a second without priorities, with them at "
        f"{rates['on']:,.0f}, {rates['on'] / rates['off']:.2f} of it."
    )
    problems = [
        *bench.problems,
        *bench.account("idle", CODES),
        *bench.account("loaded", CODES),
        *bench.account("campaign", CAMPAIGN, left=unposted),
        *bench.account("rate-off", EMPTIED),
        *bench.account("rate-on", EMPTIED),
    ]
    if (times := loaded.p99 / idle.p99) > MOST_TIMES:
        problems.append(
            f"the codes' p99 is {times:.1f} times the idle one, where the worker waited "
            f"{loaded.cpu_wait:.0%} of the time for a CPU"
        )
    if not left:
        problems.append("the campaign was over before the codes")
    return table, problems


def _row(name: str, codes: Codes) -> tuple[str, ...]:
    figures = (median(codes.seconds), codes.p99, max(codes.seconds))
    return (name, *(f"{1000 * figure:.0f} ms" for figure in figures), f"{codes.cpu_wait:.1%}")


async def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="put the table into the docs")
    arguments = parser.parse_args()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Api, "127.0.0.1", 0)
    api_url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    with (
        private_broker() as broker,
        guarded() as guard,
        tempfile.TemporaryDirectory() as folder,
    ):
        bench = Bench(broker.url, api_url, Path(folder), guard)
        try:
            async with asyncio.timeout(MAX_SECONDS):
                table, problems = await measure(bench)
        except TimeoutError:
            tell(f"FAILED: it takes longer than {MAX_SECONDS} s; run it on an idle machine")
            return 1
    page = PAGE if arguments.write else None
    return conclude(table, problems, page=page, mark=MARK)


if __name__ == "__main__":
    sys.exit(run(main()))
