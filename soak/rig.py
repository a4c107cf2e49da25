"""What proofs with real processes stand on: a private broker, a service, a proxy, workers."""

import asyncio
import json
import logging
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Collection, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import uvloop

from bridge.amqp.link import USEFUL_SECONDS
from bridge.config import WorkerSettings
from bridge.sandbox.broker import Broker, private_broker
from bridge.sandbox.orders import Fault
from bridge.sandbox.processes import Child, Guard, guarded
from bridge.topology.declarations import retry_queue
from soak.bench import read_rss_bytes
from soak.publisher import Publisher, Request, plan_requests
from tests.faults.amqp_proxy import AmqpProxy, open_amqp_proxy
from tests.faults.bench import (
    PROGRAM,
    Amqp,
    Bench,
    Service,
    eventually,
    make_environ,
    open_amqp,
    open_service,
)

CONCURRENCY: Final = 50
DELAYS: Final = WorkerSettings().retry_delays
NAIVE: Final = Path(__file__).with_name("naive_worker.py")
LATENCY_SECONDS: Final = 0.2
# A connection that is lost sooner counts as one that never was: the next one waits longer.
SESSION_SECONDS: Final = USEFUL_SECONDS + 0.1
# More than any scene publishes.
PLANNED: Final = 90_000
# Longer than anything waits that is not in a queue.
QUIET_SECONDS: Final = 5
# What the drain may take, and some more.
END_SECONDS: Final = 60
EXIT_INTERRUPTED: Final = 130


