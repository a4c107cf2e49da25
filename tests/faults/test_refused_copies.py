"""Copies that the broker refuses for themselves: they stay unacked and hold up no other message."""

import asyncio
import json
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from tests.erlang import evaluate
from tests.faults.amqp_proxy import PUBLISH, Alter
from tests.faults.bench import CONSUME_LINK, PUBLISH_LINK, Bench, Live, eventually, make_numbers
from tests.faults.traffic import REFUSED, TOO_EARLY, once_each
from tests.plain_http import NO_AUTHORITIES

USUAL_LIMIT = 128 * 1024 * 1024


def limit_messages(bench: Bench, size: int) -> None:
    """Have the broker refuse larger messages on every channel that is opened from now on."""
    # RabbitMQ 4 reads its setting once, when it starts, and keeps it in a term.
    application = f"application:set_env(rabbit, max_message_size, {size})"
    term = f"persistent_term:put(max_message_size, {size})"
    evaluate(bench.broker, f"{application}, {term}")


@asynccontextmanager
async def limited(bench: Bench, size: int) -> AsyncIterator[None]:
    """Have the broker refuse larger messages for a while."""
    limit_messages(bench, size)
    try:
        yield
    finally:
        limit_messages(bench, USUAL_LIMIT)


def refused_ids(live: Live) -> list[str]:
    return [line["message_id"] for line in live.logged("copy_refused")]


def aside(*workers: Live) -> float:
    """Count the messages that stay unacked for that."""
    return sum(live.metric("sms_bridge_worker_copies_refused") for live in workers)


async def readiness(live: Live) -> tuple[int, int]:
    async with httpx.AsyncClient(trust_env=False, verify=NO_AUTHORITIES) as client:
        answer = await client.get(f"{live.admin_url}/readyz")
    return answer.status_code, answer.json()["worker"]["copies_refused"]


async def test_a_copy_that_is_too_large_holds_up_no_other(bench: Bench) -> None:
    """It was in the queue when `max_message_size` came into force; a second one comes later.

    All others are sent, tried again or dead-lettered as ever, the worker is ready and stops clean.
    """
    numbers = make_numbers(22)
    bench.service.misbehave(*once_each(numbers[:10], TOO_EARLY), *once_each(numbers[20:], REFUSED))
    await bench.declare_main()
    limit_messages(bench, USUAL_LIMIT)
    async with asyncio.TaskGroup() as group:
        for name in ("too-large-1", "too-large-2"):
            group.create_task(bench.amqp.publish(bench.queue, b"x" * 200_000, message_id=name))
    async with limited(bench, 100_000), bench.worker(worker__concurrency=2) as live:
        await eventually(lambda: aside(live) == 2, what="both set aside")
        await bench.publish(numbers)
        await bench.until_taken(numbers[:20])
        await bench.until_dead(2)
        await bench.until_settled(live)

        assert sorted(refused_ids(live)) == ["too-large-1", "too-large-2"]
        assert live.paused == set()
        assert await readiness(live) == (200, 2)
        assert await bench.amqp.count_if_there(bench.queue) == 0
        assert await live.stop() == 0
    assert {letter.headers["sms-bridge-reason"] for letter in await bench.dead_letters()} == {
        "refused"
    }
    assert await bench.amqp.count_if_there(bench.queue) == 2


async def test_two_workers_do_not_pass_it_on(bench: Bench) -> None:
    await bench.declare_main()
    limit_messages(bench, USUAL_LIMIT)
    await bench.amqp.publish(bench.queue, b"x" * 200_000, message_id="too-large")
    async with limited(bench, 100_000), bench.worker() as first, bench.worker() as second:
        await eventually(lambda: aside(first, second) == 1, what="set aside")
        await bench.until_taken(await bench.publish(50))
        await bench.until_settled(first)
        assert refused_ids(first) == ["too-large"]

        owner, other = (first, second) if aside(first) else (second, first)
        assert await owner.stop() == 0
        await eventually(lambda: aside(other) == 1, what="the other has it")
        await bench.until_taken(await bench.publish(5))
        assert refused_ids(first) == ["too-large"] * 2
        assert await other.stop() == 0


