"""The wire against a real broker: what the publisher and the consumer rely on."""

import asyncio
import gc
import tracemalloc
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest

from bridge.amqp import publisher
from bridge.amqp.channels import open_channel
from bridge.amqp.client import Channel, ChannelClosed, Connection
from bridge.amqp.frames import Body
from bridge.amqp.properties import Properties
from bridge.amqp.wire import PublishingChannel
from bridge.errors import Confirm
from bridge.sandbox.broker import Broker
from bridge.telemetry.metrics import BridgeMetrics, new_registry
from tests.alarms import memory_alarm
from tests.amqp_client import Amqp
from tests.integration.conftest import SECONDS, connected, eventually, unique

METRICS = BridgeMetrics(
    new_registry(), component="worker", version="0", revision="0", exchanges=("default",)
)
EVENT_LOOP_TURNS = 2_000


def count_objects() -> int:
    """Count the objects that are reachable and may hold others."""
    gc.collect()
    return len(gc.get_objects())


class Taken(NamedTuple):
    """A delivery as it was handed over."""

    delivery_tag: int
    redelivered: bool
    message_id: str | None
    headers: Any
    body: Body


@pytest.fixture
async def queue(amqp: Amqp) -> AsyncIterator[str]:
    name = unique("wires")
    await amqp.channel.declare_queue(name, durable=True)
    yield name
    await amqp.delete([name])


class Consumption:
    """Consumes on a channel of its own, and writes down what it is given."""

    def __init__(self, connection: Connection, channel: Channel) -> None:
        self.connection = connection
        self.channel = channel
        self.taken: list[Taken] = []

    def take(
        self,
        delivery_tag: int,
        redelivered: bool,  # noqa: FBT001  as the wire calls it
        properties: Properties,
        body: Body,
    ) -> None:
        self.taken.append(
            Taken(delivery_tag, redelivered, properties.message_id, properties.headers, body)
        )

    async def until(self, count: int) -> list[Taken]:
        async def is_there() -> bool:
            return len(self.taken) >= count

        await eventually(is_there, what=f"{count} deliveries")
        return self.taken

    def ack(self, *deliveries: Taken) -> None:
        for delivery in deliveries:
            self.connection.wire.ack(self.channel, delivery.delivery_tag)


@asynccontextmanager
async def consuming(connection: Connection, queue: str) -> AsyncIterator[Consumption]:
    ours = Consumption(connection, await open_channel(connection))
    with connection.wire.deliveries(ours.channel, ours.take) as callback:
        await ours.channel.basic_qos(prefetch_count=1000)
        await ours.channel.basic_consume(queue, callback)
        yield ours


@asynccontextmanager
async def publishing(connection: Connection) -> AsyncIterator[tuple[Channel, PublishingChannel]]:
    channel = await open_channel(connection, confirms=True)
    with connection.wire.publishing(channel) as ours:
        yield channel, ours


def put(ours: PublishingChannel, queue: str, **changed: Any) -> "asyncio.Future[Confirm]":
    body = changed.pop("body", b"hello")
    changed.setdefault("message_id", uuid.uuid4().hex)
    properties = Properties(delivery_mode=2, **changed)
    return ours.publish(body, exchange="", routing_key=queue, properties=properties)


async def told(*confirms: "asyncio.Future[Confirm]") -> list[Confirm]:
    """Return what became of publishes."""
    async with asyncio.timeout(SECONDS):
        return await asyncio.gather(*confirms)


# Deliveries and acks


async def test_what_is_acked_is_gone_and_the_rest_comes_again(
    amqp_url: str, queue: str, amqp: Amqp
) -> None:
    for number in range(200):
        await amqp.publish(queue, b"", message_id=str(number))
    async with connected(amqp_url) as connection, consuming(connection, queue) as ours:
        taken = await ours.until(200)
        ours.ack(*reversed(taken[::2]))
        async with asyncio.timeout(SECONDS):
            await connection.wire.acks_read(ours.channel)
        # A delivery that is acked twice, or never was, would have closed it.
        assert not ours.channel.is_closed
    async with connected(amqp_url) as connection, consuming(connection, queue) as ours:
        again = await ours.until(100)

    assert {delivery.message_id for delivery in again} == {str(n) for n in range(1, 200, 2)}
    assert all(delivery.redelivered for delivery in again)


