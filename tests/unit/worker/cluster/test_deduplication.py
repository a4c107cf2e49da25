"""Messages that a publisher sent twice, and that two workers receive: which one is sent."""

import asyncio
from functools import partial

import pytest

from bridge.worker.cluster.deduplication import (
    MAX_RECENT_SECONDS,
    REPORT_SECONDS,
)
from bridge.worker.cluster.membership import MESSAGE_SECONDS
from bridge.worker.cluster.messages import Message, Recent, RecentQuestion, Report
from bridge.worker.cluster.questions import BUSY_SECONDS
from bridge.worker.deduplicator import New, Repeat, WaitForOriginal
from tests.unit.worker.cluster.team import HEARD_AFTER_SECONDS, Team, again, message, team_of

WINDOW_SECONDS = 60.0
# The longest time until a worker's report has reached the others.
TOLD_SECONDS = REPORT_SECONDS + HEARD_AFTER_SECONDS + 0.001
deduplicating = partial(team_of, window_seconds=WINDOW_SECONDS)


async def send(team: Team, worker: int, message_id: str | None = "m-1") -> None:
    """Let one worker send a message, and report it to the others."""
    sender = team.members[worker]
    sender.settle(await sender.begin(message(team, message_id)))
    await asyncio.sleep(TOLD_SECONDS)


@deduplicating(3)
async def test_what_a_peer_has_sent_is_a_repeat(team: Team) -> None:
    """It is answered like the first, without the service's id, which is not reported."""
    await send(team, 0)
    taken = [await team.members[other].take(message(team)) for other in (1, 2)]

    assert isinstance(taken[0], Repeat)
    assert taken[0].first is not None
    assert taken[0] == taken[1]
    assert taken[0].first[:3] == (1, 202, None)
    assert taken[0].first.at == pytest.approx(1000, abs=1)


@deduplicating(2)
async def test_another_body_or_no_id_is_another_message(team: Team) -> None:
    """Only a message with the same id is the same; one without an id is not reported."""
    await send(team, 0, None)
    said = list(team.published)
    await send(team, 0)
    others = [message(team, "m-2"), message(team, None)]
    said, *taken = [said, *[type(await team.members[1].take(one)) for one in others]]
    assert "Report" not in {kind for _, kind in said}
    assert taken == [New, New]


@pytest.mark.parametrize(
    ("seconds", "taken"), [(WINDOW_SECONDS - 1, Repeat), (WINDOW_SECONDS + 0.1, New)]
)
@pytest.mark.parametrize("worker", [0, 1], ids=["itself", "another"])
@deduplicating(2)
async def test_the_window_is_the_same_for_all(
    team: Team, seconds: float, taken: type, worker: int
) -> None:
    """After the window a message is sent again, also by the worker that sent the first."""
    await send(team, 0)
    await asyncio.sleep(seconds - TOLD_SECONDS)

    assert type(await team.members[worker].take(message(team))) is taken


@deduplicating(1)
async def test_a_redelivery_is_known_beyond_the_window(team: Team) -> None:
    """A redelivery after a lost ack is no second message of the publisher."""
    await send(team, 0)
    await asyncio.sleep(2 * WINDOW_SECONDS)

    assert type(await team.members[0].take(again(team, message(team)))) is Repeat


@pytest.mark.parametrize(("sent", "taken"), [(True, Repeat), (False, New)])
@deduplicating(2)
async def test_what_a_peer_has_in_flight_is_waited_for(
    team: Team, taken: type, *, sent: bool
) -> None:
    """The second is a repeat once the first is sent; after a copy or a dead letter it is new."""
    first, second = team.members
    claim = await first.begin(message(team))
    await asyncio.sleep(4 * BUSY_SECONDS)
    taking = asyncio.create_task(second.take(message(team)))
    await asyncio.sleep(4 * BUSY_SECONDS)
    assert not taking.done()
    first.settle(claim, sent=sent)
    ended_at = team.loop.time()
    found, seconds = await taking, team.loop.time() - ended_at
    assert type(found) is taken
    assert seconds <= TOLD_SECONDS


