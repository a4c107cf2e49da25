"""Order across workers: with lanes none overtakes, whoever comes, goes, is cut or killed."""

import asyncio
import os
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bench.usage import read_run_delay
from bridge.admin.checks.consumers import check_consumers
from bridge.admin.checks.set_up import ConnectedBroker, SetUp
from bridge.admin.finding import Finding
from bridge.sandbox.processes import guarded
from bridge.worker.ordering.lane_consumer import LaneConsumer
from tests.faults.amqp_proxy import ACK, PUBLISH
from tests.faults.bench import (
    CONSUME_LINK,
    PUBLISH_LINK,
    Bench,
    Live,
    eventually,
    make_environ,
    make_numbers,
    make_settings,
    open_amqp,
    open_link,
    running,
)
from tests.faults.lane_traffic import LANES, ON, publish_in_turn, until_all_sent
from tests.faults.traffic import has_peers, has_taken, publish_texts, texts_of
from tests.forked import ForkedChild

SORT_LINK = "worker sort"
# Seconds that each POST takes: there is always something that waits.
SLOW: dict[str, Any] = {"latency_seconds": 0.03, "count": None}
# A worker that stops, or is gone, has no lane after so many seconds.
MOVED_SECONDS = 5.0


def lanes_of(bench: Bench, count: int = LANES) -> list[str]:
    """Name the lanes."""
    return [f"{bench.queue}.lane.{number}" for number in range(count)]


def out_of_order(bench: Bench, numbers: Iterable[str]) -> dict[str, list[str]]:
    """Return, of each number that got them so, the texts as they came; repeats are left out."""
    came: defaultdict[str, list[str]] = defaultdict(list)
    for message in bench.service.taken(numbers):
        if message.text not in came[message.to]:
            came[message.to].append(message.text)
    return {
        number: texts
        for number, texts in came.items()
        if texts != [f"text {place}" for place in range(len(texts))]
    }


async def until_lanes_empty(bench: Bench) -> None:
    """Return when nothing is left in the main queue and the lanes."""

    async def is_empty() -> bool:
        return not any([await bench.amqp.count(name) for name in (bench.queue, *lanes_of(bench))])

    await eventually(is_empty, what="empty lanes")


def lanes_taken(live: Live) -> int:
    """Return from how many lanes a worker takes."""
    consumer = live.worker.consumer
    assert isinstance(consumer, LaneConsumer)
    return consumer.lanes


def sorters(*workers: Live) -> int:
    """Count the workers that sort."""
    return int(sum(live.metric("sms_bridge_worker_sorter_up") for live in workers))


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
    """A message that has to be tried again keeps its place, and holds up no other number.

    Takes the steps of the ladder that it waits.
    """
    ordered, free = make_numbers(2)
    bench.service.misbehave({**fault, "to": ordered})
    async with bench.worker(**ON) as live:
        texts = await publish_texts(bench, ordered, 6)
        await bench.publish([free])
        await bench.until_taken([free])
        assert not has_taken(bench, [ordered], len(texts))
        await eventually(lambda: has_taken(bench, [ordered], len(texts)), what="all are sent")
        await until_lanes_empty(bench)
        await bench.until_settled(live)

    assert texts_of(bench, [ordered]) == texts


async def test_attempts_count_where_a_message_keeps_its_place(bench: Bench) -> None:
    """One that always fails is a dead letter after its attempts, and the next one goes.

    Takes the steps of the ladder that it waits.
    """
    (number,) = make_numbers(1)
    bench.service.misbehave({"status": 425, "to": number, "count": 3})
    async with bench.worker(**ON, worker__max_attempts=3) as live:
        await publish_texts(bench, number, 2)
        await eventually(lambda: has_taken(bench, [number], 1), what="the second text")
        await bench.until_settled(live)

    (dead,) = await bench.dead_letters()
    assert (dead.headers["sms-bridge-reason"], dead.headers["sms-bridge-attempts"]) == (
        "exhausted",
        3,
    )
    assert texts_of(bench, [number]) == ["text 1"]


