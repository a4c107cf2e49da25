"""What a publisher sends twice is one SMS, whichever of the workers is given which of the two."""

import asyncio
import json
import random
from collections import Counter
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import pytest

from tests.faults.bench import Bench, Live, eventually, make_numbers
from tests.faults.traffic import has_in_flight, has_peers

MESSAGES = 400
MAX_GAP_SECONDS = 2.0
# Two that are published closer to each other may be sent twice; with time to spare for a machine
# that is busy.
SURE_GAP_SECONDS = 1.0
DEDUPLICATING: dict[str, Any] = {"worker__deduplicate": "15m"}


def repeats(live: Live) -> float:
    """Count what a worker recognised."""
    name = "sms_bridge_worker_messages_processed_total"
    return live.metric(name, outcome="dropped", reason="duplicate")


async def publish_twice(
    bench: Bench, numbers: list[str], chance: random.Random
) -> dict[str, float]:
    firsts = [(chance.uniform(0, MAX_GAP_SECONDS), number) for number in numbers]
    seconds = [(at + chance.uniform(0, MAX_GAP_SECONDS), number) for at, number in firsts]
    loop = asyncio.get_running_loop()
    began, published_at, gaps = loop.time(), dict[str, float](), dict[str, float]()
    for at, number in sorted([*firsts, *seconds]):
        await asyncio.sleep(began + at - loop.time())
        await bench.publish([number])
        now = loop.time()
        gaps[number] = now - published_at.setdefault(number, now)
    return gaps


async def test_hundreds_of_messages_twice(bench: Bench) -> None:
    """Three workers send each once, but for some that were published within the same moment."""
    bench.service.misbehave({"to": None, "latency_seconds": 0.1})
    async with AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(bench.worker(**DEDUPLICATING, worker__concurrency=50))
            for _ in range(3)
        ]
        await eventually(lambda: all(has_peers(live, 2) for live in workers), what="all three")
        numbers = make_numbers(MESSAGES)
        gaps = await publish_twice(bench, numbers, random.Random(16))
        for live in workers:
            await bench.until_settled(live)

        extra = bench.extra_posts(numbers)
        shown = sorted(round(gaps[number] * 1000) for number in extra)
        print(f"POSTed twice: {len(extra)} of {MESSAGES}; published apart, in ms: {shown}")  # noqa: T201
        assert [gaps[number] for number in extra if gaps[number] >= SURE_GAP_SECONDS] == []
        assert len(bench.service.posts(numbers)) == MESSAGES + len(extra)
        assert sum(repeats(live) for live in workers) == MESSAGES - len(extra)
        assert all(repeats(live) for live in workers)


async def test_a_peer_is_waited_for(bench: Bench) -> None:
    settings: dict[str, Any] = {**DEDUPLICATING, "worker__concurrency": 1}
    bench.service.misbehave({"to": None, "count": 1, "latency_seconds": 2})
    async with bench.worker(**settings) as first, bench.worker(**settings) as second:
        await eventually(lambda: has_peers(first, 1) and has_peers(second, 1), what="each other")
        (number,) = await bench.publish(1)
        await has_in_flight(bench, [number])
        for _ in range(3):
            await bench.publish([number])
        for live in (first, second):
            await bench.until_settled(live)

        assert bench.extra_posts([number]) == {}
        assert (repeats(first) > 0, repeats(second) > 0) == (True, True)


async def test_workers_that_are_replaced_one_after_the_other(bench: Bench) -> None:
    answers = await bench.amqp.channel.declare_queue(exclusive=True)
    async with AsyncExitStack() as stack:
        former = await stack.enter_async_context(bench.worker(**DEDUPLICATING))
        numbers = await bench.publish(20)
        await bench.until_taken(numbers)
        for _ in range(2):
            live = await stack.enter_async_context(bench.worker(**DEDUPLICATING))
            await eventually(partial(knows, live, 20), what="what was sent")
            await former.stop()
            former = live
        await bench.publish(numbers, reply_to=answers.name)
        await eventually(lambda: repeats(former) == 20, what="repeats")

        told = [json.loads((await answers.get(timeout=10)).body) for _ in numbers]
    assert Counter(len(bench.service.posts([number])) for number in numbers) == {1: 20}
    assert {
        (one["outcome"], one["status"], one["attempts"], one["duplicate"], one["provider_id"])
        for one in told
    } == {("sent", 202, 1, True, None)}


def knows(live: Live, count: int) -> bool:
    return len(list(live.worker._deduplicator.sent.latest(100))) == count


@pytest.mark.parametrize(("by", "posts"), [("message_id", 2), ("text", 1)])
async def test_equal_texts_are_one_message_where_that_is_wanted(
    bench: Bench, by: str, posts: int
) -> None:
    """Whatever their ids, and whichever worker takes them; without the word they are two."""
    settings: dict[str, Any] = {**DEDUPLICATING, "worker__deduplicate_by": by}
    async with bench.worker(**settings) as first, bench.worker(**settings) as second:
        await eventually(lambda: has_peers(first, 1) and has_peers(second, 1), what="each other")
        (number,) = make_numbers(1)
        members = {"to": number, "from": "Acme", "text": "Hi"}
        await bench.amqp.publish(bench.queue, json.dumps(members).encode(), message_id="a")
        await bench.until_taken([number])
        for live in (first, second):
            await eventually(partial(knows, live, 1), what="the report")
        reversed_body = json.dumps(dict(reversed(members.items()))).encode()
        await bench.amqp.publish(bench.queue, reversed_body, message_id="b")
        await eventually(
            lambda: len(bench.service.taken([number])) + repeats(first) + repeats(second) == 2,
            what="the second",
        )

        assert len(bench.service.posts([number])) == posts
