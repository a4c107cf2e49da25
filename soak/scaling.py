"""Workers that come and go as KEDA has them: none to many and back, and an account of it all.

    python soak/scaling.py --messages 6000 --waves 4 --seed 1

The numbers come from the chart's own ScaledObject, and from RabbitMQ's management API; the workers
are processes, and any of them may be the one that is ended. Exit code 1: a promise was broken.
"""

import argparse
import asyncio
import itertools
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import httpx

from bridge.topology.declarations import retry_queue
from soak.autoscaler import Autoscaler
from soak.figures import tell
from soak.rig import END_SECONDS, LATENCY_SECONDS, Process, Rig, Stand, open_stand, run
from soak.scenes import Finding
from tests.chart.rendering import MINIMAL, Values, merged, nested, of_kind, render
from tests.faults.bench import eventually, make_numbers
from tests.faults.traffic import TOO_EARLY, once_each

MAX_SECONDS: Final = 900
WAVE_SECONDS: Final = 200
ANSWER_SECONDS: Final = 30
TICK_SECONDS: Final = 0.1
# Of each wave; the others come all at once.
TRICKLE_SHARE: Final = 0.25
TRICKLE_SECONDS: Final = 16
LATE: Final = 5
MOST_SHARE: Final = 0.8
# Longer than it takes until no worker is left: two reports of the broker, 5 s each, the cooldown,
# and a look.
LADDER_SECONDS: Final = 25
# The same, on a computer that is busy with the workers' ends.
EMPTY_SECONDS: Final = 90


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is done, and how the workers are scaled; a wave takes them from none to `most`.

    `refused_share` of a burst goes up the ladder once, for `ladder_seconds`.
    """

    messages: int
    waves: int
    seed: int
    most: int = 5
    for_each: int = 100
    concurrency: int = 10
    trickle_seconds: float = TRICKLE_SECONDS
    refused_share: float = 0.1
    ladder_seconds: int = LADDER_SECONDS

    def scaled_object(self, rig: Rig) -> dict[str, Any]:
        """Render the chart's ScaledObject, with seconds where people have minutes."""
        one_by_one = {"type": "Pods", "value": 1, "periodSeconds": 2}
        keda: Values = {
            "enabled": True,
            "managementUrl": rig.broker.management_url,
            "existingSecret": "monitoring",
            "queueLength": self.for_each,
            "minReplicaCount": 0,
            "maxReplicaCount": self.most,
            "pollingInterval": 1,
            "cooldownPeriod": 2,
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": 2, "policies": [one_by_one]}},
        }
        values = merged(
            MINIMAL, nested("worker.keda", keda), nested("config.worker.queue", rig.queue)
        )
        (scaled,) = of_kind(render(values), "ScaledObject").values()
        return scaled


class Deployment:
    """As many workers as the autoscaler asks for; `counts` has each number that there was."""

    def __init__(self, start: Callable[[], Process], autoscaler: Autoscaler, *, seed: int) -> None:
        self.counts = [0]
        self.ended: list[Process] = []
        self._workers: list[Process] = []
        self._start = start
        self._autoscaler = autoscaler
        self._random = random.Random(seed)

    @property
    def is_empty(self) -> bool:
        """Whether there is no worker; some may still drain."""
        return not self._workers

    @property
    def deliveries(self) -> int:
        """How many deliveries the workers have settled, those that are ended too."""
        return sum(_events(worker).count("delivery") for worker in (*self._workers, *self.ended))

    async def follow(self) -> None:
        """Look at the queue and scale, for ever; raises when the broker does not tell its length.

        As in Kubernetes nobody waits for the end of a pod before the next one is started.
        """
        async with httpx.AsyncClient(
            auth=("guest", "guest"), trust_env=False, timeout=ANSWER_SECONDS
        ) as client:
            while True:
                answer = await client.get(self._autoscaler.url)
                messages = self._autoscaler.read(answer.raise_for_status().json())
                replicas = len(self._workers)
                self._scale(self._autoscaler.decide(messages, replicas, time.monotonic()))
                await asyncio.sleep(self._autoscaler.polling_seconds)

    def _scale(self, replicas: int) -> None:
        while len(self._workers) < replicas:
            self._workers.append(self._start())
        while len(self._workers) > replicas:
            worker = self._workers.pop(self._random.randrange(len(self._workers)))
            worker.child.ask_to_end()
            self.ended.append(worker)
        if replicas != self.counts[-1]:
            self.counts.append(replicas)

    async def end(self) -> None:
        """Take all workers away, and wait for the end of each."""
        self._scale(0)
        await eventually(
            lambda: not any(worker.is_running for worker in self.ended),
            what="the workers' end",
            seconds=END_SECONDS,
        )


