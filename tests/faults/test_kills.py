"""Workers that are killed, or frozen, in the middle of their work."""

import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.faults.bench import Bench, eventually, make_numbers
from tests.faults.endings import Scenario
from tests.faults.traffic import has_in_flight, has_taken

CONCURRENCY = 10


@pytest.mark.parametrize("latency_seconds", [0.0, 0.05])
async def test_a_kill_doubles_no_more_than_was_in_flight(
    bench: Bench, tmp_path: Path, latency_seconds: float
) -> None:
    await bench.declare_main()
    numbers = make_numbers(200)
    if latency_seconds:
        bench.service.misbehave({"latency_seconds": latency_seconds, "count": None})
    # A worker that is gone answers no question; nobody waits for it.
    changed: dict[str, Any] = {
        "worker__concurrency": CONCURRENCY,
        "worker__coordination": "off",
        "rabbitmq__url": [bench.broker.url],
    }
    await bench.publish(numbers)
    with bench.worker_process(tmp_path / "killed.log", **changed) as child:
        await Scenario(bench, child).until_logged("consuming")
        await eventually(lambda: has_taken(bench, numbers, 50), what="a part of them")
    async with bench.worker(worker__concurrency=CONCURRENCY):
        await bench.until_taken(numbers)

    posts = bench.service.posts(numbers)
    assert len(posts) - len(numbers) <= CONCURRENCY
    assert len({(post.to, post.idempotency_key) for post in posts}) == len(numbers)


async def test_a_frozen_worker_posts_nothing_more_that_another_has_sent(
    bench: Bench, tmp_path: Path
) -> None:
    """It still holds messages when it goes on, and has not read yet that its connection is lost."""
    changed: dict[str, Any] = {
        "worker__concurrency": CONCURRENCY,
        "worker__redelivery_wait": 1,
        "rabbitmq__url": [bench.broker.url],
        "rabbitmq__heartbeat_seconds": 1,
    }
    held = make_numbers(CONCURRENCY + 1)
    with bench.worker_process(tmp_path / "frozen.log", **changed) as child:
        await Scenario(bench, child).until_logged("consuming")
        bench.service.misbehave({"to": None, "count": CONCURRENCY, "latency_seconds": 2})
        await bench.publish(held[:-1])
        await has_in_flight(bench, held[:-1])
        # In its prefetch, and behind the others.
        await bench.publish(held[-1:])
        await eventually(lambda: is_prefetched(bench), what="a prefetched message")
        child.signal(signal.SIGSTOP)
        try:
            async with bench.worker(**changed):
                posts = partial(bench.service.posts, held)
                await eventually(lambda: len(posts()) == 2 * CONCURRENCY + 1, what="all again")
                child.signal(signal.SIGCONT)
                consuming = '"event":"consuming"'
                scenario = Scenario(bench, child)
                await eventually(lambda: scenario.count_logged(consuming) == 2, what=consuming)
        finally:
            child.signal(signal.SIGCONT)

    assert len(posts()) == 2 * CONCURRENCY + 1


async def is_prefetched(bench: Bench) -> bool:
    """Say whether no message waits in the queue."""
    return await bench.amqp.count_if_there(bench.queue) == 0
