"""The order of a number's messages, whatever happens to one of them."""

import asyncio
import itertools
from typing import Any

import pytest

from tests.faults.bench import Bench, eventually, make_numbers
from tests.faults.traffic import has_taken, publish_texts, seconds_to_send, texts_of


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param({"status": 425, "count": 3}, id="retried"),
        pytest.param({"status": 503, "headers": {"Retry-After": "1"}, "count": 2}, id="later"),
        pytest.param({"status": 429, "headers": {"Retry-After": "1"}, "count": 2}, id="slow"),
        pytest.param({"mode": "cut", "count": 2}, id="uncertain"),
    ],
)
async def test_order_is_kept_over_retries(bench: Bench, fault: dict[str, Any]) -> None:
    ordered, free = make_numbers(2)
    bench.service.misbehave({**fault, "to": ordered})
    async with bench.worker(worker__ordering="recipient") as live:
        texts = await publish_texts(bench, ordered, 6)
        await bench.publish([free])
        await bench.until_taken([free])
        # On its way from the ladder a message is in no queue for a moment.
        await eventually(lambda: has_taken(bench, [ordered], len(texts)), what="all are sent")
        await bench.until_settled(live)

    assert texts_of(bench, [ordered]) == texts


async def test_followers_come_back_soon_after_their_leader(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those behind a message on the ladder wait for what is left of its step, not for a whole one.

    It goes up as late as it can here: a message that fails waits a moment before, to be spread.
    """
    monkeypatch.setattr("bridge.worker.settle.random.uniform", lambda _, most: most)
    (number,) = make_numbers(1)
    bench.service.misbehave({"status": 425, "count": 2})
    async with bench.worker(worker__ordering="recipient", worker__retry_delays=["1s", "8s"]):
        texts = await publish_texts(bench, number, 3)
        await eventually(lambda: has_taken(bench, [number], 3), what="all three")

    sent_at = [message.received_at for message in bench.service.taken([number])]
    assert texts_of(bench, [number]) == texts
    assert sent_at[-1] - sent_at[0] < 4


async def test_one_message_of_a_number_at_a_time(bench: Bench) -> None:
    bench.service.misbehave({"latency_seconds": 0.4, "count": None})
    ordered, *others = make_numbers(6)
    async with bench.worker(worker__ordering="recipient") as live:
        await asyncio.gather(publish_texts(bench, ordered, 4), bench.publish(others))
        await eventually(lambda: has_taken(bench, [ordered, *others], 9), what="all are sent")
        await bench.until_settled(live)

    starts = [post.received_at for post in bench.service.posts([ordered])]
    assert all(later - earlier >= 0.39 for earlier, later in itertools.pairwise(starts))
    begin = min(starts)
    assert sum(post.received_at < begin + 4 * 0.4 for post in bench.service.posts(others)) == 5


async def test_order_is_kept_over_a_lost_connection(bench: Bench) -> None:
    """A message that goes back to the queue comes again ahead of those on the ladder behind it."""
    (number,) = make_numbers(1)
    bench.service.misbehave(
        {"status": 425, "count": 2}, {"status": 429, "headers": {"Retry-After": "3"}, "count": 1}
    )
    async with bench.worker(worker__ordering="recipient") as live:
        texts = await publish_texts(bench, number, 1)
        # One of them is on the ladder when the first is back and held.
        while len(bench.service.posts([number])) < 3:
            texts += await publish_texts(bench, number, 1, start=len(texts))
            await asyncio.sleep(0.2)
        bench.proxy.reset()
        await eventually(lambda: has_taken(bench, [number], len(texts)), what="all are sent")
        await bench.until_settled(live)

    assert texts_of(bench, [number]) == texts


async def test_repeats_of_a_message_to_a_bad_number(bench: Bench) -> None:
    """Repeats of an id whose first is held in a pause leave room for those that end the pause."""
    (bad,) = make_numbers(1)
    bench.service.misbehave({"to": bad, "status": 404})
    async with bench.worker() as live:
        await bench.publish([bad])
        await eventually(lambda: live.paused == {"misconfigured"}, what="paused")
        await bench.publish([bad] * 6)

        assert await seconds_to_send(bench, 5) < 5
        assert live.logged("resumed")


async def test_many_ordered_messages_to_a_bad_number(bench: Bench) -> None:
    (bad,) = make_numbers(1)
    bench.service.misbehave({"to": bad, "status": 404})
    async with bench.worker(worker__ordering="recipient") as live:
        await publish_texts(bench, bad, 12)
        await eventually(lambda: live.paused == {"misconfigured"}, what="paused")
        await eventually(lambda: len(bench.service.posts([bad])) >= 5, what="probes")

        assert await seconds_to_send(bench, 5) < 5
        assert live.logged("resumed")
