"""A connection to the broker that ends at an exact frame, or in silence."""

import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest

from bridge.worker.limits.adaptive_limit import FIRST_LIMIT
from tests.faults.amqp_proxy import (
    ACK,
    CHANNEL_CLOSE,
    CHANNEL_OPEN,
    DECLARE,
    DELIVER,
    PUBLISH,
    Method,
    misnumber,
)
from tests.faults.bench import (
    CONSUME_LINK,
    PUBLISH_LINK,
    Bench,
    Live,
    eventually,
    make_numbers,
    make_settings,
    running,
)
from tests.faults.traffic import REFUSED, TOO_EARLY, WITH_AND_WITHOUT_IDS, has_taken, once_each


def has_opened(live: Live, count: int) -> bool:
    return live.metric("sms_bridge_amqp_connections_total", outcome="opened") >= count


@WITH_AND_WITHOUT_IDS
async def test_cut_at_the_ack_of_a_sent_message(bench: Bench, *, ids: bool) -> None:
    async with bench.worker() as live:
        trap = bench.proxy.trap("client", ACK, "cut", nth=20, again=True, link=CONSUME_LINK)
        numbers = await bench.publish(100, ids=ids)
        await bench.until_taken(numbers)
        await eventually(lambda: trap.seen >= 100, what="100 acks")
        await bench.until_settled(live)

        assert bench.extra_posts(numbers) == {}


async def fill_the_rate(bench: Bench, _live: Live) -> None:
    """Use up the rate limit, so that what comes next waits for some seconds."""
    await bench.until_taken(await bench.publish(1))


async def fill_the_slots(bench: Bench, _live: Live) -> None:
    numbers = make_numbers(FIRST_LIMIT)
    bench.service.misbehave(*({"to": number, "latency_seconds": 3} for number in numbers))
    await bench.publish(numbers)
    await eventually(lambda: len(bench.service.posts(numbers)) == FIRST_LIMIT, what="POSTs")


async def close_the_gate(bench: Bench, live: Live) -> None:
    """Have the service ask for some seconds without requests."""
    numbers = make_numbers(1)
    bench.service.misbehave(*once_each(numbers, {"status": 429, "headers": {"Retry-After": "3"}}))
    await bench.publish(numbers)
    throttled = partial(live.metric, "sms_bridge_worker_throttled_seconds_total")
    await eventually(throttled, what="a wait for the service")


@pytest.mark.parametrize(
    ("hold_up", "changed"),
    [
        pytest.param(
            fill_the_rate, {"worker__rate_limit": {"per_second": 0.25, "burst": 1}}, id="rate"
        ),
        pytest.param(fill_the_slots, {"worker__concurrency": "auto"}, id="slots"),
        pytest.param(close_the_gate, {}, id="gate"),
    ],
)
async def test_cut_while_the_second_of_two_equal_texts_waits(
    bench: Bench, hold_up: Callable[[Bench, Live], Awaitable[None]], changed: dict[str, Any]
) -> None:
    """The same words again, that wait for their turn as the connection ends, are sent as well."""
    async with bench.worker(**changed) as live:
        (number,) = await bench.publish(1, ids=False)
        await bench.until_taken([number])
        # From here on the broker does not deliver the first of them again.
        await live.worker.consumer.flush()
        await hold_up(bench, live)
        received = partial(live.metric, "sms_bridge_worker_messages_received_total")
        before = received()
        await bench.publish([number], ids=False)
        await eventually(lambda: received() > before, what="the second delivery")
        bench.proxy.cut(CONSUME_LINK)
        await eventually(partial(has_opened, live, 3), what="a new connection")
        await eventually(lambda: len(bench.service.taken([number])) >= 2, what="both")
        await bench.until_settled(live)

        assert len(bench.service.taken([number])) == 2


