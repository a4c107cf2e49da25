"""The soak of an hour: a worker and a receiver under faults, which may neither end nor grow.

    python soak/hour.py --minutes 60 --seed 1 --json hour.json

Both run from the beginning to the end, with traffic, strangers and malformed messages all the time
and one fault after the other; `--calm` leaves the faults out, so that connections stay up and keep
what is left on them. Every five minutes traffic stops until the queues are empty, and
every message and webhook is accounted for. Exit code 0: all is well. 1: it is not. 2: bad usage.
"""

import argparse
import asyncio
import json
import logging
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final

from rich.console import Console
from rich.table import Table

import bridge
from bridge.errors import BridgeError
from bridge.sandbox.broker import Broker, private_broker
from bridge.sandbox.processes import Guard, guarded
from soak import checker, webhook_checker
from soak.bench import DEAD, QUEUE, Bench, SoakError, WorkerLog, bounded
from soak.growth import MOST_GROWTH, Growth, is_judged, measure
from soak.hardships import MALFORMED, Hardships
from soak.hour_faults import CUT_SHORT, SPOILING, HourFaults
from soak.nemesis import Nemesis
from soak.publisher import Publisher, Request, plan_requests
from soak.webhook import MountedSecrets, Receiver, Service, read_out, read_version
from tests.faults.amqp_proxy import open_amqp_proxy
from tests.faults.bench import open_amqp
from tests.faults.http_proxy import open_http_proxy

ROUND_SECONDS: Final = 300.0
WARM_UP_SECONDS: Final = 3.0
# Without faults: between two looks at the memory.
CALM_SECONDS: Final = 30.0
DRAIN_SECONDS: Final = 180.0
# The last round, its drain and the reading out may take so much longer.
END_SECONDS: Final = 900
MIB: Final = 2**20
PLAIN_WIDTH: Final = 120
EXIT_INTERRUPTED: Final = 130
FIRST_SECRET: Final = "secret-0"


@dataclass
class Books:
    """What was counted in all rounds together."""

    published: int = 0
    sent: int = 0
    posts: int = 0
    dead: Counter[str] = field(default_factory=Counter)
    extra_posts: Counter[str] = field(default_factory=Counter)
    lost: int = 0
    malformed: int = 0
    events: int = 0
    tries: int = 0
    stored: int = 0
    missing: int = 0
    excess: int = 0
    forged: int = 0
    problems: list[str] = field(default_factory=list)

    def add(self, worker: checker.Verdict, receiver: webhook_checker.Verdict) -> None:
        """Add a round."""
        self.published += worker.confirmed
        self.sent += worker.sent
        self.posts += worker.posts
        self.dead.update(worker.dead)
        self.extra_posts.update(worker.extra_posts)
        self.lost += len(worker.lost)
        self.events += receiver.events
        self.tries += receiver.tries
        self.stored += receiver.stored
        self.missing += len(receiver.missing)
        self.excess += len(receiver.excess)
        self.forged += receiver.forged
        self.problems += [f"worker: {problem}" for problem in worker.problems]
        self.problems += [f"receiver: {problem}" for problem in receiver.problems]
        for posts in worker.histories.values():
            self.problems += posts