async def test_order_over_a_scale_from_one_to_three_to_one(bench: Bench) -> None:
    """Workers that come take over lanes, those that go leave them: nothing twice, in order."""
    bench.service.misbehave({"status": 425, "count": 3}, SLOW)
    numbers = make_numbers(20)
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(bench.worker(**ON))]
        await publish_in_turn(bench, numbers, 10)
        for _ in range(2):
            more = await stack.enter_async_context(bench.worker(**ON))
            workers = [*workers, more]
        await eventually(lambda: all(has_peers(live, 2) for live in workers), what="all three")
        await publish_in_turn(bench, numbers, 10, start=10)
        assert sorters(*workers) == 1
        for live in workers[:2]:
            assert await live.stop() == 0
        await publish_in_turn(bench, numbers, 5, start=20)
        await until_all_sent(bench, numbers, 25)
        await until_lanes_empty(bench)

        assert lanes_taken(workers[2]) == LANES

    assert out_of_order(bench, numbers) == {}
    assert len(bench.service.taken(numbers)) == 25 * 20


async def test_lanes_are_shared_evenly(bench: Bench) -> None:
    """Of three workers none has two lanes more than another, and each lane one consumer."""
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(bench.worker(**ON)) for _ in range(3)]

        def shares() -> list[int]:
            return sorted(lanes_taken(live) for live in workers)

        await eventually(lambda: shares() == [1, 1, 2], what="even shares")

        async def has_one_each() -> bool:
            return [await bench.amqp.consumers(name) for name in lanes_of(bench)] == [1] * LANES

        await eventually(has_one_each, what="one consumer for each lane")


@pytest.mark.parametrize("link", [CONSUME_LINK, SORT_LINK, PUBLISH_LINK])
async def test_order_over_a_cut_connection(bench: Bench, link: str) -> None:
    """What is delivered again keeps its place, and what was in flight is not sent again."""
    bench.service.misbehave(SLOW)
    numbers = make_numbers(20)
    sent_by = {CONSUME_LINK: ACK, SORT_LINK: ACK, PUBLISH_LINK: PUBLISH}
    async with bench.worker(**ON) as live:
        bench.proxy.trap("client", sent_by[link], "cut", nth=60, link=link)
        await publish_in_turn(bench, numbers, 15)
        await until_all_sent(bench, numbers, 15)
        await until_lanes_empty(bench)
        await bench.until_settled(live)

    assert out_of_order(bench, numbers) == {}
    assert len(bench.service.taken(numbers)) == 15 * 20


async def test_order_over_a_restart_of_the_broker(bench: Bench) -> None:
    """Two workers come back in any order, and go on where they were.

    Takes the seconds of the restart.
    """
    bench.service.misbehave(SLOW)
    numbers = make_numbers(20)
    async with bench.worker(**ON) as live, bench.worker(**ON):
        await eventually(partial(has_peers, live, 1), what="a peer")
        await publish_in_turn(bench, numbers, 15)
        await asyncio.to_thread(bench.broker.stop)
        await asyncio.to_thread(bench.broker.start)
        await until_all_sent(bench, numbers, 15, seconds=60)
        async with open_amqp(bench.broker.url) as bench.amqp:
            # Copies whose confirm was lost are there twice: who sent the first knows the second.
            await until_lanes_empty(bench)
            await bench.until_settled(live)

    assert out_of_order(bench, numbers) == {}
    assert len(bench.service.taken(numbers)) == 15 * 20


async def test_order_over_a_killed_worker(bench: Bench, tmp_path: Path) -> None:
    """What it held comes to the others in its order; what was in flight is sent again at most.

    Takes the seconds for which the others wait for what the dead one might have said.
    """
    bench.service.misbehave({"status": 425, "count": 5}, SLOW)
    numbers = make_numbers(20)
    settings = ON | {"worker__redelivery_wait": 2}
    # Past the proxy, which shares this process: acks that wait in it would be lost with the worker.
    environ = make_environ(bench.values(**settings, rabbitmq__url=[bench.broker.url]))
    async with bench.worker(**settings) as live:
        with guarded() as guard:
            log = tmp_path / "worker.log"
            child = ForkedChild(["worker"], guard=guard, log=log, environ=environ)
            await eventually(partial(has_peers, live, 1), what="a peer")
            await publish_in_turn(bench, numbers, 15)
            await eventually(lambda: has_taken(bench, numbers, 60), what="a beginning")
            child.kill()
        await until_all_sent(bench, numbers, 15, seconds=60)
        await until_lanes_empty(bench)
        await bench.until_settled(live)

    assert out_of_order(bench, numbers) == {}
    assert len(bench.service.taken(numbers)) <= 15 * 20 + 10


