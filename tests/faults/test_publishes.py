"""Our publisher on a real broker: what it says of a message is what became of the message."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aio_pika.abc import AbstractIncomingMessage

from bridge.amqp import publisher as publisher_module
from bridge.amqp.properties import Properties
from bridge.amqp.publisher import MAX_UNWRITTEN_BYTES, Publisher
from bridge.errors import PublishError
from bridge.telemetry.metrics import BridgeMetrics, new_registry
from tests.amqp_client import Amqp, open_amqp
from tests.faults.amqp_proxy import (
    ACK,
    CHANNEL_CLOSE,
    PUBLISH,
    Deed,
    Method,
    Sender,
    confirm_all_so_far,
    refuse,
)
from tests.faults.bench import PUBLISH_LINK, Bench, eventually, open_link

QUORUM: dict[str, Any] = {"x-queue-type": "quorum"}
TIMEOUT_SECONDS = 10.0
AT_ONCE = 500

# What each message's publisher was told, by the message's number.
Told = dict[int, str]


@asynccontextmanager
async def open_publisher(bench: Bench, **changed: Any) -> AsyncIterator[Publisher]:
    """Run a publisher on a connection of its own, through the proxy."""
    metrics = BridgeMetrics(
        new_registry(), component="worker", version="0", revision="0", exchanges=("default",)
    )
    ours = Publisher(metrics, timeout_seconds=TIMEOUT_SECONDS)
    async with open_link(bench, "publish", **changed) as connection:
        serving = asyncio.create_task(ours.serve(connection))
        try:
            yield ours
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)


@pytest.fixture
async def publisher(bench: Bench) -> AsyncIterator[Publisher]:
    """Run a publisher; at the end it may hold nothing of what it published."""
    async with open_publisher(bench) as ours:
        yield ours
        channel = ours._main.channel
        if channel is not None:
            await eventually(lambda: channel.unconfirmed == 0, what="all answered")
            assert channel._by_id == {}
    assert ours.unconfirmed == 0


async def publish(
    ours: Publisher,
    number: int,
    queue: str,
    *,
    size: int = 0,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> str:
    properties = Properties(message_id=str(number), delivery_mode=2)
    ours._timeout_seconds = timeout_seconds
    try:
        await ours.publish(b"x" * size, exchange="", routing_key=queue, properties=properties)
    except PublishError as error:
        return error.fault
    return "confirmed"


async def publish_all(ours: Publisher, targets: dict[int, str], told: Told) -> None:
    left = iter(targets.items())

    async def work() -> None:
        for number, queue in left:
            # Now and then one that takes several frames, which a return has in between, too.
            size = 300_000 if number % 1000 == 0 else number % 200
            told[number] = await publish(ours, number, queue, size=size)

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(work())


def told_so(told: Told, what: str) -> set[int]:
    """Return the messages whose publisher was told this."""
    return {number for number, one in told.items() if one == what}


async def take(amqp: Amqp, queue: str, wanted: set[int]) -> Counter[int]:
    """Take the wanted messages, then the rest: a queue counts wrongly just after a restart."""
    found: Counter[int] = Counter()
    source = await amqp.channel.get_queue(queue, ensure=False)

    async def count(message: AbstractIncomingMessage) -> None:
        found[int(message.message_id or -1)] += 1

    tag = await source.consume(count, no_ack=True)
    await eventually(lambda: wanted <= found.keys(), what=f"{len(wanted)} messages in {queue}")
    await source.cancel(tag)
    found.update(int(message.message_id or -1) for message in await amqp.take_all(queue))
    return found


async def test_each_of_many_is_told_its_own(bench: Bench, publisher: Publisher) -> None:
    """Of 4,000 messages every tenth goes to a queue that is not there: just those are returned."""
    await bench.declare_main()
    count, missing = 4000, f"{bench.queue}.missing"
    told: Told = {}
    targets = {n: missing if n % 10 == 0 else bench.queue for n in range(1, count + 1)}
    await publish_all(publisher, targets, told)

    assert told_so(told, "returned") == {n for n in targets if n % 10 == 0}
    assert told_so(told, "confirmed") == {n for n in targets if n % 10}
    confirmed = told_so(told, "confirmed")
    assert await take(bench.amqp, bench.queue, confirmed) == Counter(confirmed)


async def test_no_confirmed_message_is_missing_after_a_kill(bench: Bench) -> None:
    await bench.declare_main()
    await asyncio.to_thread(bench.broker.flush)
    told: Told = {}
    async with open_publisher(bench) as ours:
        count = 20_000
        targets = dict.fromkeys(range(1, count + 1), bench.queue)
        publishing = asyncio.create_task(publish_all(ours, targets, told))
        await eventually(lambda: len(told) > 1000, what="in the midst")
        bench.broker.kill()
        ended_at = time.monotonic()
        await eventually(lambda: told_so(told, "error"), what="the end is told")
        assert time.monotonic() - ended_at < TIMEOUT_SECONDS / 2
        publishing.cancel()
        await asyncio.gather(publishing, return_exceptions=True)
        assert ours.unconfirmed == 0
    await asyncio.to_thread(bench.broker.start)

    confirmed = told_so(told, "confirmed")
    async with open_amqp(bench.broker.url) as amqp:
        stored = await take(amqp, bench.queue, confirmed)
    assert len(confirmed) > 1000
    assert told_so(told, "returned") == told_so(told, "nacked") == set()
    assert max(stored.values()) == 1


@pytest.mark.parametrize(
    ("sender", "method", "nth"),
    [("client", PUBLISH, 700), ("broker", ACK, 5)],
    ids=["publish", "confirm"],
)
async def test_a_connection_that_is_cut(
    bench: Bench, sender: Sender, method: Method, nth: int
) -> None:
    await bench.declare_main()
    told: Told = {}
    async with open_publisher(bench) as ours:
        await eventually(lambda: ours._main.channel is not None, what="a channel")
        trap = bench.proxy.trap(sender, method, "cut", nth=nth, link="publish")
        publishing = asyncio.create_task(
            publish_all(ours, dict.fromkeys(range(1, 20_001), bench.queue), told)
        )
        await eventually(lambda: told_so(told, "error"), what="the end is told")
        assert trap.sprung.is_set()
        publishing.cancel()
        await asyncio.gather(publishing, return_exceptions=True)

    assert max((await take(bench.amqp, bench.queue, told_so(told, "confirmed"))).values()) == 1


async def test_a_frozen_broker_does_not_fill_the_memory(bench: Bench) -> None:
    """What time-outs leave unwritten has a limit, and all goes on when the broker does."""
    await bench.declare_main()
    properties, body = Properties(delivery_mode=2), bytes(1 << 20)

    async def refusal(ours: Publisher) -> str:
        ours._timeout_seconds = 0.01
        try:
            await ours.publish(body, exchange="", routing_key=bench.queue, properties=properties)
        except PublishError as error:
            return str(error)
        return ""

    async with open_publisher(bench, rabbitmq__url=[bench.broker.url]) as ours:
        assert await publish(ours, 1, bench.queue) == "confirmed"
        channel = ours._main.channel
        assert channel is not None
        bench.broker.pause()
        try:
            reasons = Counter([await refusal(ours) for _ in range(200)])
            unwritten = channel.unwritten_bytes
        finally:
            bench.broker.resume()
        await eventually(lambda: channel.unconfirmed == 0, what="all answered")
        after = await publish(ours, 2, bench.queue)

    # As many as fit time out; of the others each fails before its time.
    assert reasons.keys() == {"no confirm in time", "the broker does not read from the connection"}
    assert 50 < reasons["no confirm in time"] < 100
    assert unwritten < MAX_UNWRITTEN_BYTES + 2 * len(body)
    assert after == "confirmed"


@pytest.mark.parametrize("answer", ["drop", refuse], ids=["unanswered", "refused"])
async def test_confirms_that_are_overdue_bring_another_channel(
    bench: Bench, answer: Deed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read, and never confirmed or always refused, is published anew on another channel.

    So does a node of a cluster that goes on asking a leader which is gone, and meanwhile does not
    answer the channel's close either. A broker that needs longer for every confirm is given more
    time on each channel.
    """
    monkeypatch.setattr(publisher_module, "FIRST_CONFIRM_SECONDS", 1.0)
    bench.service.misbehave({"status": 425, "count": 5})
    bench.proxy.trap("client", CHANNEL_CLOSE, "drop", again=True, link=PUBLISH_LINK)
    async with bench.worker(rabbitmq__publish_timeout_seconds=0.5) as live:
        trap = bench.proxy.trap("broker", ACK, answer, again=True, link=PUBLISH_LINK)
        numbers = await bench.publish(5)
        await eventually(lambda: len(live.logged("confirms_overdue")) == 2, what="two channels")
        bench.proxy.traps.remove(trap)
        await bench.until_taken(numbers)
        await bench.until_settled(live)

        assert [line["seconds"] for line in live.logged("confirms_overdue")] == [1, 2]
        assert live.logged("broker_lost") == []
    assert bench.sent_twice(numbers) == {}


