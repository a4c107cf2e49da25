"""Several workers on one queue, as processes: one pause and one pace."""

import asyncio
import itertools
import json
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from bridge.sandbox.processes import Guard, guarded
from tests.faults.bench import SECONDS, Bench, eventually, make_environ
from tests.faults.paced_worker import PacedWorker
from tests.simulation.windows import most_in

# What is sent in a second is measured.
# A limit and its burst, of all workers; and for how long nothing is sent before it, in which each
# worker alone would gather the whole burst from its third of the limit.
LIMIT: Final = 30
QUIET_SECONDS: Final = 3.5


class Crew:
    """Workers that come and go."""

    def __init__(self, bench: Bench, guard: Guard, folder: Path, values: dict[str, Any]) -> None:
        self._bench = bench
        self._guard = guard
        self._folder = folder
        self._environ = make_environ(values)
        self._serials = itertools.count()
        self.workers: list[PacedWorker] = []
        self._gone: list[PacedWorker] = []

    async def scale(self, number: int, end: signal.Signals = signal.SIGTERM) -> None:
        while len(self.workers) > number:
            self._gone.append(self.workers.pop(0))
            self._gone[-1].child.signal(end)
        while len(self.workers) < number:
            name = f"worker-{next(self._serials)}"
            self.workers.append(PacedWorker(self._folder, name, self._guard, self._environ))

        def is_ready() -> bool:
            logs = (worker.child.log.read_text() for worker in self.workers)
            return all('"event":"consuming"' in log for log in logs)

        await eventually(is_ready, what="consumers")

    async def until_shared(self) -> float:
        """Return when the last of those that run had its part of the limit."""
        number = len(self.workers)
        await eventually(
            lambda: all(worker.shares_with(number) for worker in self.workers),
            what=f"a limit shared by {number}",
        )
        return max(worker.shares_with(number) or 0.0 for worker in self.workers)

    async def end(self) -> None:
        everyone = [*self.workers, *self._gone]
        ends = (asyncio.to_thread(one.child.end, grace_seconds=SECONDS) for one in everyone)
        await asyncio.gather(*ends)

    def tokens(self, sender: str | None = None, *, gone: bool = False) -> list[float]:
        """Return when those that run spent their tokens, and those that are `gone`."""
        workers = [*self.workers, *(self._gone if gone else [])]
        return sorted(at for worker in workers for at in worker.tokens(sender))

    def logged(self, event: str) -> list[list[dict[str, Any]]]:
        return [
            [
                line
                for line in map(json.loads, log.rpartition("\n")[0].splitlines())
                if line["event"] == event
            ]
            for log in (worker.child.log.read_text() for worker in self.workers)
        ]


@asynccontextmanager
async def open_crew(bench: Bench, folder: Path, number: int, **changed: Any) -> AsyncIterator[Crew]:
    """Run so many workers, and end those that run at the end."""
    values = bench.values(rabbitmq__url=[bench.broker.url], **changed)
    with guarded() as guard:
        crew = Crew(bench, guard, folder, values)
        try:
            await crew.scale(number)
            yield crew
        finally:
            await crew.end()


@pytest.mark.parametrize(("workers", "slots"), [(1, 30), (3, 10)])
async def test_a_revoked_key_costs_the_posts_of_one_worker(
    bench: Bench, tmp_path: Path, workers: int, slots: int
) -> None:
    await bench.declare_main()
    numbers = await bench.publish(900)
    async with open_crew(bench, tmp_path, workers, worker__concurrency=slots) as crew:
        await eventually(lambda: len(bench.service.posts(numbers)) > 300, what="load")
        bench.service.misbehave({"status": 401})
        before = len(bench.service.posts(numbers))
        await asyncio.sleep(8)
        refused = len(bench.service.posts(numbers)) - before
        bench.service.behave()
        paused = crew.logged("paused")
        await bench.until_taken(numbers, seconds=60)

        # Probes after 1, 2 and 4 seconds, each a little less.
        assert 3 <= refused <= workers * slots + 4
        assert [len(lines) for lines in paused] == [1] * workers
        assert await bench.dead_letters() == []
        assert bench.sent_twice(numbers) == {}


