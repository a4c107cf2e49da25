"""Consuming one queue: with which prefetch, how much of it is read, and how it ends.

All run on an event loop whose time leaps to the next timer; the broker is a channel and a wire
that do as they are told.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bridge.amqp.channels import ACKS_HELD_BACK_SECONDS, RPC_TIMEOUT_SECONDS
from bridge.amqp.client import ChannelAccessRefused, Connection
from bridge.amqp.frames import DeliveryHandler
from bridge.amqp.properties import Properties
from bridge.config import WorkerSettings
from bridge.errors import BrokerError
from bridge.worker.consumer import (
    LARGE_RPC_TIMEOUT_SECONDS,
    USUAL_BODY_BYTES,
    WATCH_SECONDS,
    Consumer,
)
from bridge.worker.delivery import Delivery
from bridge.worker.dispatcher import MAX_BYTES, POISON_SESSIONS, WARN_FROM_COUNT, Dispatcher
from bridge.worker.envelope import DELIVERY_COUNT, POSSIBLE_DUPLICATE
from tests.clock import LeapingWorld, in_world
from tests.deliveries import make_delivery
from tests.ears import Ears

MIB = 1024 * 1024


class Channel:
    """What stands in for a channel: notes what it is asked, and answers unless it hangs."""

    number = 1

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.asked: list[tuple[str, object]] = []
        self.consumers: dict[str, str] = {}
        self.on_consumer_cancel_callbacks: set[Callable[[object], object]] = set()
        self.closing: asyncio.Future[None] = loop.create_future()
        self.hangs = False
        self.fault: Exception | None = None

    @property
    def is_closed(self) -> bool:
        return self.closing.done()

    async def _answer(self, method: str, fact: object) -> None:
        self.asked.append((method, fact))
        if self.hangs:
            await asyncio.Event().wait()
        if self.fault is not None:
            raise self.fault

    async def basic_qos(self, *, prefetch_count: int) -> None:
        await self._answer("qos", prefetch_count)

    async def basic_consume(
        self, queue: str, _callback: object, *, consumer_tag: str | None = None
    ) -> SimpleNamespace:
        await self._answer("consume", queue)
        tag = consumer_tag or f"tag-{len(self.asked)}"
        self.consumers[tag] = queue
        return SimpleNamespace(consumer_tag=tag)

    async def basic_cancel(self, tag: str) -> None:
        await self._answer("cancel", None)
        del self.consumers[tag]

    def cancel_by_broker(self, queue: str) -> None:
        """End the consumer of a queue, as RabbitMQ does when the queue is deleted."""
        self.consumers = {tag: one for tag, one in self.consumers.items() if one != queue}
        for tell in self.on_consumer_cancel_callbacks:
            tell(None)


class Wire:
    """What stands in for the stream: hands deliveries on, and notes acks and reading."""

    def __init__(self) -> None:
        self.take: DeliveryHandler | None = None
        self.by_tag: Mapping[bytes, DeliveryHandler] = {}
        self.acked: list[int] = []
        self.is_reading = True
        self.kept_alive = 0
        self.acks_are_read = asyncio.Event()
        self.acks_read_fault: Exception | None = None

    @contextmanager
    def deliveries(
        self, _channel: object, take: DeliveryHandler, by_tag: Mapping[bytes, DeliveryHandler]
    ) -> Iterator[object]:
        """Hand deliveries to `take`, or to the handler of their consumer."""
        self.take = take
        self.by_tag = by_tag
        yield None
        self.take = None

    def ack(self, _channel: object, tag: int) -> None:
        self.acked.append(tag)

    async def acks_read(self, _channel: object) -> None:
        if self.acks_read_fault is not None:
            raise self.acks_read_fault
        await self.acks_are_read.wait()

    def set_reading(self, *, enabled: bool) -> None:
        self.is_reading = enabled

    def keep_alive(self) -> None:
        if not self.is_reading:
            self.kept_alive += 1


class World(LeapingWorld):
    """A consumer between a broker and deliveries that are held until they are let go."""

    def __init__(self) -> None:
        super().__init__()
        self.prefetch = 10
        self.prefetches: dict[str, int] = {}
        self.taken: list[Delivery] = []
        self.lost: list[int] = []
        self.registrations = 0
        self._ends: dict[Delivery, asyncio.Event] = {}
        self.changed = asyncio.Event()
        self.channel = Channel(self.loop)
        self.wire = Wire()
        settings = WorkerSettings(queue="q")
        self.dispatcher = Dispatcher(
            settings, process=self._process, changed=self.changed, metrics=self.metrics
        )
        self.consumer = Consumer(
            settings,
            owner=self,
            dispatcher=self.dispatcher,
            lock=None,
            changed=self.changed,
            metrics=self.metrics,
        )

    def _process(self, delivery: Delivery) -> Coroutine[Any, Any, object]:
        self.taken.append(delivery)
        self._ends[delivery] = asyncio.Event()
        return self._ends[delivery].wait()

    def prefetch_of_each(self) -> dict[str, int]:
        return self.prefetches or {"q": self.prefetch}

    def consumer_registered(self) -> None:
        self.registrations += 1

    def session_over(self, most_unacked: int) -> None:
        self.lost.append(most_unacked)

    async def let_go(self, delivery: Delivery) -> None:
        self._ends[delivery].set()
        await turns()

    def connect(self) -> Connection:
        self.channel, self.wire = Channel(self.loop), Wire()
        channel = self.channel

        async def open_channel(**_options: bool) -> Channel:
            return channel

        inner = SimpleNamespace(channel=open_channel)
        transport = SimpleNamespace(connection=inner)
        return cast("Connection", SimpleNamespace(transport=transport, wire=self.wire))

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["asyncio.Task[None]"]:
        task = asyncio.create_task(self.consumer.serve(self.connect()))
        await turns()
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def want(self, prefetch: int) -> None:
        self.prefetch = prefetch
        self.changed.set()
        await turns()

    def deliver(self, size: int = 10, **facts: Any) -> Delivery:
        assert self.wire.take is not None
        properties = Properties(message_id="m-1", **facts)
        self.wire.take(len(self.taken) + 1, False, properties, bytes(size))
        return self.taken[-1]


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def consuming(prefetch: int) -> list[tuple[str, object]]:
    return [("qos", prefetch), ("consume", "q")]


CANCEL = ("cancel", None)

# The prefetch


@pytest.mark.parametrize("is_told", [True, False], ids=["told", "found"])
@pytest.mark.parametrize(
    ("first", "then", "asked"),
    [
        (10, 10, consuming(10)),
        (10, 25, [*consuming(10), CANCEL, *consuming(25)]),
        (10, 0, [*consuming(10), CANCEL]),
        (0, 3, consuming(3)),
    ],
)
@in_world
async def test_the_prefetch_is_the_wanted_one(
    world: World, first: int, then: int, asked: list[tuple[str, object]], *, is_told: bool
) -> None:
    """A lost event delays a change for a few seconds; without a change nothing is interrupted."""
    world.prefetch = first
    async with world.serving():
        if is_told:
            await world.want(then)
        world.prefetch = then
        await asyncio.sleep(10 * WATCH_SECONDS)
        assert world.channel.asked == asked
        assert world.consumer.is_registered == (then > 0)
        assert world.value("consumer_up", queue="q") == (then > 0)
    assert world.registrations == len(asked) // 2
    assert world.value("consumer_up", queue="q") == 0


@in_world
async def test_a_new_consumer_on_demand(world: World, ears: Ears) -> None:
    """After `renew`, unacked deliveries are no part of the new consumer's prefetch."""
    async with world.serving():
        world.consumer.renew()
        await turns()
        anew = [*consuming(10), CANCEL, *consuming(10)]
        assert world.channel.asked == anew
        await asyncio.sleep(2.5 * WATCH_SECONDS)
        assert world.channel.asked == anew
        assert world.deliver().session.prefetches == {"q": 20}
    assert ears.heard("consuming") == [{"queue": "q", "prefetch": 10}] * 2
    assert ears.heard("not_consuming") == [{"queue": "q"}] * 2


