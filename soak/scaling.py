"""Scales workers as KEDA does, from none to several and back, and accounts for every message.

The values come from the chart's ScaledObject and RabbitMQ's management API. The rules are those of
KEDA's `rabbitmq_scaler.go` and "Scaling Deployments", and of Kubernetes' "Horizontal Pod
Autoscaling".
"""

import asyncio
import itertools
import math
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final
from urllib.parse import quote_plus

import httpx

from bridge.topology.declarations import QUORUM, retry_queue
from soak.checker import Evidence, check
from soak.report import tell
from soak.rig import DEAD, QUEUE, Rig, Role, SoakError, dead_letters, open_rig
from soak.traffic import Request, plan_requests
from tests.amqp_client import open_amqp
from tests.chart.rendering import MINIMAL, Values, merged, nested, of_kind, render

# The autoscaler does nothing within this tolerance of the target.
TOLERANCE: Final = 0.1
WAVE_SECONDS: Final = 200
ANSWER_SECONDS: Final = 30
# Longer than the slowest answer takes.
TIMEOUT_SECONDS: Final = 30
TICK_SECONDS: Final = 0.1
# Share of each wave that arrives slowly. The rest arrives at once.
TRICKLE_SHARE: Final = 0.25
LATE: Final = 5
MOST_SHARE: Final = 0.8
# How long it takes until no worker is left, on a busy machine.
EMPTY_SECONDS: Final = 90


class Autoscaler:
    """Decides the number of workers.

    There is one trigger, the length of a queue, and a policy that scales down by a number of pods.
    Only the maximum limits scaling up: Kubernetes allows four pods at once.
    """

    def __init__(self, scaled_object: Mapping[str, Any]) -> None:
        spec = scaled_object["spec"]
        (trigger,) = spec["triggers"]
        scale_down = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]
        (policy,) = scale_down["policies"]
        assert (trigger["metricType"], policy["type"]) == ("AverageValue", "Pods")
        self.polling_seconds: int = spec["pollingInterval"]
        self._fewest: int = spec["minReplicaCount"]
        self._most: int = spec["maxReplicaCount"]
        self._cooldown_seconds: int = spec["cooldownPeriod"]
        self._window_seconds: int = scale_down["stabilizationWindowSeconds"]
        self._step: int = policy["value"]
        self._step_seconds: int = policy["periodSeconds"]
        self._trigger: Mapping[str, str] = trigger["metadata"]
        self._active_at = -math.inf
        self._wanted: list[tuple[float, int]] = []
        self._removed: list[tuple[float, int]] = []

    @property
    def url(self) -> str:
        """URL of the length in the management API."""
        host = self._trigger["host"]
        # KEDA takes the text after the last slash as the virtual host, which is set separately.
        base = host.rpartition("/")[0] if "/" in host.partition("://")[2] else host
        queues = f"{base}/api/queues/{quote_plus(self._trigger['vhostName'])}"
        name = quote_plus(self._trigger["queueName"])
        if not self._matches:
            return f"{queues}/{name}"
        asked = f"page=1&use_regex=true&pagination=false&name={name}&page_size=100"
        return f"{queues}?{asked}"

    def read(self, answer: Mapping[str, Any]) -> int:
        """Return the length from an answer of `url`. 0 means unknown."""
        queues = answer["items"] if self._matches else [answer]
        is_ready_only = self._trigger["excludeUnacknowledged"] == "true"
        key = "messages_ready" if is_ready_only else "messages"
        return sum(queue.get(key) or 0 for queue in queues)

    def decide(self, messages: int, replicas: int, now: float) -> int:
        """Return the wanted number of workers. `now` is monotonic, in seconds."""
        is_active = messages > float(self._trigger["activationValue"])
        if is_active:
            self._active_at = now
        if not replicas:
            return max(self._fewest, 1 if is_active else 0)
        has_cooled = now - self._active_at > self._cooldown_seconds
        if not self._fewest and not is_active and has_cooled:
            # Regardless of the scale-down policy.
            return 0
        return self._decide_from_one_on(messages, replicas, now)

    @property
    def _matches(self) -> bool:
        return self._trigger.get("useRegex") == "true"

    def _decide_from_one_on(self, messages: int, replicas: int, now: float) -> int:
        for_each = float(self._trigger["value"])
        is_near = abs(messages / (for_each * replicas) - 1) <= TOLERANCE
        wanted = replicas if is_near else math.ceil(messages / for_each)
        wanted = min(max(wanted, self._fewest, 1), self._most)
        self._wanted.append((now, wanted))
        if wanted >= replicas:
            return wanted
        recent = max(n for at, n in self._wanted if at >= now - self._window_seconds)
        removed = sum(n for at, n in self._removed if at > now - self._step_seconds)
        least = replicas - max(0, self._step - removed)
        decided = min(replicas, max(recent, least))
        if decided < replicas:
            self._removed.append((now, replicas - decided))
        return decided


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Number of messages, and scaling of workers, from none to `most` in each wave.

    `refused_share` of a burst waits in a retry queue for `ladder_seconds`, until no worker is left.
    """

    messages: int = 1_500
    seed: int = 1
    most: int = 5
    for_each: int = 100
    concurrency: int = 10
    trickle_seconds: float = 16
    refused_share: float = 0.1
    ladder_seconds: int = 25

    def scaled_object(self, rig: Rig) -> dict[str, Any]:
        """Render the chart's ScaledObject, with seconds instead of minutes."""
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
        (scaled,) = of_kind(
            render(merged(MINIMAL, nested("worker.keda", keda))), "ScaledObject"
        ).values()
        return scaled


