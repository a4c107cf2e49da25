"""How many requests are in progress when much else happens."""

import functools

from tests.faults.bench import Bench, eventually, make_numbers
from tests.faults.traffic import has_taken


async def test_no_more_than_concurrency_after_a_pause(bench: Bench) -> None:
    await bench.declare_main()
    slow, bad, rest = make_numbers(9), make_numbers(1), make_numbers(20)
    for numbers in (slow, bad, rest):
        await bench.publish(numbers)
    bench.service.misbehave(
        *({"to": n, "latency_seconds": 4, "count": 1} for n in (*slow, *rest)),
        {"to": bad[0], "status": 401, "count": 1},
    )
    async with bench.worker(worker__concurrency=10) as live:
        everybody = [*slow, *bad, *rest]
        await bench.until_taken(everybody, 60)
        await bench.until_settled(live)

        assert live.metric("sms_bridge_worker_provider_requests_total", result="timeout") == 0
        assert len(bench.service.posts(everybody)) == len(everybody) + 1


async def test_the_limit_follows_the_service(bench: Bench) -> None:
    await bench.declare_main()
    numbers = await bench.publish(500)
    bench.service.misbehave({"latency_seconds": 0.3})
    limit = "sms_bridge_worker_concurrency_limit"
    async with bench.worker(worker__concurrency="auto", worker__max_concurrency=16) as live:
        await eventually(lambda: live.metric(limit) == 16, what="a limit that has grown")
        for _ in range(2):
            live.worker._account._capacity.log_limit()
        assert len(live.logged("concurrency_changed")) == 1
        bench.service.misbehave({"status": 503, "headers": {"Retry-After": "1"}, "count": 1})
        await eventually(lambda: live.metric(limit) <= 8, what="a limit that is halved")
        bench.service.misbehave({"latency_seconds": 0.3})
        await bench.until_taken(numbers, 60)
        await bench.until_settled(live)

        refused = {a.to for a in bench.service.posts(numbers) if a.status == 503}
        assert len(refused) == 1
        assert bench.extra_posts(numbers).keys() == refused
        assert bench.sent_twice(numbers) == {}


async def test_a_drain_with_a_limit_that_moves(bench: Bench) -> None:
    """At the end what is in flight is finished, and what only waits goes back, each sent once."""
    await bench.declare_main()
    numbers = await bench.publish(100)
    bench.service.misbehave({"latency_seconds": 0.3})
    for goal in (10, 40):
        async with bench.worker(worker__concurrency="auto") as live:
            enough = functools.partial(has_taken, bench, numbers, goal)
            await eventually(enough, what=f"{goal} are sent")
            assert await live.stop() == 0
    async with bench.worker(worker__concurrency="auto"):
        await bench.until_taken(numbers)

    assert bench.extra_posts(numbers) == {}
