"""Workers that are killed in the middle of their work."""

from pathlib import Path
from typing import Any

import pytest

from tests.faults.bench import Bench, eventually, make_numbers
from tests.faults.endings import Scenario
from tests.faults.traffic import has_taken

CONCURRENCY = 10


@pytest.mark.parametrize("latency_seconds", [0.0, 0.05])
async def test_a_kill_doubles_no_more_than_was_in_flight(
    bench: Bench, tmp_path: Path, latency_seconds: float
) -> None:
    await bench.declare_main()
    numbers = make_numbers(300)
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
