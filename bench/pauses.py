"""Measures pauses of the event loops, at half of each role's maximum rate.

Meanwhile, metrics are scraped every second, and a secret is replaced every 10 s.
"""

import json
import time
from pathlib import Path
from typing import Any, Final

from bench.inbound import receiving
from bench.lineup import COMPILED_ENVIRON, KEY, PYTHON, SECRET, Contestant
from bench.outbound import IN_FLIGHT, START_SECONDS, task_of, wait_for_consumers
from bench.rig import Rig
from bench.rounds import BenchError, Options, Row, Tell
from bridge.config import ENV_PREFIX
from bridge.sandbox.processes import wait_until

PROGRAM: Final = Path(__file__).parent / "watched_role.py"
# Seconds between two replacements of the secret, which is read every 5 s.
STRETCH_SECONDS: Final = 10.0
CAPACITY_SECONDS: Final = 6.0
FIRST_WEBHOOKS: Final = 5_000
TOLD: Final = 8
KNOWN: Final = ("garbage", "scrape", "secrets")


def pauses(rig: Rig, options: Options, tell: Tell) -> list[Row]:
    """Measure the worker, then the receiver, for a number of minutes each."""
    stretches = max(1, round(options.minutes * 60 / STRETCH_SECONDS))
    return [_worker(rig, stretches, tell), _receiver(rig, stretches, tell)]


def _worker(rig: Rig, stretches: int, tell: Tell) -> Row:
    role = _Role(rig, "worker", KEY, "SMS_API__KEY_FILE", "{}")
    rig.queues.make_outbound()
    with (
        rig.api() as api,
        rig.running(role.contestant, task_of(rig, api, "http", IN_FLIGHT)),
    ):
        wait_for_consumers(rig, role.contestant)
        total, capacity = rig.queues.keep_outbound_filled(api.count, seconds=CAPACITY_SECONDS)
        role.begin()
        for _ in range(stretches):
            role.replace_secret()
            total += len(
                rig.queues.feed_outbound(
                    per_second=capacity / 2, seconds=STRETCH_SECONDS, first=total
                )
            )
        if not wait_until(lambda: api.count() >= total, seconds=START_SECONDS):
            raise BenchError(f"the worker POSTed {api.count()} of {total} messages")
        role.end()
    return role.conclude(capacity / 2, tell)


def _receiver(rig: Rig, stretches: int, tell: Tell) -> Row:
    role = _Role(rig, "webhook", SECRET, "WEBHOOK__SECRET_FILES", '["{}"]')
    with receiving(rig, role.contestant) as (h2load, _):
        capacity = h2load.send(FIRST_WEBHOOKS)
        role.begin()
        for _ in range(stretches):
            role.replace_secret()
            h2load.send_evenly(per_second=capacity / 2, seconds=STRETCH_SECONDS)
        role.end()
    return role.conclude(capacity / 2, tell)


class _Role:
    """A watched role, whose secret file is replaced."""

    def __init__(self, rig: Rig, name: str, secret: str, setting: str, value: str) -> None:
        folder = rig.folder("watched")
        folder.mkdir()
        self._name = name
        self._secret = secret
        self._file = folder / "secret"
        self._found = folder / "pauses.json"
        self._replaced = 0
        self._begun = self._ended = 0.0
        self.replace_secret()
        self.contestant = Contestant(
            f"our {name}",
            "as shipped, and watched",
            (PYTHON, str(PROGRAM), name),
            has_metrics=True,
            environ={
                f"{ENV_PREFIX}{setting}": value.format(self._file),
                "BENCH_PAUSES": str(self._found),
                **COMPILED_ENVIRON,
            },
        )

    def replace_secret(self) -> None:
        """Replace the file as Kubernetes does. The secret stays the same, with another line end."""
        self._replaced += 1
        new = self._file.with_suffix(".new")
        new.write_text(self._secret + "\n" * self._replaced, encoding="ascii")
        new.replace(self._file)

    def begin(self) -> None:
        """Start to count pauses."""
        self._begun = time.time()

    def end(self) -> None:
        """Stop counting."""
        self._ended = time.time()

    def conclude(self, rate: float, tell: Tell) -> Row:
        """Print the pauses, and return the row."""
        found: dict[str, list[dict[str, Any]]] = json.loads(self._found.read_text("utf-8"))
        counted = {
            what: [one for one in longest if self._begun <= one["at"] <= self._ended]
            for what, longest in found.items()
        }
        by_clock = counted["pauses"]
        by_cpu = sorted(by_clock, key=lambda one: float(one["cpu_ms"]), reverse=True)
        for order, first in (("longest", by_clock), ("most CPU time", by_cpu)):
            for one in first[:TOLD]:
                figures = f"{one['ms']:.1f} ms, {one['cpu_ms']:.1f} ms of CPU time"
                tell(f"{self._name}, {order}: {figures}: {one['why']}")
        for what in KNOWN:
            for one in sorted(counted[what], key=lambda one: float(one["cpu_ms"]))[-3:]:
                tell(f"{self._name}, {what}: {one['cpu_ms']:.1f} ms of CPU time {one['which']}")
        longest, busiest = (first[0] if first else _NONE for first in (by_clock, by_cpu))
        return {
            "name": self._name,
            "runs": 1,
            "minutes": (self._ended - self._begun) / 60,
            "rate": rate,
            "longest_ms": longest["ms"],
            "longest_why": longest["why"],
            "cpu_ms": busiest["cpu_ms"],
            "cpu_why": busiest["why"],
            **{
                f"{what}_ms": max((one["cpu_ms"] for one in counted[what]), default=0.0)
                for what in KNOWN
            },
        }


# A row without pauses.
_NONE: Final[dict[str, Any]] = {"ms": 0.0, "cpu_ms": 0.0, "why": ""}
