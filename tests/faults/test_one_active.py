"""Order with several workers: one is active, and another takes over whatever ends the first."""

import asyncio
import json
import os
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from aio_pika.abc import AbstractIncomingMessage

from bench.usage import read_run_delay
from bridge.sandbox.processes import Child
from tests.amqp_client import open_amqp
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
from tests.faults.test_permissions import user
from tests.faults.traffic import has_peers, has_taken, publish_texts, texts_of
from tests.plain_http import NO_AUTHORITIES

ON: dict[str, Any] = {"worker__ordering": "recipient", "worker__max_uncertain_attempts": 6}
# Each POST takes this long, so that there is always something that waits.
SLOW: dict[str, Any] = {"latency_seconds": 0.03, "count": None}
TAKEN_OVER_SECONDS = 2.0


async def publish_in_turn(bench: Bench, numbers: list[str], each: int, *, start: int = 0) -> None:
    for place in range(start, start + each):
        for number in numbers:
            body = json.dumps({"to": number, "from": "Acme", "text": f"text {place}"}).encode()
            await bench.amqp.publish(bench.queue, body, message_id=f"{number}.{place}")


async def until_all_sent(bench: Bench, numbers: list[str], each: int, seconds: float = 40) -> None:
    def is_sent() -> bool:
        taken = {(message.to, message.text) for message in bench.service.taken(numbers)}
        return len(taken) == len(numbers) * each

    await eventually(is_sent, what="all texts", seconds=seconds)


def out_of_order(bench: Bench, numbers: Iterable[str]) -> dict[str, list[str]]:
    came: defaultdict[str, list[str]] = defaultdict(list)
    for message in bench.service.taken(numbers):
        if message.text not in came[message.to]:
            came[message.to].append(message.text)
    return {
        number: texts
        for number, texts in came.items()
        if texts != [f"text {place}" for place in range(len(texts))]
    }


@asynccontextmanager
async def standby(bench: Bench, **changed: Any) -> AsyncIterator[Live]:
    """Run a worker beside an active one."""
    async with running(make_settings(bench.values(**ON | changed)), "worker") as live:
        await eventually(lambda: live.logged("standing_by"), what="a standby")
        await live.until_linked()
        yield live


def is_active(live: Live) -> bool:
    return live.metric("sms_bridge_worker_active") == 1


async def ask_ready(live: Live) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False, verify=NO_AUTHORITIES) as http:
        return await http.get(f"{live.admin_url}/readyz")


@pytest.mark.parametrize(("kind", "coordination"), [("classic", "off"), ("quorum", "on")])
async def test_one_is_active_and_the_others_stand_by(
    bench: Bench, kind: str, coordination: str
) -> None:
    await bench.amqp.channel.declare_queue(
        bench.queue, durable=True, arguments={"x-queue-type": kind}
    )
    changed = {"worker__coordination": coordination}
    async with bench.worker(**ON | changed) as active, standby(bench, **changed) as other:
        numbers = await bench.publish(20)
        await bench.until_taken(numbers)

        assert (is_active(active), is_active(other)) == (True, False)
        assert await bench.amqp.consumers(bench.queue) == 1
        assert other.metric("sms_bridge_worker_messages_received_total") == 0
        answers = [await ask_ready(live) for live in (active, other)]
        assert [one.status_code for one in answers] == [200, 200]
        assert [one.json()["worker"]["standby"] for one in answers] == [False, True]
    assert bench.sent_twice(numbers) == {}


def killable(bench: Bench, folder: Path, **changed: Any) -> AbstractContextManager[Child]:
    """Run a worker in a process of its own.

    It goes past the proxy, which shares this process: acks that wait in it would be lost with the
    worker.
    """
    given = ON | changed | {"rabbitmq__url": [bench.broker.url]}
    return bench.worker_process(folder / "worker.log", **given)