async def test_cut_on_the_way_of_the_second_of_two_equal_texts(bench: Bench) -> None:
    number, *others = make_numbers(4)
    async with bench.worker(worker__concurrency=2) as live:
        # The worker never sees it, and it comes again as delivered before.
        trap = bench.proxy.trap("broker", DELIVER, "cut", nth=5, link=CONSUME_LINK)
        for to in (number, *others, number):
            await bench.publish([to], ids=False)
        await eventually(lambda: len(bench.service.taken([number])) == 2, what="both")
        await bench.until_settled(live)

    assert trap.sprung.is_set()
    assert bench.sent_twice(others) == {}
    assert len(bench.service.taken([number])) == 2


@WITH_AND_WITHOUT_IDS
@pytest.mark.parametrize("point", ["confirm", "ack"])
async def test_cut_between_the_confirm_of_a_copy_and_the_ack(
    bench: Bench, point: str, *, ids: bool
) -> None:
    """A message whose retry copy is confirmed and whose own ack is lost goes on as one message."""
    proxy, numbers = bench.proxy, make_numbers(20)
    bench.service.misbehave(*once_each(numbers, TOO_EARLY))
    async with bench.worker() as live:
        if point == "ack":
            trap = proxy.trap("client", ACK, "cut", nth=7, again=True, link=CONSUME_LINK)
        else:
            trap = proxy.trap(
                *("broker", ACK, "pass"), link=PUBLISH_LINK, also=lambda: proxy.cut(CONSUME_LINK)
            )
        await bench.publish(numbers, ids=ids)
        await bench.until_taken(numbers)
        await bench.until_settled(live)

        assert trap.sprung.is_set()
        assert set(bench.extra_posts(numbers).values()) == {2}
        assert await bench.dead_letters() == []


async def test_a_copy_that_is_stored_twice_is_tried_once(bench: Bench) -> None:
    """Where a channel ended before its confirms, and so two copies are there, one is dropped."""
    numbers = make_numbers(5)
    bench.service.misbehave(
        *once_each(numbers, {"latency_seconds": 0.5, **TOO_EARLY}),
        *once_each(numbers, {"mode": "accept_then_cut"}),
    )
    async with bench.worker(
        rabbitmq__publish_timeout_seconds=0.5, worker__on_uncertain="park"
    ) as live:
        await bench.publish(numbers)
        await eventually(lambda: len(bench.service.posts(numbers)) == 5, what="POSTs")
        bench.proxy.freeze("broker")
        await eventually(lambda: len(live.logged("publish_failed")) >= 5, what="late confirms")
        bench.proxy.cut(PUBLISH_LINK)
        await eventually(lambda: len(live.logged("publish_failed")) >= 10, what="the end is told")
        bench.proxy.thaw()
        await bench.until_taken(numbers)
        # The second copies wait out their delay on the ladder, so they may be the last to come.
        duplicates = partial(
            live.metric, "sms_bridge_worker_messages_processed_total", reason="duplicate"
        )
        await eventually(lambda: duplicates() >= 5, what="the second copies")
        await bench.until_settled(live)

    assert bench.sent_twice(numbers) == {}
    letters = await bench.dead_letters()
    assert {letter.headers["sms-bridge-reason"] for letter in letters} == {"uncertain"}
    assert len(letters) == 5


async def test_cut_at_the_publish_of_a_dead_letter(bench: Bench) -> None:
    bench.service.misbehave(REFUSED)
    # One at a time: a cut would take the confirms of those that went before.
    async with bench.worker(worker__concurrency=1) as live:
        trap = bench.proxy.trap("client", PUBLISH, "cut", nth=4, again=True, link=PUBLISH_LINK)
        numbers = await bench.publish(8)
        await bench.until_dead(len(numbers))
        await bench.until_settled(live)

        assert trap.sprung.is_set()
        letters = Counter(letter.message_id for letter in await bench.dead_letters())
        assert letters == Counter(f"id-{number}" for number in numbers)
        assert bench.extra_posts(numbers) == {}


