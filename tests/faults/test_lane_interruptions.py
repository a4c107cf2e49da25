"""What interrupts a worker with lanes takes nothing from a message, and nothing from others."""

import time
from typing import Final

from tests.faults.bench import (
    CONSUME_LINK,
    Bench,
    eventually,
    make_numbers,
    make_settings,
    running,
)
from tests.faults.lane_traffic import LANES, ON, publish_in_turn, until_all_sent
from tests.faults.traffic import publish_texts

STEP_SECONDS: Final = 3


async def test_a_wait_that_is_cut_short_counts_no_attempt(bench: Bench) -> None:
    """Nor does the wait begin anew when it comes again: it would never end if that went on.

    Takes the steps of the ladder that it waits.
    """
    (number,) = make_numbers(1)
    bench.service.misbehave({"status": 425, "to": number, "count": 2})
    settings = ON | {"worker__max_attempts": 3, "worker__retry_delays": [f"{STEP_SECONDS}s"]}
    async with bench.worker(**settings) as live:
        await publish_texts(bench, number, 1)
        await eventually(lambda: live.logged("delivery"), what="the first try")
        half_at = time.monotonic() + STEP_SECONDS / 2
        await eventually(lambda: time.monotonic() >= half_at, what="half of its wait")
        bench.proxy.cut(CONSUME_LINK)
        await bench.until_taken([number])
        await bench.until_settled(live)

        ends = live.logged("delivery")

    told = [(one["outcome"], one["attempts"]) for one in ends]
    assert told == [("retried", 1), ("released", 0), ("retried", 2), ("sent", 3)]
    assert len(bench.service.posts([number])) == 3
    waited = [one["waited_seconds"]["retry_in_lane"] for one in ends[1:3]]
    assert sum(waited) < 1.4 * STEP_SECONDS


async def test_who_may_not_take_keeps_nobody_from_sorting(bench: Bench) -> None:
    """A worker with another number of lanes never has the lock, though it waits for longest."""
    numbers = make_numbers(5)
    more = make_settings(bench.values(**ON | {"worker__lanes": 2 * LANES}))
    async with bench.worker(**ON) as first, running(more, "worker") as unusable:
        await eventually(lambda: unusable.logged("topology_unusable"), what="told")
        assert await first.stop() == 0
        async with bench.worker(**ON):
            await publish_in_turn(bench, numbers, 1)
            await until_all_sent(bench, numbers, 1)
