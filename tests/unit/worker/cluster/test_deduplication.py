"""Messages that a publisher sent twice, and that two workers receive: which one is sent."""

import asyncio
from collections.abc import Callable, Iterator

import pytest

from bridge.worker.cluster.deduplication import (
    MAX_RECENT_SECONDS,
    REPORT_SECONDS,
)
from bridge.worker.cluster.membership import MESSAGE_SECONDS
from bridge.worker.cluster.messages import Message, Recent, RecentQuestion, Report
from bridge.worker.cluster.questions import BUSY_SECONDS
from bridge.worker.deduplicator import New, Repeat, WaitForOriginal
from tests.unit.worker.cluster.team import HEARD_AFTER_SECONDS, Team, again, message

WINDOW_SECONDS = 60.0
# The longest time until a worker's report has reached the others.
TOLD_SECONDS = REPORT_SECONDS + HEARD_AFTER_SECONDS + 0.001
MakeTeam = Callable[[int], Team]


@pytest.fixture
def make_team() -> Iterator[MakeTeam]:
    """Make teams whose workers deduplicate, and end them."""
    teams: list[Team] = []

    def make(size: int) -> Team:
        teams.append(Team(size, window_seconds=WINDOW_SECONDS))
        return teams[-1]

    yield make
    for team in teams:
        team.close()


async def send(team: Team, worker: int, message_id: str | None = "m-1") -> None:
    """Let one worker send a message, and report it to the others."""
    sender = team.members[worker]
    sender.settle(await sender.begin(message(team, message_id)))
    await asyncio.sleep(TOLD_SECONDS)


def test_what_a_peer_has_sent_is_a_repeat(make_team: MakeTeam) -> None:
    """It is answered like the first, without the service's id, which is not reported."""
    team = make_team(3)

    async def story() -> list[object]:
        await send(team, 0)
        return [await team.members[other].take(message(team)) for other in (1, 2)]

    taken = team.play(story())
    assert taken[0] == taken[1]
    assert taken[0].first[:3] == (1, 202, None)
    assert taken[0].first.at == pytest.approx(1000, abs=1)


def test_another_body_or_no_id_is_another_message(make_team: MakeTeam) -> None:
    """Only a message with the same id is the same; one without an id is not reported."""
    team = make_team(2)

    async def story() -> list[object]:
        await send(team, 0, None)
        said = list(team.published)
        await send(team, 0)
        others = [message(team, "m-2"), message(team, None)]
        return [said, *[type(await team.members[1].take(one)) for one in others]]

    said, *taken = team.play(story())
    assert "Report" not in {kind for _, kind in said}
    assert taken == [New, New]


@pytest.mark.parametrize(
    ("seconds", "taken"), [(WINDOW_SECONDS - 1, Repeat), (WINDOW_SECONDS + 0.1, New)]
)
@pytest.mark.parametrize("worker", [0, 1], ids=["itself", "another"])
def test_the_window_is_the_same_for_all(
    make_team: MakeTeam, seconds: float, taken: type, worker: int
) -> None:
    """After the window a message is sent again, also by the worker that sent the first."""
    team = make_team(2)

    async def story() -> object:
        await send(team, 0)
        await asyncio.sleep(seconds - TOLD_SECONDS)
        return await team.members[worker].take(message(team))

    assert type(team.play(story())) is taken


def test_a_redelivery_is_known_beyond_the_window(make_team: MakeTeam) -> None:
    """A redelivery after a lost ack is no second message of the publisher."""
    team = make_team(1)

    async def story() -> object:
        await send(team, 0)
        await asyncio.sleep(2 * WINDOW_SECONDS)
        return await team.members[0].take(again(team, message(team)))

    assert type(team.play(story())) is Repeat


