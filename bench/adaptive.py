"""`worker.concurrency: auto` beside fixed values, on an API whose capacity changes meanwhile.

    python soak/adaptive.py --write

The worker and the broker are real. The API answers after a fixed time, takes so many requests at
once, lets some more wait, and answers 429 to the others; it needs hardly any CPU, so that nothing
else is measured. Fixed values are at their best at once, `auto` is given time to settle.
`--write` puts the tables into docs/operation.md. Exit code 1: `auto` has not kept its promise.
"""

import argparse
import asyncio
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.queues import OUTBOUND, Queues
from bridge.sandbox.broker import private_broker
from bridge.sandbox.processes import Child, Guard, guarded
from soak.figures import Cells, conclude, format_table, tell
from soak.plain_api import Connection, open_api
from soak.rig import Process, run
from tests.faults.bench import PROGRAM, eventually, make_environ

PAGE: Final = Path(__file__).parents[1] / "docs" / "operation.md"
MARK: Final = "adaptive"
LATENCY_SECONDS: Final = 0.2
FIXED: Final = (5, 10, 20, 50, 100, 200)
AUTO: Final = "auto"
SETTLE_SECONDS: Final = 15.0
MEASURE_SECONDS: Final = 45.0
# A fixed value needs no time to find anything.
FIXED_SETTLE_SECONDS: Final = 4.0
FIXED_MEASURE_SECONDS: Final = 10.0
MIN_SHARE: Final = 0.9
OUTAGE_SECONDS: Final = 20.0
AFTER_SECONDS: Final = 60.0
MAX_SECONDS: Final = 1500


@dataclass(frozen=True, slots=True)
class Capacity:
    """How many requests the API works on at once, and how many it lets in, those included."""

    slots: int
    most: int

    def __str__(self) -> str:
        """Say it as the table does."""
        return f"{self.slots} at once, 429 beyond {self.most}"


PHASES: Final = (Capacity(20, 40), Capacity(5, 10), Capacity(50, 100), Capacity(10, 10))
SMALL: Final = Capacity(10, 10)


class Api:
    """An SMS API with a capacity that can be changed; None: it answers 503 to everything."""

    def __init__(self) -> None:
        self.capacity: Capacity | None = None
        self.answers: Counter[int] = Counter()
        self._busy = 0
        self._waiting: deque[Connection] = deque()

    def take(self, connection: Connection) -> None:
        """Take a request, or refuse it."""
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

    def _finish(self, connection: Connection) -> None:
        self._busy -= 1
        self._answer(connection, 202)
        self._work()

    def _answer(self, connection: Connection, status: int) -> None:
        self.answers[status] += 1
        connection.answer(status)


@dataclass(frozen=True, slots=True)
class Measured:
    """What was answered in a phase: accepted per second when settled, and 429s in all of it."""

    per_second: float
    refused: int


