"""Sorting: to which queue, with which properties, acked when, and what comes again.

All run on an event loop whose time leaps to the next timer. The publisher and the session are
stand-ins.
"""

import asyncio
from collections.abc import Iterator
from contextlib import closing
from typing import Any, cast

import pytest

from bridge.amqp.properties import Properties
from bridge.amqp.publisher import Publisher
from bridge.config import Settings, WorkerSettings
from bridge.errors import Confirm
from bridge.topology.upkeep import Upkeep
from bridge.worker.cluster.exchange import Peers
from bridge.worker.delivery import Delivery
from bridge.worker.entry import Entry
from bridge.worker.envelope import bare_envelope
from bridge.worker.ledger import Ledger
from bridge.worker.ordering.share import LaneShare
from bridge.worker.session import Session
from bridge.worker.sorting.chosen import make_sorter
from bridge.worker.sorting.move import sorting_entry
from bridge.worker.sorting.mover import PREFETCH
from bridge.worker.sorting.sorter import Sorter
from bridge.worker.sorting.written import LATE_SECONDS
from tests.clock import LeapingWorld
from tests.ears import Ears
from tests.unit.worker.stand_ins import PUBLISH_SECONDS, Broker, Channel, nobody_told

BODY = b'{"to":"+491713920001","from":"Acme","text":"Hi"}'
URGENT = {"sms-bridge-priority": "urgent"}


class Connection(Channel):
    """A session of the sorter's."""


class FixedTopology:
    """What stands in for the upkeep of a topology that is as it should be."""

    is_usable = True


class World(LeapingWorld):
    """A sorter between the main queue and those of the classes, or so many lanes."""

    def __init__(self, lanes: int | None = None) -> None:
        super().__init__()
        self.broker = Broker(self.loop)
        self.connection = Connection()
        self.topology = FixedTopology()
        peers = Peers("q", is_enabled=False, metrics=self.metrics, clock=self.loop.time)
        share = None if lanes is None else LaneShare(lanes, peers, changed=lambda: None)
        own = (
            WorkerSettings(queue="q", priorities="on")
            if lanes is None
            else WorkerSettings(queue="q", ordering="recipient", lanes=lanes)
        )
        sorter = make_sorter(
            Settings(worker=own),
            publisher=cast("Publisher", self.broker),
            peers=peers,
            repeated_copies=nobody_told(self.metrics),
            share=share,
            upkeep=cast("Upkeep", self.topology),
            metrics=self.metrics,
        )
        assert sorter is not None
        self.sorter: Sorter = sorter
        self.tags = 0

    def deliver(self, *, redelivered: bool = False, **properties: Any) -> Delivery:
        """Have the broker deliver a message."""
        self.tags += 1
        given = Properties(**properties)
        delivery = Delivery(
            body=BODY,
            properties=given,
            redelivered=redelivered,
            tag=self.tags,
            session=cast("Session", self.connection),
            envelope=bare_envelope(given, now=self.loop.time()),
            clock=self.loop.time,
        )
        self.sorter.mover.take(delivery)
        return delivery

    def deliver_of(self, key: str, name: str, *, redelivered: bool = False) -> Delivery:
        """Have the broker deliver a message that is kept in the order of a key."""
        headers = {"sms-bridge-ordering-key": key}
        return self.deliver(message_id=name, headers=headers, redelivered=redelivered)

    def lose_connection(self) -> None:
        """Have the session end, and another one begin."""
        self.connection.is_over = True
        self.sorter.mover.on_session_over(PREFETCH)
        self.connection = Connection()
        self.sorter.mover.ledger.consuming_again()

    def sort(self, **facts: Any) -> None:
        """Deliver a message, and wait until it is sorted or given back."""

        async def play() -> None:
            self.deliver(**facts)
            await self.sorter.mover.all_done()

        self.run(play())

    @property
    def targets(self) -> list[str]:
        """The queues of the copies, in order."""
        return [one.routing_key for one in self.broker.published]

    @property
    def stored(self) -> list[str | None]:
        """The ids of the copies, in order."""
        return [one.properties.message_id for one in self.broker.published]