@pytest.mark.parametrize(("sent", "taken"), [(True, Repeat), (False, New)])
def test_what_a_peer_has_in_flight_is_waited_for(
    make_team: MakeTeam, taken: type, *, sent: bool
) -> None:
    """The second is a repeat once the first is sent; after a copy or a dead letter it is new."""
    team = make_team(2)
    first, second = team.members

    async def story() -> tuple[object, float]:
        claim = await first.begin(message(team))
        await asyncio.sleep(4 * BUSY_SECONDS)
        taking = asyncio.create_task(second.take(message(team)))
        await asyncio.sleep(4 * BUSY_SECONDS)
        assert not taking.done()
        first.settle(claim, sent=sent)
        ended_at = team.loop.time()
        return await taking, team.loop.time() - ended_at

    found, seconds = team.play(story())
    assert type(found) is taken
    assert seconds <= TOLD_SECONDS


def test_what_went_back_is_no_longer_waited_for(make_team: MakeTeam) -> None:
    """When a peer returns its delivery to the queue, the second one is tried."""
    team = make_team(2)
    first, second = team.members

    async def story() -> object:
        delivery = message(team)
        claim = await first.begin(delivery)
        await asyncio.sleep(TOLD_SECONDS)
        taking = asyncio.create_task(second.take(message(team)))
        await asyncio.sleep(1)
        first.release(claim, delivery)
        return await taking

    assert isinstance(team.play(story()), New)


@pytest.mark.parametrize("is_sent", [True, False], ids=["sent", "in_flight"])
def test_reports_that_were_lost_with_the_connection_are_made_again(
    make_team: MakeTeam, *, is_sent: bool
) -> None:
    """A worker that joins again reports anew what it has in flight, and what it sent lately."""
    team = make_team(2)
    first, second = team.members

    async def story() -> bool:
        team.exchange.loses = lambda _sender, sent: isinstance(sent, Report)
        claim = await first.begin(message(team))
        if is_sent:
            first.settle(claim)
        await asyncio.sleep(30)
        first.fall_silent()
        team.exchange.loses = lambda _sender, _message: False
        await asyncio.sleep(5)
        first.come_back()
        await asyncio.sleep(1)
        taking = asyncio.create_task(second.take(message(team)))
        await asyncio.sleep(1)
        if not is_sent:
            assert not taking.done()
            first.settle(claim)
        return isinstance(await taking, Repeat)

    assert team.play(story())


def test_a_peer_that_dies_is_waited_for_some_seconds(make_team: MakeTeam) -> None:
    """Then the other worker sends the equal message that it received."""
    team = make_team(2)
    first, second = team.members

    async def story() -> float:
        await first.begin(message(team))
        await asyncio.sleep(TOLD_SECONDS)
        first.fall_silent()
        began = team.loop.time()
        await second.begin(message(team))
        return team.loop.time() - began

    assert team.play(story()) <= BUSY_SECONDS + 1


def test_a_peer_that_has_left_is_not_waited_for(make_team: MakeTeam) -> None:
    """It has nothing in flight, even if its last report was lost."""
    team = make_team(2)
    first, second = team.members

    async def story() -> float:
        await first.begin(message(team))
        await asyncio.sleep(TOLD_SECONDS)
        first.end()
        await asyncio.sleep(1)
        await asyncio.sleep(TOLD_SECONDS)
        began = team.loop.time()
        await second.begin(message(team))
        return team.loop.time() - began

    assert team.play(story()) == 0


def test_of_two_that_have_it_the_other_is_waited_for(make_team: MakeTeam) -> None:
    """One of two has released the message; the other still has it in flight."""
    team = make_team(3)
    first, second, third = team.members

    async def story() -> object:
        claims = [await worker.begin(message(team)) for worker in (first, second)]
        await asyncio.sleep(TOLD_SECONDS)
        first.settle(claims[0], sent=False)
        await asyncio.sleep(TOLD_SECONDS)
        taking = asyncio.create_task(third.take(message(team)))
        await asyncio.sleep(2)
        assert not taking.done()
        second.settle(claims[1])
        return await taking

    assert isinstance(team.play(story()), Repeat)