class Process:
    """One worker that runs for real."""

    def __init__(self, child: Child) -> None:
        self.child = child

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self.child.exit_code is None

    @property
    def rss_bytes(self) -> int:
        """How much memory it occupies now."""
        return read_rss_bytes(self.child.pid)

    async def until_consuming(self) -> None:
        """Return when it consumes; fail when it ends before."""

        def is_consuming() -> bool:
            assert self.is_running, self.child.tail()
            return '"event":"consuming"' in self.child.log.read_text(encoding="utf-8")

        await eventually(is_consuming, what="a worker consumes")

    async def end(self) -> float:
        """Send SIGTERM; return after how many seconds it has ended, whatever its exit code."""
        started = time.monotonic()
        self.child.ask_to_end()
        await eventually(lambda: not self.is_running, what="its end", seconds=END_SECONDS)
        seconds = time.monotonic() - started
        self.child.kill()  # whatever it has started
        return seconds

    def kill(self) -> None:
        """End it at once."""
        self.child.kill()


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What became of the messages that were confirmed to their publisher."""

    confirmed: int
    repeated: int
    sent: int
    lost: int
    waiting: int
    dead: int
    extra_posts: int
    sent_twice: int
    new_keys: int


class Load:
    """Messages that are being published."""

    def __init__(self, publisher: Publisher, requests: Sequence[Request]) -> None:
        self._publisher = publisher
        self._requests = requests

    def confirmed(self) -> set[str]:
        """Return the numbers whose message was confirmed."""
        ids = set(self._publisher.confirmed)
        return {request.number for request in self._requests if request.message_id in ids}

    def repeated(self) -> set[str]:
        """Return the numbers whose message was published more than once, for want of a confirm.

        Two workers do not know of each other: each may be given one of the two.
        """
        counts = self._publisher.published
        return {request.number for request in self._requests if counts[request.message_id] > 1}


class Rig(Bench):
    """A world with a queue of its own, and workers of both kinds as processes.

    A worker has the settings of `config.example.yaml`, as far as an address is not concerned.
    """

    def __init__(self, stand: "Stand", proxy: AmqpProxy, amqp: Amqp) -> None:
        super().__init__(stand.broker, proxy, stand.service, amqp)
        self.ladder = [retry_queue(self.queue, delay) for delay in DELAYS]
        self._stand = stand
        self._processes: list[Process] = []

    def values(self, **changed: Any) -> dict[str, Any]:
        """Return the settings; `worker__queue` changes `worker.queue`."""
        usual = {"worker__concurrency": CONCURRENCY, "worker__retry_delays": [*DELAYS]}
        return super().values(**(usual | changed))

    @property
    def posted(self) -> int:
        """How many POSTs have reached the service."""
        return len(self.service.memory.requests)

    @property
    def accepted(self) -> int:
        """How many messages the service has accepted."""
        return len(self.service.memory.messages)

    def start(self, **changed: Any) -> Process:
        """Start a worker of ours; it may not consume yet."""
        return self._start([*PROGRAM, "worker"], make_environ(self.values(**changed)))

    def start_naive(self, style: str) -> Process:
        """Start a worker of the usual way; it may not consume yet."""
        where = (f"{self.proxy.url}?name=naive", self.service.url, self.queue)
        return self._start([sys.executable, str(NAIVE), style, *where], make_environ({}))

    def _start(self, command: Sequence[str], environ: dict[str, str]) -> Process:
        log = self._stand.folder / f"{self.queue}-{len(self._processes)}.log"
        process = Process(Child(command, guard=self._stand.guard, log=log, environ=environ))
        self._processes.append(process)
        return process

    @asynccontextmanager
    async def load(self, per_second: float) -> AsyncIterator[Load]:
        """Publish so many messages a second, each again until it is confirmed."""
        requests = plan_requests(PLANNED, seed=id(self))
        publisher = Publisher([self.broker.url], self.queue, requests)
        publisher.floor = per_second
        publisher.start()
        try:
            yield Load(publisher, requests)
        finally:
            await asyncio.to_thread(publisher.stop)

    async def until_accepted(self, more: int, *, seconds: float = 60) -> None:
        """Return when the service has accepted so many messages more."""
        goal = self.accepted + more
        await eventually(
            lambda: self.accepted >= goal, what=f"{more} more accepted", seconds=seconds
        )

    async def until_through(self, numbers: Collection[str], seconds: float = 240) -> None:
        """Return when every message is accepted, or no worker has anything to do any more.

        Fails at the deadline.
        """
        wanted, deadline = set(numbers), time.monotonic() + seconds
        busy_at = time.monotonic()
        before = -1
        while wanted - {message.to for message in self.service.memory.messages}:
            assert time.monotonic() < deadline, f"not through within {seconds:g} s"
            if self.posted != before or await self._count_ready():
                before, busy_at = self.posted, time.monotonic()
            elif time.monotonic() - busy_at > QUIET_SECONDS:
                return
            await asyncio.sleep(0.2)

    async def _count_ready(self) -> int:
        async with open_amqp(self.broker.url) as amqp:
            return sum([await amqp.count(queue) for queue in (self.queue, *self.ladder)])

    async def account(
        self, confirmed: Collection[str], *, repeated: Collection[str] = ()
    ) -> Account:
        """Account for the numbers whose message was confirmed; no worker may run any more.

        What was `repeated` by its publisher is left out of the POSTs that are one too many.
        """
        async with open_amqp(self.broker.url) as amqp:
            await eventually(lambda: self._is_left(amqp), what="no consumer is left")
            waiting = await _read(amqp, [self.queue, *self.ladder])
            dead = await _read(amqp, [self.dead_queue])
        posts: Counter[str] = Counter()
        keys: defaultdict[str, set[str | None]] = defaultdict(set)
        for attempt in self.service.memory.requests:
            posts[str(attempt.to)] += 1
            keys[str(attempt.to)].add(attempt.idempotency_key)
        taken = Counter(message.to for message in self.service.memory.messages)
        return Account(
            confirmed=len(confirmed),
            repeated=len(repeated),
            sent=len(taken.keys() & set(confirmed)),
            lost=len(set(confirmed) - taken.keys() - waiting.keys() - dead.keys()),
            # What was published and not confirmed yet may wait; what was sent may not.
            waiting=sum(number in taken or number in confirmed for number in waiting.elements()),
            dead=dead.total(),
            extra_posts=sum(n - 1 for number, n in posts.items() if number not in repeated),
            sent_twice=sum(n - 1 for number, n in taken.items() if number not in repeated),
            new_keys=sum(len(used) - 1 for used in keys.values()),
        )

    async def _is_left(self, amqp: Amqp) -> bool:
        return await amqp.consumers(self.queue) == 0

    def limit(self, per_second: float) -> None:
        """Have the service answer 429 to what comes faster."""
        memory, tokens, at = self.service.memory, per_second, time.monotonic()

        def take_fault(_to: str) -> Fault | None:
            nonlocal tokens, at
            now = time.monotonic()
            tokens, at = min(per_second, tokens + (now - at) * per_second), now
            if tokens < 1:
                return Fault(status=429)
            tokens -= 1
            return None

        self.service.misbehave({"status": 429})  # it looks for faults only when there is one
        memory.take_fault = take_fault  # type: ignore[assignment, method-assign]

    def close(self) -> None:
        """End the workers at once."""
        for process in self._processes:
            process.kill()
        self.service.memory.__dict__.pop("take_fault", None)


async def _read(amqp: Amqp, queues: Iterable[str]) -> Counter[str]:
    """Take everything out of the queues that there are; count how often each number is there."""
    bodies = [
        message.body
        for queue in queues
        if await amqp.count(queue)
        for message in await amqp.take_all(queue)
    ]
    return Counter(str(json.loads(body)["to"]) for body in bodies)


@dataclass(frozen=True, slots=True)
class Stand:
    """What all rigs of one run share."""

    broker: Broker
    service: Service
    guard: Guard
    folder: Path

    @asynccontextmanager
    async def rig(self) -> AsyncIterator[Rig]:
        """Lend a rig; the service forgets everything."""
        self.service.forget()
        broker = self.broker
        async with open_amqp_proxy(broker.url) as proxy, open_amqp(broker.url) as amqp:
            rig = Rig(self, proxy, amqp)
            try:
                yield rig
            finally:
                rig.close()


@asynccontextmanager
async def open_stand(*, management: bool = False) -> AsyncIterator[Stand]:
    """Lend a stand, and leave nothing of it behind."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    folder = Path(tempfile.mkdtemp(prefix="sms-bridge-proof-"))
    try:
        with private_broker(management=management) as broker, guarded() as guard:
            async with open_service() as service:
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                    loop.add_signal_handler(number, task.cancel)
                yield Stand(broker, service, guard, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run(main: Coroutine[Any, Any, int]) -> int:
    """Run a command to its end, or to the first signal, and return its exit code."""
    # What goes wrong on the clients' connections is meant to.
    logging.disable(logging.CRITICAL)
    try:
        return uvloop.run(main)
    except asyncio.CancelledError:
        return EXIT_INTERRUPTED