@pytest.fixture
def world() -> Iterator[World]:
    """Give a sorter that has nothing to do."""
    with closing(World()) as made:
        yield made


@pytest.fixture
def ordered() -> Iterator[World]:
    """Give one that keeps the order of each key."""
    with closing(World(lanes=4)) as made:
        yield made


async def turns() -> None:
    """Let every task run as far as it can."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_each_class_has_its_queue(world: World) -> None:
    """The copy is in the queue of its class, body as it came, and the original is acked."""
    world.sort(message_id="m-1")
    world.sort(message_id="m-2", headers=dict(URGENT))

    assert world.targets == ["q.normal", "q.urgent"]
    assert [one.body for one in world.broker.published] == [BODY, BODY]
    assert world.connection.acked == [1, 2]
    assert world.value("messages_sorted_total", **{"class": "urgent"}) == 1
    assert world.value("messages_sorted_total", **{"class": "normal"}) == 1


def test_acked_only_when_stored(world: World, ears: Ears) -> None:
    """A copy that the broker refuses is tried again; until one is stored nothing is acked."""
    world.broker.faults = ["nacked", "returned", "late"]

    async def play() -> None:
        world.deliver(message_id="m-1")
        await asyncio.sleep(60)
        assert (world.connection.acked, world.broker.written) == ([], 3)
        world.broker.pending[0].set_result("confirmed")
        await world.sorter.mover.all_done()

    world.run(play())
    assert world.connection.acked == [1]
    assert ears.heard("internal_error") == []
    assert world.sorter.mover.queue_missing.is_set()


def test_many_keep_their_order(world: World) -> None:
    """They are written in the order in which they came, and acked by one ack for all."""

    async def play() -> None:
        for number in range(50):
            world.deliver(message_id=f"m-{number}")
        await world.sorter.mover.all_done()

    world.run(play())
    assert world.stored == [f"m-{number}" for number in range(50)]
    assert world.connection.for_many == [50]


def test_a_late_confirm_is_waited_for(world: World) -> None:
    """However late: the copy may be stored, and must not be there twice."""
    world.broker.faults = ["late"]

    async def play() -> None:
        world.deliver(message_id="m-1")
        world.deliver(message_id="m-2")
        await asyncio.sleep(10 * LATE_SECONDS)
        assert world.connection.acked == [2]
        world.broker.pending[0].set_result("confirmed")
        await world.sorter.mover.all_done()

    world.run(play())
    assert world.connection.acked == [2, 1]
    assert world.broker.written == 2


def test_a_copy_that_is_not_confirmed_in_time_is_told(world: World, ears: Ears) -> None:
    """Whoever looks at the log sees why nothing is sorted."""
    world.broker.faults = ["late"]

    async def play() -> None:
        world.deliver(message_id="m-1")
        await asyncio.sleep(LATE_SECONDS + PUBLISH_SECONDS + 1)
        world.broker.pending[0].set_result("confirmed")
        await world.sorter.mover.all_done()

    world.run(play())
    (told,) = ears.heard("not_stored")
    assert told["fault"] == "timeout"


def test_what_is_acked_on_no_session_is_sorted_once(world: World) -> None:
    """A confirm that comes after the loss of its delivery's session is no reason for a second."""
    world.broker.faults = ["late"]

    async def play() -> None:
        world.deliver(message_id="m-1")
        await turns()
        world.lose_connection()
        world.deliver(message_id="m-2")
        world.broker.pending[0].set_result("confirmed")
        await world.sorter.mover.all_done()
        world.deliver(message_id="m-1", redelivered=True)
        await world.sorter.mover.all_done()

    world.run(play())
    assert world.connection.acked == [1 + 1, 3]
    assert world.broker.written == 2