@pytest.mark.parametrize("is_sent", [True, False], ids=["sent", "in_flight"])
@deduplicating(2)
async def test_reports_that_were_lost_with_the_connection_are_made_again(
    team: Team, *, is_sent: bool
) -> None:
    """A worker that joins again reports anew what it has in flight, and what it sent lately."""
    first, second = team.members
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

    assert isinstance(await taking, Repeat)


@deduplicating(2)
async def test_a_peer_that_dies_is_waited_for_some_seconds(team: Team) -> None:
    """Then the other worker sends the equal message that it received."""
    first, second = team.members
    await first.begin(message(team))
    await asyncio.sleep(TOLD_SECONDS)
    first.fall_silent()
    began = team.loop.time()
    await second.begin(message(team))

    assert team.loop.time() - began <= BUSY_SECONDS + 1


@deduplicating(2)
async def test_a_peer_that_has_left_is_not_waited_for(team: Team) -> None:
    """It has nothing in flight, even if its last report was lost."""
    first, second = team.members
    await first.begin(message(team))
    await asyncio.sleep(TOLD_SECONDS)
    first.end()
    await asyncio.sleep(1)
    await asyncio.sleep(TOLD_SECONDS)
    began = team.loop.time()
    await second.begin(message(team))

    assert team.loop.time() - began == 0


@deduplicating(3)
async def test_of_two_that_have_it_the_other_is_waited_for(team: Team) -> None:
    """One of two has released the message; the other still has it in flight."""
    first, second, third = team.members
    claims = [await worker.begin(message(team)) for worker in (first, second)]
    await asyncio.sleep(TOLD_SECONDS)
    first.settle(claims[0], sent=False)
    await asyncio.sleep(TOLD_SECONDS)
    taking = asyncio.create_task(third.take(message(team)))
    await asyncio.sleep(2)
    assert not taking.done()
    second.settle(claims[1])

    assert isinstance(await taking, Repeat)


@deduplicating(2)
async def test_what_is_taken_again_at_once_is_in_hand(team: Team) -> None:
    """If a report contains a message as ended and as taken, it is in flight."""
    first, second = team.members
    await send(team, 0, "m-2")
    first.settle(await first.begin(message(team)), sent=False)
    claim = await first.begin(message(team))
    await asyncio.sleep(TOLD_SECONDS)
    taking = asyncio.create_task(second.take(message(team)))
    await asyncio.sleep(2)
    assert not taking.done()
    first.settle(claim)

    assert isinstance(await taking, Repeat)


@deduplicating(3)
async def test_workers_that_start_together_ask_each_other_once(team: Team) -> None:
    """None of them knows all messages, and each answers each other one once."""
    await asyncio.sleep(2 * MAX_RECENT_SECONDS)

    assert [kind for _, kind in team.published].count("RecentQuestion") == 6


@deduplicating(2)
async def test_none_waits_in_a_pause(team: Team) -> None:
    """A delivery that waits when a pause begins is put off within a second."""
    first, second = team.members
    await first.begin(message(team))
    await asyncio.sleep(TOLD_SECONDS)
    taking = asyncio.create_task(second.take(message(team)))
    await asyncio.sleep(5)
    second.may_wait = False
    paused_at = team.loop.time()
    taken, seconds = await taking, team.loop.time() - paused_at
    assert (taken, seconds <= 1) == (WaitForOriginal(None, is_redelivery=False), True)


@pytest.mark.parametrize("sent", [True, False])
@deduplicating(2)
async def test_a_lost_end_is_asked_for(team: Team, *, sent: bool) -> None:
    """A waiting worker asks each second; an end without an acceptance is not repeated."""
    first, second = team.members
    claim = await first.begin(message(team))
    await asyncio.sleep(TOLD_SECONDS)
    taking = asyncio.create_task(second.take(message(team)))
    await asyncio.sleep(1.5)
    team.exchange.loses = lambda sender, _message: sender == first.worker_id
    first.settle(claim, sent=sent)
    await asyncio.sleep(2 * REPORT_SECONDS)
    team.exchange.loses = lambda _sender, _message: False
    ended_at = team.loop.time()
    taken, seconds = await taking, team.loop.time() - ended_at
    assert type(taken) is (Repeat if sent else New)
    assert seconds <= (1.1 if sent else BUSY_SECONDS + 1.1)