@pytest.mark.parametrize(
    ("size", "prefetch"),
    [
        (USUAL_BODY_BYTES, 1000),
        (USUAL_BODY_BYTES + 1, 256),
        (MIB, 16),
        (MAX_BYTES // 4, 4),
        (MAX_BYTES // 4 + 1, 1),
        (MAX_BYTES, 1),
    ],
)
@in_world
async def test_large_bodies_make_the_prefetch_smaller(
    world: World, size: int, prefetch: int
) -> None:
    """In large steps, to how many of the largest may be held at once."""
    world.prefetch = 1000
    async with world.serving():
        await world.let_go(world.deliver(size))
        await turns()
        assert world.channel.asked[-2:] == consuming(prefetch)


def test_a_large_body_is_forgotten_behind_small_ones(world: World) -> None:
    """Each that follows counts a little less, until the prefetch is whole again."""

    async def play() -> int:
        world.prefetch = 1000
        async with world.serving():
            await world.let_go(world.deliver(MIB))
            await turns()
            for small in range(100):
                if world.channel.asked[-2:] == consuming(1000):
                    return small
                await world.let_go(world.deliver(100))
                await turns()
            return 100

    # 0.95 ** 54 of it is 64 KiB, which is usual.
    assert world.run(play()) == 55


# What is held


@in_world
async def test_a_delivery_is_what_the_wire_brought(world: World) -> None:
    """It belongs to the session, and is acked on it for as long as that lasts."""
    async with world.serving():
        delivery = world.deliver(5)
        assert (delivery.body, delivery.tag, delivery.redelivered) == (bytes(5), 1, False)
        assert delivery.envelope.message_id == "m-1"
        assert not delivery.is_stale
        assert delivery.session.ack(delivery.tag)
        assert world.wire.acked == [1]
    assert world.taken[0].is_stale
    assert not world.taken[0].session.ack(1)
    assert world.wire.acked == [1]


@in_world
async def test_a_copy_that_may_be_there_twice_counts_as_delivered_before(world: World) -> None:
    """Of the first of them, which another worker may have, the broker says nothing."""
    async with world.serving():
        assert world.deliver(headers={POSSIBLE_DUPLICATE: True}).redelivered


@pytest.mark.parametrize(
    ("count", "warned"), [(WARN_FROM_COUNT - 1, False), (WARN_FROM_COUNT, True), ("x", False)]
)
@in_world
async def test_what_is_delivered_again_and_again_is_told(
    world: World, ears: Ears, count: object, *, warned: bool
) -> None:
    """A quorum queue with a delivery limit drops it in the end."""
    async with world.serving():
        world.deliver(headers={DELIVERY_COUNT: count})
    assert bool(ears.heard("high_delivery_count")) is warned


@in_world
async def test_nothing_is_read_while_too_much_is_held(world: World) -> None:
    """The broker keeps the rest, the connection lives, and nothing is asked of the broker."""
    async with world.serving():
        first, second = world.deliver(MAX_BYTES), world.deliver(1)
        states = [world.wire.is_reading]
        await world.want(50)
        await asyncio.sleep(2 * WATCH_SECONDS)
        assert world.wire.kept_alive >= 2
        assert world.channel.asked == consuming(10)
        await world.let_go(second)
        states.append(world.wire.is_reading)
        assert states == [False, True]
        await world.let_go(first)
        await turns()
        assert world.channel.asked == [*consuming(10), CANCEL, *consuming(1)]


@in_world
async def test_what_a_lost_session_left_counts_for_the_next_one(world: World) -> None:
    """Bodies that are still held take up room, whichever connection brought them."""
    async with world.serving():
        held = world.deliver(MAX_BYTES + 1)
    async with world.serving():
        assert (world.wire.is_reading, world.channel.asked) == (False, [])
        await world.let_go(held)
        await turns()
        assert world.wire.is_reading
        assert world.channel.asked == consuming(1)


# How it ends


@pytest.mark.parametrize(
    ("end", "told"),
    [
        (lambda channel: channel.closing.set_result(None), "the consuming channel was closed"),
        (lambda channel: channel.cancel_by_broker("q"), "the broker cancelled the consumer of q"),
        (
            lambda channel: channel.cancel_by_broker("q.urgent"),
            "the broker cancelled the consumer of q.urgent",
        ),
    ],
    ids=["channel", "queue", "urgent queue"],
)
@in_world
async def test_the_end_of_a_session_is_noticed_at_once(
    world: World, end: Callable[[Channel], None], told: str
) -> None:
    """Its deliveries are redelivered, and their owner is notified."""
    world.prefetches = {"q": 10, "q.urgent": 20}
    async with world.serving() as task:
        session = world.deliver().session
        end(world.channel)
        began = world.loop.time()
        with pytest.raises(BrokerError, match=f"^{re.escape(told)}$"):
            await task
        assert world.loop.time() == began
        assert (world.lost, session.is_over) == ([session.most_unacked], True)
        assert not world.consumer.is_registered


@pytest.mark.parametrize(
    ("size", "seconds"), [(1, RPC_TIMEOUT_SECONDS), (MIB, LARGE_RPC_TIMEOUT_SECONDS)]
)
def test_a_broker_that_does_not_answer(world: World, size: int, seconds: float) -> None:
    """It has its time, and longer when its answer comes behind large bodies."""

    async def play() -> float:
        async with world.serving() as task:
            world.deliver(size)
            await turns()
            world.channel.hangs = True
            began = world.loop.time()
            await world.want(1)
            world.consumer.renew()
            with pytest.raises(TimeoutError):
                await task
            return world.loop.time() - began

    assert world.run(play()) == pytest.approx(seconds)


@in_world
async def test_sessions_that_bring_nothing_are_suspicious(world: World, ears: Ears) -> None:
    """A message that nobody can decode ends each connection; one that comes through is proof."""
    suspected = []
    for _ in range(POISON_SESSIONS + 1):
        async with world.serving():
            suspected.append(world.value("protocol_poison_suspected"))
    async with world.serving():
        world.deliver()
        suspected.append(world.value("protocol_poison_suspected"))

    assert suspected == [0] * POISON_SESSIONS + [1, 0]
    assert ears.heard("protocol_poison_suspected") == [{"queue": "q"}] * 2


@in_world
async def test_a_broker_that_refuses_to_deliver_casts_no_suspicion_on_a_message(
    world: World, ears: Ears
) -> None:
    """A missing permission ends each connection too, and the log names it already."""
    for _ in range(2 * POISON_SESSIONS):
        connection = world.connect()
        world.channel.fault = ChannelAccessRefused("no read access to q")
        with pytest.raises(ChannelAccessRefused):
            await world.consumer.serve(connection)
    assert world.value("protocol_poison_suspected") == 0
    assert ears.heard("protocol_poison_suspected") == []


# Stop, resume, flush


@in_world
async def test_stopping_returns_when_the_broker_has_been_told(world: World) -> None:
    """Nothing more comes then, until it goes on."""
    async with world.serving():
        began = world.loop.time()
        await world.consumer.stop()
        assert world.loop.time() == began
        assert world.channel.asked == [*consuming(10), CANCEL]
        assert not world.consumer.is_registered
        await asyncio.sleep(2.5 * WATCH_SECONDS)
        assert len(world.channel.asked) == 3
        world.consumer.resume()
        await turns()
        assert world.channel.asked[3:] == consuming(10)


@in_world
async def test_stopping_without_a_broker_returns(world: World) -> None:
    """What was never begun, or has ended, need not be told to anybody."""
    await world.consumer.stop()
    world.consumer.resume()
    async with world.serving() as task:
        world.channel.hangs = True
        stopping = asyncio.create_task(world.consumer.stop())
        await turns()
        assert not stopping.done()
        task.cancel()
        await stopping


@in_world
async def test_who_stopped_stays_so_on_another_connection(world: World) -> None:
    """A broker that comes back finds no consumer."""
    await world.consumer.stop()
    async with world.serving():
        assert world.channel.asked == []


@in_world
async def test_flushing_waits_until_the_broker_has_taken_the_acks(world: World) -> None:
    """It has read them, and a moment more has passed since the last one."""
    async with world.serving():
        delivery = world.deliver()
        delivery.session.ack(delivery.tag)
        flushing = asyncio.create_task(world.consumer.flush())
        await asyncio.sleep(ACKS_HELD_BACK_SECONDS / 2)
        world.wire.acks_are_read.set()
        began = world.loop.time()
        await flushing
        assert world.loop.time() - began == pytest.approx(ACKS_HELD_BACK_SECONDS / 2)
        began = world.loop.time()
        await world.consumer.flush()
        assert world.loop.time() == began


def test_flushing_without_a_broker_returns(world: World) -> None:
    """There is nobody who could take an ack."""
    assert world.seconds(world.consumer.flush()) == 0


@pytest.mark.parametrize("fault", [None, BrokerError("gone")], ids=["never read", "fails"])
def test_a_broker_that_takes_no_acks_is_given_up(world: World, fault: Exception | None) -> None:
    """The session is over then, so that all comes again, and flushing ends with it."""

    async def play() -> float:
        async with world.serving() as task:
            world.wire.acks_read_fault = fault
            world.deliver().session.ack(1)
            began = world.loop.time()
            await world.consumer.flush()
            assert len(world.lost) == 1
            with pytest.raises(BrokerError, match=r"^the broker does not read acks$"):
                await task
            return world.loop.time() - began

    assert world.run(play()) == pytest.approx(0 if fault else RPC_TIMEOUT_SECONDS)


# The urgent queue


@in_world
async def test_a_queue_that_delivers_nothing_puts_no_acks_in_doubt(world: World) -> None:
    """Of each queue no more can be unacked than its prefetch, and than it has delivered."""
    world.prefetches = {"q.urgent": 20, "q": 10}
    async with world.serving():
        session = world.deliver().session
        assert session.most_unacked == 1
        for _ in range(15):
            world.deliver()
        assert session.most_unacked == 10


@in_world
async def test_several_queues_have_each_a_prefetch(world: World) -> None:
    """A change of one interrupts no other, and all are one session."""
    world.prefetches = {"q.urgent": 20, "q": 10}
    async with world.serving():
        first = [("qos", 20), ("consume", "q.urgent"), ("qos", 10), ("consume", "q")]
        assert world.channel.asked == first
        assert (world.consumer.is_registered, world.consumer.prefetch) == (True, 10)
        assert world.deliver().session.prefetches == {"q.urgent": 20, "q": 10}

        world.prefetches = {"q.urgent": 20, "q": 5}
        world.changed.set()
        await turns()
        change = [CANCEL, ("qos", 5), ("consume", "q")]
        assert world.channel.asked == [*first, *change]

        world.prefetches = {"q.urgent": 20, "q": 0}
        world.changed.set()
        await turns()
        assert world.channel.asked == [*first, *change, CANCEL]
        assert world.consumer.is_registered


@in_world
async def test_a_delivery_knows_its_queue(world: World) -> None:
    """By the tag of its consumer, also of a former one, whose deliveries may be on their way."""
    world.prefetches = {"q": 10, "q.urgent": 20}
    async with world.serving():
        world.deliver()
        first = dict(world.wire.by_tag)
        world.consumer.renew()
        await turns()
        tags = [*first, *(world.wire.by_tag.keys() - first.keys())]
        for tag in tags:
            world.wire.by_tag[tag](2, False, Properties(), b"")

    assert [(one.queue, one.is_urgent) for one in world.taken] == [
        ("q", False),
        ("q.urgent", True),
        ("q.urgent", True),
    ]


@pytest.mark.parametrize("both", [True, False])
@in_world
async def test_large_bodies_of_both_queues_have_one_bound(world: World, *, both: bool) -> None:
    """Each of two queues has half of what fits."""
    queues = ["q", "q.urgent"] if both else ["q"]
    world.prefetches = dict.fromkeys(queues, 200)
    async with world.serving():
        world.deliver(MIB)
        await turns()
        asked = world.channel.asked[-2 * len(queues) :]
        assert asked == [
            one for queue in queues for one in (("qos", 16 // len(queues)), ("consume", queue))
        ]


# Cancelled consumers


def take(world: World, session: object) -> Delivery:
    delivery = make_delivery(session=session)
    world.dispatcher.start(delivery)
    return delivery


def make_session() -> Any:
    channel = SimpleNamespace(is_closed=False)
    return SimpleNamespace(is_over=False, is_leaving=False, in_progress=0, channel=channel)


@in_world
async def test_cancelled_consumers_count_as_long_as_something_of_theirs_is_held(
    world: World,
) -> None:
    """Each that was given something and has not seen all of it acked is one; others are none."""
    dispatcher, session = world.dispatcher, make_session()
    dispatcher.note_cancel("q")
    assert dispatcher.cancelled_consumers == 0
    first, second = take(world, session), take(world, session)
    await turns()
    assert dispatcher.cancelled_consumers == 0
    dispatcher.note_cancel("q")
    dispatcher.note_cancel("q")
    third = take(world, session)
    await turns()
    dispatcher.note_cancel("q.urgent")
    dispatcher.note_cancel("q")
    assert dispatcher.cancelled_consumers == 2
    await world.let_go(first)
    assert dispatcher.cancelled_consumers == 2
    await world.let_go(second)
    assert dispatcher.cancelled_consumers == 1
    await world.let_go(third)
    assert dispatcher.cancelled_consumers == 0


@in_world
async def test_no_consumer_outlives_its_session(world: World) -> None:
    """With the channel all of its consumers end, whatever is still worked on."""
    session = make_session()
    take(world, session)
    world.dispatcher.note_cancel("q")
    session.channel.is_closed = True
    assert world.dispatcher.cancelled_consumers == 0