@pytest.mark.parametrize("coordination", ["on", "off"])
async def test_another_takes_over_within_two_seconds(
    bench: Bench, tmp_path: Path, coordination: str
) -> None:
    changed = {"worker__coordination": coordination}
    await bench.declare_main()
    with killable(bench, tmp_path, **changed) as child:
        await bench.until_taken(await bench.publish(5))
        async with standby(bench, **changed) as live:
            began, waited = time.monotonic(), read_run_delay(os.getpid())
            child.kill()
            await bench.until_taken(await bench.publish(5))

            # What other programs take of the CPUs meanwhile is no time of the worker's.
            waited = read_run_delay(os.getpid()) - waited
            assert time.monotonic() - began - waited < TAKEN_OVER_SECONDS
            assert is_active(live)


async def test_a_worker_that_stops_hands_over(bench: Bench) -> None:
    """What is published then is sent within two seconds, by the next one."""
    async with bench.worker(**ON) as first, standby(bench) as second:
        assert await first.stop() == 0
        began, waited = time.monotonic(), read_run_delay(os.getpid())
        await bench.until_taken(await bench.publish(5))

        waited = read_run_delay(os.getpid()) - waited
        assert time.monotonic() - began - waited < TAKEN_OVER_SECONDS
        assert is_active(second)


async def test_order_over_a_scale_from_one_to_three_to_one(bench: Bench) -> None:
    bench.service.misbehave({"status": 425, "count": 3}, SLOW)
    numbers = make_numbers(20)
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(bench.worker(**ON))]
        await publish_in_turn(bench, numbers, 10)
        workers += [await stack.enter_async_context(standby(bench)) for _ in range(2)]
        await eventually(lambda: all(has_peers(live, 2) for live in workers), what="all three")
        await publish_in_turn(bench, numbers, 10, start=10)
        for live in workers[:2]:
            assert await live.stop() == 0
            await eventually(
                lambda: sum(is_active(other) for other in workers) == 1, what="another one"
            )
        await publish_in_turn(bench, numbers, 5, start=20)
        await until_all_sent(bench, numbers, 25)
        await bench.until_settled(workers[2])

        assert is_active(workers[2])

    assert out_of_order(bench, numbers) == {}
    assert len(bench.service.taken(numbers)) == 25 * 20


@pytest.mark.parametrize("link", [CONSUME_LINK, PUBLISH_LINK])
async def test_order_over_a_cut_connection(bench: Bench, link: str) -> None:
    """Whoever is active then, what was in flight is not sent again, and the order is kept."""
    bench.service.misbehave(SLOW)
    numbers = make_numbers(20)
    async with bench.worker(**ON) as live, standby(bench) as other:
        await eventually(lambda: has_peers(live, 1) and has_peers(other, 1), what="a peer")
        await publish_in_turn(bench, numbers, 5)
        bench.proxy.cut(link)
        await publish_in_turn(bench, numbers, 10, start=5)
        await until_all_sent(bench, numbers, 15)
        await bench.until_settled(live)
        await bench.until_settled(other)

    assert out_of_order(bench, numbers) == {}
    assert len(bench.service.taken(numbers)) == 15 * 20


async def test_order_over_a_restart_of_the_broker(bench: Bench) -> None:
    """Two workers come back in any order, one becomes active and goes on where they were."""
    bench.service.misbehave(SLOW)
    numbers = make_numbers(20)
    async with bench.worker(**ON) as live, standby(bench) as other:
        await eventually(partial(has_peers, live, 1), what="a peer")
        await publish_in_turn(bench, numbers, 15)
        await asyncio.to_thread(bench.broker.stop)
        await asyncio.to_thread(bench.broker.start)
        await until_all_sent(bench, numbers, 15, seconds=60)
        async with open_amqp(bench.broker.url) as bench.amqp:
            await bench.until_settled(live)
            await bench.until_settled(other)

    assert out_of_order(bench, numbers) == {}
    assert len(bench.service.taken(numbers)) == 15 * 20


async def test_order_over_a_killed_worker(bench: Bench, tmp_path: Path) -> None:
    """What it held comes to the next in its order; what was in flight is sent again at most."""
    bench.service.misbehave({"status": 425, "count": 5}, SLOW)
    numbers = make_numbers(20)
    changed = {"worker__redelivery_wait": 2}
    await bench.declare_main()
    with killable(bench, tmp_path, **changed) as child:
        await publish_in_turn(bench, numbers, 15)
        async with standby(bench, **changed) as live:
            await eventually(lambda: has_taken(bench, numbers, 60), what="a beginning")
            child.kill()
            await until_all_sent(bench, numbers, 15, seconds=60)
            await bench.until_settled(live)

    assert out_of_order(bench, numbers) == {}
    assert len(bench.service.taken(numbers)) <= 15 * 20 + 10


