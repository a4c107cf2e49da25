"""A worker takes from the lanes that are its own, on a real broker, and leaves each whole."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import cast

import pytest

from bridge.amqp.client import Connection
from bridge.errors import BrokerError
from bridge.topology.declarations import lane_arguments, lane_queue
from bridge.worker.consumer import Gauges
from bridge.worker.delivery import Delivery
from bridge.worker.ordering.lane_consumer import (
    LEAST_HELD_OF_EACH,
    MOST_HELD,
    Calls,
    LaneConsumer,
)
from bridge.worker.ordering.share import LaneShare
from bridge.worker.session import Session
from tests.integration.conftest import Amqp, connected, eventually, unique

LANES = 4


class Share:
    """What stands in for the part of a worker, as its peers would leave it."""

    lanes = LANES

    def __init__(self) -> None:
        self.own = frozenset(range(LANES))
        self.takes: list[bool] = []

    def note_taking(self, *, takes: bool) -> None:
        """Note whether the worker says that it takes from its lanes."""
        if not self.takes or self.takes[-1] is not takes:
            self.takes.append(takes)


class Taker:
    """A consumer of lanes, and what it has called."""

    def __init__(self, queue: str) -> None:
        self.share = Share()
        self.changed = asyncio.Event()
        self.may_take = True
        self.held: list[Delivery] = []
        self.gives_back: set[str] = set()
        self.sessions_over: list[int] = []
        self.registered = 0
        self.consumer = LaneConsumer(
            queue,
            cast("LaneShare", self.share),
            may_take=lambda: self.may_take,
            changed=self.changed,
            calls=Calls(
                delivery=self.held.append,
                registered=self._count,
                session_over=self.sessions_over.append,
                give_back=self._give_back,
            ),
            gauges=Gauges(lambda _: None, lambda _: None),
        )

    def change(self, *own: int) -> None:
        """Have the worker another part."""
        self.share.own = frozenset(own)
        self.changed.set()

    @property
    def texts(self) -> list[str]:
        """What it holds, in the order in which it came."""
        return [bytes(delivery.body).decode() for delivery in self.held]

    def settle(self, delivery: Delivery) -> None:
        """Ack a delivery and hold it no more."""
        self.held.remove(delivery)
        delivery.session.ack(delivery.tag)
        self.consumer.let_go(delivery)

    def _give_back(self, lane: Session) -> None:
        """Let go of what only waits of a lane that is being left."""
        for delivery in [one for one in self.held if one.session is lane]:
            if bytes(delivery.body).decode() in self.gives_back:
                self.held.remove(delivery)
                self.consumer.let_go(delivery)

    def _count(self) -> None:
        self.registered += 1


@asynccontextmanager
async def at_work(taker: Taker, connection: Connection) -> AsyncIterator["asyncio.Task[None]"]:
    """Have it serve a connection for as long as the block lasts."""
    serving = asyncio.create_task(taker.consumer.serve(connection))
    try:
        yield serving
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def until(check: Callable[[], object], what: str) -> None:
    """Return when something is so."""

    async def look() -> bool:
        return bool(check())

    await eventually(look, what=what)


@pytest.fixture
async def queue(amqp: Amqp) -> AsyncIterator[str]:
    """Declare the lanes of a queue that no other test uses."""
    name = unique("lanes")
    lanes = [lane_queue(name, number) for number in range(LANES)]
    for lane in lanes:
        arguments = dict(lane_arguments(LANES))
        await amqp.channel.declare_queue(lane, durable=True, arguments=arguments)
    yield name
    await amqp.delete(lanes)


async def publish(amqp: Amqp, queue: str, number: int, *texts: str) -> None:
    """Publish texts to a lane, in order."""
    for text in texts:
        await amqp.publish(lane_queue(queue, number), text.encode())


async def test_it_takes_from_its_own_lanes_only(
    amqp: Amqp, connection: Connection, queue: str
) -> None:
    """Each has a prefetch of its own, and what is in another worker's lane stays there."""
    taker = Taker(queue)
    taker.share.own = frozenset({0, 2})
    for number in range(LANES):
        await publish(amqp, queue, number, f"{number}a", f"{number}b")
    async with at_work(taker, connection):
        # Deliveries may come before the answers to what asked for them.
        await until(lambda: taker.consumer.is_registered, "its lanes")
        await until(lambda: len(taker.held) == 4, "two of each")

        assert [text for text in taker.texts if text[0] == "0"] == ["0a", "0b"]
        assert {text[0] for text in taker.texts} == {"0", "2"}
        assert (taker.consumer.lanes, taker.registered, taker.share.takes) == (2, 1, [True])
        assert taker.consumer.prefetch == 2 * max(LEAST_HELD_OF_EACH, MOST_HELD // LANES)
        assert taker.consumer.is_registered
    assert taker.sessions_over == [2 * max(LEAST_HELD_OF_EACH, MOST_HELD // LANES)]
    assert all(delivery.session.is_over for delivery in taker.held)
    assert not taker.consumer.is_registered


async def test_a_lane_moves_whole(amqp: Amqp, amqp_url: str, queue: str) -> None:
    """The next worker gets what waits of it, in its order, when what is in flight has ended."""
    first, second = Taker(queue), Taker(queue)
    first.share.own, second.share.own = frozenset({0}), frozenset[int]()
    await publish(amqp, queue, 0, "in flight", "b", "c")
    async with (
        connected(amqp_url) as one,
        connected(amqp_url) as other,
        at_work(first, one),
        at_work(second, other),
    ):
        await until(lambda: len(first.held) == 3, "all three")
        first.gives_back = {"b", "c"}
        second.change(0)
        first.change()
        await until(lambda: first.texts == ["in flight"], "what waits to be let go of")
        await publish(amqp, queue, 0, "d")
        await until(lambda: second.consumer.lanes, "the second in line")
        assert second.held == []
        first.settle(first.held[0])
        await until(lambda: len(second.held) == 3, "the rest")

        assert second.texts == ["b", "c", "d"]
        assert first.consumer.lanes == 0


async def test_nothing_new_is_begun_of_a_lane_that_is_left(
    amqp: Amqp, connection: Connection, queue: str
) -> None:
    """What comes while the last of it is in flight goes back with the channel."""
    taker = Taker(queue)
    await publish(amqp, queue, 1, "in flight")
    async with at_work(taker, connection):
        await until(lambda: taker.held, "the first")
        taker.change()
        await until(lambda: taker.consumer.lanes == 0, "the lane left")
        await publish(amqp, queue, 1, "later")
        stopping = asyncio.create_task(taker.consumer.stop())
        await asyncio.wait({stopping}, timeout=0.3)
        assert (stopping.done(), taker.texts) == (False, ["in flight"])
        taker.settle(taker.held[0])
        await asyncio.wait_for(stopping, 20)

        assert taker.share.takes == [True, False]
        await amqp.until_count(lane_queue(queue, 1), 1)


async def test_a_pause_leaves_all_lanes(amqp: Amqp, connection: Connection, queue: str) -> None:
    """In an operator's pause others may take them; afterwards it takes from them again."""
    taker = Taker(queue)
    async with at_work(taker, connection):
        await until(lambda: taker.consumer.is_registered, "its lanes")
        taker.may_take = False
        taker.changed.set()
        await until(lambda: not taker.consumer.is_registered, "none")
        assert taker.consumer.prefetch == 0
        taker.may_take = True
        taker.changed.set()
        await publish(amqp, queue, 3, "a")
        await until(lambda: taker.held, "a delivery")

        assert taker.share.takes == [True, False, True]


async def test_it_ends_for_good(connection: Connection, queue: str) -> None:
    """`serve` returns when all lanes are left, and takes from none again."""
    taker = Taker(queue)
    async with at_work(taker, connection) as serving:
        await until(lambda: taker.consumer.is_registered, "its lanes")
        await asyncio.wait_for(taker.consumer.end(), 20)
        await asyncio.wait_for(serving, 20)
    async with at_work(taker, connection) as serving:
        await asyncio.wait_for(serving, 20)

    assert not taker.consumer.has_session


async def test_a_lane_that_is_deleted_ends_the_session(
    amqp: Amqp, connection: Connection, queue: str
) -> None:
    """Whoever serves the connection declares it anew."""
    taker = Taker(queue)
    async with at_work(taker, connection) as serving:
        await until(lambda: taker.consumer.is_registered, "its lanes")
        await amqp.channel.queue_delete(lane_queue(queue, 2))
        with pytest.raises(BrokerError, match="cancelled the consumer of a lane"):
            await asyncio.wait_for(serving, 20)
