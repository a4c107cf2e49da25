"""Runs of webhook receivers under h2load: all that they take, then half of it."""

import hashlib
import hmac
import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bridge.sandbox.processes import accepts, free_ports, wait_until
from tests.bench.errors import BenchError
from tests.bench.lineup import SECRET, Contestant, Task
from tests.bench.outbound import Delay, quantile
from tests.bench.queues import INBOUND
from tests.bench.rig import Rig

CONNECTIONS: Final = 64
START_SECONDS: Final = 60
LOAD_SECONDS: Final = 600
COUNT_SECONDS: Final = 20
WARM_UP: Final = 0.1
FEED_SECONDS: Final = 10.0
# It names no event, so that no receiver may take the second one for a repeat of the first.
BODY: Final = json.dumps(
    {
        "type": "message.received",
        "data": {
            "from": "+4915112345678",
            "to": "+4917012345678",
            "text": "Yes, please. Tomorrow at nine is fine, and thank you for asking.",
            "received_at": "2026-01-01T09:00:00Z",
        },
    }
).encode()


@dataclass(frozen=True, slots=True)
class Load:
    """What one run showed. Rates are webhooks per second of the clock or of CPU time.

    The delays, in milliseconds, are those at `rate` webhooks per second.
    """

    wall_rate: float
    cpu_rate: float
    peak_mib: float
    rate: float
    p50_ms: float
    p99_ms: float


def load(rig: Rig, contestant: Contestant, *, webhooks: int) -> Load:
    """Send signed webhooks over 64 connections, then at half the rate that this showed.

    Raises BenchError when one is not answered 200, or its event is not in the queue.
    """
    rig.queues.make_inbound()
    port = free_ports(1)[0]
    folder = rig.folder("load")
    folder.mkdir()
    h2load = H2load(folder, port)
    with rig.running(contestant, Task(amqp_url=rig.broker.url, port=port)) as program:
        if not wait_until(lambda: accepts(port), seconds=START_SECONDS):
            raise BenchError(f"{contestant.name} does not listen")
        warm = round(webhooks * WARM_UP)
        h2load.send(warm)
        before = program.usage().cpu_seconds
        wall_rate = h2load.send(webhooks)
        usage = program.usage()
        fed = _whole(wall_rate / 2 * FEED_SECONDS)
        late = h2load.send_evenly(fed, per_second=wall_rate / 2)
    _check(rig, contestant, warm + webhooks + fed)
    return Load(
        wall_rate=wall_rate,
        cpu_rate=webhooks / (usage.cpu_seconds - before),
        peak_mib=usage.peak_mib,
        rate=late.rate,
        p50_ms=late.p50_ms,
        p99_ms=late.p99_ms,
    )


class H2load:
    """The load, by a program in C that no receiver in this race can outrun."""

    def __init__(self, folder: Path, port: int) -> None:
        found = shutil.which("h2load")
        if found is None:
            raise BenchError("No h2load is installed: run `make nginx`.")
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
        """Send so many, as fast as they are answered; return the rate."""
        return self._run(count)

    def send_evenly(self, count: int, *, per_second: float) -> Delay:
        """Send so many at an even rate; return how long the answers took."""
        self._log.unlink(missing_ok=True)
        self._run(count, f"--rps={per_second / CONNECTIONS:.3f}", f"--log-file={self._log}")
        rows = [line.split() for line in self._log.read_text(encoding="ascii").splitlines()]
        late = sorted(int(row[2]) / 1000 for row in rows[round(len(rows) * WARM_UP) :])
        return Delay(per_second, p50_ms=quantile(late, 0.5), p99_ms=quantile(late, 0.99))

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
            raise BenchError(f"not all of {count} webhooks were taken:\n{result.stdout[-800:]}")
        return float(rate[1])


def _whole(count: float) -> int:
    """Round to what all connections can share evenly."""
    return max(1, round(count / CONNECTIONS)) * CONNECTIONS


def _check(rig: Rig, contestant: Contestant, sent: int) -> None:
    if not wait_until(lambda: rig.queues.count(INBOUND) == sent, seconds=COUNT_SECONDS):
        stored = rig.queues.count(INBOUND)
        raise BenchError(f"{contestant.name}: {sent} webhooks were answered 200, {stored} stored")