class Deployment:
    """The workers that the autoscaler wants. `counts` contains every number of workers so far."""

    def __init__(self, rig: Rig, plan: Plan) -> None:
        self.counts = [0]
        self.rig = rig
        self.plan = plan
        self._running: list[Role] = []
        self._ending: list[asyncio.Task[None]] = []
        self._autoscaler = Autoscaler(plan.scaled_object(rig))
        self._random = Random(plan.seed)

    @property
    def is_empty(self) -> bool:
        """Whether there is no worker. Some may still drain."""
        return not self._running

    @property
    def sent(self) -> int:
        """Number of messages that all workers have sent."""
        return sum(worker.log.sent for worker in self.rig.workers)

    async def follow(self) -> None:
        """Read the queue and scale, forever. Raise if the broker does not report the length."""
        async with httpx.AsyncClient(
            auth=("guest", "guest"), trust_env=False, timeout=ANSWER_SECONDS
        ) as client:
            while True:
                answer = await client.get(self._autoscaler.url)
                messages = self._autoscaler.read(answer.raise_for_status().json())
                replicas = len(self._running)
                self._scale(self._autoscaler.decide(messages, replicas, time.monotonic()))
                await asyncio.sleep(self._autoscaler.polling_seconds)

    def _scale(self, replicas: int) -> None:
        while len(self._running) < replicas:
            worker = self.rig.add_worker(
                sms_api__timeout_seconds=TIMEOUT_SECONDS,
                worker__concurrency=self.plan.concurrency,
                worker__retry_delays=[self.plan.ladder_seconds],
            )
            worker.start()
            self._running.append(worker)
        while len(self._running) > replicas:
            worker = self._running.pop(self._random.randrange(len(self._running)))
            # Kubernetes starts the next pod without waiting for the end of this one.
            self._ending.append(asyncio.create_task(worker.end()))
        if replicas != self.counts[-1]:
            self.counts.append(replicas)

    async def end(self) -> None:
        """Stop all workers, and wait for each."""
        self._scale(0)
        await asyncio.gather(*self._ending)
        self.rig.look()


@asynccontextmanager
async def deployed(rig: Rig, plan: Plan) -> AsyncIterator[Deployment]:
    """Scale workers during the block, then stop all."""
    async with open_amqp(rig.broker.url) as amqp:
        await amqp.channel.declare_queue(QUEUE, durable=True, arguments=dict(QUORUM))
    deployment = Deployment(rig, plan)
    following = asyncio.create_task(deployment.follow())
    try:
        yield deployment
    finally:
        following.cancel()
        (fault,) = await asyncio.gather(following, return_exceptions=True)
        await deployment.end()
        assert isinstance(fault, asyncio.CancelledError), f"nobody scaled any more: {fault!r}"


