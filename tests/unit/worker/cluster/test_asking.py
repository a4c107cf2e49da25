"""A redelivery that is unknown here: who is asked, how long, and what is done with the answers."""

import asyncio
import gc
import sys

import pytest

from bridge.worker.cluster.messages import Message
from bridge.worker.deduplicator import New, Repeat
from bridge.worker.outcomes import Dead, Retried
from tests.unit.worker.cluster.team import (
    DELAYS_SECONDS,
    HEARD_AFTER_SECONDS,
    MOST_SECONDS,
    Colleague,
    Team,
    again,
    identity,
    kind_of,
    message,
    team_of,
)

WITH_AND_WITHOUT_IDS = pytest.mark.parametrize("message_id", ["m-1", None], ids=["id", "no id"])


@WITH_AND_WITHOUT_IDS
@team_of(2)
async def test_what_another_has_in_flight_is_waited_for(team: Team, message_id: str | None) -> None:
    """It is a repeat once the other worker has sent it, and that one no longer expects it."""
    first, second = team.members
    delivery = message(team, message_id)
    claim = await first.begin(delivery)
    first.lose_connection()
    taking = asyncio.create_task(second.take(again(team, delivery, key="f" * 32)))
    await asyncio.sleep(3)
    assert not taking.done()
    first.settle(claim, acked=False)

    assert await taking == Repeat(None)
    assert not first.deduplicator.expects_redeliveries
    assert team.metrics.redelivery_questions.labels("done").value == 1


@team_of(2)
async def test_a_peer_that_works_on_it_is_waited_for_longer(team: Team) -> None:
    """A POST may take longer than `redelivery_wait`; as long as its worker is heard, it is none."""
    first, second = team.members
    delivery = message(team)
    claim = await first.begin(delivery)
    first.lose_connection()
    taking = asyncio.create_task(second.take(again(team, delivery)))
    await asyncio.sleep(3 * MOST_SECONDS)
    assert not taking.done()
    first.settle(claim, acked=False)

    assert await taking == Repeat(None)


@team_of(2)
async def test_a_peer_that_dies_at_work_is_not_waited_for_for_ever(team: Team) -> None:
    """Who said that it is busy, and is heard no more, has the same time as any other."""
    first, second = team.members
    delivery = message(team)
    await first.begin(delivery)
    first.lose_connection()
    began = team.loop.time()
    taking = asyncio.create_task(second.take(again(team, delivery)))
    await asyncio.sleep(3)
    first.fall_silent()
    assert isinstance(await taking, New)

    assert MOST_SECONDS <= team.loop.time() - began <= MOST_SECONDS + 2


@team_of(1)
async def test_who_is_alone_does_not_wait(team: Team) -> None:
    """Without a peer that was heard in the last minute a redelivery is taken at once."""
    (alone,) = team.members
    began = team.loop.time()
    await alone.begin(again(team, message(team)))

    assert team.loop.time() == began
    assert team.published == [(alone.worker_id, "Join")]


@team_of(3)
async def test_what_nobody_knows_waits_for_the_answers_alone(team: Team) -> None:
    """It is taken as soon as each peer has said that it does not know it."""
    began = team.loop.time()
    await team.members[0].begin(again(team, message(team)))

    assert team.loop.time() - began == pytest.approx(2 * HEARD_AFTER_SECONDS)
    assert team.metrics.redelivery_questions.labels("unknown").value == 1


@team_of(2)
async def test_what_was_asked_for_is_not_kept(team: Team) -> None:
    """Its body, and the session that it came on, are gone with it, though answers may come late."""
    delivery = again(team, message(team))
    references = sys.getrefcount(delivery)
    await team.members[0].begin(delivery)
    gc.collect()

    assert sys.getrefcount(delivery) == references


@team_of(2)
async def test_a_first_delivery_asks_nobody(team: Team) -> None:
    """Only what the broker delivers again is asked for."""
    await team.members[0].begin(message(team))

    assert {kind for _, kind in team.published} <= {"Join", "WorkerState"}


@team_of(2)
async def test_what_is_known_here_is_asked_of_nobody(team: Team) -> None:
    """The own deduplicator comes first."""
    first = team.members[0]
    delivery = message(team)
    first.settle(await first.begin(delivery), acked=False)

    assert isinstance(await first.take(again(team, delivery)), Repeat)
    assert {kind for _, kind in team.published} <= {"Join", "WorkerState"}