class Campaign:
    """Waves of messages, each of which begins without a worker."""

    def __init__(self, rig: Rig, deployment: Deployment, plan: Plan) -> None:
        self.numbers: list[str] = []
        self.refused = 0
        self.finding = Finding()
        self._rig = rig
        self._deployment = deployment
        self._plan = plan
        self._random = random.Random(plan.seed)

    async def play(self) -> None:
        """Play all waves; fails when one is not through in time."""
        for wave in range(1, self._plan.waves + 1):
            begun = len(self._deployment.counts) - 1
            async with asyncio.timeout(WAVE_SECONDS):
                await self._until_empty()
                await self._rush(self._plan.messages // self._plan.waves)
                seconds = await self._wake_from_none()
            counts = self._deployment.counts[begun:]
            tell(f"wave {wave}: workers {' '.join(map(str, counts))}; awake after {seconds:.1f} s")
            if max(counts) < self._plan.most:
                self.finding.show(f"wave {wave}: at most {max(counts)} workers", kept=False)

    async def _rush(self, count: int) -> None:
        """Publish a burst, then some more at an even rate, while workers go again."""
        trickle = make_numbers(round(count * TRICKLE_SHARE))
        burst = make_numbers(count - len(trickle) - LATE)
        self._refuse_once(self._random.sample(burst, round(len(burst) * self._plan.refused_share)))
        before = self._rig.accepted
        await self._rig.publish(burst)
        # With all workers there, or a trickle would not be less than they can do.
        await eventually(
            lambda: self._rig.accepted - before > len(burst) * MOST_SHARE,
            what="most of the burst",
            seconds=WAVE_SECONDS,
        )
        ticks = round(self._plan.trickle_seconds / TICK_SECONDS)
        for part in _parts(trickle, ticks):
            await self._rig.publish(part)
            await asyncio.sleep(TICK_SECONDS)
        await self._until_taken([*burst, *trickle])

    async def _wake_from_none(self) -> float:
        """Have messages come due while there is no worker.

        Return how long after that the last of them was accepted.
        """
        late = make_numbers(LATE)
        self._refuse_once(late)
        await self._rig.publish(late)
        memory = self._rig.service.memory
        await eventually(lambda: len(self._rig.service.posts(late)) == LATE, what="the first POSTs")
        due = max(post.received_at for post in self._rig.service.posts(late))
        due += self._plan.ladder_seconds
        await self._until_empty()
        waiting = await self._rig.amqp.count(*self._rig.ladder)
        if waiting != LATE:
            self.finding.show(f"{waiting} of {LATE} on the ladder without a worker", kept=False)
        await self._until_taken(late)
        return max(m.received_at for m in memory.messages if m.to in set(late)) - due

    def _refuse_once(self, numbers: Sequence[str]) -> None:
        self.refused += len(numbers)
        self._rig.service.misbehave(
            *once_each([*numbers], TOO_EARLY), {"latency_seconds": LATENCY_SECONDS}
        )

    async def _until_taken(self, numbers: Sequence[str]) -> None:
        await self._rig.until_taken(numbers, seconds=WAVE_SECONDS)
        self.numbers += numbers

    async def _until_empty(self) -> None:
        await eventually(
            lambda: self._deployment.is_empty, what="no worker is left", seconds=EMPTY_SECONDS
        )


def _parts(items: Sequence[str], count: int) -> Iterator[Sequence[str]]:
    edges = [round(len(items) * place / count) for place in range(count + 1)]
    return (items[begin:end] for begin, end in itertools.pairwise(edges))


@asynccontextmanager
async def deployed(rig: Rig, plan: Plan) -> AsyncIterator[Deployment]:
    """Scale workers of the rig's queue while this is open; at the end all are taken away."""
    await rig.declare_main()
    rig.ladder = [retry_queue(rig.queue, plan.ladder_seconds)]
    deployment = Deployment(
        lambda: rig.start(
            worker__concurrency=plan.concurrency,
            worker__retry_delays=[plan.ladder_seconds],
        ),
        Autoscaler(plan.scaled_object(rig)),
        seed=plan.seed,
    )
    following = asyncio.create_task(deployment.follow())
    try:
        yield deployment
    finally:
        following.cancel()
        (fault,) = await asyncio.gather(following, return_exceptions=True)
        await deployment.end()
        assert isinstance(fault, asyncio.CancelledError), f"nobody scaled any more: {fault!r}"


async def play(stand: Stand, plan: Plan) -> Finding:
    """Play a campaign and account for every message of it."""
    async with stand.rig() as rig:
        async with deployed(rig, plan) as deployment:
            campaign = Campaign(rig, deployment, plan)
            await campaign.play()
        account = await rig.account(campaign.numbers)
    finding = campaign.finding
    finding.show_account(account)
    finding.show_no_double(account)
    extra = account.extra_posts - campaign.refused
    finding.show(f"POSTs but for the {campaign.refused} retries {extra}", kept=extra == 0)
    codes = [worker.child.exit_code for worker in deployment.ended]
    finding.show(f"{len(codes)} workers ended, exit codes {set(codes)}", kept=set(codes) == {0})
    in_flight = [_count_in_flight(worker) for worker in deployment.ended]
    busy = sum(map(bool, in_flight))
    finding.show(f"{busy} of them with requests in flight, {sum(in_flight)} in all")
    return finding


def _count_in_flight(worker: Process) -> int:
    """Count the deliveries that a worker ended with after it was told to stop."""
    events = _events(worker)
    return events[events.index("signal") :].count("delivery") if "signal" in events else 0


def _events(worker: Process) -> list[str]:
    # The last line may be half written.
    whole, _, _ = worker.child.log.read_text(encoding="utf-8").rpartition("\n")
    return [json.loads(line)["event"] for line in whole.splitlines() if line.startswith("{")]


async def main(plan: Plan) -> int:
    """Play it, print what it has shown, and return the exit code."""
    try:
        async with asyncio.timeout(MAX_SECONDS), open_stand(management=True) as stand:
            finding = await play(stand, plan)
    except (AssertionError, TimeoutError) as error:
        finding = Finding(broken=[str(error) or f"not over within {MAX_SECONDS} s"])
    tell(json.dumps({"seed": plan.seed, "waves": plan.waves}) + " " + ", ".join(finding.figures))
    for problem in finding.broken:
        tell(f"FAILED: {problem}")
    return 1 if finding.broken else 0


def _parse_arguments() -> Plan:
    parser = argparse.ArgumentParser(description="Workers that come and go, every message counted.")
    parser.add_argument("--messages", type=int, default=6_000)
    parser.add_argument("--waves", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if not 1 <= options.waves <= options.messages / 1_000:
        parser.error("--waves must be 1 or more, and each needs 1000 messages")
    return Plan(messages=options.messages, waves=options.waves, seed=options.seed)


if __name__ == "__main__":
    sys.exit(run(main(_parse_arguments())))