async def test_a_channel_that_has_confirmed_is_left_alone(
    bench: Bench, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for its confirm while another, which has never had one, is replaced twice.

    For RabbitMQ hands what waits on it to the queue's next leader.
    """
    monkeypatch.setattr(publisher_module, "FIRST_CONFIRM_SECONDS", 0.5)
    await bench.declare_main()
    async with open_publisher(bench) as fresh:
        assert await publish(publisher, 1, bench.queue) == "confirmed"
        await eventually(lambda: fresh._main.channel is not None, what="a channel")
        first, channels = publisher._main.channel, [fresh._main.channel]
        held = bench.proxy.trap("broker", ACK, "drop", again=True)
        waiting = asyncio.create_task(publish(publisher, 2, bench.queue))
        while len(channels) < 3:
            await publish(fresh, 3, bench.queue, timeout_seconds=0.1)
            if fresh._main.channel not in (None, channels[-1]):
                channels.append(fresh._main.channel)
        bench.proxy.traps.remove(held)
        bench.proxy.trap("broker", ACK, confirm_all_so_far, again=True)
        assert await publish(publisher, 4, bench.queue) == "confirmed"

        assert await waiting == "confirmed"
        assert publisher._main.channel is first


async def test_properties_that_no_frame_holds(bench: Bench, publisher: Publisher) -> None:
    """They are refused at once, and neither end the connection nor disturb another publish."""
    await bench.declare_main()
    large = Properties(message_id="large", headers={"large": "x" * 131_072})
    others = [asyncio.create_task(publish(publisher, n, bench.queue)) for n in range(1, 11)]
    await eventually(lambda: publisher._main.channel is not None, what="a channel")
    with pytest.raises(PublishError, match="does not fit"):
        await publisher.publish(b"", exchange="", routing_key=bench.queue, properties=large)

    assert await asyncio.gather(*others) == ["confirmed"] * 10
    assert await publish(publisher, 11, bench.queue) == "confirmed"
