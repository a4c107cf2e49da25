"""Order across workers: they come, go, are killed, and the broker restarts; no message overtakes.

    python soak/lanes.py --messages 20000 --numbers 500 --seed 1

Exit code 0: nothing out of order, nothing lost, nothing sent again but what was in flight at a
kill. 1: it was. How fast workers with lanes are: soak/lane_rates.py.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from bridge.sandbox.faults import Fault
from bridge.sandbox.messages import Attempt
from soak.figures import tell
from soak.rig import Process, Rig, open_stand, run
from tests.faults.bench import make_numbers, open_amqp

LANES: Final = 32
CONCURRENCY: Final = 20
LATENCY_SECONDS: Final = 0.05
DELAYS: Final = ["1s", "2s", "5s"]
# The share of POSTs that go wrong in each way.
FAULTS: Final[tuple[tuple[float, Fault], ...]] = (
    (0.010, Fault(status=500)),
    (0.005, Fault(status=425)),
    (0.002, Fault(status=429, headers={"Retry-After": "1"})),
)
PER_SECOND: Final = 250.0
PUBLISHED_AT_ONCE: Final = 50
END_SECONDS: Final = 120.0
# A worker that stops lets go of its lanes within this time.
MOVED_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of all messages. `extra` are POSTs of what was accepted before."""

    published: int
    accepted: int
    lost: int
    out_of_order: int
    tries: int
    extra: int
    most_extra: int


def judge(attempts: Sequence[Attempt], published: int, *, most_extra: int) -> Verdict:
    """Compare the POSTs, whose keys are `<number>.<place>`, with the order of their publishing.

    Out of order is a first POST of a message while one before it, to the same number, is not
    accepted.
    """
    accepted: set[str] = set()
    tried: set[str] = set()
    next_place: defaultdict[str, int] = defaultdict(int)
    out_of_order = extra = 0
    for attempt in attempts:
        key = attempt.idempotency_key or ""
        number, _, place = key.rpartition(".")
        extra += key in accepted
        if key not in tried and int(place) > next_place[number]:
            out_of_order += 1
        tried.add(key)
        if attempt.status is not None and attempt.status < 300 and key not in accepted:
            accepted.add(key)
            next_place[number] = max(next_place[number], int(place) + 1)
    return Verdict(
        published=published,
        accepted=len(accepted),
        lost=published - len(accepted),
        out_of_order=out_of_order,
        tries=len(attempts),
        extra=extra,
        most_extra=most_extra,
    )


def is_kept(verdict: Verdict) -> bool:
    """Say whether what is promised was kept."""
    few = verdict.extra <= verdict.most_extra
    return verdict.lost == 0 and verdict.out_of_order == 0 and few


class Traffic:
    """Messages of some numbers, published in order, again until they are confirmed."""

    def __init__(self, rig: Rig, *, messages: int, numbers: int, seed: int) -> None:
        self._rig = rig
        random_ = random.Random(seed)
        to = make_numbers(numbers)
        counts: Counter[str] = Counter()
        self._bodies = []
        for _ in range(messages):
            number = random_.choice(to)
            text = f"text {counts[number]}"
            body = json.dumps({"to": number, "from": "Acme", "text": text}).encode()
            self._bodies.append((f"{number}.{counts[number]}", body))
            counts[number] += 1
        self.published = 0

    async def publish(self, count: int, *, per_second: float = PER_SECOND) -> None:
        """Publish so many more, in order."""
        until = min(self.published + count, len(self._bodies))
        async with open_amqp(self._rig.broker.url) as amqp:
            while self.published < until:
                began = time.monotonic()
                some = self._bodies[self.published : min(self.published + PUBLISHED_AT_ONCE, until)]
                # Written in this order; the confirms may come in any.
                await asyncio.gather(
                    *(amqp.publish(self._rig.queue, body, message_id=key) for key, body in some)
                )
                self.published += len(some)
                await asyncio.sleep(max(0.0, began + len(some) / per_second - time.monotonic()))


