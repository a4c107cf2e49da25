"""Runs soaks: traffic under faults, then an account of every message and webhook.

    python soak/run.py SCENARIO --minutes 20 --seed 1 --workers 3

Exit status 0: no message was lost, and none sent twice without need. 1: a promise was broken.
"""

import argparse
import asyncio
import logging
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Final

import uvloop

from bridge import is_compiled
from bridge.errors import BridgeError
from soak import checker, webhook_checker
from soak.growth import Growth, Sample, is_judged, measure
from soak.nemesis import CUT_SHORT, Nemesis
from soak.report import Books, draw, tell
from soak.rig import (
    CONCURRENCY,
    DEAD,
    LADDER,
    MALFORMED,
    QUEUE,
    Rig,
    SoakError,
    dead_letters,
    open_rig,
    read_sample,
)
from soak.scaling import scale
from soak.traffic import EventSender, Ids, Publisher, Request, make_malformed, plan_requests
from tests.amqp_client import open_amqp
from tests.faults.attack import ATTACKS, strike

ROUND_SECONDS: Final = 300.0
WARM_UP_SECONDS: Final = 3.0
CALM_SECONDS: Final = 30.0
DRAIN_SECONDS: Final = 180.0
# The last round, its drain and the account may take this much longer.
END_SECONDS: Final = 900
# Messages that are unpublished when a round ends would only have to be drained.
PLANNED_SHARE: Final = 1.5
ORDERING_KEYS: Final = 40
ROTATION_SECONDS: Final = 20.0
RELOAD_SECONDS: Final = 30.0
MALFORMED_PER_SECOND: Final = 2.0
STRANGERS: Final = 4
BETWEEN_SECONDS: Final = 0.5
# Longest allowed gap without a sent SMS or a stored webhook after an event of the cluster.
MAX_GAP_SECONDS: Final = 10.0
# Backlog of the workers while the publisher looks for another node.
BACKLOG: Final = 600
MAX_WORKERS: Final = 8
EXIT_INTERRUPTED: Final = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Processes, traffic and faults of a soak. Rates are per second."""

    what: str
    groups: Sequence[str] = ("broker", "worker", "receiver", "api")
    without: str = ""
    nodes: int = 1
    workers: int = 1
    is_ordered: bool = False
    messages: float = 40.0
    events: float = 20.0
    ids: Ids = "half"
    minutes: float = 20.0
    # The processes run from start to end, and are checked for growth.
    is_watched: bool = False


SCENARIOS: Final = {
    "faults": Scenario(what="workers under faults of all components"),
    "ordering": Scenario(
        what="three workers with `ordering: recipient`, whose active worker is killed repeatedly",
        groups=("worker", "broker"),
        # A frozen worker does not notice that it has lost the lock.
        without="frozen",
        workers=3,
        is_ordered=True,
        ids="on",
    ),
    "cluster": Scenario(
        what="nodes of a RabbitMQ cluster of three are killed, stopped, frozen and cut off",
        groups=("broker",),
        nodes=3,
        ids="on",
        minutes=6,
    ),
    "webhook": Scenario(
        what="webhooks, while secrets are rotated and broker and receiver are killed",
        groups=("broker", "receiver"),
        messages=10.0,
        events=200.0,
    ),
    "hour": Scenario(
        what="one worker and the receiver, which must neither end nor grow",
        groups=("broker", "api"),
        messages=150.0,
        events=150.0,
        minutes=60,
        is_watched=True,
    ),
}
SCALING: Final = "scaling"


class Soak:
    """A run: rounds of traffic under faults, each with its account."""

    def __init__(self, rig: Rig, scenario: Scenario, options: argparse.Namespace) -> None:
        self.books = Books()
        self.growths: dict[str, Growth] = {}
        self._rig = rig
        self._scenario = scenario
        self._is_calm: bool = options.calm
        self._seed: int = options.seed
        self._random = Random(options.seed)
        self._seconds: float = options.minutes * 60
        self._events = EventSender(rig.port, seed=options.seed, secret="secret-0")
        changed = {"worker__ordering": "recipient"} if scenario.is_ordered else {}
        if rig.cluster:
            # The workers limit the rate, so that a publisher that lost its node hides no gap.
            changed["worker__rate_limit__per_second"] = scenario.messages / options.workers
        for _ in range(options.workers):
            rig.add_worker(**changed)
        self.nemesis = Nemesis(
            rig,
            self._random,
            groups=scenario.groups,
            only=options.only,
            without=scenario.without,
        )
        self._malformed: set[str] = set()
        self._dead_malformed: set[str] = set()
        self._samples: defaultdict[str, list[Sample]] = defaultdict(list)
        self._planned = 0

    async def run(self) -> None:
        """Run all rounds."""
        await self._rig.start()
        begun = time.monotonic()
        hardships = [self._watch, self._publish_malformed, self._replace_secrets]
        hardships += [self._attack] * STRANGERS
        async with _running(hardships):
            while (left := begun + self._seconds - time.monotonic()) > 0:
                await self._play_round(left if self._rig.cluster else min(left, ROUND_SECONDS))
        await self._rig.end()
        self.books.seconds = time.monotonic() - begun
        self.books.problems += [*self.nemesis.stalls, *self._problems_of_roles()]
        if self._scenario.is_watched:
            self._judge_growth()

    async def _play_round(self, seconds: float) -> None:
        scenario, rig = self._scenario, self._rig
        ends = time.monotonic() + seconds
        requests = plan_requests(
            int(scenario.messages * PLANNED_SHARE * max(seconds, ROUND_SECONDS)),
            seed=self._seed,
            ids=scenario.ids,
            keys=ORDERING_KEYS if scenario.is_ordered else 0,
            first=self._planned,
        )
        self._planned += len(requests)
        urls = rig.urls if rig.cluster else [rig.broker.url]
        publisher = Publisher(
            urls,
            QUEUE,
            requests,
            per_second=scenario.messages,
            burst=BACKLOG if rig.cluster else 0,
        )
        self._events.forget()
        async with self._events.sending(scenario.events), publisher.publishing():
            await rig.wait(WARM_UP_SECONDS)
            while time.monotonic() < ends:
                if self._is_calm:
                    await rig.wait(min(CALM_SECONDS, ends - time.monotonic()))
                else:
                    await self._bring_fault()
        # Later messages may not be dead letters yet.
        malformed = set(self._malformed)
        await self._drain()
        await self._account(publisher, requests, malformed)

    async def _bring_fault(self) -> None:
        fault = await self.nemesis.strike()
        name = f"{fault.kind} {fault.detail}".rstrip()
        tell(
            f"{name}: {fault.ended - fault.started:.1f} s, then sending again "
            f"after {time.time() - fault.ended:.1f} s"
        )
        await self._rig.wait(self._random.uniform(2, 6))

    async def _drain(self) -> None:
        """Wait until the queues are empty, twice in a row."""
        ends, empty = time.monotonic() + DRAIN_SECONDS, 0
        while empty < 2 and time.monotonic() < ends:
            empty = 0 if await self._rig.count_waiting() else empty + 1
            await self._rig.wait(1)

    # The account

    async def _account(
        self, publisher: Publisher, requests: Sequence[Request], malformed: set[str]
    ) -> None:
        known = len(self.books.problems)
        evidence = await self._collect(publisher, requests)
        events = webhook_checker.Evidence(
            events=self._events.events,
            stored=await self._rig.take_events(),
            forged=self._events.forged,
        )
        verdict = checker.check(evidence)
        self.books.add(verdict, webhook_checker.check(events))
        if lost := malformed - self._dead_malformed:
            self.books.problems.append(f"malformed messages were lost: {sorted(lost)}")
            self._dead_malformed |= lost
        self.books.malformed = len(self._dead_malformed)
        if self._rig.cluster:
            accepted = sorted(post.at for post in evidence.posts if post.accepted)
            self._judge_gaps(accepted, verdict)
        await self._rig.api.forget()
        self.nemesis.spoiled.clear()
        for problem in self.books.problems[known:]:
            tell(f"FAILED: {problem}")
        tell(self.books.summary())

    async def _collect(self, publisher: Publisher, requests: Sequence[Request]) -> checker.Evidence:
        rig = self._rig
        known = [request for request in requests if request.message_id in publisher.published]
        rows: defaultdict[str, list[str]] = defaultdict(list)
        slow: defaultdict[str, list[float]] = defaultdict(list)
        cut: defaultdict[str, list[float]] = defaultdict(list)
        for request in known:
            if request.key is not None:
                rows[request.key].append(request.message_id)
        for worker in rig.workers:
            worker.log.read()
            for read, kept in ((worker.log.slow, slow), (worker.log.cut, cut)):
                for key, moments in read.items():
                    kept[key] += moments
                read.clear()
        taken = await rig.take_messages([DEAD])
        for letter in taken:
            if (name := letter["app_id"]).startswith(MALFORMED):
                self._dead_malformed.add(name)
                if letter["reason"] != "invalid":
                    self.books.problems.append(f"{name} is dead as {letter['reason']}")
        waiting = await rig.take_messages([QUEUE, *LADDER]) if await rig.count_waiting() else []
        owners = {request.number: request.message_id for request in known}
        return checker.Evidence(
            published=publisher.published,
            confirmed=publisher.confirmed,
            posts=await rig.api.read_posts(known),
            dead=dead_letters(taken, known),
            waiting=[owners.get(one["number"], one["number"]) for one in waiting],
            faults=self.nemesis.timeline,
            slow=slow,
            cut=cut,
            spoiled=dict(self.nemesis.spoiled),
            nameless={one.message_id for one in known if not one.has_id},
            rows=rows.values(),
            concurrency=CONCURRENCY,
            workers=len(rig.workers),
        )

    def _judge_gaps(self, accepted: Sequence[float], verdict: checker.Verdict) -> None:
        """Measure the gap in service after each event of the cluster."""
        stored = sorted(self._events.accepted_at)
        for fault in self.nemesis.timeline:
            for what, moments in (("an SMS", accepted), ("a webhook", stored)):
                gap = _longest_gap(moments, fault.started, fault.ended)
                tell(f"{fault.kind}: at most {gap:.1f} s without {what}")
                if gap > MAX_GAP_SECONDS:
                    self.books.problems.append(f"{fault.kind}: {gap:.1f} s without {what}")
        # If a confirm is lost, two workers may receive the publisher's repeats.
        if extra := {c: n for c, n in verdict.extra_posts.items() if c != "publisher_repeat"}:
            self.books.problems.append(f"extra POSTs, by cause: {extra}")
        if verdict.dead:
            self.books.problems.append(f"dead letters, by reason: {verdict.dead}")

    def _problems_of_roles(self) -> Iterator[str]:
        told = 0
        kinds = Counter(fault.kind for fault in self.nemesis.timeline)
        for role in self._rig.roles:
            told += role.log.events["unhandled_error"]
            if count := role.log.events["internal_error"]:
                yield f"{role.name} logged internal_error {count} times"
            if bad := {code: n for code, n in role.exit_codes.items() if code}:
                yield f"after SIGTERM {role.name} did not end cleanly: {bad}"
        if told > (cut := sum(n for kind, n in kinds.items() if kind.endswith(CUT_SHORT))):
            yield f"unhandled_error was logged {told} times, with {cut} frames cut short"

    def _judge_growth(self) -> None:
        for name, samples in self._samples.items():
            self.growths[name] = growth = measure(samples)
            if is_judged(self.books.seconds):
                self.books.problems += [f"{name}: {problem}" for problem in growth.problems()]

    # Background activity during all faults

    async def _watch(self) -> None:
        while True:
            for role in self._rig.roles:
                # A role that is being restarted has no process.
                with suppress(OSError, SoakError):
                    self._samples[role.name].append(read_sample(role.pid))
            await asyncio.sleep(1)

    async def _publish_malformed(self) -> None:
        number = 0
        while True:
            # This connection breaks as often as the bridge's.
            with suppress(Exception):
                async with open_amqp(self._rig.broker.url) as amqp:
                    while True:
                        number += 1
                        name = f"{MALFORMED}{number}"
                        body, properties = make_malformed(self._random, number)
                        await amqp.publish(QUEUE, body, app_id=name, **properties)
                        self._malformed.add(name)
                        await asyncio.sleep(1 / MALFORMED_PER_SECOND)
            await asyncio.sleep(BETWEEN_SECONDS)

    async def _replace_secrets(self) -> None:
        """Rotate the secrets: the receiver must accept the newest two and refuse older ones."""
        removed = "secret-before"
        while True:
            await asyncio.sleep(ROTATION_SECONDS)
            old, new = self._events.secret, f"secret-{self.books.webhook_secrets + 1}"
            self._rig.secrets.put(current=new, previous=old)
            if not await self._is_refused(removed):
                self.books.problems.append(f"{removed} was removed, but is still accepted")
            self._events.secret, removed = new, old
            self.books.webhook_secrets += 1

    async def _is_refused(self, secret: str) -> bool:
        ends = time.monotonic() + RELOAD_SECONDS
        while (status := await self._events.probe(secret)) != 401:
            # While the receiver is down, nothing reads the files.
            if status is not None and time.monotonic() > ends:
                return False
            await asyncio.sleep(BETWEEN_SECONDS)
        return True

    async def _attack(self) -> None:
        while True:
            with suppress(OSError):
                await strike(self._rig.port, ATTACKS[self._random.choice([*ATTACKS])])
            self.books.attacks += 1
            await asyncio.sleep(BETWEEN_SECONDS)


def _longest_gap(moments: Sequence[float], started: float, ended: float) -> float:
    """Return the longest interval without any of these times."""
    within = [moment for moment in moments if started <= moment <= ended]
    return max(later - earlier for earlier, later in pairwise([started, *within, ended]))


@asynccontextmanager
async def _running(ways: Sequence[Callable[[], Awaitable[None]]]) -> AsyncIterator[None]:
    """Run coroutines until the end of the block. Raise as soon as one fails."""

    async def run(way: Callable[[], Awaitable[None]]) -> None:
        with suppress(asyncio.CancelledError):
            await way()

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(run(way)) for way in ways]
        yield
        for task in tasks:
            task.cancel()


async def play(scenario: Scenario, options: argparse.Namespace) -> bool:
    """Run a scenario, print the report, and return whether every promise was kept."""
    async with AsyncExitStack() as stack:
        rig = await stack.enter_async_context(
            open_rig(nodes=scenario.nodes, management=scenario.nodes > 1)
        )
        soak = Soak(rig, scenario, options)
        await soak.run()
        kind = "compiled" if is_compiled() else "plain"
        version = await rig.ctl("version")
        title = f"{options.scenario}, seed {options.seed}, {options.workers} workers, {kind}"
        draw(
            f"{title}, RabbitMQ {version.strip()}", soak.books, soak.nemesis.timeline, soak.growths
        )
        if soak.books.problems:
            # `open_rig` keeps the logs if this raises.
            raise SoakError(f"{len(soak.books.problems)} promises were broken")
    return True


async def main(options: argparse.Namespace) -> int:
    """Run the command line, and return the exit status."""
    try:
        async with asyncio.timeout(options.minutes * 60 + END_SECONDS):
            if options.scenario == SCALING:
                await scale(options.seed, minutes=options.minutes)
            else:
                await play(SCENARIOS[options.scenario], options)
    except (SoakError, BridgeError, TimeoutError, ExceptionGroup) as error:
        for each in getattr(error, "exceptions", [error]):
            tell(f"FAILED: {type(each).__name__}: {each}")
        return 1
    return 0


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Send traffic under faults, and account for every message."
    )
    parser.add_argument("scenario", choices=[*SCENARIOS, SCALING], nargs="?", default="faults")
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--workers", type=int)
    parser.add_argument("--only", default="", metavar="WORDS", help="only these faults")
    parser.add_argument("--calm", action="store_true", help="inject no faults")
    options = parser.parse_args()
    scenario = SCENARIOS.get(options.scenario, Scenario(what="", minutes=15))
    options.minutes = options.minutes or scenario.minutes
    options.workers = options.workers or scenario.workers
    if options.minutes <= 0 or not 1 <= options.workers <= MAX_WORKERS:
        parser.error(f"--minutes must be over 0, --workers 1 to {MAX_WORKERS}")
    return options


if __name__ == "__main__":
    # Errors on the clients' connections are intended.
    logging.disable(logging.CRITICAL)
    try:
        sys.exit(uvloop.run(main(_parse_arguments())))
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