async def test_many_of_them_end_one_connection(bench: Bench) -> None:
    """After the first, others of that size are known: nothing waits for a connection again."""
    numbers, large = make_numbers(10), make_numbers(6)
    bench.service.misbehave(*({**REFUSED, "to": number} for number in large))
    await bench.declare_main()
    limit_messages(bench, USUAL_LIMIT)
    for number in large:
        body = json.dumps({"to": number, "from": "Acme", "text": "x" * 1500}).encode()
        await bench.amqp.publish(bench.queue, body, message_id=f"id-{number}")
    async with limited(bench, 1000), bench.worker(worker__concurrency=1) as live:
        await eventually(lambda: aside(live) == 6, what="all set aside")
        await bench.until_taken(await bench.publish(numbers))
        await live.until_linked()
        bench.proxy.cut(CONSUME_LINK)
        await eventually(lambda: len(refused_ids(live)) == 12, what="all refused again")
        await eventually(lambda: aside(live) == 6, what="all set aside again")

        opened = [line["link"] for line in live.logged("broker_connected")]
        assert opened.count(PUBLISH_LINK) == 2
        assert len(live.logged("paused")) == 1
        assert bench.extra_posts(large) == {}
        assert await live.stop() == 0


async def test_what_was_decided_about_it_stays(bench: Bench) -> None:
    """It comes again with each connection and is POSTed once; when it is taken, it is replaced."""
    number = make_numbers(1)[0]
    bench.service.misbehave({**REFUSED, "to": number})
    body = json.dumps({"to": number, "from": "Acme", "text": "x" * 1500}).encode()
    await bench.declare_main()
    limit_messages(bench, USUAL_LIMIT)
    await bench.amqp.publish(bench.queue, body)
    async with limited(bench, 1000), bench.worker() as live:
        for times in (1, 2):
            await eventually(lambda: len(refused_ids(live)) == times, what="refused")  # noqa: B023
            await eventually(lambda: aside(live) == 1, what="set aside")
            await live.until_linked()
            bench.proxy.cut(CONSUME_LINK)
        await eventually(lambda: len(refused_ids(live)) == 3, what="refused again")
        await live.until_linked()
        limit_messages(bench, USUAL_LIMIT)
        bench.proxy.cut(CONSUME_LINK)
        await bench.until_dead(1)
        await bench.until_settled(live)
        assert aside(live) == 0

    (letter,) = await bench.dead_letters()
    assert letter.body == body
    assert letter.headers["sms-bridge-reason"] == "refused"
    assert letter.headers["sms-bridge-attempts"] == 1
    assert len(bench.service.posts([number])) == 1


def spoil(*, queue: str) -> Alter:
    """Alter publishes to a queue so that the broker cannot read them, and ends the connection."""
    name = queue.encode()

    def alter(frame: bytes) -> bytes:
        if name not in frame:
            return frame
        # A frame of a type that there is not.
        return struct.pack(">B", 77) + frame[1:]

    return alter


async def test_a_copy_that_ends_each_connection_holds_up_no_other(bench: Bench) -> None:
    """After three connections it is known to be the cause, and stays unacked."""
    numbers = make_numbers(20)
    bench.service.misbehave(*once_each(numbers, TOO_EARLY), {**REFUSED, "to": "+491713920099"})
    async with bench.worker() as live:
        bench.proxy.trap(
            "client", PUBLISH, spoil(queue=bench.dead_queue), again=True, link=PUBLISH_LINK
        )
        await bench.publish(["+491713920099"])
        await bench.publish(numbers)
        await bench.until_taken(numbers)
        await eventually(lambda: aside(live) == 1, what="set aside")
        await bench.until_settled(live)

        assert refused_ids(live) == ["id-+491713920099"]
        assert bench.sent_twice(numbers) == {}
        assert await live.stop() == 0
