"""The soak: many messages, many faults, and an account of every single message.

    python soak/run.py --messages 50000 --seed 1 --faults 100 --json soak.json

Exit code 0: nothing was lost, nothing sent twice without need. 1: it was. 2: bad usage.
"""

import argparse
import json
import logging
import platform
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, get_args

from rich.console import Console

from bridge.errors import BridgeError
from bridge.sandbox.broker import private_broker
from bridge.sandbox.processes import guarded
from soak.bench import CONCURRENCY, QUEUE, Bench, SoakError, bounded
from soak.checker import GROUPS, Evidence, Fault, Verdict, check
from soak.nemesis import Nemesis
from soak.publisher import Ids, Publisher, plan_requests
from soak.report import draw

DRAIN_SECONDS: Final = 180.0
# What the end needs: the drain, the reading out, the end of all processes.
END_SECONDS: Final = 300.0
FIRST_CYCLE_SECONDS: Final = 20.0
# For what is left to publish when the last fault is over.
RUSH_PER_SECOND: Final = 300.0
WARM_UP_SECONDS: Final = 3.0
# With fewer there is nothing to send when some fault ends, which looks as if it had not ended.
MESSAGES_PER_FAULT: Final = 100
PLAIN_WIDTH: Final = 120
MAX_WORKERS: Final = 8

EXIT_INTERRUPTED: Final = 130


class Soak:
    """One run: traffic under faults, then the drain, then the books."""

    def __init__(self, bench: Bench, options: argparse.Namespace, console: Console) -> None:
        self._bench = bench
        self._console = console
        self._faults: int = options.faults
        self._begun = time.monotonic()
        self._deadline = self._begun + options.max_seconds - END_SECONDS
        self._requests = plan_requests(options.messages, seed=options.seed, ids=options.ids)
        self._publisher = Publisher([bench.broker.url], QUEUE, self._requests)
        self._nemesis = Nemesis(
            bench, seed=options.seed, groups=[options.only] if options.only else GROUPS
        )

    def run(self) -> tuple[Verdict, dict[str, Any]]:
        """Play it all; return the verdict, and what else there is to tell."""
        versions = _versions(self._bench)
        self._publisher.start()
        try:
            self._bring_faults()
            self._publish_rest()
        finally:
            self._publisher.stop()
        drained_after = self._drain()
        self._bench.end_workers()
        self._bench.log.read()
        verdict = check(self._collect())
        verdict.problems += [*self._nemesis.stalls, *self._problems_of_worker()]
        return verdict, self._context(versions, drained_after)

    def _bring_faults(self) -> None:
        self._publisher.floor = 1
        self._publisher.share = 1 / FIRST_CYCLE_SECONDS / (self._faults + 1)
        self._nemesis.wait(WARM_UP_SECONDS)
        begun = time.monotonic()
        for done in range(1, self._faults + 1):
            fault = self._nemesis.strike()
            self._tell(fault, done)
            self._nemesis.rest()
            if time.monotonic() > self._deadline:
                self._nemesis.stalls.append(f"only {done} faults fitted into --max-seconds")
                return
            cycle = (time.monotonic() - begun) / done
            # As if there were one fault more, so that there is traffic in the last one, too.
            self._publisher.share = 1 / cycle / (self._faults - done + 1)

    def _tell(self, fault: Fault, done: int) -> None:
        clock = time.strftime("%H:%M:%S", time.localtime(fault.started))
        what = f"{fault.kind} {fault.detail}".rstrip()
        self._console.print(
            f"{clock}  {done:>3}/{self._faults}  {what}: {fault.ended - fault.started:.1f} s, "
            f"then sending again after {time.time() - fault.ended:.1f} s; "
            f"{len(self._publisher.confirmed)} confirmed",
            markup=False,
        )

    def _publish_rest(self) -> None:
        self._publisher.floor = RUSH_PER_SECOND
        seconds = max(0.0, self._deadline - time.monotonic())
        self._nemesis.wait(seconds, until=lambda: self._publisher.is_done)

    def _drain(self) -> float:
        """Wait until the queues are empty, twice in a row; return how long it took."""
        begun = time.monotonic()
        empty = 0
        while empty < 2 and time.monotonic() < begun + DRAIN_SECONDS:
            empty = 0 if self._bench.count_waiting() else empty + 1
            self._nemesis.wait(1)
        return time.monotonic() - begun

    def _collect(self) -> Evidence:
        return Evidence(
            published=self._publisher.published,
            confirmed=self._publisher.confirmed,
            posts=self._bench.read_posts(self._requests),
            dead=self._bench.read_dead_letters(self._requests),
            waiting=self._bench.read_waiting(self._requests),
            faults=self._nemesis.timeline,
            slow=self._bench.log.slow,
            nameless={one.message_id for one in self._requests if not one.has_id},
            concurrency=CONCURRENCY,
            workers=self._bench.workers,
        )

    def _problems_of_worker(self) -> Iterator[str]:
        for event in ("internal_error", "unhandled_error"):
            if count := self._bench.log.events[event]:
                yield f"the worker logged {event} {count} times"
        if bad := {code: n for code, n in self._bench.worker_exits.items() if code}:
            yield f"after SIGTERM the worker did not end cleanly: {bad}"

    def _context(self, versions: dict[str, str], drained_after: float) -> dict[str, Any]:
        return {
            "versions": versions,
            "seconds": round(time.monotonic() - self._begun, 1),
            "drained_after_seconds": round(drained_after, 1),
            "worker_peak_mib": round(self._bench.worker_peak_kib / 1024, 1),
            "worker_deliveries": dict(self._bench.log.deliveries),
            "worker_events": dict(self._bench.log.events),
            "timeline": [asdict(fault) for fault in self._nemesis.timeline],
        }