def test_a_drain_that_is_cut_off_remembers_what_was_written(world: World) -> None:
    """Whoever asks for it is told that its copy may be there."""
    world.broker.faults = ["late"]

    async def play() -> None:
        world.deliver(message_id="m-1")
        draining = asyncio.create_task(world.sorter.drain())
        await turns()
        draining.cancel()
        await asyncio.wait({draining})
        assert world.sorter.mover.count == 0
        assert world.sorter.mover.ledger.keeps_any
        world.broker.pending[0].set_result("confirmed")
        await turns()

    world.run(play())
    assert world.connection.acked == []


def test_a_message_without_an_id_gets_one(world: World) -> None:
    """All its copies have the same, so that the second is known."""
    world.broker.faults = ["nacked"]
    world.sort()
    world.sort()
    first, second = (one.properties.message_id for one in world.broker.published)

    assert first
    assert first != second


@pytest.mark.parametrize("name", ["m-1", None], ids=["with id", "without id"])
def test_what_comes_again_is_known(world: World, name: str | None) -> None:
    """What is sorted, or is being sorted, when the connection is lost gets no second copy."""
    world.sort(message_id=name)
    world.broker.faults = ["late"]

    async def play() -> None:
        world.deliver(message_id=name, headers={"x-other": 1})
        await turns()
        world.lose_connection()
        again = [world.deliver(message_id=name, redelivered=True) for _ in range(2)]
        await turns()
        world.broker.pending[0].set_result("confirmed")
        await world.sorter.mover.all_done()
        assert sorted(world.connection.acked) == [one.tag for one in again]

    world.run(play())
    assert len(world.broker.published) == 2


def test_what_others_had_is_marked(world: World) -> None:
    """Nobody here knows whether whoever had it has stored a copy: the sender is to ask."""
    world.sort(message_id="m-1", redelivered=True)
    world.sort(message_id="m-2")
    first, second = (one.properties.headers or {} for one in world.broker.published)

    assert len(first) == 1
    assert second == {}


def test_a_copy_that_is_moved_back_by_hand_is_sorted_again(world: World) -> None:
    """It has the number of a copy that was there before, and is no repeat of it."""
    headers = {"sms-bridge-copies": 2, "sms-bridge-attempts": 2}
    world.sort(message_id="m-1", headers=dict(headers))
    world.sort(message_id="m-1", headers=dict(headers))

    assert world.targets == ["q.normal"] * 2


def test_what_is_published_twice_is_sorted_twice(world: World) -> None:
    """Whoever sends it knows the second, and answers it."""
    world.sort(message_id="m-1")
    world.sort(message_id="m-1")

    assert len(world.broker.published) == 2


def test_a_drain_gives_back_what_is_not_begun(world: World) -> None:
    """What is written is waited for and acked; what comes then is left to the next worker."""
    world.broker.faults = ["late"]

    async def play() -> None:
        world.deliver(message_id="m-1")
        await turns()
        draining = asyncio.create_task(world.sorter.drain())
        await turns()
        world.deliver(message_id="m-2")
        await turns()
        assert not draining.done()
        world.broker.pending[0].set_result("confirmed")
        assert await draining

    world.run(play())
    assert world.connection.acked == [1]


def test_it_takes_nothing_that_it_could_not_store(world: World) -> None:
    """While the broker blocks, or a queue is not as it must be, and as much as it may else."""
    assert world.sorter._prefetch() == {"q": PREFETCH}
    world.broker.is_blocked = True
    assert world.sorter._prefetch() == {}
    world.broker.is_blocked = False
    world.topology.is_usable = False
    assert world.sorter._prefetch() == {}


def test_a_drain_takes_one_at_a_time(world: World) -> None:
    """Which may be one that is moved and has to be acked, whatever else is in the way."""
    world.sorter.mover.stop()
    world.broker.is_blocked = True
    assert world.sorter._prefetch() == {"q": 1}


