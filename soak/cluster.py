"""The soak of a RabbitMQ cluster: nodes are killed, stopped, frozen and cut off under traffic.

    python soak/cluster.py --seed 1 --workers 1

Three nodes are joined when the queues are there already, which are brought to all of them as
`check --online` says. Workers and a webhook receiver know all three. There are requests and signed
events all the time, and an API that answers late, refuses and limits. In the end every message is
accounted for. Exit code 0: nothing lost, nothing sent twice, and no event cost more than ten
seconds without an SMS or a stored webhook. 1: it did. 2: bad usage.
"""

import argparse
import asyncio
import logging
import random
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final

from bridge.admin.doctor import examine
from bridge.errors import BridgeError
from bridge.sandbox.broker import Broker
from bridge.sandbox.processes import guarded
from soak import webhook, webhook_checker
from soak.bench import CONCURRENCY, QUEUE, RETRY_DELAYS, Bench, SoakError
from soak.checker import Evidence, Fault, Verdict, check
from soak.figures import PAGE, Cells, conclude, format_table, tell
from soak.publisher import Publisher, plan_requests
from soak.webhook import OLD, MountedSecrets, Receiver, Service
from tests.faults.bench import make_settings
from tests.rabbitmq_cluster import Cluster, private_cluster

MARK: Final = "cluster"
# The pace is the workers', so that a publisher that has lost its node too hides no gap.
SENT_PER_SECOND: Final = 40.0
EVENTS_PER_SECOND: Final = 20.0
# So that there is something to send while the publisher looks for a node that lives.
BACKLOG: Final = 600
RUSH_PER_SECOND: Final = 300.0
PLANNED: Final = 60_000
# How long a node is away, and how long everything is in peace afterwards.
# A node that hangs is left after two heartbeats.
HEARTBEAT_SECONDS: Final = 3
DOWN_SECONDS: Final = 12.0
FROZEN_SECONDS: Final = 25.0
PEACE_SECONDS: Final = 5.0
# A node that was frozen or cut off seems to be there until it notices that it was not, and takes no
# clients until it has started anew. Nothing is done to another one meanwhile: one has no majority.
NOTICE_SECONDS: Final = 3.0
MAX_GAP_SECONDS: Final = 10.0
# The management API shows new members some seconds late.
SPREAD_TRIES: Final = 6
SPREAD_SECONDS: Final = 5.0
LOOK_SECONDS: Final = 0.05
DRAIN_SECONDS: Final = 90.0
FAULT_SECONDS: Final = (0.5, 2.0)

# Each says that the message was not taken, or takes it: whatever is POSTed again is one too many.
_API_FAULTS: Final[Sequence[dict[str, object]]] = (
    {"status": 425, "count": 3},
    {"status": 429, "headers": {"Retry-After": "1"}, "count": 1},
    {"latency_seconds": 1.2, "count": 5},
)


@dataclass(frozen=True, slots=True)
class Event:
    """What was done to the cluster, and the longest times without a success from then on."""

    name: str
    started: float
    ended: float
    sms_gap: float
    webhook_gap: float


@dataclass(slots=True)
class Events:
    """When events were stored, as a list of moments."""

    service: Service
    moments: list[float] = field(default_factory=list)

    async def watch(self) -> None:
        """Note each moment at which more events had been answered 200."""
        before = -1
        while True:
            if self.service.accepted != before:
                before = self.service.accepted
                self.moments.append(time.time())
            await asyncio.sleep(LOOK_SECONDS)


