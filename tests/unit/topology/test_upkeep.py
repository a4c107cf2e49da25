"""When a role looks at its topology, and what it says of it, on a clock that leaps."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from bridge.amqp.client import Connection
from bridge.config import TopologyMode, WorkerSettings
from bridge.telemetry.metrics import BridgeMetrics, new_registry
from bridge.topology import upkeep
from bridge.topology.declarations import name_of, worker_topology
from bridge.topology.differences import Difference
from bridge.topology.upkeep import LOG_AGAIN_SECONDS, MEND_SECONDS, Upkeep
from tests.clock import LeapingLoop
from tests.ears import Ears

CONNECTION = cast("Connection", None)
NEEDED = worker_topology(WorkerSettings(retry_delays=(5,), urgent_queue=None))
MAIN, RETRY, DEAD = NEEDED.queues
RETRY_DIFFERS = Difference(RETRY, "different", "it is another one", "make it anew")
DEAD_DIFFERS = Difference(DEAD, "different", "it is another one", "make it anew")
MAIN_DIFFERS = Difference(MAIN, "different", "it is classic", "agree")
UNSEEN = Difference(MAIN, "not_compared", "exists", "grant it")


@dataclass
class Broker:
    """Says what differs, look for look; the last word holds."""

    loop: LeapingLoop
    answers: list[list[Difference] | Exception] = field(default_factory=lambda: [[]])
    looks: list[float] = field(default_factory=list)

    async def provide(self, *_: object) -> list[Difference]:
        self.looks.append(self.loop.time())
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def loop() -> Iterator[LeapingLoop]:
    with asyncio.Runner(loop_factory=LeapingLoop) as runner:
        ours = runner.get_loop()
        assert isinstance(ours, LeapingLoop)
        yield ours


@pytest.fixture
def broker(loop: LeapingLoop, monkeypatch: pytest.MonkeyPatch) -> Broker:
    ours = Broker(loop)
    monkeypatch.setattr(upkeep, "provide", ours.provide)
    return ours


def make_upkeep(mode: TopologyMode = "declare") -> tuple[Upkeep, BridgeMetrics]:
    entities = [name_of(entity) for entity in NEEDED.declarable]
    labels: dict[str, Any] = {"component": "worker", "version": "0", "revision": "0"}
    metrics = BridgeMetrics(new_registry(), **labels, exchanges=(), entities=entities)
    return Upkeep(NEEDED, mode, metrics=metrics), metrics


def test_what_is_of_no_use_is_told_once_a_minute(
    loop: LeapingLoop, broker: Broker, ears: Ears
) -> None:
    ours, _ = make_upkeep()
    per_minute = round(LOG_AGAIN_SECONDS / upkeep.LOOK_SECONDS)
    broker.answers = [*[[RETRY_DIFFERS]] * (2 * per_minute + 1), [DEAD_DIFFERS], [], []]
    loop.run_until_complete(ours.ensure(CONNECTION))
    loop.run_until_complete(ours.ensure(CONNECTION))
    told = [line["why"] for line in ears.heard("topology_unusable")]

    assert told == [RETRY_DIFFERS.why] * 3 + [DEAD_DIFFERS.why]
    assert len(ears.heard("topology_usable")) == 1
    assert ours.is_usable


def test_a_topology_is_usable_only_when_the_role_can_work_with_it(
    loop: LeapingLoop, broker: Broker
) -> None:
    """What turns out to be wrong later is no longer settled, until it is right again."""
    ours, metrics = make_upkeep()
    missing = asyncio.Event()
    seen: list[tuple[bool, float]] = []

    def look() -> None:
        gauge = metrics.topology_differences.labels(name_of(RETRY))
        seen.append((ours.is_usable, gauge._value.get()))

    async def run() -> None:
        look()
        await ours.ensure(CONNECTION)
        look()
        broker.answers = [[RETRY_DIFFERS, RETRY_DIFFERS], []]
        missing.set()
        mending = asyncio.create_task(ours.mend(CONNECTION, missing))
        await asyncio.sleep(1)
        look()
        await asyncio.sleep(upkeep.LOOK_SECONDS)
        look()
        mending.cancel()

    loop.run_until_complete(run())

    assert seen == [(False, 0), (True, 0), (False, 2), (True, 0)]


def test_what_is_used_is_told_once(loop: LeapingLoop, broker: Broker, ears: Ears) -> None:
    """What differs and is used is told when it is new, and holds nothing up."""
    ours, _ = make_upkeep()
    broker.answers = [[MAIN_DIFFERS], [MAIN_DIFFERS], [UNSEEN], [MAIN_DIFFERS]]
    for _ in range(4):
        loop.run_until_complete(ours.ensure(CONNECTION))
    told = [line["why"] for line in ears.heard("topology_differs")]

    assert told == ["queue sms.outbound: it is classic"] * 2
    assert [line["why"] for line in ears.heard("topology_not_compared")] == [
        "queue sms.outbound: exists"
    ]
    assert ears.heard("topology_unusable") == []


def test_it_is_mended_now_and_then(loop: LeapingLoop, broker: Broker) -> None:
    """However often something is missing, it is looked at at once, and then every 5 s at most."""
    ours, _ = make_upkeep()
    missing = asyncio.Event()

    async def run() -> None:
        mending = asyncio.create_task(ours.mend(CONNECTION, missing))
        await asyncio.sleep(1)
        for _ in range(100):
            missing.set()
            await asyncio.sleep(0.11)
        mending.cancel()

    loop.run_until_complete(run())
    first = broker.looks[0]

    assert [look - first for look in broker.looks] == pytest.approx(
        [0, MEND_SECONDS, 2 * MEND_SECONDS], abs=0.2
    )


def test_a_broker_that_hangs_does_not_end_the_mending(loop: LeapingLoop, broker: Broker) -> None:
    """A look without an answer in time costs no connection: the next one comes."""
    ours, _ = make_upkeep()
    broker.answers = [TimeoutError(), []]
    missing = asyncio.Event()

    async def run() -> None:
        mending = asyncio.create_task(ours.mend(CONNECTION, missing))
        for _ in range(2):
            missing.set()
            await asyncio.sleep(MEND_SECONDS + 1)
        mending.cancel()

    loop.run_until_complete(run())

    assert (len(broker.looks), ours.is_usable) == (2, True)