@deduplicating(2)
async def test_many_are_told_in_few_messages(team: Team) -> None:
    """A thousand messages in a tenth of a second need a few reports, not a thousand."""
    first, second = team.members
    for number in range(1000):
        first.settle(await first.begin(message(team, f"m-{number}")))
        if number % 10 == 0:
            await asyncio.sleep(0.001)
    await asyncio.sleep(TOLD_SECONDS)

    taken = {type(await second.take(message(team, f"m-{number}"))) for number in range(1000)}
    assert taken == {Repeat}
    assert len([kind for _, kind in team.published if kind == "Report"]) < 12


@deduplicating(1)
async def test_who_is_alone_says_nothing(team: Team) -> None:
    """A single worker reports nothing, and keeps nothing to report."""
    await send(team, 0)

    assert {kind for _, kind in team.published} <= {"Join", "WorkerState"}


@deduplicating(2)
async def test_a_newcomer_learns_what_was_sent(team: Team) -> None:
    """Including messages of a worker that is gone; the answer has ages, not times."""
    first = team.members[0]
    await asyncio.sleep(MAX_RECENT_SECONDS + 2)
    for number in range(1000):
        first.settle(await first.begin(message(team, f"m-{number}")))
    await asyncio.sleep(1)
    first.fall_silent()
    await asyncio.sleep(WINDOW_SECONDS - 10)
    newcomer = team.hire()
    await asyncio.sleep(2)
    known = {type(await newcomer.take(message(team, f"m-{n}"))) for n in range(1000)}
    await asyncio.sleep(10)

    assert known == {Repeat}
    assert isinstance(await newcomer.take(message(team, "m-0")), New)


@pytest.mark.parametrize("lost", [RecentQuestion, Recent])
@deduplicating(1)
async def test_a_newcomer_asks_again_until_it_is_answered(team: Team, lost: type[Message]) -> None:
    """A question or a part of its answer may be lost, and the only peer is asked once more."""
    await asyncio.sleep(MAX_RECENT_SECONDS + 2)
    await send(team, 0)
    team.exchange.loses = lambda _sender, sent: isinstance(sent, lost)
    newcomer = team.hire()
    await asyncio.sleep(1.5)
    team.exchange.loses = lambda _sender, _message: False
    await asyncio.sleep(MAX_RECENT_SECONDS / 2)

    assert isinstance(await newcomer.take(message(team)), Repeat)


@pytest.mark.parametrize("is_sent", [True, False], ids=["sent", "in_flight"])
@deduplicating(2)
async def test_a_frozen_worker_learns_what_it_missed(team: Team, *, is_sent: bool) -> None:
    """The broker keeps no message for it for longer than some seconds; it asks as a newcomer."""
    first, second = team.members
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

    assert isinstance(await taking, Repeat)


@deduplicating(2)
async def test_a_newcomer_is_told_what_is_in_flight(team: Team) -> None:
    """It waits for a message that was in flight before it joined."""
    claim = await team.members[0].begin(message(team))
    await asyncio.sleep(1)
    newcomer = team.hire()
    await asyncio.sleep(2 * TOLD_SECONDS)
    taking = asyncio.create_task(newcomer.take(message(team)))
    await asyncio.sleep(5)
    assert not taking.done()
    team.members[0].settle(claim)

    assert isinstance(await taking, Repeat)


@deduplicating(2)
async def test_what_was_sent_elsewhere_is_acked_silently_when_it_is_the_same_delivery(
    team: Team,
) -> None:
    """A redelivery of a sent message has been answered; a second message with its id has not."""
    first, second = team.members
    delivery = message(team)
    claim = await first.begin(delivery)
    first.lose_connection()
    first.settle(claim, acked=False)
    await asyncio.sleep(TOLD_SECONDS)
    same, other = [await second.take(again(team, delivery)), await second.take(message(team))]
    assert same == Repeat(None)
    assert isinstance(other, Repeat)
    assert other.first is not None