def test_what_is_taken_again_at_once_is_in_hand(make_team: MakeTeam) -> None:
    """If a report contains a message as ended and as taken, it is in flight."""
    team = make_team(2)
    first, second = team.members

    async def story() -> object:
        await send(team, 0, "m-2")
        first.settle(await first.begin(message(team)), sent=False)
        claim = await first.begin(message(team))
        await asyncio.sleep(TOLD_SECONDS)
        taking = asyncio.create_task(second.take(message(team)))
        await asyncio.sleep(2)
        assert not taking.done()
        first.settle(claim)
        return await taking

    assert isinstance(team.play(story()), Repeat)


def test_workers_that_start_together_ask_each_other_once(make_team: MakeTeam) -> None:
    """None of them knows all messages, and each answers each other one once."""
    team = make_team(3)
    team.play(asyncio.sleep(2 * MAX_RECENT_SECONDS))

    assert [kind for _, kind in team.published].count("RecentQuestion") == 6


def test_none_waits_in_a_pause(make_team: MakeTeam) -> None:
    """A delivery that waits when a pause begins is put off within a second."""
    team = make_team(2)
    first, second = team.members

    async def story() -> tuple[object, float]:
        await first.begin(message(team))
        await asyncio.sleep(TOLD_SECONDS)
        taking = asyncio.create_task(second.take(message(team)))
        await asyncio.sleep(5)
        second.may_wait = False
        paused_at = team.loop.time()
        return await taking, team.loop.time() - paused_at

    taken, seconds = team.play(story())
    assert (taken, seconds <= 1) == (WaitForOriginal(None, is_redelivery=False), True)


@pytest.mark.parametrize("sent", [True, False])
def test_a_lost_end_is_asked_for(make_team: MakeTeam, *, sent: bool) -> None:
    """A waiting worker asks each second; an end without an acceptance is not repeated."""
    team = make_team(2)
    first, second = team.members

    async def story() -> tuple[object, float]:
        claim = await first.begin(message(team))
        await asyncio.sleep(TOLD_SECONDS)
        taking = asyncio.create_task(second.take(message(team)))
        await asyncio.sleep(1.5)
        team.exchange.loses = lambda sender, _message: sender == first.worker_id
        first.settle(claim, sent=sent)
        await asyncio.sleep(2 * REPORT_SECONDS)
        team.exchange.loses = lambda _sender, _message: False
        ended_at = team.loop.time()
        return await taking, team.loop.time() - ended_at

    taken, seconds = team.play(story())
    assert type(taken) is (Repeat if sent else New)
    assert seconds <= (1.1 if sent else BUSY_SECONDS + 1.1)


def test_many_are_told_in_few_messages(make_team: MakeTeam) -> None:
    """A thousand messages in a tenth of a second need a few reports, not a thousand."""
    team = make_team(2)
    first, second = team.members

    async def story() -> list[object]:
        for number in range(1000):
            first.settle(await first.begin(message(team, f"m-{number}")))
            if number % 10 == 0:
                await asyncio.sleep(0.001)
        await asyncio.sleep(TOLD_SECONDS)
        return [await second.take(message(team, f"m-{number}")) for number in range(1000)]

    assert {type(one) for one in team.play(story())} == {Repeat}
    assert len([kind for _, kind in team.published if kind == "Report"]) < 12


def test_who_is_alone_says_nothing(make_team: MakeTeam) -> None:
    """A single worker reports nothing, and keeps nothing to report."""
    team = make_team(1)
    team.play(send(team, 0))

    assert {kind for _, kind in team.published} <= {"Join", "WorkerState"}


@pytest.mark.parametrize("count", [1, 1000])
def test_a_newcomer_learns_what_was_sent(make_team: MakeTeam, count: int) -> None:
    """Including messages of a worker that is gone; the answer has ages, not times."""
    team = make_team(2)

    async def story() -> list[object]:
        await asyncio.sleep(MAX_RECENT_SECONDS + 2)
        for number in range(count):
            first = team.members[0]
            first.settle(await first.begin(message(team, f"m-{number}")))
        await asyncio.sleep(1)
        team.members[0].fall_silent()
        await asyncio.sleep(WINDOW_SECONDS - 10)
        newcomer = team.hire()
        await asyncio.sleep(2)
        known = {type(await newcomer.take(message(team, f"m-{n}"))) for n in range(count)}
        await asyncio.sleep(10)
        return [known, type(await newcomer.take(message(team, "m-0")))]

    assert team.play(story()) == [{Repeat}, New]


