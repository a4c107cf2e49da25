"""Of a retry copy that is there twice, the one that does not say so is asked for as well."""

import asyncio

import pytest

from bridge.worker.deduplicator import New, Repeat
from bridge.worker.delivery import Delivery
from bridge.worker.sent_messages import SENT_SECONDS
from tests.deliveries import make_delivery
from tests.unit.worker.cluster.team import BODY, Team, again, message, team_of


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
    return again(team, message(team, copies=1, try_of="1800000000.000"))


@pytest.mark.parametrize("sent", [True, False], ids=["sent", "replaced"])
@team_of(2)
async def test_the_second_comes_first(team: Team, *, sent: bool) -> None:
    """What was settled when the second came is not sent when the first comes to another worker."""
    one, other = team.members
    second = second_copy(team)
    one.settle(await one.begin(second), sent=sent)
    await asyncio.sleep(180)

    assert await other.take(first_of(team, second)) == Repeat(None)


@pytest.mark.parametrize("place", [0, 1])
@team_of(2)
async def test_both_come_at_once(team: Team, place: int) -> None:
    """However they are given out, one of the two is sent."""
    for_first, for_second = team.members[place], team.members[1 - place]
    second = second_copy(team)
    asking = asyncio.create_task(for_second.take(second))
    await asyncio.sleep(0.015)
    taking = asyncio.create_task(for_first.take(first_of(team, second)))
    kinds = set[type]()
    for taken in asyncio.as_completed((asking, taking)):
        found = await taken
        kinds.add(type(found))
        if isinstance(found, New):
            await asyncio.sleep(0.5)
            (for_first if taking.done() else for_second).settle(found.in_flight)

    assert kinds == {New, Repeat}


@team_of(2)
async def test_a_worker_that_joins_later(team: Team) -> None:
    """One that was not there when the second came is told of it."""
    one, _ = team.members
    second = second_copy(team)
    one.settle(await one.begin(second))
    newcomer = team.hire()
    await asyncio.sleep(1)

    assert await newcomer.take(first_of(team, second)) == Repeat(None)


@team_of(2)
async def test_a_worker_that_was_alone(team: Team) -> None:
    """One that had nobody to ask when the second came tells of it when others join."""
    one, other = team.members
    other.fall_silent()
    await asyncio.sleep(100)
    second = second_copy(team)
    one.settle(await one.begin(second))
    other.come_back()
    await asyncio.sleep(1)

    assert await other.take(first_of(team, second)) == Repeat(None)


@pytest.mark.parametrize("sent", [True, False], ids=["sent", "replaced"])
@pytest.mark.parametrize("is_marked_first", [True, False], ids=["second_first", "first_first"])
@team_of(2)
async def test_its_sender_ends(team: Team, *, is_marked_first: bool, sent: bool) -> None:
    """What was settled of copies that are there twice is known when its worker is gone."""
    one, other = team.members
    publisher = team.hire()
    await asyncio.sleep(1)
    second = second_copy(team)
    copies = [first_of(team, second), second]
    publisher.publish_again(second)
    await asyncio.sleep(1)
    one.settle(await one.begin(copies.pop(is_marked_first)), sent=sent)
    await asyncio.sleep(1)
    one.end()
    await asyncio.sleep(180)

    assert await other.take(copies[0]) == Repeat(None)


@team_of(2)
async def test_its_sender_ends_before_a_third_joins(team: Team) -> None:
    """Whoever comes when the sender is gone is told by one that heard of it."""
    one, _ = team.members
    second = second_copy(team)
    one.settle(await one.begin(second))
    await asyncio.sleep(1)
    one.end()
    await asyncio.sleep(1)
    newcomer = team.hire()
    await asyncio.sleep(180)

    assert await newcomer.take(first_of(team, second)) == Repeat(None)


@team_of(2)
async def test_one_alone_tells_a_newcomer_what_all_know(team: Team) -> None:
    """Of many that were told of a copy not each tells of it again."""
    one, other = team.members
    team.hire()
    one.settle(await one.begin(second_copy(team)))
    await asyncio.sleep(1)
    one.end()
    await asyncio.sleep(1)
    newcomer = team.hire()
    await asyncio.sleep(1)
    before = len(team.published)
    newcomer.come_back()
    await asyncio.sleep(1)

    assert [who for who, kind in team.published[before:] if kind == "settled"] == [other.worker_id]


@team_of(2)
async def test_the_first_is_sent_before_the_second_is_published(team: Team) -> None:
    """Who hears that what it has sent is there twice tells that it is done."""
    one, other = team.members
    second = second_copy(team)
    one.settle(await one.begin(first_of(team, second)))
    other.publish_again(second)
    await asyncio.sleep(1)
    one.end()

    assert await other.take(second) == Repeat(None)


@team_of(2)
async def test_published_again_while_nobody_could_be_told(team: Team) -> None:
    """It is told when the worker that published it has joined the others again."""
    one, other = team.members
    second = second_copy(team)
    other.fall_silent()
    other.publish_again(second)
    other.come_back()
    await asyncio.sleep(2)
    one.settle(await one.begin(first_of(team, second)))
    await asyncio.sleep(1)
    one.end()

    assert await other.take(second) == Repeat(None)


@team_of(2)
async def test_it_ends_as_soon_as_it_is_back(team: Team) -> None:
    """What it has sent while nobody could be told is the first thing that it says."""
    one, other = team.members
    second = second_copy(team)
    other.fall_silent()
    other.publish_again(second)
    other.settle(await other.begin(second))
    await asyncio.sleep(1)
    other.come_back()
    other.end()
    await asyncio.sleep(1)

    assert await one.take(first_of(team, second)) == Repeat(None)


@team_of(2)
async def test_it_sends_one_and_ends_as_soon_as_it_is_back(team: Team) -> None:
    """It publishes the end at once, also while something older waits for the next second."""
    one, other = team.members
    second = second_copy(team)
    one.fall_silent()
    one.publish_again(second)
    await asyncio.sleep(0.1)
    one.come_back()
    one.settle(await one.begin(first_of(team, second)))
    await asyncio.sleep(0)
    one.end()
    await asyncio.sleep(1)

    assert await other.take(second) == Repeat(None)


@team_of(2)
async def test_any_other_copy_asks_nobody(team: Team) -> None:
    """Neither a later copy of the same message nor one that is known no more costs a question."""
    one, other = team.members
    second = second_copy(team)
    one.settle(await one.begin(second), sent=False)
    before = len(team.published)
    later = message(team, copies=2, try_of=second.envelope.try_of)
    other.settle(await other.begin(later), sent=False)
    await asyncio.sleep(SENT_SECONDS + 1)
    await other.begin(first_of(team, second))

    assert [kind for _, kind in team.published[before:] if kind == "Questions"] == []


@team_of(2)
async def test_what_a_publisher_wrote_is_told_to_nobody(team: Team) -> None:
    """A header that no bridge writes so might hold anything, and goes no further."""
    one, _ = team.members
    await one.begin(again(team, message(team, copies=1, try_of="+491713920001")))
    team.hire()
    await asyncio.sleep(1)

    assert [kind for _, kind in team.published if kind == "repeated"] == []