@team_of(2)
async def test_a_silent_peer_is_waited_for_so_long(team: Team) -> None:
    """A frozen or killed worker holds a redelivery up for `redelivery_wait` and no longer."""
    first, second = team.members
    first.fall_silent()
    began = team.loop.time()
    await second.begin(again(team, message(team)))

    assert team.loop.time() - began == pytest.approx(MOST_SECONDS, abs=0.1)
    assert team.metrics.redelivery_questions.labels("none").value == 1


@team_of(3)
async def test_who_said_bye_is_not_waited_for(team: Team) -> None:
    """A rolling restart holds nothing up."""
    first, second, _ = team.members
    first.end()
    await asyncio.sleep(1)
    began = team.loop.time()
    await second.begin(again(team, message(team)))

    assert team.loop.time() - began == pytest.approx(2 * HEARD_AFTER_SECONDS)


@team_of(2)
async def test_a_peer_that_comes_back_answers_at_once(team: Team) -> None:
    """It says hello, and is asked again without delay: it had sent the message."""
    first, second = team.members
    delivery = message(team)
    claim = await first.begin(delivery)
    first.lose_connection()
    first.settle(claim, acked=False)
    first.fall_silent()
    taking = asyncio.create_task(second.take(again(team, delivery)))
    await asyncio.sleep(4.5)
    first.come_back()
    back_at = team.loop.time()
    taken, seconds = await taking, team.loop.time() - back_at
    assert taken == Repeat(None)
    assert seconds == pytest.approx(3 * HEARD_AFTER_SECONDS)


def lose(team: Team, kind: str, *, count: int) -> list[str]:
    """Lose the first messages of a kind; return the list of their senders, which it fills."""
    lost: list[str] = []

    def loses(sender: str, message: Message) -> bool:
        is_lost = kind_of(message) == kind and len(lost) < count
        if is_lost:
            lost.append(sender)
        return is_lost

    team.exchange.loses = loses
    return lost


@WITH_AND_WITHOUT_IDS
@pytest.mark.parametrize("kind", ["Questions", "Answers"])
@team_of(2)
async def test_what_is_lost_on_the_way_is_asked_again(
    team: Team, kind: str, message_id: str | None
) -> None:
    """Neither a lost question nor a lost answer makes a second text."""
    first, second = team.members
    lost = lose(team, kind, count=2)
    delivery = message(team, message_id)
    claim = await first.begin(delivery)
    first.lose_connection()
    first.settle(claim, acked=False)

    assert await second.take(again(team, delivery, key="f" * 32)) == Repeat(None)
    assert len(lost) == 2


@team_of(3)
async def test_of_two_equal_texts_one_is_sent(team: Team) -> None:
    """Of two without an id that two workers get again, one was sent by a third, the other was not.

    Whichever of them is taken for the first, one is a repeat and one is sent.
    """
    first, second, third = team.members
    delivery = message(team, None)
    claim = await first.begin(delivery)
    first.lose_connection()
    first.settle(claim, acked=False)
    redelivered = [again(team, delivery, key=key * 32) for key in "ab"]
    takers: list[Colleague] = [second, third]
    taking = [taker.take(one) for taker, one in zip(takers, redelivered, strict=True)]
    taken = await asyncio.gather(*taking)
    assert sorted(type(one).__name__ for one in taken) == ["New", "Repeat"]


@pytest.mark.parametrize("copies", [0, 1])
@team_of(3)
async def test_two_that_ask_for_one_id_send_it_once(team: Team, copies: int) -> None:
    """A message that was published twice, and delivered again to two workers, is sent by one.

    One of the two may have been retried more often.
    """
    first, second, _ = team.members
    delivery = message(team)
    retried = message(team, copies=copies)
    late = asyncio.create_task(second.take(again(team, retried)))
    claim = await first.begin(again(team, delivery))
    await asyncio.sleep(2)
    assert not late.done()
    first.settle(claim)

    assert isinstance(await late, Repeat)


RETRIED = Retried(
    reason="uncertain",
    delay_seconds=5.0,
    detail="no answer",
    status=500,
    counted=True,
    code="17",
    meaning="why",
)
DEAD = Dead(reason="refused", detail="it said no", status=400, counted=True)


