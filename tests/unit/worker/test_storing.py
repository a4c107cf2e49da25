"""Storing a copy: until it is confirmed, once, and with whoever is to know of it told.

All run on an event loop whose time leaps to the next timer. The publisher and the session are
stand-ins.
"""

import asyncio
from collections.abc import Iterator
from contextlib import closing
from typing import Any, cast

import pytest

from bridge.amqp.frames import LARGE_BODY_BYTES
from bridge.amqp.properties import Properties
from bridge.amqp.publisher import Publisher
from bridge.errors import BrokerError, CopyRefusedError, Refusal
from bridge.worker.delivery import Delivery
from bridge.worker.envelope import REPEATED
from bridge.worker.storing import FIRST_WAIT_SECONDS, MAX_UNCONFIRMED_SECONDS, Storing
from tests.clock import LeapingWorld
from tests.deliveries import make_delivery
from tests.unit.worker.stand_ins import PUBLISH_SECONDS, Broker, Channel


class World(LeapingWorld):
    """What stores copies, and what it tells."""

    def __init__(self) -> None:
        super().__init__()
        self.broker = Broker(self.loop)
        self.session = Channel()
        self.told: list[str] = []
        self.repeated: list[Properties] = []
        self.has_room_aside = True
        self.storing = Storing(
            cast("Publisher", self.broker),
            block=lambda _queue, _fault: self.told.append("block"),
            unblock=lambda: self.told.append("unblock"),
            note_repeated=lambda properties, _: self.repeated.append(properties),
            may_set_aside=lambda: self.has_room_aside,
        )

    def delivery(self, key: str = "m-1") -> Delivery:
        """Make a delivery that is to have a copy."""
        return make_delivery(key, body=b"body", session=self.session, clock=self.loop.time)

    async def store(self, delivery: Delivery) -> None:
        """Store its copy."""
        await self.storing.store(
            delivery,
            queue="q.next",
            make_properties=lambda _: Properties(message_id=delivery.envelope.key),
        )


@pytest.fixture
def world() -> Iterator[World]:
    """Give one that has stored nothing."""
    with closing(World()) as made:
        yield made


def test_stored_at_once(world: World) -> None:
    """The copy is in its queue, and nobody is disturbed."""
    assert world.seconds(world.store(world.delivery())) == 0
    (copy,) = world.broker.published
    assert (copy.routing_key, copy.body, world.told) == ("q.next", b"body", [])


def test_refused_is_tried_again(world: World) -> None:
    """After a wait that doubles; meanwhile it is told that the broker stores nothing."""
    world.broker.faults = ["nacked", "returned", "error"]

    seconds = world.seconds(world.store(world.delivery()))

    assert seconds == pytest.approx((1 + 2 + 4) * FIRST_WAIT_SECONDS)
    assert len(world.broker.published) == 1
    assert world.told == ["block"] * 3 + ["unblock"]
    assert world.storing.queue_missing.is_set()


def test_a_copy_that_may_be_there_twice(world: World) -> None:
    """Whoever is to know of such copies is told, when it is written, and of no other."""

    async def store(key: str, headers: dict[str, Any]) -> None:
        await world.storing.store(
            world.delivery(key),
            queue="q.next",
            make_properties=lambda _: Properties(message_id=key, headers=headers),
        )

    world.run(store("m-1", {}))
    world.broker.faults = ["error"]
    world.run(store("m-2", {REPEATED: True}))

    assert [properties.message_id for properties in world.repeated] == ["m-2"]


def test_a_refusal_is_no_missing_queue(world: World) -> None:
    """A full queue, or a broker that is gone, calls for no declaration."""
    world.broker.faults = ["nacked", "error"]
    world.run(world.store(world.delivery()))

    assert not world.storing.queue_missing.is_set()


def test_the_last_that_waits_ends_the_block(world: World) -> None:
    """As long as one cannot be stored, nothing is sent that could need a copy."""
    world.broker.faults = ["late", "nacked"]

    async def play() -> None:
        first = asyncio.create_task(world.store(world.delivery("m-1")))
        second = asyncio.create_task(world.store(world.delivery("m-2")))
        await second
        await asyncio.sleep(PUBLISH_SECONDS + 1)
        third = world.delivery("m-3")
        world.broker.faults = ["nacked"]
        await world.store(third)
        assert world.told[-1] == "block"
        world.broker.pending[0].set_result("confirmed")
        await first

    world.run(play())
    assert world.told[-1] == "unblock"


def test_what_may_yet_be_confirmed_is_not_written_again(world: World) -> None:
    """However often its time is over: the broker would store both."""
    world.broker.faults = ["late"]

    async def play() -> None:
        storing = asyncio.create_task(world.store(world.delivery()))
        await asyncio.sleep(MAX_UNCONFIRMED_SECONDS - 1)
        assert world.broker.written == 1
        world.broker.pending[0].set_result("confirmed")
        await storing

    world.run(play())
    assert len(world.broker.published) == 1


