"""Of a retry copy that is there twice, the one that does not say so is asked for as well."""

import asyncio
from collections.abc import Iterator

import pytest

from bridge.outbound.acceptances import SENT_SECONDS
from bridge.outbound.delivery import Delivery
from bridge.outbound.ledger import Claim, Repeat
from tests.deliveries import make_delivery
from tests.outbound.peers.team import BODY, Team, again, message


@pytest.fixture
def team() -> Iterator[Team]:
    """Make a team of two."""
    ours = Team(2)
    yield ours
    ours.close()


def first_of(team: Team, second: Delivery) -> Delivery:
    """Make the copy that was published first of two, and that does not say so."""
    envelope = second.envelope
    return make_delivery(
        envelope.key,
        body=BODY,
        clock=team.loop.time,
        message_id=envelope.message_id,
        copies=envelope.copies,
        try_of=envelope.try_of,
    )


def second_copy(team: Team) -> Delivery:
    """Make the copy that says that it may be there twice."""
    return again(team, message(team, copies=1, try_of="1800000000.000"))


@pytest.mark.parametrize("sent", [True, False], ids=["sent", "replaced"])
def test_the_second_comes_first(team: Team, *, sent: bool) -> None:
    """What was settled when the second came is not sent when the first comes to another worker."""
    one, other = team.members

    async def story() -> object:
        second = second_copy(team)
        one.settle(await one.begin(second), sent=sent)
        await asyncio.sleep(180)
        return await other.take(first_of(team, second))

    assert team.play(story()) == Repeat(None)


@pytest.mark.parametrize("place", [0, 1])
def test_both_come_at_once(team: Team, place: int) -> None:
    """However they are given out, one of the two is sent."""
    for_first, for_second = team.members[place], team.members[1 - place]

    async def story() -> set[type]:
        second = second_copy(team)
        asking = asyncio.create_task(for_second.take(second))
        await asyncio.sleep(0.015)
        taking = asyncio.create_task(for_first.take(first_of(team, second)))
        kinds = set[type]()
        for taken in asyncio.as_completed((asking, taking)):
            found = await taken
            kinds.add(type(found))
            if isinstance(found, Claim):
                await asyncio.sleep(0.5)
                (for_first if taking.done() else for_second).settle(found)
        return kinds

    assert team.play(story()) == {Claim, Repeat}


def test_a_worker_that_joins_later(team: Team) -> None:
    """One that was not there when the second came is told of it."""
    one, _ = team.members

    async def story() -> object:
        second = second_copy(team)
        one.settle(await one.begin(second))
        newcomer = team.hire()
        await asyncio.sleep(1)
        return await newcomer.take(first_of(team, second))

    assert team.play(story()) == Repeat(None)


def test_a_worker_that_was_alone(team: Team) -> None:
    """One that had nobody to ask when the second came tells of it when others join."""
    one, other = team.members
    other.fall_silent()

    async def story() -> object:
        await asyncio.sleep(100)
        second = second_copy(team)
        one.settle(await one.begin(second))
        other.come_back()
        await asyncio.sleep(1)
        return await other.take(first_of(team, second))

    assert team.play(story()) == Repeat(None)


def test_any_other_copy_asks_nobody(team: Team) -> None:
    """Neither a later copy of the same message nor one that is known no more costs a question."""
    one, other = team.members

    async def story() -> list[str]:
        second = second_copy(team)
        one.settle(await one.begin(second), sent=False)
        before = len(team.fanout.said)
        later = message(team, copies=2, try_of=second.envelope.try_of)
        other.settle(await other.begin(later), sent=False)
        await asyncio.sleep(SENT_SECONDS + 1)
        await other.begin(first_of(team, second))
        return [kind for _, kind in team.fanout.said[before:] if kind == "held?"]

    assert team.play(story()) == []


def test_what_a_publisher_wrote_is_told_to_nobody(team: Team) -> None:
    """A header that no bridge writes so might hold anything, and goes no further."""
    one, _ = team.members

    async def story() -> list[str]:
        await one.begin(again(team, message(team, copies=1, try_of="+4917012345678")))
        team.hire()
        await asyncio.sleep(1)
        return [kind for _, kind in team.fanout.said if kind == "repeated"]

    assert team.play(story()) == []