async def test_waiting_for_acks_keeps_the_prefetch_of_a_consumer_that_registers_meanwhile(
    connection: Connection, queue: str, amqp: Amqp
) -> None:
    for number in range(10):
        await amqp.publish(queue, b"", message_id=str(number))
    ours = Consumption(connection, await open_channel(connection))
    with connection.wire.deliveries(ours.channel, ours.take) as callback:
        await ours.channel.basic_qos(prefetch_count=10)
        async with asyncio.timeout(SECONDS):
            await connection.wire.acks_read(ours.channel)
        await ours.channel.basic_consume(queue, callback)

        await ours.until(10)


async def test_a_delivery_after_the_block_is_left_to_the_broker(
    connection: Connection, queue: str, amqp: Amqp
) -> None:
    async with consuming(connection, queue) as ours:
        await amqp.publish(queue, b"first")
        (first,) = await ours.until(1)
    await amqp.publish(queue, b"second")
    # The broker answers after it has delivered.
    await ours.channel.basic_qos(prefetch_count=1)
    await asyncio.sleep(0)

    assert ours.taken == [first]


# Publishes and confirms


@pytest.fixture
def memory() -> Iterator[Callable[[], int]]:
    """Measure how many bytes are held."""
    tracemalloc.start()
    yield lambda: tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()


async def test_what_the_broker_does_not_read_is_told_with_all_that_it_takes(
    managed_broker: Broker, memory: Callable[[], int]
) -> None:
    async with connected(managed_broker.url) as connection, publishing(connection) as (_, ours):
        assert await told(put(ours, "nowhere")) == ["returned"]
        before = memory()
        managed_broker.pause()
        try:
            confirms = []
            # The kernel's buffers, and a broker that is not paused yet, take many of them.
            for number in range(200):
                confirms.append(put(ours, "nowhere", body=bytes([number]) * 300_000))
                await asyncio.sleep(0)
            for _ in range(10):
                await asyncio.sleep(0)
            held, unwritten = memory() - before, ours.unwritten_bytes
        finally:
            managed_broker.resume()
        assert set(await told(*confirms)) == {"returned"}

    # Besides the bodies there are frames, futures and tasks; what the kernel has taken is not held.
    assert 20_000_000 < held < unwritten + 4_000_000


async def test_looking_for_late_confirms_leaves_no_objects(
    connection: Connection, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "LOOK_SECONDS", 0.0)
    ours = publisher.Publisher(METRICS, timeout_seconds=SECONDS)
    serving = asyncio.create_task(ours.serve(connection))
    await ours.publish(b"", exchange="", routing_key=queue, properties=Properties(message_id="m"))
    before = count_objects()
    for _ in range(EVENT_LOOP_TURNS):
        await asyncio.sleep(0)
    more = count_objects() - before
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)

    # The publisher looks once in a few turns; one object for each look would be more.
    assert more < EVENT_LOOP_TURNS / 20


async def test_the_end_of_a_channel_is_an_error(connection: Connection, queue: str) -> None:
    async with publishing(connection) as (channel, ours):
        properties = Properties(message_id="m")
        lost = ours.publish(b"", exchange=unique("no"), routing_key="", properties=properties)
        await asyncio.wait({channel.closing}, timeout=SECONDS)
        late = put(ours, queue)
    assert await told(lost, late) == ["error", "error"]

    assert isinstance(channel.closing.exception(), ChannelClosed)
    assert ours.unconfirmed == 0


async def test_an_alarm_is_seen_and_told(managed_broker: Broker) -> None:
    """While the broker accepts no messages the wire is blocked, and reports begin and end."""
    seen: list[tuple[bool, bool]] = []
    async with (
        connected(managed_broker.url) as connection,
        publishing(connection) as (_, ours),
    ):
        before = ours.is_blocked
        wire = connection.wire
        wire.on_blocked(lambda reason: seen.append((reason is not None, wire.is_blocked)))

        async def is_told() -> bool:
            # The broker blocks a connection once it publishes.
            _ = put(ours, "nowhere")
            return len(seen) == 1

        async def is_over() -> bool:
            return len(seen) == 2

        async with memory_alarm(managed_broker):
            await eventually(is_told, what="the alarm")
        await eventually(is_over, what="its end")

    assert not before
    assert seen == [(True, True), (False, False)]