def test_without_priorities_there_is_none(world: World) -> None:
    """Nothing is sorted."""
    sorter = make_sorter(
        Settings(),
        publisher=cast("Publisher", world.broker),
        peers=Peers("q", is_enabled=False, metrics=world.metrics),
        repeated_copies=nobody_told(world.metrics),
        share=None,
        upkeep=cast("Upkeep", world.topology),
        metrics=world.metrics,
    )

    assert sorter is None


def test_one_of_a_key_is_on_its_way_at_a_time(ordered: World) -> None:
    """Another key waits for none of them; a broker that refuses the first lets none overtake."""
    ordered.broker.faults = ["late"]

    async def play() -> None:
        for key, name in (("k", "k-0"), ("k", "k-1"), ("x", "x-0"), ("k", "k-2"), ("x", "x-1")):
            ordered.deliver_of(key, name)
        await turns()
        assert ordered.stored == ["x-0", "x-1"]
        ordered.broker.pending[0].set_result("nacked")
        await ordered.sorter.mover.all_done()

    ordered.run(play())
    assert ordered.stored == ["x-0", "x-1", "k-0", "k-1", "k-2"]
    assert sorted(ordered.connection.acked) == [1, 2, 3, 4, 5]


def test_many_of_one_key_are_sorted_one_after_the_other(ordered: World) -> None:
    """As many as are held at a time."""

    async def play() -> None:
        for number in range(PREFETCH):
            ordered.deliver_of("k", f"k-{number}")
        assert ordered.broker.written == 1
        await ordered.sorter.mover.all_done()

    ordered.run(play())
    assert ordered.stored == [f"k-{number}" for number in range(PREFETCH)]
    assert ordered.value("messages_sorted_total", **{"class": "lane"}) == PREFETCH


def test_what_comes_again_keeps_its_place(ordered: World) -> None:
    """While others are asked for it, and though what comes behind it could go at once."""

    async def learn(delivery: Delivery, entry: Entry, *, ledger: Ledger) -> None:
        assert (delivery.tag, ledger.knows(entry)) == (1, False)
        await asyncio.sleep(3)

    ordered.sorter.mover.learn_of = learn

    async def play() -> None:
        ordered.deliver_of("k", "k-0", redelivered=True)
        ordered.deliver_of("k", "k-1")
        ordered.deliver_of("x", "x-0")
        await ordered.sorter.mover.all_done()

    ordered.run(play())
    assert ordered.stored == ["x-0", "k-0", "k-1"]


def test_what_waits_for_its_turn_is_let_go_with_its_session(ordered: World) -> None:
    """It comes again behind the first, and is stored once."""
    ordered.broker.faults = ["late"]

    async def play() -> None:
        for name in ("k-0", "k-1", "k-2"):
            ordered.deliver_of("k", name)
        await turns()
        ordered.lose_connection()
        assert ordered.sorter.mover.count == 1
        for name in ("k-0", "k-1", "k-2"):
            ordered.deliver_of("k", name, redelivered=True)
        await turns()
        ordered.broker.pending[0].set_result("confirmed")
        await ordered.sorter.mover.all_done()

    ordered.run(play())
    assert ordered.stored == ["k-0", "k-1", "k-2"]
    assert ordered.connection.acked == [4, 5, 6]


def test_a_session_that_ends_unnoticed_lets_nothing_begin(ordered: World) -> None:
    """What has its turn then would be stored behind its own redelivery, or beside it."""
    ordered.broker.faults = ["late"]

    async def play() -> None:
        ordered.deliver_of("k", "k-0")
        ordered.deliver_of("k", "k-1")
        ordered.connection.is_over = True
        ordered.broker.pending[0].set_result("confirmed")
        await ordered.sorter.mover.all_done()

    ordered.run(play())
    assert ordered.stored == ["k-0"]


