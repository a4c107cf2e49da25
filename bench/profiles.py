"""Profiles both roles at full load with py-spy."""

import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.inbound import H2load
from bench.lineup import HERE, RECEIVERS, WORKERS, Contestant, Task
from bench.outbound import IN_FLIGHT
from bench.rig import Rig
from bench.rounds import BenchError
from bridge.sandbox.processes import accepts, free_ports, wait_until

SAMPLES_PER_SECOND: Final = 500
START_SECONDS: Final = 60
DRAIN_SECONDS: Final = 600
WRITE_SECONDS: Final = 60


@dataclass(frozen=True, slots=True)
class Profile:
    """Shares of all samples, largest first: in a function itself, and including its callees."""

    samples: int
    own: list[tuple[str, float]]
    whole: list[tuple[str, float]]


def profile_worker(rig: Rig, *, messages: int, native: bool) -> Profile:
    """Profile the worker at the instant API with 100 in flight."""
    rig.queues.make_outbound(messages)
    raw = rig.folder("profile")
    with rig.api() as api:
        task = Task(amqp_url=rig.broker.url, api_url=api.url("http"), in_flight=IN_FLIGHT)
        with rig.running(_ours(WORKERS), task) as program:
            wait_until(lambda: api.count() > messages / 10, seconds=START_SECONDS)
            with _recorded(program.pid, raw, native=native):
                wait_until(lambda: api.count() >= messages, seconds=DRAIN_SECONDS)
    return _summarise(raw)


def profile_receiver(rig: Rig, *, webhooks: int, native: bool) -> Profile:
    """Profile the webhook receiver under h2load."""
    rig.queues.make_inbound()
    raw = rig.folder("profile")
    folder = rig.folder("load")
    folder.mkdir()
    port = free_ports(1)[0]
    h2load = H2load(folder, port)
    with rig.running(_ours(RECEIVERS), Task(amqp_url=rig.broker.url, port=port)) as program:
        wait_until(lambda: accepts(port), seconds=START_SECONDS)
        h2load.send(webhooks // 10)
        with _recorded(program.pid, raw, native=native):
            h2load.send(webhooks)
    return _summarise(raw)


def _ours(contestants: tuple[Contestant, ...]) -> Contestant:
    return next(one for one in contestants if one.name == HERE)


@contextmanager
def _recorded(pid: int, raw: Path, *, native: bool) -> Iterator[None]:
    """Record the stacks of a process, by function, in flame graph format."""
    spy = shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if spy is None:
        raise BenchError("No py-spy is installed: run `make bench-profile`.")
    process = subprocess.Popen(
        [
            *(spy, "record", f"--pid={pid}", "--format=raw", f"--output={raw}", "--function"),
            *(f"--rate={SAMPLES_PER_SECOND}", "--duration=unlimited"),
            *(("--native",) if native else ()),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=WRITE_SECONDS)
    finally:
        process.kill()
        process.wait()
    if not raw.exists():
        raise BenchError(f"py-spy recorded nothing:\n{errors}")


def _summarise(raw: Path) -> Profile:
    own: Counter[str] = Counter()
    whole: Counter[str] = Counter()
    for line in raw.read_text(encoding="utf-8").splitlines():
        stack, _, count = line.rpartition(" ")
        functions = stack.split(";")
        own[functions[-1]] += int(count)
        whole.update(dict.fromkeys(functions, int(count)))
    samples = own.total()
    return Profile(
        samples,
        own=[(name, count / samples) for name, count in own.most_common()],
        whole=[(name, count / samples) for name, count in whole.most_common()],
    )