def test_a_confirm_that_is_lost_is_given_up(world: World) -> None:
    """Then it is written anew, marked as one that may be there twice."""
    world.broker.faults = ["late"]
    delivery = world.delivery()

    seconds = world.seconds(world.store(delivery))

    assert MAX_UNCONFIRMED_SECONDS <= seconds <= MAX_UNCONFIRMED_SECONDS + PUBLISH_SECONDS
    assert world.broker.written == 2
    assert delivery.envelope.has_been_copied


def test_nothing_is_given_up_while_the_broker_blocks(world: World) -> None:
    """It has not read what was written, and confirms it when its alarm is over."""
    world.broker.faults = ["late"]
    world.broker.is_blocked = True

    async def play() -> None:
        storing = asyncio.create_task(world.store(world.delivery()))
        await asyncio.sleep(2 * MAX_UNCONFIRMED_SECONDS)
        assert world.broker.written == 1
        world.broker.pending[0].set_result("confirmed")
        await storing

    world.run(play())


@pytest.mark.parametrize(("fault", "is_marked"), [("nacked", False), ("timeout", True)])
def test_only_what_may_be_there_is_marked(world: World, fault: str, *, is_marked: bool) -> None:
    """A copy that was refused is nowhere; one whose channel has ended may be."""
    world.broker.faults = ["late"]
    delivery = world.delivery()

    async def play() -> None:
        storing = asyncio.create_task(world.store(delivery))
        await asyncio.sleep(1)
        world.broker.pending[0].set_result("nacked" if fault == "nacked" else "error")
        await storing

    world.run(play())
    assert delivery.envelope.has_been_copied is is_marked
    assert world.broker.written == 2


def test_what_comes_again_is_left_to_the_broker(world: World) -> None:
    """When its session is over, a copy that is not stored is not tried for ever."""
    world.broker.faults = ["nacked"]
    world.session.is_over = True

    with pytest.raises(BrokerError):
        world.run(world.store(world.delivery()))
    assert world.broker.written == 1
    assert world.told[-1] == "unblock"


TOO_LARGE = Refusal("message size 2 is larger than configured max size 1", is_certain=True)
ENDED = Refusal("INTERNAL_ERROR", is_certain=False)


def test_a_copy_that_is_refused_for_itself(world: World) -> None:
    """It was in flight when the channel ended, is published alone, and nobody else is held up."""
    world.broker.refused_alone = [TOO_LARGE]

    async def store() -> None:
        storing = asyncio.create_task(world.store(world.delivery()))
        await asyncio.sleep(0)
        world.broker.refusals += 1
        await storing

    world.broker.faults = ["error"]
    with pytest.raises(CopyRefusedError, match="larger than configured"):
        world.run(store())

    assert world.told == ["block", "unblock"]
    assert world.broker.published == []


def test_a_copy_that_was_only_beside_the_refused_one(world: World) -> None:
    """Published alone, it is stored."""

    async def store() -> None:
        storing = asyncio.create_task(world.store(world.delivery()))
        await asyncio.sleep(0)
        world.broker.refusals += 1
        await storing

    world.broker.faults = ["error"]
    world.run(store())

    assert len(world.broker.published) == 1


def large_delivery(world: World) -> Delivery:
    """Make a delivery whose copy is published alone from the first."""
    body = bytes(LARGE_BODY_BYTES + 1)
    return make_delivery("m-1", body=body, session=world.session, clock=world.loop.time)


@pytest.mark.parametrize(
    ("refusals", "is_refused"), [([ENDED] * 2, False), ([ENDED] * 3, True), ([TOO_LARGE], True)]
)
def test_a_large_copy_is_alone_from_the_first(
    world: World, refusals: list[Refusal | None], *, is_refused: bool
) -> None:
    """A connection that ends may have other causes, twice; none of it holds up anybody."""
    world.broker.refused_alone = list(refusals)
    told = ""
    try:
        world.run(world.store(large_delivery(world)))
    except CopyRefusedError as error:
        told = str(error)

    assert bool(told) == is_refused
    assert world.told == []


def test_when_too_many_stay_unacked_the_others_wait(world: World) -> None:
    """The copy is tried again until it is stored, and nothing new is taken meanwhile."""
    world.has_room_aside = False
    world.broker.refused_alone = [TOO_LARGE] * 3
    world.run(world.store(large_delivery(world)))

    assert world.told == ["block"] * 3 + ["unblock"]


@pytest.mark.parametrize(("refusal", "is_marked"), [(TOO_LARGE, False), (ENDED, True)])
def test_what_the_broker_may_have_stored_before_it_ended_the_connection(
    world: World, refusal: Refusal, *, is_marked: bool
) -> None:
    """It may have ended that for another message; a channel it ends for the copy alone."""
    delivery = large_delivery(world)
    world.broker.refused_alone = [refusal]
    world.has_room_aside = False

    world.run(world.store(delivery))

    assert delivery.envelope.has_been_copied is is_marked