async def test_a_hand_over_keeps_places_and_attempts(bench: Bench) -> None:
    """A message that waits for its next try goes on with its attempts, ahead of later ones."""
    (number,) = make_numbers(1)
    bench.service.misbehave({"status": 425, "to": number, "count": 2})
    changed = {"worker__max_attempts": 3, "worker__retry_delays": ["3s"]}
    async with bench.worker(**ON | changed) as first, standby(bench, **changed) as second:
        await eventually(lambda: has_peers(first, 1) and has_peers(second, 1), what="peers")
        texts = await publish_texts(bench, number, 3)
        await eventually(lambda: first.logged("delivery"), what="the first try")
        assert await first.stop() == 0
        await eventually(lambda: has_taken(bench, [number], len(texts)), what="all")
        await bench.until_settled(second)
        ends = [
            (one["outcome"], one["attempts"])
            for one in second.logged("delivery")
            if one["outcome"] != "released"
        ]

    assert ends == [("retried", 1), ("retried", 2), ("sent", 3), ("sent", 1), ("sent", 1)]
    assert texts_of(bench, [number]) == texts
    assert len(bench.service.posts([number])) == 5


async def test_a_wait_that_is_cut_short_counts_no_attempt(bench: Bench) -> None:
    """Nor does the wait begin anew when the message comes again."""
    step = 3
    (number,) = make_numbers(1)
    bench.service.misbehave({"status": 425, "to": number, "count": 2})
    changed = ON | {"worker__max_attempts": 3, "worker__retry_delays": [f"{step}s"]}
    async with bench.worker(**changed) as live:
        await publish_texts(bench, number, 1)
        await eventually(lambda: live.logged("delivery"), what="the first try")
        half_at = time.monotonic() + step / 2
        await eventually(lambda: time.monotonic() >= half_at, what="half of its wait")
        bench.proxy.cut(CONSUME_LINK)
        await bench.until_taken([number])
        await bench.until_settled(live)
        ends = live.logged("delivery")

    told = [(one["outcome"], one["attempts"]) for one in ends]
    assert told == [("retried", 1), ("released", 0), ("retried", 2), ("sent", 3)]
    assert len(bench.service.posts([number])) == 3
    assert sum(one["waited_seconds"]["next_try"] for one in ends[1:3]) < 1.4 * step


async def test_attempts_count_where_a_message_keeps_its_place(bench: Bench) -> None:
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


async def test_an_operators_pause_keeps_the_order(bench: Bench) -> None:
    bench.service.misbehave(SLOW)
    numbers = make_numbers(10)
    async with bench.worker(**ON) as live, standby(bench) as other:
        await publish_in_turn(bench, numbers, 20)
        paused = f"{bench.queue}.paused"
        await bench.amqp.channel.declare_queue(
            paused, durable=True, arguments={"x-queue-type": "quorum"}
        )
        await eventually(lambda: "operator" in live.paused, what="the pause")

        async def is_given_back() -> bool:
            return await bench.amqp.count_if_there(bench.queue) == 200 - len(
                bench.service.taken(numbers)
            )

        await eventually(is_given_back, what="all is back in the queue")
        assert (is_active(live), is_active(other)) == (True, False)
        assert (await ask_ready(live)).status_code == 200
        await bench.amqp.channel.queue_delete(paused)
        await until_all_sent(bench, numbers, 20)
        await bench.until_settled(live)

    assert out_of_order(bench, numbers) == {}
    assert len(bench.service.taken(numbers)) == 200