class Scale:
    """Workers that come and go."""

    def __init__(self, rig: Rig, **settings: Any) -> None:
        self._rig = rig
        # Past the proxy, which would be the slowest part.
        self._settings = {"rabbitmq__url": [rig.broker.url], **settings}
        self.workers: list[Process] = []

    async def to(self, count: int) -> None:
        """Start or stop workers until there are so many."""
        while len(self.workers) < count:
            self.workers.append(self._rig.start(**self._settings))
        for worker in self.workers:
            await worker.until_consuming()
        leaving, self.workers = self.workers[count:], self.workers[:count]
        await asyncio.gather(*(worker.end() for worker in leaving))

    def kill(self, at: int) -> None:
        """End one at once."""
        self.workers.pop(at).kill()


def settings(**changed: Any) -> dict[str, Any]:
    """Return the settings of a worker with lanes."""
    with_lanes = {"worker__ordering": "recipient", "worker__lanes": LANES}
    return {
        "worker__concurrency": CONCURRENCY,
        "worker__retry_delays": DELAYS,
        "worker__max_uncertain_attempts": 20,
        "worker__max_attempts": 20,
        **with_lanes,
    } | changed


def misbehave(rig: Rig, *, seed: int) -> None:
    """Have some POSTs fail, each in its way."""
    random_ = random.Random(seed)
    slow = Fault(latency_seconds=LATENCY_SECONDS)

    def take_fault(_to: str) -> Fault:
        at = random_.random()
        for share, fault in FAULTS:
            at -= share
            if at < 0:
                return fault
        return slow

    rig.service.misbehave({"latency_seconds": LATENCY_SECONDS})
    rig.service.memory.take_fault = take_fault  # type: ignore[assignment, method-assign]


async def play(rig: Rig, options: argparse.Namespace) -> Verdict:
    """Publish all that is asked for while workers come, go and die, and the broker restarts."""
    misbehave(rig, seed=options.seed)
    await rig.declare_main()
    traffic = Traffic(rig, messages=options.messages, numbers=options.numbers, seed=options.seed)
    scale = Scale(rig, **settings())
    random_ = random.Random(options.seed)
    part = options.messages // 8
    kills = 0

    async def kill() -> None:
        nonlocal kills
        scale.kill(random_.randrange(len(scale.workers)))
        kills += 1

    async def restart() -> None:
        await asyncio.to_thread(rig.broker.stop)
        await asyncio.to_thread(rig.broker.start)

    steps: list[tuple[str, Callable[[], Awaitable[None]]]] = [
        ("1 worker", lambda: scale.to(1)),
        ("3 workers", lambda: scale.to(3)),
        ("kill -9 of one", kill),
        ("3 workers", lambda: scale.to(3)),
        ("the broker restarts", restart),
        ("kill -9 of one", kill),
        ("1 worker", lambda: scale.to(1)),
        ("kill -9 of the last, 1 worker", lambda: _replace(scale, kill)),
    ]
    for name, step in steps:
        tell(f"{time.monotonic() - options.began:6.1f} s  {name}")
        await step()
        await traffic.publish(part)
    await traffic.publish(options.messages)
    tell(f"{time.monotonic() - options.began:6.1f} s  all published")
    await _until_through(rig, traffic)
    await scale.to(0)
    return judge(rig.service.memory.attempts, traffic.published, most_extra=kills * CONCURRENCY)


async def _replace(scale: Scale, kill: Callable[[], Awaitable[None]]) -> None:
    await kill()
    await scale.to(1)


async def _until_through(rig: Rig, traffic: Traffic) -> None:
    deadline = time.monotonic() + END_SECONDS
    while len({one.idempotency_key for one in rig.service.memory.messages}) < traffic.published:
        if time.monotonic() > deadline:
            return
        await asyncio.sleep(0.5)


async def main() -> int:
    """Play what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--numbers", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    options.began = time.monotonic()
    async with open_stand() as stand, stand.rig() as rig:
        verdict = await play(rig, options)
    tell(json.dumps(asdict(verdict)))
    return int(not is_kept(verdict))


if __name__ == "__main__":
    sys.exit(run(main()))
