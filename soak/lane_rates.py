"""How fast workers with lanes are, beside the same workers without order.

    python soak/lane_rates.py --write

Three workers, 20 requests in flight each, empty a queue of messages to 500 numbers; the APIs answer
after different times. Measured is from when all workers consume until nine tenths are accepted:
what waits at the very end are the numbers that have most. The sorting is a part of it: all messages
are in the main queue before the first worker starts. `--write` puts the table into docs/scaling.md.
Exit code 1: lanes have less than 0.8 of what is unordered, and this computer's cores are not what
limits them.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import aiormq

from bench.queues import TEXT, WINDOW
from bench.usage import read_usage
from bridge.amqp.properties import ClientProperties
from soak.figures import Cells, conclude, format_table, tell
from soak.lanes import Scale, settings
from soak.plain_api import Connection, open_api
from soak.rig import Process, Stand, open_stand, run
from tests.faults.bench import eventually, make_numbers

PAGE: Final = Path(__file__).parents[1] / "docs" / "scaling.md"
MARK: Final = "lane-rates"
WORKERS: Final = 3
NUMBERS: Final = 500
PART: Final = 0.9
# After how many seconds the API answers, and how many messages there are: for 20 seconds, or a few
# where it does not set the pace.
SCENES: Final = ((0.25, 6_000), (0.04, 25_000), (0.02, 30_000), (0.0, 30_000))
MAX_SECONDS: Final = 90
# Of all cores: with more than this there is no time left for more messages.
USED_UP: Final = 0.85
WORTH_OF_UNORDERED: Final = 0.8
UNORDERED: Final[dict[str, Any]] = {"worker__ordering": "none", "worker__lanes": None}


class Speed(NamedTuple):
    """Messages a second, and the CPU time of each, in microseconds."""

    per_second: float
    broker_us: float
    workers_us: float
    api_us: float

    @property
    def cores(self) -> float:
        """How many cores all that takes."""
        return self.per_second * (self.broker_us + self.workers_us + self.api_us) / 1e6


class Service:
    """Accepts everything, after so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.accepted = 0

    def take(self, connection: Connection) -> None:
        """Take a request."""
        if self._seconds:
            asyncio.get_running_loop().call_later(self._seconds, self._accept, connection)
        else:
            self._accept(connection)

    def _accept(self, connection: Connection) -> None:
        self.accepted += 1
        connection.answer(202)


async def fill(url: str, queue: str, count: int) -> None:
    """Publish so many messages."""
    numbers, choose = make_numbers(NUMBERS), random.Random(1).choice
    connection = await aiormq.connect(url)
    channel = await connection.channel()

    async def publish(place: int) -> None:
        body = {"to": choose(numbers), "from": "Acme", "text": TEXT}
        properties = ClientProperties(
            message_id=f"{queue}-{place}", timestamp=datetime.now(UTC), delivery_mode=2
        )
        await channel.basic_publish(
            json.dumps(body).encode(), routing_key=queue, properties=properties
        )

    try:
        for start in range(0, count, WINDOW):
            await asyncio.gather(*map(publish, range(start, min(start + WINDOW, count))))
    finally:
        await connection.close()


async def measure(stand: Stand, seconds: float, messages: int, **changed: Any) -> Speed:
    """Have a full queue emptied by workers with these settings."""
    service = Service(seconds)
    async with stand.rig() as rig, open_api(service.take) as api_url:
        await rig.declare_main()
        await fill(rig.broker.url, rig.queue, messages)
        scale = Scale(rig, sms_api__base_url=api_url, **changed)
        await scale.to(WORKERS)
        began, before, used = time.monotonic(), service.accepted, _usage(stand, scale.workers)
        await eventually(
            lambda: service.accepted >= PART * messages, what="emptied", seconds=MAX_SECONDS
        )
        took, done = time.monotonic() - began, service.accepted - before
        spent = zip(_usage(stand, scale.workers), used, strict=True)
        return Speed(done / took, *(1e6 * (now - at) / done for now, at in spent))


def _usage(stand: Stand, workers: list[Process]) -> tuple[float, float, float]:
    return (
        read_usage([stand.broker.pid]).cpu_seconds,
        read_usage(worker.child.pid for worker in workers).cpu_seconds,
        time.process_time(),
    )


def _row(seconds: float, plain: Speed, ordered: Speed) -> Cells:
    return (
        f"{1000 * seconds:.0f} ms" if seconds else "at once",
        f"{plain.per_second:,.0f}",
        f"{ordered.per_second:,.0f}",
        f"{ordered.per_second / plain.per_second:.2f}",
        *(" / ".join(f"{us:.0f}" for us in speed[1:]) for speed in (plain, ordered)),
    )


HEAD: Final = (
    "the API answers after",
    "unordered, a second",
    "in lanes",
    "of it",
    "µs of CPU each: broker / workers / API",
    "in lanes",
)


async def main() -> int:
    """Measure all of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="put the table into the docs")
    arguments = parser.parse_args()
    rows, problems = [], []
    async with open_stand() as stand:
        for seconds, messages in SCENES:
            plain = await measure(stand, seconds, messages, **settings(**UNORDERED))
            ordered = await measure(stand, seconds, messages, **settings())
            rows.append(_row(seconds, plain, ordered))
            tell(" ".join(rows[-1]))
            is_slow = ordered.per_second < WORTH_OF_UNORDERED * plain.per_second
            if is_slow and ordered.cores < USED_UP * (os.cpu_count() or 1):
                problems.append(f"an API of {seconds:g} s: lanes are slower than 0.8 of unordered")
    page = PAGE if arguments.write else None
    return conclude(format_table(HEAD, rows), problems, page=page, mark=MARK)


if __name__ == "__main__":
    sys.exit(run(main()))