class Hour:
    """One run: rounds of traffic under faults, each with its account."""

    def __init__(
        self,
        bench: Bench,
        receiver: Receiver,
        service: Service,
        faults: HourFaults,
        hardships: Hardships,
        options: argparse.Namespace,
        tell: Callable[[str], None],
    ) -> None:
        self._bench = bench
        self._receiver = receiver
        self._service = service
        self._faults = faults
        self._hardships = hardships
        self._nemesis = Nemesis(
            bench, seed=options.seed, groups=("broker", "api"), more=faults.acts
        )
        self._is_calm: bool = options.calm
        self._rate: float = options.rate
        self._seconds: float = options.minutes * 60
        self._tell = tell
        self._round_messages = int(2 * self._rate * ROUND_SECONDS)
        rounds = int(self._seconds // ROUND_SECONDS) + 1
        planned = rounds * self._round_messages
        self._requests = plan_requests(planned, seed=options.seed, ids="half")
        self._dead_malformed: set[str] = set()
        self._log = WorkerLog([receiver.log])
        self.books = Books()

    @property
    def faults(self) -> Counter[str]:
        """How often each kind of fault was brought on."""
        return Counter(fault.kind for fault in self._nemesis.timeline)

    async def run(self) -> None:
        """Play it all."""
        await asyncio.to_thread(self._bench.start)
        await self._receiver.until_metric("sms_bridge_amqp_connection_up", 1)
        begun = time.monotonic()
        async with self._hardships.all():
            while (left := begun + self._seconds - time.monotonic()) > 0:
                await self._play_round(min(left, ROUND_SECONDS))
        await asyncio.to_thread(self._bench.end_workers)
        exit_code = await self._receiver.end()
        self._bench.log.read()
        self._log.read()
        self.books.problems += [*self._nemesis.stalls, *self._problems_of_processes(exit_code)]

    async def _play_round(self, seconds: float) -> None:
        ends = time.monotonic() + seconds
        requests = self._requests[: self._round_messages]
        del self._requests[: self._round_messages]
        publisher = Publisher([self._bench.broker.url], QUEUE, requests)
        publisher.floor = self._rate
        publisher.start()
        self._service.forget()
        try:
            async with self._service.sending(None, self._rate) as enough:
                await asyncio.to_thread(self._nemesis.wait, WARM_UP_SECONDS)
                while time.monotonic() < ends:
                    if self._is_calm:
                        await self._stay_calm()
                    else:
                        await self._bring_fault()
                enough.set()
        finally:
            await asyncio.to_thread(publisher.stop)
        # What comes later may not be dead yet when the dead letters are taken.
        malformed = set(self._hardships.malformed)
        await asyncio.to_thread(self._drain)
        await self._account(publisher, requests, malformed)

    async def _bring_fault(self) -> None:
        fault = await asyncio.to_thread(self._nemesis.strike)
        what = f"{fault.kind} {fault.detail}".rstrip()
        self._tell(f"{what}: {fault.ended - fault.started:.1f} s; {self._show_memory()}")
        await asyncio.to_thread(self._nemesis.rest)

    async def _stay_calm(self) -> None:
        await asyncio.to_thread(self._nemesis.wait, CALM_SECONDS)
        self._tell(self._show_memory())

    def _drain(self) -> None:
        """Wait until the queues are empty, twice in a row."""
        ends = time.monotonic() + DRAIN_SECONDS
        empty = 0
        while empty < 2 and time.monotonic() < ends:
            empty = 0 if self._bench.count_waiting() else empty + 1
            self._nemesis.wait(1)

    # What was promised, and what came about

    async def _account(
        self, publisher: Publisher, requests: list[Request], malformed: set[str]
    ) -> None:
        books, known = self.books, len(self.books.problems)
        books.add(
            checker.check(await self._collect_messages(publisher, requests)),
            webhook_checker.check(await self._collect_events()),
        )
        if lost := malformed - self._dead_malformed:
            books.problems.append(f"malformed messages are lost: {sorted(lost)}")
            self._dead_malformed |= lost
        books.malformed = len(self._dead_malformed)
        await asyncio.to_thread(self._bench.forget_posts)
        self._faults.spoiled.clear()
        self._bench.log.slow.clear()
        for problem in books.problems[known:]:
            self._tell(f"FAILED: {problem}")
        self._tell(
            f"accounted for: {books.published} messages, {books.malformed} malformed ones, "
            f"{books.events} webhooks; lost {books.lost + books.missing}; {self._show_memory()}"
        )

    async def _collect_messages(
        self, publisher: Publisher, requests: list[Request]
    ) -> checker.Evidence:
        dead = await self._take_dead_letters({one.number: one.message_id for one in requests})
        posts = await asyncio.to_thread(self._bench.read_posts, requests)
        spoiling = [fault for fault in self._nemesis.timeline if fault.kind in SPOILING]

        def is_spoiled(post: checker.Post) -> bool:
            covered = any(fault.covers(post.at) for fault in spoiling)
            return covered and post.key in self._faults.spoiled

        return checker.Evidence(
            published=publisher.published,
            confirmed=publisher.confirmed,
            # What the service answered has not reached the worker.
            posts=[post._replace(status=None) if is_spoiled(post) else post for post in posts],
            dead=dead,
            waiting=await asyncio.to_thread(self._bench.read_waiting, requests),
            faults=self._nemesis.timeline,
            slow=self._bench.log.slow,
            nameless={one.message_id for one in requests if not one.has_id},
        )

    async def _collect_events(self) -> webhook_checker.Evidence:
        # Its metric tells less: an event whose confirm was late is counted as one that failed.
        return webhook_checker.Evidence(
            events=self._service.events,
            stored=await read_out(self._bench.broker.url),
            forged=self._service.forged,
        )

    async def _take_dead_letters(self, owners: Mapping[str, str]) -> list[checker.DeadLetter]:
        """Take all dead letters; return those that are not of malformed messages."""
        letters = []
        async with open_amqp(self._bench.broker.url) as amqp:
            for message in await amqp.take_all(DEAD):
                reason = str(message.headers.get("sms-bridge-reason"))
                name = message.app_id or ""
                if not name.startswith(MALFORMED):
                    number = str(json.loads(message.body)["to"])
                    letters.append(checker.DeadLetter(owners.get(number, number), reason))
                    continue
                self._dead_malformed.add(name)
                if reason != "invalid":
                    self.books.problems.append(f"{name} is dead as {reason}")
        return letters

    def _problems_of_processes(self, receiver_exit: int | None) -> Iterator[str]:
        logs = {"worker": self._bench.log.events, "receiver": self._log.events}
        for role, events in logs.items():
            for event in ("internal_error", "unreadable"):
                if count := events[event]:
                    yield f"the {role} logged {event} {count} times"
        told = sum(events["unhandled_error"] for events in logs.values())
        if told > (cut := sum(n for kind, n in self.faults.items() if kind.endswith(CUT_SHORT))):
            yield f"unhandled_error was logged {told} times, with {cut} frames cut short"
        if unheard := self._faults.keys - logs["worker"]["secret_changed"]:
            yield f"the worker has not heard of {unheard} new keys"
        if bad := {code: n for code, n in self._bench.worker_exits.items() if code}:
            yield f"after SIGTERM the worker did not end cleanly: {bad}"
        if receiver_exit:
            yield f"after SIGTERM the receiver ended with {receiver_exit}"

    def _show_memory(self) -> str:
        memory = self._hardships.memory
        return ", ".join(f"{name} {s[-1] / MIB:.1f} MiB" for name, s in memory.items() if s)


async def play(
    broker: Broker,
    folder: Path,
    guard: Guard,
    options: argparse.Namespace,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """Play the hour and return the report."""
    begun = time.monotonic()
    rng = Random(options.seed)
    key_file = folder / "key"
    key_file.write_text("key-0\n", encoding="ascii")
    secrets = MountedSecrets(folder / "secrets")
    files = secrets.put(current=FIRST_SECRET, previous="an-older-secret")
    key = {"SMS_API__KEY": "null", "SMS_API__KEY_FILE": str(key_file)}
    async with open_amqp_proxy(broker.url) as amqp:
        bench = Bench(broker, folder, guard, urls=[amqp.url], settings=key)
        async with open_http_proxy(bench.api_url) as http:
            bench.api_url = http.url
            receiver = Receiver([amqp.url], folder, guard, files)
            service = Service(receiver.port, seed=options.seed, secret=FIRST_SECRET)
            faults = HourFaults(bench, amqp, http, key_file, rng)
            hardships = Hardships(bench, receiver, service, secrets, rng)
            try:
                hour = Hour(bench, receiver, service, faults, hardships, options, tell)
                await hour.run()
            finally:
                receiver.kill()
                bench.close()
    return {
        "seed": options.seed,
        "rate": options.rate,
        "kind": "compiled" if bridge.is_compiled() else "plain",
        "is_calm": options.calm,
        "rabbitmq": await read_version(broker.url),
        "seconds": round(time.monotonic() - begun),
        **vars(hour.books),
        "fuzzed": hardships.fuzzed,
        "attacks": hardships.attacks,
        "webhook_secrets": hardships.webhook_secrets,
        "faults": dict(sorted(hour.faults.items())),
        "worker_events": bench.log.events,
        "memory": hardships.memory,
    }


def judge_memory(report: dict[str, Any]) -> dict[str, Growth]:
    """Measure each role's memory, and note as a problem what grows."""
    found = {}
    for role, samples in report["memory"].items():
        found[role] = growth = measure(samples)
        if is_judged(report["seconds"]) and growth.share > MOST_GROWTH:
            report["problems"].append(f"the {role} grows by {growth.share:.1%} a quarter")
    return found


# The lines of the table: what they are called, and where the report has it.
_LINES: Final = {
    "messages, confirmed": "published",
    "  sent": "sent",
    "  POSTs": "posts",
    "  lost": "lost",
    "malformed messages": "malformed",
    "webhooks": "events",
    "  tries": "tries",
    "  stored": "stored",
    "  answered 200 and missing": "missing",
    "  stored too often": "excess",
    "forged webhooks": "forged",
    "fuzzed requests": "fuzzed",
    "new webhook secrets": "webhook_secrets",
    "seconds": "seconds",
}


def draw(console: Console, report: Mapping[str, Any], growths: Mapping[str, Growth]) -> None:
    """Print the books, the faults, the memory and the verdict."""
    table = Table(
        title=f"{report['kind']}{', calm' * report['is_calm']}, seed {report['seed']}",
        title_justify="left",
    )
    table.add_column("")
    table.add_column("", justify="right")
    for title, name in _LINES.items():
        table.add_row(title, str(report[name]))
    for reason, count in sorted(report["dead"].items()):
        table.add_row(f"dead: {reason}", str(count))
    for cause, count in sorted(report["extra_posts"].items()):
        table.add_row(f"POSTed again: {cause}", str(count))
    table.add_row("other strangers", str(sum(report["attacks"].values())))
    table.add_section()
    for kind, count in report["faults"].items():
        table.add_row(kind, str(count))
    console.print(table)
    for role, growth in growths.items():
        quarters = ", ".join(f"{each / MIB:.1f}" for each in growth.quarters)
        console.print(
            f"{role}: {growth.start / MIB:.1f} MiB at the start, by quarters {quarters}, at the "
            f"end {growth.end / MIB:.1f}, at most {growth.peak / MIB:.1f}; in the second half "
            f"{growth.share:+.1%} a quarter"
        )
    if not is_judged(report["seconds"]):
        console.print("The run was too short to judge the memory.")
    for problem in report["problems"]:
        console.print(f"FAILED: {problem}", markup=False)
    if not report["problems"]:
        console.print("PASSED: nothing ended, nothing grew, nothing was lost or sent twice.")


def main() -> int:
    """Run the soak that the command line asks for and return the exit code."""
    options = _parse_arguments()
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    # What goes wrong on the clients' connections is meant to.
    logging.disable(logging.CRITICAL)
    # Who crashes tells where.
    os.environ["PYTHONFAULTHANDLER"] = "1"
    try:
        with bounded(int(options.minutes * 60) + END_SECONDS):
            return _run(options, console)
    except (SoakError, BridgeError, ExceptionGroup) as error:
        for each in getattr(error, "exceptions", [error]):
            console.print(f"FAILED: {type(each).__name__}: {each}", markup=False)
        return 1
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _run(options: argparse.Namespace, console: Console) -> int:
    folder = Path(tempfile.mkdtemp(prefix="sms-bridge-soak-"))
    console.print(f"seed {options.seed}; the logs are in {folder}", markup=False)

    def tell(text: str) -> None:
        console.print(f"{time.strftime('%H:%M:%S')}  {text}", markup=False)

    with private_broker(management=True) as broker, guarded() as guard:
        report = asyncio.run(play(broker, folder, guard, options, tell))
    growths = judge_memory(report)
    if options.json is not None:
        options.json.write_text(json.dumps(report) + "\n", encoding="utf-8")
    draw(console, report, growths)
    if not report["problems"]:
        shutil.rmtree(folder)
    return 1 if report["problems"] else 0


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A worker and a receiver under faults for long.")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--rate", type=float, default=150, help="messages, and webhooks, a second")
    parser.add_argument("--calm", action="store_true", help="bring no faults")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there, too")
    options = parser.parse_args()
    if options.minutes <= 0 or options.rate <= 0:
        parser.error("--minutes and --rate must be over 0")
    return options


if __name__ == "__main__":
    sys.exit(main())
