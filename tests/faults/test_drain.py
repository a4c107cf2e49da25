"""A worker that is told to end, in whatever state it is."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from bridge.sandbox.broker import Broker
from tests.alarms import memory_alarm
from tests.amqp_client import open_amqp
from tests.faults.amqp_proxy import open_amqp_proxy
from tests.faults.bench import Bench, Service, eventually
from tests.faults.endings import SHUTDOWN_SECONDS, Ending, Scenario
from tests.faults.traffic import NOT_SENT

# A worker has two seconds to end in, which other tests would use up.
pytestmark = pytest.mark.serial


async def end_idle(scenario: Scenario) -> Ending:
    return await scenario.end([])


async def end_in_flight(scenario: Scenario) -> Ending:
    """End a worker that waits for answers which come in time."""
    return await scenario.end(await scenario.publish({"latency_seconds": 1}))


async def end_paused(scenario: Scenario) -> Ending:
    """End a worker that is paused and holds a probe."""
    numbers = await scenario.publish({"status": 401})
    await scenario.until_logged("paused")
    return await scenario.end(numbers)


async def end_frozen(scenario: Scenario) -> Ending:
    """End a worker whose broker hangs while answers come in."""
    numbers = await scenario.publish({"latency_seconds": 1})
    scenario.bench.proxy.freeze()
    return await scenario.end(numbers)


async def end_frozen_copies(scenario: Scenario) -> Ending:
    """End a worker whose broker hangs while it has retry copies to store."""
    numbers = await scenario.publish({"latency_seconds": 1, **NOT_SENT})
    scenario.bench.proxy.freeze()
    return await scenario.end(numbers)


async def end_away(scenario: Scenario) -> Ending:
    """End a worker whose broker goes away while answers come in."""
    numbers = await scenario.publish({"latency_seconds": 1})
    scenario.bench.proxy.refuse()
    return await scenario.end(numbers)


async def end_cut(scenario: Scenario) -> Ending:
    """End a worker whose connections have just been cut while answers come in."""
    numbers = await scenario.publish({"latency_seconds": 0.3})
    scenario.bench.proxy.reset()
    return await scenario.end(numbers)


async def end_hanging(scenario: Scenario) -> Ending:
    """End a worker whose API does not answer."""
    return await scenario.end(await scenario.publish({"mode": "hang"}))


async def end_blocked(scenario: Scenario) -> Ending:
    # Long enough for the alarm to be on first, where `rabbitmqctl` is slow to start.
    numbers = await scenario.publish({"latency_seconds": 10, **NOT_SENT})
    async with memory_alarm(scenario.bench.broker):
        await scenario.until_logged("publish_failed")
        return await scenario.end(numbers)


async def end_stopped(scenario: Scenario) -> Ending:
    """End a worker whose broker is stopped by SIGSTOP while answers come in."""
    numbers = await scenario.publish({"latency_seconds": 1})
    broker = scenario.bench.broker
    broker.pause()
    resume = asyncio.get_running_loop().call_later(2 * SHUTDOWN_SECONDS + 5, broker.resume)
    try:
        scenario.child.ask_to_end()
        started = time.monotonic()
        await eventually(lambda: scenario.child.exit_code is not None, what="the end")
        seconds = time.monotonic() - started
    finally:
        resume.cancel()
        broker.resume()
    return replace(await scenario.end(numbers), seconds=seconds)


TOGETHER: dict[str, Callable[[Scenario], Awaitable[Ending]]] = {
    "idle": end_idle,
    "in_flight": end_in_flight,
    "paused": end_paused,
    "frozen": end_frozen,
    "frozen_copies": end_frozen_copies,
    "away": end_away,
    "cut": end_cut,
    "hanging": end_hanging,
}


# These are about the broker that all share.
ALONE: dict[str, Callable[[Scenario], Awaitable[Ending]]] = {
    "blocked": end_blocked,
    "stopped": end_stopped,
}


@pytest.fixture(scope="module")
async def endings(
    broker: Broker, service: Service, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Ending]:
    service.forget()
    folder = tmp_path_factory.mktemp("drains")

    async def play(name: str, end: Callable[[Scenario], Awaitable[Ending]]) -> Ending:
        async with open_amqp_proxy(broker.url) as proxy, open_amqp(broker.url) as amqp:
            bench = Bench(broker, proxy, service, amqp)
            with bench.worker_process(
                folder / f"{name}.log",
                rabbitmq__publish_timeout_seconds=1,
                worker__shutdown_timeout_seconds=SHUTDOWN_SECONDS,
                worker__retry_delays=["1m", "2m"],
            ) as child:
                scenario = Scenario(bench, child)
                await scenario.until_logged("consuming")
                return await end(scenario)

    found = await asyncio.gather(*(play(name, end) for name, end in TOGETHER.items()))
    endings = dict(zip(TOGETHER, found, strict=True))
    for name, end in ALONE.items():
        endings[name] = await play(name, end)
    return endings


@pytest.mark.parametrize("state", [*TOGETHER, *ALONE])
async def test_drain_loses_nothing_and_ends_in_time(endings: dict[str, Ending], state: str) -> None:
    ending = endings[state]

    assert ending.seconds < SHUTDOWN_SECONDS + 5
    assert ending.lost == set(), ending.log
    assert max(ending.taken.values(), default=1) == 1
    assert max(ending.posts.values(), default=1) == 1 or state == "paused"


@pytest.mark.parametrize(
    ("state", "code"),
    [
        ("idle", 0),
        ("in_flight", 0),
        ("paused", 0),
        ("frozen_copies", 75),
        ("away", 75),
        ("hanging", 75),
        ("blocked", 75),
    ],
)
async def test_drain_says_whether_it_was_cut_off(
    endings: dict[str, Ending], state: str, code: int
) -> None:
    """The exit code is 0 when all that was taken is acked or given back, 75 when it was not."""
    assert endings[state].code == code, endings[state].log


async def test_drain_finishes_what_is_in_flight(endings: dict[str, Ending]) -> None:
    """What is being sent at SIGTERM is sent and acked."""
    ending = endings["in_flight"]

    assert len(ending.taken) == 3
    assert ending.left == set()
