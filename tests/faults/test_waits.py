"""Why a message was late: its log line and the histogram name what it waited for."""

import pytest

from bridge.worker.delivery import WaitCause
from bridge.worker.limits.adaptive_limit import FIRST_LIMIT
from tests.faults.bench import Bench, Live

SUM = "sms_bridge_worker_wait_duration_seconds_sum"


def waits(live: Live) -> dict[str, dict[str, float]]:
    return {
        line["message_id"]: line.get("waited_seconds", {})
        for line in live.logged("delivery")
        if line["outcome"] == "sent"
    }


def late(live: Live, cause: WaitCause) -> float:
    name = "sms_bridge_worker_wait_duration_seconds"
    shortest = live.metric(f"{name}_bucket", cause=cause, le="0.1")
    return live.metric(f"{name}_count", cause=cause) - shortest


async def test_a_rate_limit_is_named(bench: Bench) -> None:
    await bench.declare_main()
    numbers = await bench.publish(3)
    limit = {"per_second": 2, "burst": 1}
    async with bench.worker(worker__rate_limit=limit) as live:
        await bench.until_taken(numbers)
        await bench.until_settled(live)

        seconds = sorted(waited.get("rate", 0.0) for waited in waits(live).values())
        assert [each > 0.4 for each in seconds] == [False, True, True]
        assert seconds[2] > 0.9
        assert live.metric(SUM, cause="rate") == pytest.approx(sum(seconds), abs=0.01)
        assert late(live, "rate") >= 2


async def test_full_slots_are_named(bench: Bench) -> None:
    """Who is held while as many requests as may be are in flight waits for one to end."""
    bench.service.misbehave({"latency_seconds": 1})
    await bench.declare_main()
    numbers = await bench.publish(FIRST_LIMIT + 2)
    async with bench.worker(worker__concurrency="auto") as live:
        await bench.until_taken(numbers)
        await bench.until_settled(live)

        seconds = sorted(waited.get("slot", 0.0) for waited in waits(live).values())
        assert [each > 0.5 for each in seconds] == [False] * FIRST_LIMIT + [True] * 2
        assert live.metric(SUM, cause="slot") == pytest.approx(sum(seconds), abs=0.01)
        assert late(live, "slot") >= 2