class Proof:
    """What all runs share."""

    def __init__(self, url: str, guard: Guard, folder: Path) -> None:
        self._url = url
        self._queues = Queues(url)
        self._guard = guard
        self._folder = folder

    @asynccontextmanager
    async def worker(self, api_url: str, concurrency: str, messages: int) -> AsyncIterator[None]:
        """Run a worker on a queue with so many messages, which have to be enough."""
        await asyncio.to_thread(self._queues.make_outbound, messages)
        values = {
            "rabbitmq.url": [self._url],
            "sms_api.base_url": api_url,
            "sms_api.key": "a-key",
            "worker.concurrency": concurrency,
            "admin.host": "127.0.0.1",
            "admin.port": "0",
            "log.format": "json",
        }
        log = self._folder / f"{concurrency}-{messages}.log"
        child = Child(
            [*PROGRAM, "worker"], guard=self._guard, log=log, environ=make_environ(values)
        )
        process = Process(child)
        try:
            await process.until_consuming()
            yield
            assert process.is_running, child.tail()
            left = await asyncio.to_thread(self._queues.count, OUTBOUND)
            assert left, "the queue has run empty"
        finally:
            process.kill()

    async def change(self, concurrency: str) -> list[Measured]:
        """Change the API's capacity under a worker, and measure it in each phase."""
        is_auto = concurrency == AUTO
        settle = SETTLE_SECONDS if is_auto else FIXED_SETTLE_SECONDS
        measure = MEASURE_SECONDS if is_auto else FIXED_MEASURE_SECONDS
        best = sum(phase.slots for phase in PHASES) / LATENCY_SECONDS
        needed = int(best * (settle + measure) * 1.1) + 1000
        found = []
        api = Api()
        async with open_api(api.take) as url:
            api.capacity = PHASES[0]
            async with self.worker(url, concurrency, needed):
                for phase in PHASES:
                    refused = api.answers[429]
                    api.capacity = phase
                    await asyncio.sleep(settle)
                    before, began = api.answers[202], time.monotonic()
                    await asyncio.sleep(measure)
                    rate = (api.answers[202] - before) / (time.monotonic() - began)
                    found.append(Measured(rate, api.answers[429] - refused))
                    tell(f"{concurrency}: {phase}: {rate:.0f}/s, {found[-1].refused} x 429")
        return found

    async def come_back_small(self, concurrency: str) -> tuple[int, int]:
        """Have the API fail for a while and come back small; count what it takes and refuses."""
        needed = int(SMALL.slots / LATENCY_SECONDS * (OUTAGE_SECONDS + AFTER_SECONDS)) * 2
        api = Api()
        async with open_api(api.take) as url:
            api.capacity = PHASES[0]
            async with self.worker(url, concurrency, needed):
                await eventually(lambda: api.answers[202] >= 500, what="500 messages")
                api.capacity = None
                await asyncio.sleep(OUTAGE_SECONDS)
                api.answers.clear()
                api.capacity = SMALL
                await asyncio.sleep(AFTER_SECONDS)
                accepted, refused = api.answers[202], api.answers[429]
        tell(f"{concurrency}: after an outage: {accepted} accepted, {refused} x 429")
        return accepted, refused


async def main(*, write: bool) -> int:
    """Measure, print the tables, and return the exit code."""
    folder = Path(tempfile.mkdtemp(prefix="sms-bridge-adaptive-"))
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, task.cancel)
    try:
        async with asyncio.timeout(MAX_SECONDS):
            with private_broker() as broker, guarded() as guard:
                proof = Proof(broker.url, guard, folder)
                names = (AUTO, *map(str, FIXED))
                found = {name: await proof.change(name) for name in names}
                after = {name: await proof.come_back_small(name) for name in (AUTO, "50")}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    tables = f"{_format_phases(found)}\n\n{_format_comeback(after)}"
    problems = [*_judge_phases(found), *_judge_comeback(after)]
    return conclude(tables, problems, page=PAGE if write else None, mark=MARK)


def _best(found: dict[str, list[Measured]], phase: int) -> float:
    return max(runs[phase].per_second for name, runs in found.items() if name != AUTO)


def _judge_phases(found: dict[str, list[Measured]]) -> list[str]:
    return [
        f"{phase}: {found[AUTO][n].per_second:.0f}/s of {_best(found, n):.0f}/s"
        for n, phase in enumerate(PHASES)
        if found[AUTO][n].per_second < MIN_SHARE * _best(found, n)
    ]


def _judge_comeback(after: dict[str, tuple[int, int]]) -> list[str]:
    auto, fixed = (after[name][1] / max(after[name][0], 1) for name in (AUTO, "50"))
    return [] if auto < fixed else [f"{auto:.2f} refusals a message after an outage"]


def _format_phases(found: dict[str, list[Measured]]) -> str:
    rows: list[Cells] = [
        (name, *(f"{one.per_second:.0f}, {one.refused:,}" for one in runs))
        for name, runs in found.items()
    ]
    shares = [f"{found[AUTO][n].per_second / _best(found, n):.0%}" for n in range(len(PHASES))]
    rows.append(("auto of the best fixed", *shares))
    return format_table(("`worker.concurrency`", *map(str, PHASES)), rows)


def _format_comeback(after: dict[str, tuple[int, int]]) -> str:
    rows: Sequence[Cells] = [
        (name, f"{accepted:,}", f"{refused:,}", f"{refused / max(accepted, 1):.2f}")
        for name, (accepted, refused) in after.items()
    ]
    return format_table(("`worker.concurrency`", "accepted", "429s", "429s per message"), rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Adaptive concurrency beside fixed values.")
    parser.add_argument("--write", action="store_true", help="put the tables into the docs")
    sys.exit(run(main(write=parser.parse_args().write)))
