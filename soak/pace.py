"""Keep and use a limit that workers share, while they are started, stopped and killed.

    python soak/pace.py --write

Broker and workers are processes. Two moments of each request are noted: when its worker sends it,
and when the service reads it, which is later by whatever the machine has else to do. The limit is
kept as sent, however busy the machine is; it is used, and requests come in as evenly, where there
is CPU time for all. `--write` puts the table into docs/scaling.md. Exit code 1: a promise is not
kept.
"""

import argparse
import asyncio
import itertools
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.queues import Queues
from bridge.sandbox.broker import private_broker
from bridge.sandbox.processes import Guard, guarded
from soak.figures import Cells, conclude, format_table, tell
from soak.plain_api import Connection, open_api
from soak.rig import run
from tests.faults.bench import eventually, make_environ
from tests.forked import ForkedChild
from tests.simulation.windows import fewest_in, most_in

PAGE: Final = Path(__file__).parents[1] / "docs" / "scaling.md"
MARK: Final = "pace"
SCALES: Final = (1, 3, 1, 8)
LIMIT: Final = 100
BURST: Final = 5
# For each number of workers, from when all have their parts: longer than the longest window.
PHASE_SECONDS: Final = 11.0
MESSAGES: Final = 9000
# What is promised: of the limit in any second, in any ten, and until the parts are right.
MOST: Final = 1.05
FEWEST: Final = 0.9
FOLLOW_SECONDS: Final = 2.0
END_SECONDS: Final = 30.0
MAX_SECONDS: Final = 230


class Service:
    """An SMS service that accepts everything at once, and notes when."""

    def __init__(self) -> None:
        self.arrivals: list[float] = []

    def take(self, connection: Connection) -> None:
        """Accept a request."""
        self.arrivals.append(time.monotonic())
        connection.answer(202)


class PacedChild(ForkedChild):
    """A process of `soak/paced_worker.py`."""

    program = "soak.paced_worker"


class Worker:
    """One worker process, and what it notes; see `soak/paced_worker.py`."""

    def __init__(self, folder: Path, name: str, guard: Guard, environ: dict[str, str]) -> None:
        self._notes = folder / f"{name}.notes"
        self.child = PacedChild(
            [str(self._notes), "worker"],
            guard=guard,
            log=folder / f"{name}.log",
            environ=environ,
        )

    def notes(self, what: str) -> list[tuple[float, str]]:
        """Return the moments of notes, with what follows the word."""
        if not self._notes.exists():
            return []
        lines = self._notes.read_text(encoding="ascii").rpartition("\n")[0].splitlines()
        parts = (line.split(maxsplit=2) for line in lines)
        return [(float(at), " ".join(rest)) for at, word, *rest in parts if word == what]

    def tokens(self, sender: str | None = None) -> list[float]:
        """Return when it spent its tokens, those of one sender if it is named."""
        return [at for at, one in self.notes("token") if sender in {None, one}]

    def waits(self) -> list[tuple[float, float]]:
        """Return from when to when it knew that it had to keep still after a 429."""
        told = ((at, float(seconds)) for at, seconds in self.notes("closed"))
        return [(at, at + seconds) for at, seconds in told if seconds > 0]

    def shares_with(self, number: int) -> float | None:
        """Return since when it has divided the limit by so many; None when it does not."""
        since = None
        for at, told in self.notes("share"):
            since = None if int(told) != number else since or at
        return since

    @property
    def begins_at(self) -> float:
        """When it knew its first share, before its first token."""
        return self.notes("share")[0][0]