def test_a_copy_that_is_late_holds_its_key_up_and_no_longer(ordered: World) -> None:
    """Whoever waits for its confirm gives it back when its session ends, and the next one goes."""
    ordered.broker.faults = ["late"]

    async def play() -> None:
        ordered.deliver_of("k", "k-0")
        await turns()
        ordered.lose_connection()
        ordered.deliver_of("k", "k-1")
        await asyncio.sleep(LATE_SECONDS + PUBLISH_SECONDS + 1)
        assert ordered.sorter.mover.ledger.keeps_any
        await ordered.sorter.mover.all_done()

    ordered.run(play())
    assert ordered.stored == ["k-1"]


def test_a_drain_gives_back_what_waits_for_its_turn(ordered: World) -> None:
    """The first is waited for and acked; the next worker takes those behind it, in order."""
    ordered.broker.faults = ["late"]

    async def play() -> None:
        for name in ("k-0", "k-1", "k-2"):
            ordered.deliver_of("k", name)
        draining = asyncio.create_task(ordered.sorter.drain())
        await turns()
        assert not draining.done()
        ordered.broker.pending[0].set_result("confirmed")
        assert await draining

    ordered.run(play())
    assert (ordered.stored, ordered.connection.acked) == (["k-0"], [1])
    assert ordered.sorter.mover.count == 0


def test_a_drain_that_is_cut_off_lets_go_of_all(ordered: World) -> None:
    """Nothing of a key is begun after that, though it still took what comes again."""
    ordered.sort(message_id="m-1")
    ordered.broker.faults = ["late"]

    async def play() -> None:
        ordered.lose_connection()
        for name in ("k-0", "k-1"):
            ordered.deliver_of("k", name)
        draining = asyncio.create_task(ordered.sorter.drain())
        await turns()
        draining.cancel()
        await asyncio.wait({draining})
        assert ordered.sorter.mover.count == 0
        assert ordered.sorter.mover.ledger.keeps_any
        await turns()

    ordered.run(play())
    assert (ordered.broker.written, ordered.connection.acked) == (2, [])


def test_a_session_that_ends_as_a_turn_comes_lets_go_once(ordered: World) -> None:
    """What is called and given back at once has left its line already."""
    ordered.broker.faults = ["late"]
    faults: list[dict[str, Any]] = []
    ordered.loop.set_exception_handler(lambda _, context: faults.append(context))

    async def play() -> None:
        first = ordered.connection
        ordered.deliver_of("k", "k-0")
        ordered.deliver_of("k", "k-1")
        ordered.broker.pending[0].set_result("confirmed")
        while not first.acked:  # noqa: ASYNC110  one turn of the loop counts here
            await asyncio.sleep(0)
        ordered.lose_connection()
        await turns()

    ordered.run(play())
    assert (ordered.stored, ordered.sorter.mover.count, faults) == (["k-0"], 0, [])


def test_the_copy_in_a_lane_has_no_priority(ordered: World) -> None:
    """RabbitMQ 4 would give it out before what came earlier."""
    ordered.sort(message_id="m-1", priority=9)
    (stored,) = ordered.broker.published

    assert stored.properties.priority is None


@pytest.mark.parametrize("confirm", ["error", "nacked"])
def test_cut_off_before_its_task_begins(ordered: World, confirm: Confirm) -> None:
    """What loses its channel in the moment in which a drain times out goes back like the others."""
    ordered.broker.faults = ["late"]

    async def play() -> Delivery:
        delivery = ordered.deliver_of("A", "1")
        draining = asyncio.create_task(ordered.sorter.drain())
        await turns()
        ordered.broker.pending[-1].set_result(confirm)
        draining.cancel()
        await asyncio.gather(draining, return_exceptions=True)
        await turns()
        return delivery

    delivery = ordered.run(play())

    assert not ordered.sorter.mover.count
    assert not ordered.sorter.mover.ledger.is_working_on(sorting_entry(delivery))
    assert ordered.sorter.mover.ledger.keeps_any