async def test_a_worker_that_stops_leaves_its_lanes_at_once(bench: Bench) -> None:
    """What is published then is sent within five seconds, sorted by another one too.

    What other programs take of the CPUs meanwhile is left out: it is no time of the workers'.
    """
    numbers = make_numbers(20)
    async with bench.worker(**ON) as first, bench.worker(**ON) as second:
        await eventually(partial(has_peers, first, 1), what="a peer")
        assert await first.stop() == 0
        began, waited = time.monotonic(), read_run_delay(os.getpid())
        await publish_in_turn(bench, numbers, 1)
        await until_all_sent(bench, numbers, 1)

        waited = read_run_delay(os.getpid()) - waited
        assert time.monotonic() - began - waited < MOVED_SECONDS
        assert sorters(second) == 1


async def test_an_operators_pause_keeps_the_order(bench: Bench) -> None:
    """What is held goes back to the lanes, and is sent in its order when it is over."""
    bench.service.misbehave(SLOW)
    numbers = make_numbers(10)
    async with bench.worker(**ON) as live:
        await publish_in_turn(bench, numbers, 20)
        paused = f"{bench.queue}.paused"
        await bench.amqp.channel.declare_queue(
            paused, durable=True, arguments={"x-queue-type": "quorum"}
        )
        await eventually(lambda: "operator" in live.paused, what="the pause")

        async def is_given_back() -> bool:
            counts = [await bench.amqp.count(name) for name in lanes_of(bench)]
            return sum(counts) == 200 - len(bench.service.taken(numbers))

        await eventually(is_given_back, what="all is back in the lanes")
        await bench.amqp.channel.queue_delete(paused)
        await until_all_sent(bench, numbers, 20)
        await bench.until_settled(live)

    assert out_of_order(bench, numbers) == {}
    assert len(bench.service.taken(numbers)) == 200


async def test_a_message_that_cannot_be_read_is_dead(bench: Bench) -> None:
    """Without a number it has a lane all the same."""
    async with bench.worker(**ON) as live:
        await bench.amqp.publish(bench.queue, b"no request")
        await bench.until_settled(live)
        await until_lanes_empty(bench)

    (dead,) = await bench.dead_letters()
    assert dead.headers["sms-bridge-reason"] == "invalid"


async def test_switched_off_again(bench: Bench) -> None:
    """A worker without lanes takes what was sorted before, and says what to do."""
    bench.service.misbehave({"latency_seconds": 1, "count": None})
    numbers = make_numbers(20)
    async with bench.worker(**ON) as live:
        await publish_in_turn(bench, numbers, 15)
        sorted_so_far = partial(live.metric, "sms_bridge_worker_messages_sorted_total")
        await eventually(lambda: sorted_so_far() >= 15 * 20, what="all are sorted")
    # It ended what was in flight, one of each number, and gave the others back.
    assert sum([await bench.amqp.count(name) for name in lanes_of(bench)])
    bench.service.behave()
    async with bench.worker() as live:
        await until_all_sent(bench, numbers, 15)

        (warning,) = live.logged("queues_left_behind")
        assert warning["queues"] == lanes_of(bench)
        findings = await _findings(bench)
        assert [f"queue {name}" for name in lanes_of(bench)] == [
            one.subject for one in findings if "is left from" in one.text
        ]


async def _findings(bench: Bench) -> list[Finding]:
    settings = make_settings(bench.values())
    set_up = SetUp(settings=settings, roles=["worker"])
    async with open_link(bench, "check") as connection:
        broker = ConnectedBroker(set_up=set_up, url=settings.rabbitmq.url[0], connection=connection)
        return await check_consumers(broker)


async def test_another_number_of_lanes_is_refused(bench: Bench) -> None:
    """Keys would be in other lanes than what waits: the worker says so, and takes nothing."""
    async with bench.worker(**ON):
        pass
    numbers = await bench.publish(3)
    more = make_settings(bench.values(**ON | {"worker__lanes": 2 * LANES}))
    async with running(more, "worker") as live:
        await eventually(lambda: live.logged("topology_unusable"), what="told")

        (told,) = live.logged("topology_unusable")
        assert f"{bench.queue}.lane.0: x-delivery-limit" in told["why"]

        async def are_waiting() -> bool:
            return await bench.amqp.count(bench.queue) == len(numbers)

        await eventually(are_waiting, what="nothing is taken")