@pytest.mark.parametrize("outcome", [None, RETRIED], ids=["sent", "retry"])
@pytest.mark.parametrize("askers", [(0, 1), (2, 3), (3, 0)])
@team_of(4)
async def test_two_equal_texts_that_two_workers_had_in_flight(
    team: Team, askers: tuple[int, int], outcome: Retried | None
) -> None:
    """Whoever is told twice of its one redelivery has the other's answer for who asks as well."""
    takers = [team.members[place] for place in askers]
    senders = [member for member in team.members if member not in takers]
    deliveries = [message(team, None), again(team, message(team, None), key="d" * 32)]
    deliveries[1].redelivered = False
    redelivered = [
        again(team, delivery, key=key * 32) for delivery, key in zip(deliveries, "ab", strict=True)
    ]
    for sender, delivery in zip(senders, deliveries, strict=True):
        claim = await sender.begin(delivery)
        sender.lose_connection()
        if outcome is None:
            sender.settle(claim, acked=False)
        else:
            sender.release(claim, delivery, outcome)
    taking = [taker.take(one) for taker, one in zip(takers, redelivered, strict=True)]
    taken = await asyncio.gather(*taking)
    if outcome is None:
        assert taken == [Repeat(None), Repeat(None)]
        return
    kept = [taker.recall(one) for taker, one in zip(takers, redelivered, strict=True)]
    assert [one and one.outcome for one in kept] == [outcome, outcome]
    assert {one.envelope.key for one in kept if one} == {d.envelope.key for d in deliveries}


@WITH_AND_WITHOUT_IDS
@pytest.mark.parametrize("outcome", [None, RETRIED, DEAD], ids=["undecided", "retry", "dead"])
@team_of(2)
async def test_what_went_back_goes_on_elsewhere(
    team: Team, message_id: str | None, outcome: Retried | Dead | None
) -> None:
    """Its key, its age and what was decided go with it; its former worker forgets it."""
    first, second = team.members
    delivery = message(team, message_id, expires_at=2_000_000_000.0, scheduled_at=1_900_000_000.0)
    redelivered = again(team, delivery, key=None if message_id else "f" * 32)
    first.release(await first.begin(delivery), delivery, outcome)
    first.lose_connection()
    assert isinstance(await second.take(redelivered), New)
    kept = second.recall(redelivered)
    assert kept is not None
    assert kept.outcome == outcome
    assert kept.envelope.key == delivery.envelope.key
    assert kept.envelope.first_delivered_at == pytest.approx(0.0, abs=1)
    assert kept.envelope.expires_at == pytest.approx(2_000_000_000, abs=1)
    assert kept.envelope.scheduled_at == pytest.approx(1_900_000_000, abs=1)
    assert not first.deduplicator.has_released


@team_of(2)
async def test_a_step_that_the_ladder_here_lacks_becomes_the_next_longer_one(team: Team) -> None:
    """During an upgrade that changes the ladder, a copy goes where there is a queue."""
    first, second = team.members
    delivery = message(team)
    redelivered = again(team, delivery)
    outcome = RETRIED._replace(delay_seconds=7.0)
    first.release(await first.begin(delivery), delivery, outcome)
    first.lose_connection()
    await second.begin(redelivered)
    kept = second.recall(redelivered)
    assert kept is not None
    assert isinstance(kept.outcome, Retried)
    assert kept.outcome.delay_seconds == DELAYS_SECONDS[1]


@team_of(3)
async def test_one_that_was_sent_is_not_begun_again_for_what_a_third_knows(team: Team) -> None:
    """Of a message with an id, that it was sent counts more than that it went back before."""
    first, second, third = team.members
    delivery = message(team)
    first.release(await first.begin(delivery), delivery)
    first.lose_connection()
    second.settle(await second.begin(delivery), acked=False)
    second.lose_connection()

    assert await third.take(again(team, delivery)) == Repeat(None)


@team_of(2)
async def test_an_answer_that_comes_too_late_is_learned(team: Team) -> None:
    """Who gave it knows it no more: the redelivery after this one must not be a second text."""
    first, second = team.members
    delivery = message(team, None)
    claim = await first.begin(delivery)
    first.lose_connection()
    first.settle(claim, acked=False)
    taking = asyncio.create_task(second.take(again(team, delivery, key="a" * 32)))
    await asyncio.sleep(1.5 * HEARD_AFTER_SECONDS)
    taking.cancel()  # as when its connection is lost
    await asyncio.sleep(1)

    assert isinstance(await second.take(again(team, delivery, key="b" * 32)), Repeat)