@WITH_AND_WITHOUT_IDS
async def test_channel_closed_by_the_broker(bench: Bench, *, ids: bool) -> None:
    async with bench.worker() as live:
        trap = bench.proxy.trap("client", ACK, misnumber, nth=5, link=CONSUME_LINK)
        numbers = await bench.publish(30, ids=ids)
        closed = partial(
            live.metric, "sms_bridge_amqp_connections_total", outcome="closed_by_broker"
        )
        await eventually(closed, what="the end of the channel")
        await bench.until_taken(numbers)
        await bench.until_settled(live)

        assert trap.sprung.is_set()
        assert closed() == 1
        assert bench.extra_posts(numbers) == {}


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(CHANNEL_OPEN, id="channel_open"),
        pytest.param(DECLARE, id="queue_declare"),
        pytest.param(CHANNEL_CLOSE, id="channel_close"),
    ],
)
async def test_cut_while_queue_lengths_are_read(bench: Bench, method: Method) -> None:
    # Those of the queues are read on a second channel each, beside the one that consumes.
    beside: dict[str, Any] = {"link": CONSUME_LINK, "channel": 2}
    for nth in (1, 4):
        async with running(make_settings(bench.values()), "worker") as live:
            trap = bench.proxy.trap("client", method, "cut", nth=nth, **beside)
            await eventually(trap.sprung.is_set, what=f"frame {nth}")
            bench.proxy.traps.clear()
            await eventually(
                partial(has_opened, live, 3),
                what=f"a new connection after a cut at frame {nth}",
                seconds=5,
            )
            await live.until_consuming()


async def test_a_flapping_connection(bench: Bench) -> None:
    bench.service.misbehave({"latency_seconds": 0.1})
    async with bench.worker() as live:
        numbers = await bench.publish(150)
        for _ in range(8):
            await live.until_consuming()
            goal = min(len(bench.service.taken(numbers)) + 5, 150)
            await eventually(partial(has_taken, bench, numbers, goal), what="progress")
            bench.proxy.reset()
        await bench.until_taken(numbers)
        await bench.until_settled(live)

        assert bench.extra_posts(numbers) == {}


async def test_black_holed_broker(bench: Bench) -> None:
    """A broker that is silently gone is noticed; what it sends once more is not sent again.

    After two heartbeats, neither sooner nor later: a busy broker is not to be left, and the other
    nodes of a cluster wait to be used.
    """
    bench.service.misbehave({"latency_seconds": 0.5})
    async with bench.worker(rabbitmq__heartbeat_seconds=2) as live:
        first = await bench.publish(5, ids=False)
        await eventually(lambda: len(bench.service.posts(first)) == 5, what="5 POSTs")
        bench.proxy.freeze()
        frozen_at = time.monotonic()
        await eventually(lambda: not live.worker.consumer.is_registered, what="a loss")
        silent_seconds = time.monotonic() - frozen_at
        second = await bench.publish(5)
        bench.proxy.thaw()
        await bench.until_taken([*first, *second])
        await bench.until_settled(live)

        assert bench.extra_posts([*first, *second]) == {}
        # The last frame came up to a second before, it takes a second to be sure, and a busy
        # computer is given three more. The client library alone needs 3 * (2 + 1) s.
        assert 4 - 1 <= silent_seconds <= 4 + 1 + 3


async def test_two_lost_connections_during_one_post(bench: Bench) -> None:
    """However often the connection ends during a POST, it is not repeated; without an id too."""
    bench.service.misbehave({"latency_seconds": 6})
    received = "sms_bridge_worker_messages_received_total"
    async with bench.worker() as live:
        numbers = await bench.publish(5, ids=False)
        await eventually(lambda: len(bench.service.posts(numbers)) == 5, what="5 POSTs")
        for seen in (5, 10):
            bench.proxy.reset()
            await eventually(
                partial(has_received, live, received, seen), what=f"{seen} redeliveries"
            )
        await bench.until_settled(live)

        assert bench.extra_posts(numbers) == {}


def has_received(live: Live, name: str, count: int) -> bool:
    return live.metric(name, redelivered="true") >= count