class Crew:
    """Workers that come and go."""

    def __init__(self, broker_url: str, api_url: str, guard: Guard, folder: Path) -> None:
        self._environ = make_environ(
            {
                "rabbitmq.url": [broker_url],
                "sms_api.base_url": api_url,
                "sms_api.key": "a-key",
                "worker.concurrency": "20",
                "worker.rate_limit.per_second": str(LIMIT),
                "worker.rate_limit.burst": str(BURST),
                "worker.rate_limit.scope": "cluster",
                "admin.host": "127.0.0.1",
                "admin.port": "0",
                "log.format": "json",
            }
        )
        self._guard = guard
        folder.mkdir()
        self._folder = folder
        self._serials = itertools.count(1)
        self._running: list[Worker] = []
        self.all: list[Worker] = []

    async def scale(self, number: int, *, kill: bool) -> float:
        """Have so many workers; return in how many seconds each had its part of the limit.

        They count from when a worker is told to end, is killed, or knows what it may send.
        """
        fresh = [self._start() for _ in range(number - len(self._running))]
        began = time.monotonic()
        while len(self._running) + len(fresh) > number:
            child = self._running.pop(0).child
            child.kill() if kill else child.ask_to_end()
        self._running += fresh

        def is_shared() -> bool:
            for worker in self._running:
                assert worker.child.exit_code is None, worker.child.tail()
            return all(worker.shares_with(number) for worker in self._running)

        await eventually(is_shared, what=f"a limit shared by {number}", seconds=END_SECONDS)
        if fresh:
            began = max(worker.begins_at for worker in fresh)
        since = (worker.shares_with(number) for worker in self._running)
        return max(0.0, *(at - began for at in since if at is not None))

    def _start(self) -> Worker:
        name = f"worker-{next(self._serials)}"
        worker = Worker(self._folder, name, self._guard, self._environ)
        self.all.append(worker)
        return worker

    def kill(self) -> None:
        """End all at once."""
        for worker in self.all:
            worker.child.kill()


@dataclass(frozen=True, slots=True)
class Run:
    """When tokens were spent and requests came in, and in how many seconds parts were right."""

    tokens: list[float]
    arrivals: list[float]
    followed_seconds: float


async def scale(
    broker_url: str,
    guard: Guard,
    folder: Path,
    *,
    kill: bool,
    scales: Sequence[int] = SCALES,
    phase_seconds: float = PHASE_SECONDS,
    messages: int = MESSAGES,
) -> Run:
    """Scale up and down on a queue that does not run empty."""
    await asyncio.to_thread(Queues(broker_url).make_outbound, messages)
    followed = []
    service = Service()
    async with open_api(service.take) as api_url:
        crew = Crew(broker_url, api_url, guard, folder)
        try:
            for number in scales:
                followed.append(await crew.scale(number, kill=kill))
                tell(f"{number} workers have their parts after {followed[-1]:.2f} s")
                await asyncio.sleep(phase_seconds)
        finally:
            crew.kill()
        tokens = sorted(at for worker in crew.all for at in worker.tokens())
    # The first ones have nobody before them to share with.
    return Run(tokens, sorted(service.arrivals), max(followed[1:]))


def fullest_second(moments: Sequence[float]) -> float:
    """Return what share of the limit was used in the fullest second."""
    return most_in(moments, 1) / LIMIT


def emptiest_ten(moments: Sequence[float]) -> float:
    """Return what share of the limit was used in the emptiest ten seconds."""
    return fewest_in(moments, 10) / (10 * LIMIT)


def judge(how: str, found: Run) -> list[str]:
    """Say what is not as promised."""
    problems = []
    if fullest_second(found.tokens) > MOST:
        problems.append(f"{how}: {fullest_second(found.tokens):.1%} in the fullest second")
    if emptiest_ten(found.tokens) < FEWEST:
        problems.append(f"{how}: {emptiest_ten(found.tokens):.1%} in the emptiest ten seconds")
    if found.followed_seconds > FOLLOW_SECONDS:
        problems.append(f"{how}: {found.followed_seconds:.1f} s until the parts were right")
    return problems


def format_found(found: dict[str, Run]) -> str:
    """Format the table."""
    rows: Sequence[Cells] = [
        (
            how,
            f"{fullest_second(one.tokens):.1%}",
            f"{fullest_second(one.arrivals):.1%}",
            f"{emptiest_ten(one.tokens):.1%}",
            f"{one.followed_seconds:.2f} s",
        )
        for how, one in found.items()
    ]
    head = (
        "workers end by",
        "fullest second, as sent",
        "as it came in",
        "emptiest ten seconds",
        "parts right within",
    )
    return format_table(head, rows)


async def main(*, write: bool) -> int:
    """Measure both ways to end, print the table, and return the exit code."""
    folder = Path(tempfile.mkdtemp(prefix="sms-bridge-pace-"))
    found = {}
    try:
        async with asyncio.timeout(MAX_SECONDS):
            with private_broker() as broker, guarded() as guard:
                for how, kill in (("SIGTERM", False), ("SIGKILL", True)):
                    tell(how)
                    found[how] = await scale(broker.url, guard, folder / how, kill=kill)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    problems = [line for how, one in found.items() for line in judge(how, one)]
    return conclude(format_found(found), problems, page=PAGE if write else None, mark=MARK)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A shared limit while workers come and go.")
    parser.add_argument("--write", action="store_true", help="put the table into the docs")
    sys.exit(run(main(write=parser.parse_args().write)))
