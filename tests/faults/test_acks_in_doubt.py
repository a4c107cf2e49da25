"""A worker that is told to end and does not know which of its acks arrived."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from bridge.sandbox.orders import Fault
from bridge.worker.deduplicator import COMES_AGAIN_SECONDS
from tests.faults.amqp_proxy import ACK, CONFIRM_SELECT_OK, PUBLISH
from tests.faults.bench import (
    CONSUME_LINK,
    PUBLISH_LINK,
    Bench,
    eventually,
    make_numbers,
    make_settings,
    running,
)
from tests.faults.endings import Scenario
from tests.faults.traffic import WITH_AND_WITHOUT_IDS

# As `Scenario` looks for what is left.
LADDER: dict[str, Any] = {"worker__retry_delays": ["1m", "2m"]}


async def test_drain_without_a_connection_waits_for_what_comes_again(
    bench: Bench, tmp_path: Path
) -> None:
    """SIGTERM after a loss that took acks along: the worker comes back to ack the redeliveries."""
    await bench.declare_main()
    with bench.worker_process(tmp_path / "worker.log", **LADDER) as child:
        scenario = Scenario(bench, child)
        await scenario.until_logged("consuming")
        lost = bench.proxy.trap("client", ACK, "drop", again=True, link=CONSUME_LINK)
        numbers = await bench.publish(5)
        await eventually(lambda: lost.seen >= 5, what="5 acks")
        bench.proxy.refuse()
        bench.proxy.traps.clear()
        child.ask_to_end()
        # Longer than a broker that is there would take to deliver again.
        asyncio.get_running_loop().call_later(
            COMES_AGAIN_SECONDS + 1, lambda: asyncio.ensure_future(bench.proxy.accept())
        )
        ending = await scenario.end(numbers)

    assert (ending.code, ending.left) == (0, set()), ending.log
    assert set(ending.posts.values()) == {1}


@asynccontextmanager
async def owing_worker(
    bench: Bench, folder: Path, numbers: list[str], *, others: bool
) -> AsyncIterator[Scenario]:
    """Run a worker process that has sent these and cannot ack them: its connection was cut.

    With `others`, another worker has taken what came again. Without, that is still in the queue
    with whatever comes later, because the process cannot connect until `bench.proxy.accept`.
    """
    await bench.declare_main()
    faults = [Fault(to=number, latency_seconds=1.5, count=1) for number in numbers]
    bench.service.faults.extend(faults)
    elsewhere = bench.values(rabbitmq__url=[bench.broker.url])
    with bench.worker_process(folder / "a.log", **LADDER) as child:
        scenario = Scenario(bench, child)
        await scenario.until_logged("consuming")
        await bench.publish(numbers)
        await eventually(lambda: len(bench.service.posts(numbers)) >= 5, what="POSTs")
        bench.proxy.refuse()
        if others:
            async with running(make_settings(elsewhere), "worker"):
                await bench.until_taken(numbers)
                await eventually(lambda: len(bench.service.taken(numbers)) == 10, what="all")
        await eventually(lambda: scenario.count_logged('"sent"') >= 5, what="5 sent")
        yield scenario


@WITH_AND_WITHOUT_IDS
async def test_drain_acks_what_has_come_again_before_it(bench: Bench, *, ids: bool) -> None:
    """SIGTERM while redeliveries wait for their own POSTs: they are acked when these end."""
    bench.service.misbehave({"latency_seconds": 4, "count": None})
    async with bench.worker() as live:
        numbers = await bench.publish(3, ids=ids)
        await eventually(lambda: len(bench.service.posts(numbers)) == 3, what="POSTs")
        bench.proxy.reset(CONSUME_LINK)
        received = "sms_bridge_worker_messages_received_total"
        await eventually(lambda: live.metric(received, redelivered="true") == 3, what="again")
        code = await live.stop()

    assert code == 0
    assert len(bench.service.taken(numbers)) == 3
    assert await bench.amqp.take_all(bench.queue) == []


@pytest.mark.parametrize("seconds", [0, COMES_AGAIN_SECONDS + 1], ids=["at_once", "later"])
async def test_drain_carries_out_what_is_decided(bench: Bench, seconds: float) -> None:
    bench.service.misbehave({"mode": "accept_then_cut"})
    async with bench.worker(worker__on_uncertain="park") as live:
        copies = bench.proxy.trap("client", PUBLISH, "pass", nth=3, link=PUBLISH_LINK)
        confirms = bench.proxy.trap("broker", ACK, "drop", again=True, link=PUBLISH_LINK)
        numbers = await bench.publish(3)
        await eventually(copies.sprung.is_set, what="copies that are not confirmed")
        stopping = asyncio.create_task(live.stop())
        await eventually(lambda: live.bridge.wiring.health.is_draining, what="the drain")
        away = bench.proxy.trap("broker", CONFIRM_SELECT_OK, "cut", again=True, link=PUBLISH_LINK)
        asyncio.get_running_loop().call_later(seconds, bench.proxy.traps.remove, away)
        # In this order, so that no delivery can be acked when its copy is refused.
        bench.proxy.reset(CONSUME_LINK)
        ends = ("broker_lost", "broker_unavailable")
        await eventually(lambda: any(map(live.logged, ends)), what="the end of the deliveries")
        bench.proxy.reset(PUBLISH_LINK)
        bench.proxy.traps.remove(confirms)
        code = await stopping

    assert code == 0
    assert len(bench.service.posts(numbers)) == 3
    assert await bench.amqp.take_all(bench.queue) == []
    dead = await bench.dead_letters()
    assert {json.loads(letter.body)["to"] for letter in dead} == {*numbers}


async def test_drain_does_not_wait_for_what_others_have_taken(bench: Bench, tmp_path: Path) -> None:
    numbers = make_numbers(5)
    async with owing_worker(bench, tmp_path, numbers, others=True) as scenario:
        await bench.proxy.accept()
        await eventually(lambda: scenario.count_logged('"consuming"') >= 2, what="a new consumer")
        ending = await scenario.end(numbers)

    assert ending.code == 0, ending.log
    # Long before the drain would have to end; the rest is what a busy computer takes to exit.
    assert ending.seconds < COMES_AGAIN_SECONDS + 10
    assert '"event":"not_redelivered"' in ending.log


async def test_drain_holds_one_message_of_others(bench: Bench, tmp_path: Path) -> None:
    """A worker that waits for what comes again keeps one new message from others, no more."""
    numbers, fresh = make_numbers(5), make_numbers(20)
    async with owing_worker(bench, tmp_path, numbers, others=True) as scenario:
        await bench.publish(fresh)
        scenario.child.ask_to_end()
        await scenario.until_logged("signal")
        await bench.proxy.accept()
        least = len(fresh)
        while scenario.child.exit_code is None:
            least = min(least, await bench.amqp.count_if_there(bench.queue))
        ending = await scenario.end(fresh)

    assert least == len(fresh) - 1
    assert (ending.code, ending.posts, ending.left) == (0, {}, {*fresh}), ending.log


async def test_drain_ends_while_messages_of_others_come_again(bench: Bench, tmp_path: Path) -> None:
    """However long the broker delivers again what is not ours, the wait ends, and it is told."""
    numbers, returned = make_numbers(5), make_numbers(50)
    async with owing_worker(bench, tmp_path, numbers, others=True) as scenario:
        await bench.publish(returned)
        held = [await bench.amqp.get(bench.queue) for _ in returned]
        scenario.child.ask_to_end()
        await scenario.until_logged("signal")
        await bench.proxy.accept()
        while scenario.child.exit_code is None:
            if scenario.count_logged('"consuming"') >= 2 and held:
                await held.pop().nack(requeue=True)
            await asyncio.sleep(COMES_AGAIN_SECONDS / 8)
        for message in held:
            await message.nack(requeue=True)
        ending = await scenario.end(returned)

    assert ending.code == 75, ending.log
    assert '"event":"acks_in_doubt"' in ending.log
    assert (ending.posts, ending.left) == ({}, {*returned})
    assert len(held) > 10


async def test_drain_acks_what_comes_again_behind_others(bench: Bench, tmp_path: Path) -> None:
    """What is done is acked even when messages that are not done come again before it."""
    numbers, waiting = make_numbers(5), make_numbers(3)
    await bench.declare_main()
    # Not so far that they would wait on the ladder.
    await bench.publish(waiting, headers={"sms-bridge-not-before": int(time.time()) + 45})
    async with owing_worker(bench, tmp_path, numbers, others=False) as scenario:
        scenario.child.ask_to_end()
        await scenario.until_logged("signal")
        await bench.proxy.accept()
        ending = await scenario.end([*numbers, *waiting])

    assert ending.code == 0, ending.log
    assert ending.left == {*waiting}
    assert all(ending.posts[number] == 1 for number in numbers)
