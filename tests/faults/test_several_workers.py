"""Several workers of one queue: what one has in flight, no other sends, whatever is cut."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import pytest
from aio_pika.abc import AbstractIncomingMessage

from bridge.worker.cluster.membership import PRESENT
from bridge.worker.envelope import POSSIBLE_DUPLICATE
from bridge.worker.limits.capacity import SLOTS_PER_SPARE
from tests.alarms import memory_alarm
from tests.amqp_client import open_amqp
from tests.faults.amqp_proxy import ACK, CONSUME, PUBLISH, AmqpProxy, Trap, open_amqp_proxy
from tests.faults.bench import (
    CONSUME_LINK,
    POLL_SECONDS,
    PUBLISH_LINK,
    SECONDS,
    Bench,
    Live,
    eventually,
    make_numbers,
)
from tests.faults.traffic import (
    TOO_EARLY,
    WITH_AND_WITHOUT_IDS,
    has_in_flight,
    has_peers,
    once_each,
)

IN_FLIGHT = 20
# Of a worker that is cut off to the end of its test, when nothing is left that it could wait for.
ENDS_SOON: dict[str, Any] = {"worker__shutdown_timeout_seconds": 1}


@asynccontextmanager
async def second_worker(bench: Bench, **changed: Any) -> AsyncIterator[tuple[Live, AmqpProxy]]:
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(open_amqp_proxy(bench.broker.url))
        url = {"rabbitmq__url": [proxy.url]}
        live = await stack.enter_async_context(bench.worker(**changed | url))
        yield live, proxy


@pytest.mark.parametrize(
    ("coordination", "extra", "ids"),
    [("on", 0, True), ("on", 0, False), ("off", IN_FLIGHT, True)],
)
async def test_cut_of_one_of_two(bench: Bench, coordination: str, extra: int, *, ids: bool) -> None:
    """What the other worker is given again it does not send, unless it stands alone."""
    settings: dict[str, Any] = {
        "worker__concurrency": IN_FLIGHT,
        "worker__coordination": coordination,
    }
    # In which the other worker has to start, on a busy computer too.
    bench.service.misbehave({"to": None, "count": IN_FLIGHT, "latency_seconds": 8})
    async with bench.worker(**settings) as first:
        numbers = await bench.publish(IN_FLIGHT, ids=ids)
        await has_in_flight(bench, numbers)
        async with second_worker(bench, **settings) as (second, _):
            bench.proxy.cut(CONSUME_LINK)
            await bench.until_settled(first, seconds=30)
            await bench.until_settled(second, seconds=30)

            assert len(bench.extra_posts(numbers)) == extra


async def test_a_restart_of_the_broker_under_three(bench: Bench) -> None:
    """Whoever is back first is given what all have in flight, and sends none of it."""
    settings: dict[str, Any] = {"worker__concurrency": IN_FLIGHT}
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(bench.worker(**settings)) for _ in range(3)]
        await eventually(lambda: all(has_peers(live, 2) for live in workers), what="all three")
        bench.service.misbehave({"to": None, "latency_seconds": 8})
        numbers = await bench.publish(3 * IN_FLIGHT, ids=False)
        await has_in_flight(bench, numbers)
        await asyncio.to_thread(bench.broker.stop)
        await asyncio.to_thread(bench.broker.start)
        bench.service.behave()
        async with open_amqp(bench.broker.url) as bench.amqp:
            for live in workers:
                await bench.until_settled(live, seconds=60)

        assert bench.extra_posts(numbers) == {}


async def test_equal_texts_without_an_id_are_sent_as_often_as_they_were_published(
    bench: Bench,
) -> None:
    settings: dict[str, Any] = {"worker__concurrency": IN_FLIGHT}
    bench.service.misbehave({"to": None, "count": IN_FLIGHT, "latency_seconds": 3})
    async with bench.worker(**settings) as first:
        numbers = make_numbers(IN_FLIGHT // 2)
        for _ in range(2):
            await bench.publish(numbers, ids=False)
        await eventually(lambda: len(bench.service.posts(numbers)) == IN_FLIGHT, what="POSTs")
        async with second_worker(bench, **settings) as (second, _):
            await eventually(lambda: has_peers(second, 1), what="the first")
            bench.proxy.cut(CONSUME_LINK)
            for live in (first, second):
                await bench.until_settled(live, seconds=30)

            counts = Counter(post.to for post in bench.service.posts(numbers))
            assert counts == dict.fromkeys(numbers, 2)


@WITH_AND_WITHOUT_IDS
async def test_a_worker_that_stays_away(bench: Bench, *, ids: bool) -> None:
    wait_seconds = 10
    settings: dict[str, Any] = {
        "worker__concurrency": IN_FLIGHT,
        "worker__redelivery_wait": wait_seconds,
        "sms_api__timeout_seconds": 60,
    }
    async with bench.worker(**settings, worker__shutdown_timeout_seconds=1):
        bench.service.misbehave({"to": None, "count": IN_FLIGHT, "latency_seconds": 25})
        numbers = await bench.publish(IN_FLIGHT, ids=ids)
        await has_in_flight(bench, numbers)
        async with second_worker(bench, **settings) as (second, _):
            await eventually(lambda: has_peers(second, 1), what="the first")
            bench.proxy.refuse()
            cut_at = time.monotonic()
            waiting = partial(second.metric, "sms_bridge_worker_messages_in_progress")
            await eventually(lambda: waiting() >= IN_FLIGHT, what="the redeliveries")
            # What comes while it changes its places would come as a redelivery, and wait as well.
            await eventually(lambda: len(second.logged("consuming")) == 2, what="other places")
            await bench.until_taken(await bench.publish(IN_FLIGHT))
            # The wait is not over yet.
            assert bench.extra_posts(numbers) == {}
            await eventually(lambda: len(bench.extra_posts(numbers)) == IN_FLIGHT, what="POSTs")

            assert time.monotonic() - cut_at >= wait_seconds
            assert set(bench.extra_posts(numbers).values()) == {2}
            keys = {(post.to, post.idempotency_key) for post in bench.service.posts(numbers)}
            assert len(keys) == IN_FLIGHT * (1 if ids else 2)


async def test_new_messages_go_on_when_two_of_three_stay_away(bench: Bench) -> None:
    # So few that a worker has no place to spare: into that of a lost one the broker would put a new
    # message before it misses the worker, and then it is a redelivery.
    each, wait_seconds = SLOTS_PER_SPARE - 1, 60
    settings: dict[str, Any] = {
        "worker__concurrency": each,
        "worker__redelivery_wait": wait_seconds,
        "worker__shutdown_timeout_seconds": 1,
    }
    numbers = make_numbers(3 * each)
    bench.service.misbehave(
        *({"to": to, "latency_seconds": 3 + place / 10} for place, to in enumerate(numbers))
    )
    async with AsyncExitStack() as stack:
        survivor = await stack.enter_async_context(bench.worker(**settings))
        lost = [await stack.enter_async_context(second_worker(bench, **settings)) for _ in "12"]
        await eventually(lambda: has_peers(survivor, 2), what="the others")
        await bench.publish(numbers)
        await has_in_flight(bench, numbers)
        for _, proxy in lost:
            proxy.refuse()

        await bench.until_taken(await bench.publish(2 * each), seconds=wait_seconds / 2)


@pytest.mark.parametrize("is_cut", [False, True], ids=["heard", "just_cut_off"])
async def test_a_clean_stop_hands_over(bench: Bench, *, is_cut: bool) -> None:
    """What a worker gives back when it stops goes on elsewhere at once, with its key.

    So it does when the connection was cut on which it speaks, and is not back yet.
    """
    # The next one would go after 25 seconds.
    slow: dict[str, Any] = {"worker__rate_limit": {"per_second": 0.04, "burst": 1}}
    async with bench.worker(**slow) as first:
        numbers = await bench.publish(3, ids=False)
        await eventually(lambda: len(bench.service.taken(numbers)) == 1, what="the first text")
        # Longer than is waited here: nobody is to be asked in vain.
        async with second_worker(bench, worker__redelivery_wait=60) as (second, _):
            await eventually(lambda: has_peers(second, 1), what="the first")
            await eventually(lambda: has_peers(first, 1), what="the second")
            if is_cut:
                bench.proxy.cut(PUBLISH_LINK)
                up = partial(first.metric, "sms_bridge_worker_coordination_up")
                await eventually(lambda: not up(), what="the cut")
            assert await first.stop() == 0
            await bench.until_taken(numbers)

            answers = partial(second.metric, "sms_bridge_worker_redelivery_questions_total")
            assert answers(answer="kept") == 2
            assert answers(answer="none") == 0
            assert bench.extra_posts(numbers) == {}


async def test_a_worker_that_cannot_be_asked_is_not_waited_for(bench: Bench) -> None:
    """A peer that stands alone is as it was without coordination."""
    bench.service.misbehave({"to": None, "count": 5, "latency_seconds": 30})
    alone: dict[str, Any] = {"worker__coordination": "off", "worker__shutdown_timeout_seconds": 1}
    # Or its own POSTs would be repeated.
    async with bench.worker(**alone, sms_api__timeout_seconds=60):
        numbers = await bench.publish(5)
        await has_in_flight(bench, numbers)
        async with second_worker(bench, worker__redelivery_wait=60):
            bench.proxy.cut(CONSUME_LINK)
            await eventually(lambda: bench.extra_posts(numbers), what="the other's POSTs")


@WITH_AND_WITHOUT_IDS
async def test_copies_that_are_stored_twice(bench: Bench, *, ids: bool) -> None:
    """A retry copy whose confirm is lost is there twice; two workers send it once."""
    async with bench.worker() as first, second_worker(bench) as (second, other):
        # The first one: how many are confirmed with it nobody knows.
        traps = [
            proxy.trap("broker", ACK, "cut", link=PUBLISH_LINK) for proxy in (bench.proxy, other)
        ]
        numbers = make_numbers(IN_FLIGHT)
        bench.service.misbehave(*once_each(numbers, TOO_EARLY))
        await bench.publish(numbers, ids=ids)
        await bench.until_taken(numbers)
        for live in (first, second):
            await bench.until_settled(live)

        assert any(trap.sprung.is_set() for trap in traps)
        assert bench.sent_twice(numbers) == {}


@WITH_AND_WITHOUT_IDS
@pytest.mark.parametrize("is_there", [True, False], ids=["is_there", "joins_later"])
async def test_the_second_of_two_copies_comes_first(
    bench: Bench, *, is_there: bool, ids: bool
) -> None:
    settings: dict[str, Any] = {"worker__retry_delays": ["1m"], **ENDS_SOON}
    async with bench.worker(**settings) as one, AsyncExitStack() as stack:
        lose_confirm_of_copy(bench.proxy)
        numbers = make_numbers(1)
        bench.service.misbehave(*once_each(numbers, TOO_EARLY))
        await bench.publish(numbers, ids=ids)
        first, second = [await take_copy(bench) for _ in "12"]
        assert [POSSIBLE_DUPLICATE in copy.headers for copy in (first, second)] == [False, True]
        if not is_there:
            await deliver(bench, second)
            await bench.until_taken(numbers)
        other, proxy = await stack.enter_async_context(second_worker(bench, **settings))
        await eventually(lambda: has_peers(one, 1) and has_peers(other, 1), what="each other")
        trap = await keep_from_consuming(one, bench.proxy)
        if is_there:
            await deliver(bench, second)
            await bench.until_taken(numbers)
            await keep_from_consuming(other, proxy)
            bench.proxy.traps.remove(trap)
            await one.until_consuming()
        await deliver(bench, first)
        await bench.until_settled(one if is_there else other)

        assert bench.sent_twice(numbers) == {}


@pytest.mark.parametrize("is_marked_first", [True, False], ids=["second_first", "first_first"])
@pytest.mark.parametrize("is_publisher", [True, False], ids=["its_publisher", "another"])
async def test_the_sender_of_one_of_two_copies_stops(
    bench: Bench, *, is_publisher: bool, is_marked_first: bool
) -> None:
    settings: dict[str, Any] = {"worker__retry_delays": ["1m"]}
    async with (
        bench.worker(**settings) as one,
        second_worker(bench, **settings) as (other, other_proxy),
    ):
        await eventually(lambda: has_peers(one, 1) and has_peers(other, 1), what="each other")
        trap = await keep_from_consuming(other, other_proxy)
        lose_confirm_of_copy(bench.proxy)
        numbers = make_numbers(1)
        bench.service.misbehave(*once_each(numbers, TOO_EARLY))
        await bench.publish(numbers)
        copies = [await take_copy(bench) for _ in "12"]
        # Who could tell nobody yet that there are two is no help.
        up = partial(one.metric, "sms_bridge_worker_coordination_up")
        await eventually(lambda: up() == 1, what="the publisher among its peers")
        sender, next_one, proxy = one, other, other_proxy
        if not is_publisher:
            own_trap = await keep_from_consuming(one, bench.proxy)
            other_proxy.traps.remove(trap)
            await other.until_consuming()
            sender, next_one, proxy, trap = other, one, bench.proxy, own_trap
        copies.sort(key=lambda copy: (POSSIBLE_DUPLICATE in copy.headers) is not is_marked_first)
        await deliver(bench, copies[0])
        await bench.until_taken(numbers)
        assert await sender.stop() == 0
        proxy.traps.remove(trap)
        await next_one.until_consuming()
        await deliver(bench, copies[1])
        await bench.until_settled(next_one)

        assert bench.sent_twice(numbers) == {}


def lose_confirm_of_copy(proxy: AmqpProxy) -> None:
    channels = set[bytes]()

    def note(frame: bytes) -> bytes:
        if b".retry." in frame:
            channels.add(frame[1:3])
        return frame

    def cut(frame: bytes) -> bytes:
        if frame[1:3] not in channels:
            return frame
        for trap in traps:
            proxy.traps.remove(trap)
        proxy.cut(PUBLISH_LINK)
        return b""

    traps = [
        proxy.trap("client", PUBLISH, note, again=True, link=PUBLISH_LINK),
        proxy.trap("broker", ACK, cut, again=True, link=PUBLISH_LINK),
    ]


async def take_copy(bench: Bench) -> AbstractIncomingMessage:
    ladder = f"{bench.queue}.retry.1m"
    deadline = time.monotonic() + SECONDS
    while not await bench.amqp.count_if_there(ladder):
        assert time.monotonic() < deadline, "no copy"
        await asyncio.sleep(POLL_SECONDS)
    copy = await bench.amqp.get(ladder)
    await copy.ack()
    return copy


async def deliver(bench: Bench, copy: AbstractIncomingMessage) -> None:
    """Bring a copy back to the queue, as the broker does when its wait is over."""
    await bench.amqp.publish(
        bench.queue, copy.body, message_id=copy.message_id, headers=copy.headers
    )


async def keep_from_consuming(live: Live, proxy: AmqpProxy) -> Trap:
    """Cut a worker off its queue, not off its peers, until the trap is removed."""
    trap = proxy.trap("client", CONSUME, "cut", again=True, link=CONSUME_LINK)
    proxy.cut(CONSUME_LINK)
    await eventually(lambda: not live.worker.consumer.is_registered, what="no consumer")
    return trap


async def test_an_alarm_makes_nobody_a_stranger(bench: Bench) -> None:
    """Silence while the broker accepts no messages is no absence: a peer is known afterwards."""
    async with bench.worker() as first, second_worker(bench) as (second, _):
        await eventually(lambda: has_peers(first, 1) and has_peers(second, 1), what="each other")
        async with memory_alarm(bench.broker):
            blocked = partial(first.metric, "sms_bridge_amqp_connection_blocked")
            await eventually(lambda: blocked() == 1, what="the block")
            await asyncio.sleep(PRESENT.seconds_at(1) + 2)
            assert has_peers(first, 1)
        # Half of what makes a worker join anew that does not hear itself.
        await eventually(lambda: blocked() == 0, what="the end of the block")
        await asyncio.sleep(2)

        for live in (first, second):
            assert has_peers(live, 1)
            assert live.logged("peer_gone") == []


async def test_one_that_cannot_consume_holds_up_no_probe(bench: Bench) -> None:
    async with bench.worker(**ENDS_SOON) as first, second_worker(bench) as (second, _):
        await eventually(lambda: has_peers(first, 1) and has_peers(second, 1), what="each other")
        bench.service.misbehave({"to": None, "status": 401})
        numbers = await bench.publish(IN_FLIGHT)
        await eventually(lambda: first.paused and second.paused, what="the pause")
        bench.proxy.trap("client", CONSUME, "cut", again=True, link=CONSUME_LINK)
        bench.proxy.cut(CONSUME_LINK)
        before = len(bench.service.posts(numbers))
        await eventually(lambda: len(bench.service.posts(numbers)) > before + 2, what="probes")
        bench.service.behave()
        await bench.until_taken(numbers)