@WITH_AND_WITHOUT_IDS
@team_of(2)
async def test_an_answer_that_is_lost_with_the_connection_is_given_again(
    team: Team, message_id: str | None
) -> None:
    """The peer has handed on its record: the next redelivery must not be a second text."""
    first, second = team.members
    lost = lose(team, "Answers", count=1)
    delivery = message(team, message_id)
    claim = await first.begin(delivery)
    first.lose_connection()
    first.settle(claim, acked=False)
    key = None if message_id else "a" * 32
    taking = asyncio.create_task(second.take(again(team, delivery, key=key)))
    await asyncio.sleep(1.5 * HEARD_AFTER_SECONDS)
    taking.cancel()  # as when its connection is lost
    await asyncio.sleep(0.5)

    assert isinstance(await second.take(again(team, delivery, key=key)), Repeat)
    assert lost == [first.worker_id]


@pytest.mark.parametrize("joins_after_seconds", [-1.0, 3.0])
@team_of(1)
async def test_who_starts_without_a_broker_waits_for_others_to_reconnect(
    team: Team, joins_after_seconds: float
) -> None:
    """It has heard no peer, but one may have sent the message before the broker went away.

    It may consume before it has joined, because these are two connections.
    """
    (first,) = team.members
    newcomer = team.appoint()
    delivery = message(team, "m-1")
    claim = await first.begin(delivery)
    first.fall_silent()
    first.lose_connection()
    first.settle(claim, acked=False)
    await asyncio.sleep(10)
    if joins_after_seconds < 0:
        newcomer.come_back()
    taking = asyncio.create_task(newcomer.take(again(team, delivery)))
    await asyncio.sleep(max(0, joins_after_seconds))
    if joins_after_seconds > 0:
        newcomer.come_back()
    await asyncio.sleep(4)
    first.come_back()
    assert await taking == Repeat(None)

    began = team.loop.time()
    await newcomer.begin(again(team, message(team, "m-2")))
    assert team.loop.time() - began < 1


@WITH_AND_WITHOUT_IDS
@team_of(3)
async def test_what_one_peer_has_said_outlives_the_wait_for_another(
    team: Team, message_id: str | None
) -> None:
    """Who knew it has handed it on; the worker whose connection is lost hands it on in its turn."""
    first, second, third = team.members
    delivery = message(team, message_id)
    redelivered = again(team, delivery, key=None if message_id else "f" * 32)
    first.release(await first.begin(delivery), delivery, RETRIED)
    first.lose_connection()
    third.fall_silent()
    taking = asyncio.create_task(second.take(again(team, delivery, key="a" * 32)))
    await asyncio.sleep(1)
    taking.cancel()  # as when its connection is lost
    (taken,) = await asyncio.gather(taking, return_exceptions=True)
    if isinstance(taken, New):  # without an id, one answer is enough
        assert taken.released is not None
        second.deduplicator.release(taken.in_flight, taken.released)
    third.come_back()
    await third.begin(redelivered)
    kept = third.recall(redelivered)
    assert kept is not None
    assert kept.outcome == RETRIED
    assert kept.envelope.key == delivery.envelope.key


@team_of(2)
async def test_others_are_taken_beside_those_that_wait(team: Team) -> None:
    """When three of four places wait for answers the worker consumes anew, with four more."""
    first, second = team.members
    first.fall_silent()
    renewals = []
    waiting = []
    for n in range(7):
        waiting.append(asyncio.create_task(second.take(again(team, message(team, f"m-{n}")))))
        await asyncio.sleep(0.1)
        renewals.append(second.consumer.renewals)
    await asyncio.gather(*waiting)

    assert renewals == [0, 0, 1, 1, 1, 2, 2]


@team_of(2)
async def test_it_asks_for_a_message_as_long_as_one_of_two_waits(team: Team) -> None:
    """Of two redeliveries that are equal, one that no longer waits leaves the other one's place."""
    first, second = team.members
    first.fall_silent()
    delivery = message(team, None)
    one, other = (asyncio.create_task(second.take(again(team, delivery))) for _ in range(2))
    asks = []
    for waiting in (one, other):
        await asyncio.sleep(1)
        asks.append(identity(delivery) in second.questions._open_entries)
        waiting.cancel()
    await asyncio.sleep(1)

    assert [*asks, identity(delivery) in second.questions._open_entries] == [True, True, False]


@team_of(2)
async def test_many_are_asked_for_in_few_messages(team: Team) -> None:
    """Those of one turn of the event loop go together."""
    first, second = team.members
    redelivered = [again(team, message(team, f"m-{n}")) for n in range(300)]
    await asyncio.gather(*(second.take(one) for one in redelivered))
    kinds = [kind for sender, kind in team.published if sender == second.worker_id]
    assert kinds.count("Questions") == 2
    answers = [kind for sender, kind in team.published if sender == first.worker_id]
    assert answers.count("Answers") == 19