async def test_a_pause_outlives_the_worker_that_began_it(bench: Bench) -> None:
    bench.service.misbehave({"status": 401, "count": None})
    async with bench.worker(**ON) as first, standby(bench) as second:
        await eventually(lambda: has_peers(first, 1) and has_peers(second, 1), what="peers")
        numbers = await bench.publish(30)
        await eventually(
            lambda: first.paused == second.paused == {"credentials_rejected"}, what="the pause"
        )
        assert await first.stop() == 0
        await eventually(lambda: is_active(second), what="the next one")
        assert second.paused == {"credentials_rejected"}
        bench.service.behave()
        await bench.until_taken(numbers)
        await bench.until_settled(second)

    assert bench.sent_twice(numbers) == {}
    assert await bench.dead_letters() == []


async def test_a_number_with_more_messages_than_are_held(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the bound the rest waits in the queue, and the order holds beyond it."""
    monkeypatch.setattr("bridge.worker.worker.MOST_HELD_IN_ORDER", 5)
    (number,) = make_numbers(1)
    bench.service.misbehave({"status": 425, "to": number, "count": 1})
    async with bench.worker(**ON) as live:
        texts = await publish_texts(bench, number, 12)
        await eventually(lambda: live.logged("delivery"), what="the first try")
        assert live.metric("sms_bridge_worker_messages_in_progress") == 5
        await eventually(lambda: has_taken(bench, [number], 12), what="all")
        await bench.until_settled(live)

    assert texts_of(bench, [number]) == texts


async def test_a_message_that_cannot_be_read_is_dead(bench: Bench) -> None:
    """Without a number it has a place all the same."""
    async with bench.worker(**ON) as live:
        await bench.amqp.publish(bench.queue, b"no request")
        await bench.until_settled(live)

    (dead,) = await bench.dead_letters()
    assert dead.headers["sms-bridge-reason"] == "invalid"


async def test_no_permission_for_the_lock(bench: Bench) -> None:
    await bench.declare_main()
    numbers = await bench.publish(3)
    async with user(bench, r"^(?!.*\.active$)", ".*", ".*") as url:
        settings = make_settings(bench.values(**ON, rabbitmq__url=[url]))
        async with running(settings, "worker") as live:
            await eventually(lambda: live.logged("order_not_kept"), what="told")
            (told,) = live.logged("order_not_kept")
            assert f"configure {bench.queue}.active" in told["remedy"]
            answer = await ask_ready(live)
            assert (answer.status_code, answer.json()["worker"]["standby"]) == (503, False)
            assert await bench.amqp.count_if_there(bench.queue) == 3
            assert live.metric("sms_bridge_worker_active") == 0
    assert bench.service.posts(numbers) == []


async def test_a_queue_in_the_place_of_the_lock(bench: Bench) -> None:
    await bench.amqp.channel.declare_queue(f"{bench.queue}.active", durable=True)
    async with running(make_settings(bench.values(**ON)), "worker") as live:
        await eventually(lambda: live.logged("order_not_kept"), what="told")
        (told,) = live.logged("order_not_kept")
        assert f"delete the queue {bench.queue}.active" in told["remedy"]
        await bench.amqp.channel.queue_delete(f"{bench.queue}.active")
        await bench.until_taken(await bench.publish(1))


async def test_another_consumer_of_the_queue(bench: Bench) -> None:
    """Whoever else consumes the queue is named as what breaks the order, and waited for a while."""
    await bench.declare_main()
    queue = await bench.amqp.channel.get_queue(bench.queue, ensure=False)
    await queue.consume(_take, exclusive=False)
    async with bench.worker(**ON) as live:
        (warning,) = live.logged("foreign_consumers")

    assert warning["queue"] == bench.queue
    assert "worker.ordering" in warning["remedy"]


async def test_a_shared_limit_is_the_active_workers(bench: Bench) -> None:
    limit = {"worker__rate_limit": {"per_second": 20, "burst": 1, "scope": "cluster"}}
    async with bench.worker(**ON | limit), standby(bench, **limit):
        began, waited = time.monotonic(), read_run_delay(os.getpid())
        await bench.until_taken(await bench.publish(40))

        seconds, waited = time.monotonic() - began, read_run_delay(os.getpid()) - waited
        assert seconds > 1.5
        assert seconds - waited < 3.5


async def _take(_message: AbstractIncomingMessage) -> None: ...