async def test_a_wait_that_one_is_asked_for_is_kept_by_all(bench: Bench, tmp_path: Path) -> None:
    await bench.declare_main()
    numbers = await bench.publish(1200)
    async with open_crew(bench, tmp_path, 3) as crew:
        await eventually(lambda: len(bench.service.posts(numbers)) > 300, what="load")
        limit = {"status": 429, "headers": {"Retry-After": "3"}, "count": 1}
        bench.service.misbehave(limit)
        await bench.until_taken(numbers, seconds=60)
        waits = [worker.waits() for worker in crew.workers]
        tokens = [worker.tokens() for worker in crew.workers]

    assert all(waits)
    asked_at = min(begin for begin, _ in itertools.chain(*waits))
    assert [first for first, *_ in waits if first[0] > asked_at + 3] == []
    assert [last for *_, last in waits if last[1] < asked_at + 3] == []
    early = [
        at - asked_at
        for own_tokens, own_waits in zip(tokens, waits, strict=True)
        for at in own_tokens
        if any(begin < at < end for begin, end in own_waits)
    ]
    assert early == []


async def test_a_newcomer_posts_nothing_in_a_pause(bench: Bench, tmp_path: Path) -> None:
    """A worker that starts in a pause hears of it before it takes a message."""
    await bench.declare_main()
    bench.service.misbehave({"status": 401})
    numbers = await bench.publish(100)
    async with open_crew(bench, tmp_path, 1, worker__concurrency=5) as crew:
        await eventually(lambda: all(crew.logged("paused")), what="paused")
        await asyncio.sleep(1)
        log = tmp_path / "newcomer.log"
        with bench.worker_process(log, rabbitmq__url=[bench.broker.url]):
            await eventually(lambda: '"event":"paused"' in log.read_text(), what="paused")
            lines = log.read_text()

    assert '"event":"consuming"' not in lines
    assert len(bench.service.posts(numbers)) <= 5 + 4


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["stopped", "killed"])
async def test_a_shared_limit_while_workers_come_and_go(
    bench: Bench, tmp_path: Path, number: signal.Signals
) -> None:
    """From three workers to one and to three: the limit is kept, and one that goes is missed.

    The times at which requests leave are the workers' own, so that a busy machine does not blur
    them. Takes two seconds for each of the three, and what it takes to start five processes.
    """
    limit = {"per_second": 100, "burst": 5, "scope": "cluster"}
    changed = {f"worker__rate_limit__{key}": value for key, value in limit.items()}
    await bench.declare_main()
    await bench.publish(2000)
    async with open_crew(bench, tmp_path, 3, worker__concurrency=20, **changed) as crew:
        await crew.until_shared()
        followed = []
        for workers in (1, 3):
            await asyncio.sleep(2)
            began = time.monotonic()
            await crew.scale(workers, number)
            shared = await crew.until_shared()
            # Those that are new begin to count when they know what they may send.
            began = began if workers == 1 else max(one.notes("share")[0][0] for one in crew.workers)
            followed.append(max(0.0, shared - began))
        await asyncio.sleep(2)
        tokens = crew.tokens(gone=True)

    # A worker that gets no CPU time for a moment gives up its part that much later.
    assert most_in(tokens, 1) <= 110
    # Two where there is CPU time for all; what a dead worker held is waited for ten seconds.
    assert max(followed) < 6


@pytest.mark.parametrize("limit", ["per_second", "per_sender"])
async def test_a_burst_is_there_once(bench: Bench, tmp_path: Path, limit: str) -> None:
    """Three workers keep the limit of one, with the burst of one, of each sender if it is theirs.

    One had a burst when the other two came, and each had time for a whole one since.
    """
    senders: list[str | None] = ["Acme", "Bcme"] if limit == "per_sender" else [None]
    limits = {limit: LIMIT, "burst": LIMIT, "scope": "cluster"}
    changed = {f"worker__rate_limit__{key}": value for key, value in limits.items()}
    await bench.declare_main()
    async with open_crew(bench, tmp_path, 1, **changed) as crew:
        await asyncio.sleep(QUIET_SECONDS / 2)
        await crew.scale(3)
        await asyncio.sleep(QUIET_SECONDS)
        for sender in senders:
            await bench.publish(5 * LIMIT, sender=sender or "Acme")
        await eventually(
            lambda: all(len(crew.tokens(sender)) > 3 * LIMIT for sender in senders),
            what="three times the burst",
        )
        tokens = [crew.tokens(sender) for sender in senders]

    for moments in tokens:
        # The burst, and what is added in that time.
        assert most_in(moments, 1) <= 2 * LIMIT
        assert most_in(moments, 2) <= 3 * LIMIT
