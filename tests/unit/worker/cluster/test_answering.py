"""What a worker tells of what others were given again, and when it has to make sure first."""

import asyncio
from typing import cast

import pytest

from bridge.amqp.publication import Publication
from bridge.errors import Confirm
from bridge.telemetry.metrics import BridgeMetrics
from bridge.worker.cluster.messages import Answers, Question, Questions, facts_of
from bridge.worker.cluster.questions import MAX_UNPROVEN
from bridge.worker.deduplicator import New, Released, Repeat
from bridge.worker.outcomes import Retried
from tests.unit.worker.cluster.team import Team, again, identity, message, team_of

RETRIED = Retried(reason="uncertain", delay_seconds=5.0, detail="no answer", counted=True)


def new_confirm() -> "asyncio.Future[Confirm]":
    return asyncio.get_running_loop().create_future()


def copy_with(confirm: "asyncio.Future[Confirm]") -> Publication:
    return Publication(cast("BridgeMetrics", None), "default", "q.retry.5s", confirm, 0.0)


@team_of(2)
async def test_two_equal_texts_of_which_one_is_in_flight_here(team: Team) -> None:
    """Without an id, what is in flight on a connection that lives is not what another got again."""
    first, second = team.members
    delivery = message(team, None)
    await first.begin(delivery)

    assert isinstance(await second.take(again(team, delivery, key="f" * 32)), New)


@pytest.mark.parametrize("settled", [False, True], ids=["in flight", "acked"])
@team_of(2)
async def test_a_loss_that_is_not_noticed_yet(team: Team, *, settled: bool) -> None:
    """Nothing is denied before the broker has answered on the connection that consumes.

    What is acked or in flight on it comes again if it is lost, and another worker may ask for that
    before this one has noticed.
    """
    first, second = team.members
    delivery = message(team, None)
    claim = await first.begin(delivery)
    if settled:
        first.settle(claim)
    first.lives_on.clear()
    taking = asyncio.create_task(second.take(again(team, delivery, key="f" * 32)))
    await asyncio.sleep(2.5)
    assert not taking.done()
    first.lose_connection()
    first.lives_on.set()
    await asyncio.sleep(0.5)
    if not settled:
        first.settle(claim, acked=False)

    assert await taking == Repeat(None)


@team_of(2)
async def test_no_more_questions_wait_for_the_broker_than_there_is_room_for(team: Team) -> None:
    """A broker that answers nothing, and peers that ask again and again, take up no memory."""
    first, second = team.members
    delivery = message(team, None)
    await first.begin(delivery)
    first.lives_on.clear()
    before = len(asyncio.all_tasks())
    for number in range(10 * MAX_UNPROVEN):
        facts = facts_of(identity(delivery))
        assert facts is not None
        question = Question(number=number, **facts.model_dump())
        second.tell(Questions(questions=(question,)))
    await asyncio.sleep(1)

    assert len(asyncio.all_tasks()) - before == MAX_UNPROVEN


@team_of(2)
async def test_a_copy_that_may_be_stored_is_waited_for(team: Team) -> None:
    """What was decided is handed on once no confirm of the copy can come, not before."""
    first, second = team.members
    delivery, confirm = message(team), new_confirm()
    redelivered = again(team, delivery)
    claim = await first.begin(delivery)
    kept = Released(delivery.envelope, RETRIED, copy_with(confirm))
    first.deduplicator.release(claim, kept)
    first.lose_connection()
    taking = asyncio.create_task(second.take(redelivered))
    await asyncio.sleep(15)
    assert not taking.done()
    confirm.set_result("error")
    assert isinstance(await taking, New)
    found = second.recall(redelivered)
    assert found is not None
    assert found.outcome == RETRIED
    assert found.replacement is None
    assert found.envelope.has_been_copied


@team_of(2)
async def test_a_copy_is_not_waited_for_by_who_ends(team: Team) -> None:
    """What was decided is handed on at once, and that the copy may be there already."""
    first, second = team.members
    delivery = message(team, None)
    redelivered = again(team, delivery, key="f" * 32)
    kept = Released(delivery.envelope, RETRIED, copy_with(new_confirm()))
    first.deduplicator.release(await first.begin(delivery), kept)
    first.lose_connection()
    first.questions.give_up_copies()
    taking = asyncio.create_task(second.take(redelivered))
    await asyncio.sleep(0.5)
    assert isinstance(taking.result(), New)
    found = second.recall(redelivered)
    assert found is not None
    assert found.outcome == RETRIED
    assert found.envelope.key == "c" * 32
    assert found.envelope.has_been_copied


@team_of(2)
async def test_a_copy_that_is_stored_ends_the_matter(team: Team) -> None:
    """The redelivery is acked: what replaces it is in a queue."""
    first, second = team.members
    delivery, confirm = message(team), new_confirm()
    confirm.set_result("confirmed")
    kept = Released(delivery.envelope, RETRIED, copy_with(confirm))
    first.deduplicator.release(await first.begin(delivery), kept)
    first.lose_connection()

    assert await second.take(again(team, delivery)) == Repeat(None)


@team_of(2)
async def test_only_who_was_asked_by_learns(team: Team) -> None:
    """An answer to another worker is none of this one's."""
    first, second = team.members
    delivery = message(team)
    claim = await first.begin(delivery)
    first.settle(claim, acked=False)
    first.tell(Answers(to="0" * 16, answers=()))

    assert await second.take(again(team, delivery)) == Repeat(None)