@dataclass(slots=True)
class Wave:
    """A burst of messages, a trickle, and messages that come due without a worker."""

    deployment: Deployment
    requests: list[Request] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    async def play(self, first: int) -> None:
        """Run the wave with messages numbered from `first`. Raise SoakError if it hangs."""
        deployment, plan = self.deployment, self.deployment.plan
        begun = len(deployment.counts) - 1
        self.requests = plan_requests(plan.messages, seed=plan.seed, first=first)
        late, rest = self.requests[:LATE], self.requests[LATE:]
        trickle = round(plan.messages * TRICKLE_SHARE)
        await self._until_empty()
        await self._rush(rest[trickle:], rest[:trickle])
        seconds = await self._wake_from_none(late)
        counts = deployment.counts[begun:]
        tell(f"workers {' '.join(map(str, counts))}; awake after {seconds:.1f} s")
        if max(counts) < plan.most:
            self.problems.append(f"only {max(counts)} workers ran")

    async def _rush(self, burst: Sequence[Request], trickle: Sequence[Request]) -> None:
        """Publish a burst, then more messages at an even rate, while workers are removed."""
        plan, before = self.deployment.plan, self.deployment.sent
        await self._refuse_once(burst[: round(len(burst) * plan.refused_share)])
        await self._publish(burst)
        # Wait for all workers, so that the trickle is below their capacity.
        await self._until_sent(before + round(len(burst) * MOST_SHARE))
        for part in _parts(trickle, round(plan.trickle_seconds / TICK_SECONDS)):
            await self._publish(part)
            await asyncio.sleep(TICK_SECONDS)
        await self._until_sent(before + len(burst) + len(trickle))

    async def _wake_from_none(self, late: Sequence[Request]) -> float:
        """Let messages come due without a worker. Return the delay of the last one."""
        rig, plan, before = self.deployment.rig, self.deployment.plan, self.deployment.sent
        await self._refuse_once(late)
        await self._publish(late)
        retry = retry_queue(QUEUE, plan.ladder_seconds)
        async with open_amqp(rig.broker.url) as amqp:
            async with asyncio.timeout(WAVE_SECONDS):
                while await amqp.count_if_there(retry) < len(late):
                    await rig.wait(TICK_SECONDS)
            due = time.time() + plan.ladder_seconds
            await self._until_empty()
            waiting = await amqp.count_if_there(retry)
        if waiting != len(late):
            self.problems.append(
                f"{waiting} of {len(late)} messages waited for a retry without a worker"
            )
        await self._until_sent(before + len(late))
        return time.time() - due

    async def _refuse_once(self, requests: Sequence[Request]) -> None:
        await self.deployment.rig.api.set_faults(
            *({"status": 425, "to": request.number, "count": 1} for request in requests)
        )

    async def _publish(self, requests: Sequence[Request]) -> None:
        async with open_amqp(self.deployment.rig.broker.url) as amqp:
            for request in requests:
                await amqp.channel.default_exchange.publish(request.message(), QUEUE)

    async def _until_sent(self, count: int) -> None:
        await self.deployment.rig.until(
            lambda: self.deployment.sent >= count, what=f"{count} sent", seconds=WAVE_SECONDS
        )

    async def _until_empty(self) -> None:
        await self.deployment.rig.until(
            lambda: self.deployment.is_empty, what="no worker is left", seconds=EMPTY_SECONDS
        )


def _parts(items: Sequence[Request], count: int) -> Iterator[Sequence[Request]]:
    edges = [round(len(items) * place / count) for place in range(count + 1)]
    return (items[begin:end] for begin, end in itertools.pairwise(edges))


async def play(rig: Rig, plan: Plan, *, seconds: float = 0) -> list[str]:
    """Run waves until the time is over, at least one. Return the broken promises."""
    ends, requests, problems = time.monotonic() + seconds, list[Request](), list[str]()
    async with deployed(rig, plan) as deployment:
        while not requests or time.monotonic() < ends:
            wave = Wave(deployment)
            await wave.play(len(requests))
            requests += wave.requests
            problems += wave.problems
    ids = [request.message_id for request in requests]
    verdict = check(
        Evidence(
            published=dict.fromkeys(ids, 1),
            confirmed=ids,
            posts=await rig.api.read_posts(requests),
            dead=dead_letters(await rig.take_messages([DEAD]), requests),
            waiting=["somebody's"] * await rig.count_waiting(),
            workers=len(rig.workers),
        )
    )
    busy = [worker.log.late for worker in rig.workers if worker.log.late]
    codes = {code for worker in rig.workers for code in worker.exit_codes}
    tell(
        f"{len(ids)} messages, {verdict.sent} sent, {verdict.posts} POSTs; {len(rig.workers)} "
        f"workers ended with {codes}, {len(busy)} of them with {sum(busy)} requests in flight"
    )
    if codes != {0}:
        problems.append(f"workers ended with {codes}")
    return [*problems, *verdict.problems]


async def scale(seed: int, *, minutes: float) -> None:
    """Run the scenario. Raise SoakError if a promise was broken."""
    async with open_rig(management=True) as rig:
        if problems := await play(rig, Plan(seed=seed), seconds=minutes * 60):
            raise SoakError("; ".join(problems))
        tell("PASSED: no message was lost or sent twice.")
