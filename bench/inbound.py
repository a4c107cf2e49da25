"""Runs webhook receivers under h2load, at full load or at an even rate."""

import hashlib
import hmac
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.lineup import SECRET, Contestant, Task
from bench.queues import INBOUND
from bench.rig import Program, Rig
from bench.rounds import BenchError
from bridge.sandbox.processes import accepts, free_ports, wait_until

CONNECTIONS: Final = 64
START_SECONDS: Final = 60
LOAD_SECONDS: Final = 600
COUNT_SECONDS: Final = 20
WARM_UP: Final = 0.1
# It has no event id, so that no receiver treats the second webhook as a repeat.
BODY: Final = json.dumps(
    {
        "type": "message.received",
        "data": {
            "from": "+491713920002",
            "to": "+491713920001",
            "text": "Yes, please. Tomorrow at nine is fine, and thank you for asking.",
            "received_at": "2026-01-01T09:00:00Z",
        },
    }
).encode()


@dataclass(frozen=True, slots=True)
class Load:
    """Figures of a run. Rates are webhooks per second, or per second of CPU time."""

    wall_rate: float
    cpu_rate: float
    peak_mib: float


def load(rig: Rig, contestant: Contestant, *, webhooks: int) -> Load:
    """Send signed webhooks over 64 connections, as fast as they are answered.

    Raises BenchError if an answer is not 200, or if an event is not in the queue.
    """
    with receiving(rig, contestant) as (h2load, program):
        h2load.send(round(webhooks * WARM_UP))
        before = program.usage().cpu_seconds
        wall_rate = h2load.send(webhooks)
        usage = program.usage()
    return Load(
        wall_rate=wall_rate,
        cpu_rate=webhooks / (usage.cpu_seconds - before),
        peak_mib=usage.peak_mib,
    )


@contextmanager
def receiving(rig: Rig, contestant: Contestant) -> Iterator[tuple["H2load", Program]]:
    """Run a receiver and its load. At the end, the queue must contain all events."""
    rig.queues.make_inbound()
    port = free_ports(1)[0]
    folder = rig.folder("load")
    folder.mkdir()
    h2load = H2load(folder, port)
    with rig.running(contestant, Task(amqp_url=rig.broker.url, port=port)) as program:
        if not wait_until(lambda: accepts(port), seconds=START_SECONDS):
            raise BenchError(f"{contestant.name} does not listen")
        yield h2load, program
    _check(rig, contestant, h2load.sent)


class H2load:
    """The load generator, a C program that is faster than every receiver."""

    def __init__(self, folder: Path, port: int) -> None:
        found = shutil.which("h2load")
        if found is None:
            raise BenchError("No h2load is installed: run `make nginx`.")
        self.sent = 0
        self._log = folder / "answers.log"
        body = folder / "body.json"
        body.write_bytes(BODY)
        signature = hmac.new(SECRET.encode(), BODY, hashlib.sha256).hexdigest()
        self._command = [
            *(found, "--h1", f"--clients={CONNECTIONS}", f"--data={body}"),
            *("--header=Content-Type: application/json",),
            f"--header=X-Service-Signature: {signature}",
            f"http://127.0.0.1:{port}/webhooks",
        ]

    def send(self, count: int) -> float:
        """Send webhooks as fast as they are answered, and return the rate."""
        return self._run(count)

    def send_evenly(self, *, per_second: float, seconds: float) -> list[float]:
        """Send at an even rate, and return the milliseconds of each answer.

        The connections send at different times, to avoid bursts of 64.
        """
        each_seconds = CONNECTIONS / per_second
        # h2load only supports whole milliseconds.
        stagger = max(1, round(each_seconds / CONNECTIONS * 1000))
        self._log.unlink(missing_ok=True)
        self._run(
            max(1, round(seconds / each_seconds)) * CONNECTIONS,
            *(f"--rps={1 / each_seconds:.3f}", f"--log-file={self._log}"),
            *("--rate=1", f"--rate-period={stagger}ms"),
        )
        rows = [line.split() for line in self._log.read_text(encoding="ascii").splitlines()]
        rows.sort(key=lambda row: int(row[0]))
        return [int(row[2]) / 1000 for row in rows[round(len(rows) * WARM_UP) :]]

    def _run(self, count: int, *options: str) -> float:
        result = subprocess.run(
            [*self._command, f"--requests={count}", *options],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LOAD_SECONDS,
            check=True,
        )
        rate = re.search(r"finished in .*?, ([0-9.]+) req/s", result.stdout)
        if rate is None or f"status codes: {count} 2xx" not in result.stdout:
            raise BenchError(f"not all of {count} webhooks were accepted:\n{result.stdout[-800:]}")
        self.sent += count
        return float(rate[1])


def _check(rig: Rig, contestant: Contestant, sent: int) -> None:
    if not wait_until(lambda: rig.queues.count(INBOUND) == sent, seconds=COUNT_SECONDS):
        stored = rig.queues.count(INBOUND)
        raise BenchError(f"{contestant.name}: {sent} webhooks were answered 200, {stored} stored")