def main() -> int:
    """Run the soak that the command line asks for and return the exit code."""
    options = _parse_arguments()
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    # What goes wrong on the publisher's connections is meant to.
    logging.disable(logging.CRITICAL)
    try:
        with bounded(options.max_seconds):
            return _run(options, console)
    except (SoakError, BridgeError) as error:
        console.print(f"FAILED: {error}", markup=False)
        return 1
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _run(options: argparse.Namespace, console: Console) -> int:
    folder = Path(tempfile.mkdtemp(prefix="sms-bridge-soak-"))
    console.print(f"seed {options.seed}; the logs are in {folder}", markup=False)
    with private_broker(management=True) as broker, guarded() as guard:
        bench = Bench(broker, folder, guard, workers=options.workers)
        try:
            bench.start()
            verdict, context = Soak(bench, options, console).run()
        finally:
            bench.close()
    settings = {key: value for key, value in vars(options).items() if key != "json"}
    report = {"settings": settings, **asdict(verdict), **context}
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    draw(console, report)
    if not verdict.problems:
        shutil.rmtree(folder)
    return 1 if verdict.problems else 0


def _versions(bench: Bench) -> dict[str, str]:
    packages = {name: version(name) for name in ("sms-bridge", "aio-pika", "aiormq")}
    return {
        **packages,
        "RabbitMQ": bench.broker_version(),
        "Python": platform.python_version(),
    }


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Many messages, many faults, every one accounted.")
    parser.add_argument("--messages", type=int, default=50_000)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--workers", type=int, default=1, help="how many take from the queue")
    parser.add_argument("--ids", choices=get_args(Ids), default="on", help="publish with an id")
    parser.add_argument("--only", choices=("broker", "worker", "api"), help="kinds of faults")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there, too")
    parser.add_argument("--max-seconds", type=int, default=3600)
    options = parser.parse_args()
    if options.faults < 0 or options.max_seconds <= END_SECONDS:
        parser.error(f"--max-seconds must be over {END_SECONDS:.0f}, --faults not negative")
    if not 1 <= options.workers <= MAX_WORKERS:
        parser.error(f"--workers must be 1 to {MAX_WORKERS}")
    if options.messages < max(1, MESSAGES_PER_FAULT * options.faults):
        parser.error(f"every fault needs {MESSAGES_PER_FAULT} messages")
    return options


if __name__ == "__main__":
    sys.exit(main())