@pytest.mark.parametrize("lost", [RecentQuestion, Recent])
def test_a_newcomer_asks_again_until_it_is_answered(
    make_team: MakeTeam, lost: type[Message]
) -> None:
    """A question or a part of its answer may be lost, and the only peer is asked once more."""
    team = make_team(1)

    async def story() -> object:
        await asyncio.sleep(MAX_RECENT_SECONDS + 2)
        await send(team, 0)
        team.exchange.loses = lambda _sender, sent: isinstance(sent, lost)
        newcomer = team.hire()
        await asyncio.sleep(1.5)
        team.exchange.loses = lambda _sender, _message: False
        await asyncio.sleep(MAX_RECENT_SECONDS / 2)
        return await newcomer.take(message(team))

    assert isinstance(team.play(story()), Repeat)


@pytest.mark.parametrize("is_sent", [True, False], ids=["sent", "in_flight"])
def test_a_frozen_worker_learns_what_it_missed(make_team: MakeTeam, *, is_sent: bool) -> None:
    """The broker keeps no message for it for longer than some seconds; it asks as a newcomer."""
    team = make_team(2)
    first, second = team.members

    async def story() -> object:
        await asyncio.sleep(MAX_RECENT_SECONDS + 2)
        second.is_frozen = True
        team.exchange.loses = lambda _sender, sent: isinstance(sent, Report)
        claim = await first.begin(message(team))
        if is_sent:
            first.settle(claim)
        await asyncio.sleep(MESSAGE_SECONDS + 2)
        team.exchange.loses = lambda _sender, _message: False
        second.is_frozen = False
        await asyncio.sleep(2)
        taking = asyncio.create_task(second.take(message(team)))
        await asyncio.sleep(1)
        if not is_sent:
            assert not taking.done()
            first.settle(claim)
        return await taking

    assert isinstance(team.play(story()), Repeat)


def test_a_newcomer_is_told_what_is_in_flight(make_team: MakeTeam) -> None:
    """It waits for a message that was in flight before it joined."""
    team = make_team(2)

    async def story() -> object:
        claim = await team.members[0].begin(message(team))
        await asyncio.sleep(1)
        newcomer = team.hire()
        await asyncio.sleep(2 * TOLD_SECONDS)
        taking = asyncio.create_task(newcomer.take(message(team)))
        await asyncio.sleep(5)
        assert not taking.done()
        team.members[0].settle(claim)
        return await taking

    assert isinstance(team.play(story()), Repeat)


def test_what_was_sent_in_silence_is_told_afterwards(make_team: MakeTeam) -> None:
    """A worker without a connection reports afterwards which messages it sent meanwhile."""
    team = make_team(2)
    first, second = team.members

    async def story() -> object:
        await asyncio.sleep(MAX_RECENT_SECONDS + 2)
        first.fall_silent()
        await send(team, 0)
        first.come_back()
        await asyncio.sleep(2)
        return await second.take(message(team))

    assert isinstance(team.play(story()), Repeat)


def test_what_was_sent_elsewhere_is_acked_silently_when_it_is_the_same_delivery(
    make_team: MakeTeam,
) -> None:
    """A redelivery of a sent message has been answered; a second message with its id has not."""
    team = make_team(2)
    first, second = team.members

    async def story() -> list[object]:
        delivery = message(team)
        claim = await first.begin(delivery)
        first.lose_connection()
        first.settle(claim, acked=False)
        await asyncio.sleep(TOLD_SECONDS)
        return [await second.take(again(team, delivery)), await second.take(message(team))]

    same, other = team.play(story())
    assert same == Repeat(None)
    assert isinstance(other, Repeat)
    assert other.first is not None