class Soak:
    """One run: the events one after the other, then the drain and the books."""

    def __init__(
        self, cluster: Cluster, bench: Bench, receiver: Receiver, options: argparse.Namespace
    ) -> None:
        seed: int = options.seed
        self._only: str = options.only
        self._cluster = cluster
        self._bench = bench
        self._receiver = receiver
        self._random = random.Random(seed)
        self._requests = plan_requests(PLANNED, seed=seed)
        self._publisher = Publisher(cluster.urls, QUEUE, self._requests)
        self._service = Service(receiver.port, seed=seed, secret=OLD)
        self._stored = Events(self._service)
        self._spans: list[tuple[str, float, float]] = []

    async def run(self) -> tuple[list[Event], list[str]]:
        """Play it all; return what each event cost, and what must not be."""
        self._publisher.floor = RUSH_PER_SECOND
        self._publisher.start()
        side = [asyncio.create_task(self._stored.watch()), asyncio.create_task(self._spoil_api())]
        try:
            async with self._service.sending(None, EVENTS_PER_SECOND) as enough:
                while len(self._publisher.confirmed) < BACKLOG:
                    await self._wait(1)
                self._publisher.floor = SENT_PER_SECOND
                for name, act in self._acts().items():
                    await self._play(name, act)
                enough.set()
        finally:
            for task in side:
                task.cancel()
            await asyncio.gather(*side, return_exceptions=True)
            await asyncio.to_thread(self._publisher.stop)
        await self._drain()
        await asyncio.to_thread(self._bench.end_workers)
        return await self._account()

    def _acts(self) -> dict[str, Callable[[], Awaitable[object]]]:
        """List the events in their order, those that are asked for."""
        acts: dict[str, Callable[[], Awaitable[object]]] = {
            "the queue's leader is killed": self._kill_leader,
            "the worker's node is stopped": self._stop_node,
            "the queue's leader is frozen": self._freeze_leader,
            "the worker's node is frozen": self._freeze_node,
            "the worker's node is cut off": self._cut_off_node,
            "all nodes are restarted, one by one": self._restart_all,
        }
        return {name: act for name, act in acts.items() if self._only in name}

    async def _play(self, name: str, act: Callable[[], Awaitable[object]]) -> None:
        started = time.time()
        await act()
        await self._wait(NOTICE_SECONDS)
        await asyncio.to_thread(self._cluster.until_in_sync)
        await self._wait(PEACE_SECONDS)
        if self._publisher.is_done:
            raise SoakError("the publisher has ended")
        self._spans.append((name, started, time.time()))
        tell(f"{time.strftime('%H:%M:%S')}  {name}: {time.time() - started:.0f} s")

    async def _wait(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._bench.look()
        self._receiver.look()

    # What is done to the cluster

    @property
    def _workers_node(self) -> Broker:
        """The node that a worker consumes from."""
        self._bench.log.read()
        host = self._bench.log.hosts["worker consume"]
        return next(node for node in self._cluster.nodes if host in node.url)

    async def _leader(self) -> Broker:
        return await asyncio.to_thread(self._cluster.leader, QUEUE)

    async def _kill_leader(self) -> None:
        node = await self._leader()
        await asyncio.to_thread(node.kill)
        await self._wait(DOWN_SECONDS)
        await asyncio.to_thread(node.start)

    async def _stop_node(self) -> None:
        await self._restart(self._workers_node, DOWN_SECONDS)

    async def _restart_all(self) -> None:
        for node in self._cluster.nodes:
            await self._restart(node, 0)
            await asyncio.to_thread(self._cluster.until_in_sync)

    async def _restart(self, node: Broker, seconds: float) -> None:
        await asyncio.to_thread(node.stop)
        await self._wait(seconds)
        await asyncio.to_thread(node.start)

    async def _freeze_leader(self) -> None:
        await self._freeze(await self._leader())

    async def _freeze_node(self) -> None:
        await self._freeze(self._workers_node)

    async def _freeze(self, node: Broker) -> None:
        self._cluster.freeze(node)
        try:
            await self._wait(FROZEN_SECONDS)
        finally:
            self._cluster.thaw()

    async def _cut_off_node(self) -> None:
        node = self._workers_node
        await asyncio.to_thread(self._cluster.cut_off, node)
        await self._wait(DOWN_SECONDS)
        await asyncio.to_thread(self._cluster.heal, node)

    async def _spoil_api(self) -> None:
        """Have the API misbehave a little, all the time."""
        while True:
            await asyncio.sleep(self._random.uniform(*FAULT_SECONDS))
            await asyncio.to_thread(self._bench.set_faults, self._random.choice(_API_FAULTS))

    # The account

    async def _drain(self) -> None:
        await asyncio.to_thread(self._bench.set_faults)
        deadline, empty = time.monotonic() + DRAIN_SECONDS, 0
        while empty < 2 and time.monotonic() < deadline:
            waiting = await asyncio.to_thread(self._bench.count_waiting)
            empty = 0 if waiting else empty + 1
            await self._wait(1)

    async def _account(self) -> tuple[list[Event], list[str]]:
        self._bench.log.read()
        evidence = await asyncio.to_thread(self._collect)
        sms = check(evidence)
        stored = webhook_checker.check(
            webhook_checker.Evidence(
                events=self._service.events,
                stored=await webhook.read_out(self._cluster.url),
                forged=self._service.forged,
            )
        )
        accepted = sorted(post.at for post in evidence.posts if post.accepted)
        events = [
            Event(
                name,
                started,
                ended,
                _longest_gap(accepted, started, ended),
                _longest_gap(self._stored.moments, started, ended),
            )
            for name, started, ended in self._spans
        ]
        tell(_describe(sms, stored))
        problems = [*self._find_problems(sms, events), *stored.problems]
        for history in sms.histories.values() if problems else ():
            tell("\n  ".join(history))
        return events, problems

    def _collect(self) -> Evidence:
        return Evidence(
            published=self._publisher.published,
            confirmed=self._publisher.confirmed,
            posts=self._bench.read_posts(self._requests),
            dead=self._bench.read_dead_letters(self._requests),
            waiting=self._bench.read_waiting(self._requests),
            faults=[
                Fault(kind=name, group="broker", started=started, ended=ended)
                for name, started, ended in self._spans
            ],
            slow=self._bench.log.slow,
            concurrency=CONCURRENCY,
            workers=self._bench.workers,
        )

    def _find_problems(self, verdict: Verdict, events: Sequence[Event]) -> Iterator[str]:
        yield from verdict.problems
        # A publisher that publishes twice for want of a confirm is no fault of a node's.
        if extra := {c: n for c, n in verdict.extra_posts.items() if c != "publisher_repeat"}:
            yield f"POSTs too many, by cause: {extra}"
        if verdict.dead:
            yield f"dead letters, by reason: {verdict.dead}"
        for event in events:
            for what, gap in (("an SMS", event.sms_gap), ("a webhook", event.webhook_gap)):
                if gap > MAX_GAP_SECONDS:
                    yield f"{event.name}: {gap:.1f} s without {what}"
        for name in ("internal_error", "unhandled_error"):
            if count := self._bench.log.events[name]:
                yield f"the worker logged {name} {count} times"


async def spread(cluster: Cluster) -> None:
    """Bring the queues, which are older than the cluster, to all nodes, as `check --online` says.

    Raises SoakError when it does not find them, or its remedy does not cure it.
    """
    values = {
        "rabbitmq.url": cluster.urls,
        "sms_api.base_url": "http://127.0.0.1:9",
        "sms_api.key": "soak",
        "worker.queue": QUEUE,
        "worker.retry_delays": RETRY_DELAYS,
        "webhook.secrets": [OLD],
    }
    settings, url = make_settings(values), cluster.nodes[0].management_url
    for tries in range(SPREAD_TRIES):
        found = await examine(settings, ("worker", "webhook"), management=url)
        poor = [one for one in found if one.subject == "replicas"]
        for one in poor:
            tell(f"check --online: {one.text}; {one.fix}")
            for command in (one.fix or "").split("; "):
                tool, *arguments = shlex.split(command)
                await asyncio.to_thread(cluster.nodes[0].ctl, *arguments, tool=tool)
        if not poor:
            if tries == 0:
                raise SoakError("check --online does not see that the queues are on one node")
            return
        await asyncio.sleep(SPREAD_SECONDS)
    raise SoakError("the queues are still not on three nodes")


def _longest_gap(moments: Sequence[float], started: float, ended: float) -> float:
    """Return the longest time without any of these moments within a span."""
    within = [moment for moment in moments if started <= moment <= ended]
    return max(later - earlier for earlier, later in pairwise([started, *within, ended]))


def _describe(sms: Verdict, stored: webhook_checker.Verdict) -> str:
    repeats = sms.extra_posts.get("publisher_repeat", 0)
    return (
        f"{sms.confirmed} requests confirmed, {sms.sent} sent, {sms.posts} POSTs, "
        f"{len(sms.lost)} lost, {sum(sms.extra_posts.values()) - repeats} extra and {repeats} of "
        f"what was published twice and taken by two workers, "
        f"{sum(sms.dead.values())} dead; {stored.accepted} webhooks answered 200, "
        f"{len(stored.missing)} lost, {stored.copies} copies of what was not answered 200"
    )


def _format(events: Sequence[Event]) -> str:
    rows: list[Cells] = [
        (one.name, f"{one.sms_gap:.1f} s", f"{one.webhook_gap:.1f} s") for one in events
    ]
    return format_table(("event", "longest time without an SMS", "without a stored webhook"), rows)


async def main(options: argparse.Namespace) -> int:
    """Run the soak and return the exit code."""
    # What goes wrong on the publisher's connections is meant to.
    logging.disable(logging.CRITICAL)
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, task.cancel)
    folder = Path(tempfile.mkdtemp(prefix="sms-bridge-soak-"))
    tell(f"seed {options.seed}; the logs are in {folder}")
    async with asyncio.timeout(options.max_seconds):
        with private_cluster(management=True) as cluster, guarded() as guard:
            settings = {
                "RABBITMQ__HEARTBEAT_SECONDS": str(HEARTBEAT_SECONDS),
                "WORKER__RATE_LIMIT__PER_SECOND": str(SENT_PER_SECOND / options.workers),
            }
            bench = Bench(
                cluster.nodes[0],
                folder,
                guard,
                workers=options.workers,
                urls=cluster.urls,
                settings=settings,
            )
            files = MountedSecrets(folder / "secrets").put(current=OLD)
            receiver = Receiver(
                cluster.urls, folder, guard, files, heartbeat_seconds=HEARTBEAT_SECONDS
            )
            try:
                await asyncio.to_thread(bench.start)
                await receiver.until_metric("sms_bridge_amqp_connection_up", 1)
                tell(f"RabbitMQ {bench.broker_version()}, {options.workers} workers")
                await asyncio.to_thread(cluster.join)
                await spread(cluster)
                await asyncio.to_thread(cluster.flush)
                events, problems = await Soak(cluster, bench, receiver, options).run()
                if exit_code := await receiver.end():
                    problems.append(f"after SIGTERM the receiver ended with {exit_code}")
            finally:
                receiver.kill()
                bench.close()
    if bad := {code: n for code, n in bench.worker_exits.items() if code}:
        problems.append(f"after SIGTERM a worker did not end cleanly: {bad}")
    if not problems:
        shutil.rmtree(folder)
    return conclude(_format(events), problems, page=PAGE if options.write else None, mark=MARK)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A cluster under faults, every message accounted.")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--workers", type=int, default=1, help="how many take from the queue")
    parser.add_argument("--only", default="", metavar="WORDS", help="only events named so")
    parser.add_argument("--write", action="store_true", help="put the table into the docs")
    parser.add_argument("--max-seconds", type=int, default=540)
    return parser.parse_args()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        try:
            sys.exit(asyncio.run(main(_parse_arguments())))
        except (SoakError, BridgeError, TimeoutError) as error:
            tell(f"FAILED: {str(error) or type(error).__name__}")
            sys.exit(1)
        except asyncio.CancelledError:
            sys.exit(130)
