"""The end of each delivery: its copy is confirmed, who asked is told, and it is acked once.

All run on an event loop whose time leaps to the next timer; the broker is a publisher that fails
as it is told.
"""

import asyncio
import random
from collections.abc import Iterator
from typing import cast, get_args

import pytest

from bridge.amqp.frames import LARGE_BODY_BYTES
from bridge.amqp.properties import Properties
from bridge.amqp.publication import READ_ITERATIONS
from bridge.amqp.publisher import Publisher
from bridge.config import WorkerSettings
from bridge.errors import BrokerError, Confirm, CopyRefusedError, Refusal
from bridge.worker import envelope
from bridge.worker.deduplicator import (
    MAX_SET_ASIDE,
    Deduplicator,
    MessageIdentity,
    New,
    Released,
)
from bridge.worker.delivery import Delivery, WaitCause
from bridge.worker.outcomes import Dead, Outcome, Retried, Sent
from bridge.worker.settle import MAX_UNCONFIRMED_SECONDS, Settler
from tests.breakers import Parts
from tests.clock import LeapingWorld, in_world
from tests.deliveries import make_delivery
from tests.ears import Ears
from tests.unit.worker.stand_ins import PUBLISH_SECONDS, Broker, Channel, nobody_told

BODY = b'{"to":"+491713920001","from":"Acme","text":"Hi"}'
AT = 1_800_000_000.123
SENT = Sent(202, provider_id="sms-1")
COUNTED = Retried("server_error", 5.0, "the SMS API answered 500", status=500, counted=True)
SPARED = Retried("paused", 30.0, "paused")
DEAD = Dead("refused", "the SMS API answered 400", status=400, counted=True, code="21211")
UNSENT = Dead("expired", "too late")


class World(LeapingWorld):
    """A settler between a broker, a circuit breaker and a channel."""

    def __init__(self) -> None:
        super().__init__()
        self.broker = Broker(self.loop)
        self.channel = Channel()
        self.pauses = Parts(WorkerSettings(), self.metrics, clock=self.loop.time).pauses
        self.deduplicator = Deduplicator(heartbeat_seconds=10)
        self.settler = Settler(
            WorkerSettings(queue="q"),
            publisher=cast("Publisher", self.broker),
            pauses=self.pauses,
            repeated_copies=nobody_told(self.metrics),
            deduplicator=self.deduplicator,
            metrics=self.metrics,
        )

    def delivery(self, *, redelivered: bool = False, body: bytes = BODY) -> Delivery:
        """Take a delivery of a message that was tried twice, once without a clear end."""
        return make_delivery(
            body=body,
            properties=Properties(message_id="m-1"),
            redelivered=redelivered,
            session=self.channel,
            clock=self.loop.time,
            attempts=2,
            uncertain_attempts=1,
            trace=(("traceparent", "00-t"),),
        )

    def fill_set_aside(self) -> None:
        identity = MessageIdentity(b"other", has_id=False, copies=0)
        released = Released(self.delivery().envelope, UNSENT)
        for _ in range(MAX_SET_ASIDE):
            verdict = self.deduplicator.claim(identity, redelivered=False)
            assert isinstance(verdict, New)
            self.deduplicator.set_aside(verdict.in_flight, released)

    def replace(self, outcome: Retried | Dead) -> float:
        """Publish what an outcome asks for, and return after how long it was confirmed."""
        return self.seconds(self.settler.replace(self.delivery(), outcome))

    def processed(self, outcome: str, reason: str) -> float | None:
        return self.value("messages_processed_total", queue="q", outcome=outcome, reason=reason)

    def waits(self, what: str, cause: str) -> float | None:
        """Return the number or the sum of the waits for a cause."""
        return self.value(f"wait_duration_seconds_{what}", queue="q", cause=cause)


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


@pytest.fixture
def longest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave nothing to chance: each wait is as long as it may be."""
    monkeypatch.setattr(random, "uniform", lambda low, high: high if low == 0 else -1)


# The copy


@pytest.mark.parametrize(
    ("outcome", "queue", "attempts", "uncertain"),
    [
        (COUNTED, "q.retry.5s", 3, 1),
        (COUNTED._replace(uncertain=True), "q.retry.5s", 3, 2),
        (SPARED, "q.retry.30s", 2, 1),
        (SPARED._replace(uncertain=True), "q.retry.30s", 2, 2),
        (DEAD, "q.dead", 3, 1),
        (DEAD._replace(uncertain=True), "q.dead", 3, 2),
        (UNSENT, "q.dead", 2, 1),
    ],
)
def test_a_copy_goes_to_its_queue(
    world: World, outcome: Retried | Dead, queue: str, attempts: int, uncertain: int
) -> None:
    """It has the body, why it is there, and the attempts, this one only if it counts."""
    world.replace(outcome)
    (copy,) = world.broker.published

    assert (copy.body, copy.exchange, copy.routing_key) == (BODY, "", queue)
    assert copy.properties.message_id == "m-1"
    assert copy.header(envelope.REASON) == outcome.reason
    assert copy.header(envelope.DETAIL) == outcome.detail
    assert copy.header(envelope.STATUS) == outcome.status
    assert copy.header(envelope.ATTEMPTS) == attempts
    assert copy.header(envelope.UNCERTAIN_ATTEMPTS) == uncertain
    assert (copy.header(envelope.DEAD_AT) is not None) == isinstance(outcome, Dead)


@in_world
async def test_a_copy_fits_what_the_broker_takes_now(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another broker may take less: each try asks how much."""
    delivery = world.delivery()
    delivery.properties.headers = {"large": "x" * 5000}
    world.broker.faults = ["timeout"]
    replacing = asyncio.create_task(world.settler.replace(delivery, UNSENT))
    await asyncio.sleep(0.1)
    monkeypatch.setattr(world.broker, "max_properties_bytes", 4000)
    await replacing
    (copy,) = world.broker.published

    assert copy.header("large") is None


@pytest.mark.usefixtures("longest")
@pytest.mark.parametrize(
    ("outcome", "seconds"),
    [
        (COUNTED._replace(delay_seconds=2.0), 0.4),
        (COUNTED, 1.0),
        (COUNTED._replace(delay_seconds=3600.0), 1.0),
        (SPARED, 0),
        (DEAD, 0),
    ],
)
def test_messages_that_failed_together_come_back_apart(
    world: World, outcome: Retried | Dead, seconds: float
) -> None:
    """A copy for a retry waits at most a fifth of its step, and a second, if an attempt failed."""
    assert world.replace(outcome) == pytest.approx(seconds)


@pytest.mark.usefixtures("longest")
def test_a_worker_that_stops_spreads_nothing(world: World) -> None:
    """Waits that only spread the load end when the worker stops, those that have begun too."""

    async def stop() -> None:
        replacing = asyncio.create_task(world.settler.replace(world.delivery(), COUNTED))
        await asyncio.sleep(0.1)
        world.settler.hurry()
        await replacing

    assert world.seconds(stop()) == pytest.approx(0.1)
    assert world.replace(COUNTED) == 0
    assert len(world.broker.published) == 2


# A broker that takes nothing


@pytest.mark.parametrize("is_blocked", [False, True])
def test_a_copy_is_tried_until_it_is_confirmed(
    world: World, ears: Ears, *, is_blocked: bool
) -> None:
    """Each failure is logged, and the waits between the tries double up to 5 s, in an alarm too."""
    world.broker.is_blocked = is_blocked
    world.broker.faults = ["error", "timeout", "nacked", "error", "timeout", "timeout"]

    assert world.replace(UNSENT) == pytest.approx(0.5 + 1 + 2 + 4 + 5 + 5)
    assert len(world.broker.published) == 1
    assert [line["fault"] for line in ears.heard("publish_failed")] == [
        *("error", "timeout", "nacked", "error", "timeout", "timeout"),
    ]
    assert ears.heard("publish_failed")[1]["why"] == "timeout"
    assert not world.settler.queue_missing.is_set()


def test_a_copy_that_no_queue_takes_calls_for_the_queue(world: World) -> None:
    """A copy that is returned has no queue, which can be declared again."""
    world.broker.faults = ["returned"]
    world.replace(UNSENT)

    assert world.settler.queue_missing.is_set()


@in_world
async def test_nothing_new_is_taken_while_anything_is_held_up(world: World) -> None:
    """The worker goes on once the last of the deliveries that wait for the broker is settled."""
    states: list[bool] = []

    world.broker.faults = ["timeout", "timeout"]
    first = asyncio.create_task(world.settler.replace(world.delivery(), UNSENT))
    await asyncio.sleep(0)
    second = asyncio.create_task(world.settler.replace(world.delivery(), DEAD))
    await asyncio.sleep(0)
    states.append(world.pauses.is_broker_blocked)
    # The second one fails twice more, the first only once.
    world.broker.faults = ["timeout"]
    await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
    states.append(world.pauses.is_broker_blocked)
    await asyncio.gather(first, second)
    states.append(world.pauses.is_broker_blocked)

    assert states == [True, True, False]
    assert len(world.broker.published) == 2


def confirm_in(world: World, seconds: float, confirm: Confirm) -> None:
    """Have the broker say then what became of what it has said nothing of."""
    world.loop.call_later(seconds, lambda: world.broker.pending.pop().set_result(confirm))


def test_a_copy_whose_confirm_is_late_is_published_once(world: World, ears: Ears) -> None:
    """The broker may have stored it: it is waited for, with the worker at rest, and ends so."""
    world.broker.faults = ["late"]
    confirm_in(world, 47.0, "confirmed")

    assert world.replace(UNSENT) == pytest.approx(47.0)
    assert (world.broker.written, len(world.broker.published)) == (1, 1)
    assert [line["fault"] for line in ears.heard("publish_failed")] == ["timeout"] * 4
    assert not world.pauses.is_broker_blocked
    assert world.value("pauses_total", reason="broker_blocked") == 1


@pytest.mark.parametrize("refusal", ["nacked", "error", "returned"])
def test_a_copy_that_is_late_and_not_stored_is_published_anew(
    world: World, refusal: Confirm
) -> None:
    """Once the broker has refused it, or its channel has ended, there is no other."""
    world.broker.faults = ["late"]
    confirm_in(world, 27.0, refusal)

    assert world.replace(UNSENT) == pytest.approx(27.0 + 0.5)
    assert (world.broker.written, len(world.broker.published)) == (2, 1)
    assert world.settler.queue_missing.is_set() == (refusal == "returned")


def test_a_confirm_that_comes_as_its_time_is_up_counts(world: World) -> None:
    """Between the time-out and what is done about it the broker may have confirmed the copy."""
    world.broker.faults = ["late"]
    turns = READ_ITERATIONS + 1

    def confirm_soon() -> None:
        nonlocal turns
        turns -= 1
        if turns:
            world.loop.call_soon(confirm_soon)
        else:
            world.broker.pending.pop().set_result("confirmed")

    world.loop.call_later(PUBLISH_SECONDS, confirm_soon)
    world.replace(UNSENT)

    assert (world.broker.written, len(world.broker.published)) == (1, 1)


def test_a_confirm_that_is_lost_holds_nothing_up_for_ever(world: World) -> None:
    """A broker that takes messages and says nothing of one for so long never will."""
    world.broker.faults = ["late"]

    assert world.replace(UNSENT) == pytest.approx(MAX_UNCONFIRMED_SECONDS)
    assert (world.broker.written, len(world.broker.published)) == (2, 1)
    # The next message with its id need not wait for it.
    assert world.broker.pending[0].done()


def test_a_confirm_lost_to_another_delivery_holds_nothing_up_for_ever(world: World) -> None:
    """Another worker has the delivery whose copy is not confirmed: here is the next with its id."""
    world.broker.faults = ["late"]
    world.channel.is_over = True
    with pytest.raises(BrokerError):
        world.replace(UNSENT)
    world.channel.is_over = False

    assert world.replace(UNSENT) == pytest.approx(MAX_UNCONFIRMED_SECONDS, rel=0.1)
    assert (world.broker.written, len(world.broker.published)) == (2, 1)


@pytest.mark.parametrize(
    ("said", "marked"), [("error", True), ("nacked", None)], ids=["channel ended", "nacked"]
)
def test_a_copy_that_may_be_there_twice_says_so(
    world: World, said: Confirm, *, marked: bool | None
) -> None:
    """Another worker than that which takes the first has to ask about the second."""
    world.broker.faults = ["late"]
    confirm_in(world, 1.0, said)
    world.replace(UNSENT)

    (copy,) = world.broker.published
    assert copy.header(envelope.POSSIBLE_DUPLICATE) is marked


def test_a_copy_of_what_another_worker_may_have_says_so(world: World) -> None:
    """A process that was frozen goes on with what the broker has long given to somebody else."""
    world.channel.is_over = True
    world.replace(UNSENT)

    (copy,) = world.broker.published
    assert copy.header(envelope.POSSIBLE_DUPLICATE) is True


def test_an_alarm_may_last_for_longer(world: World) -> None:
    """While the broker blocks it has not even read the copy, which it stores at the end."""
    world.broker.faults = ["late"]
    world.broker.is_blocked = True
    confirm_in(world, 4 * MAX_UNCONFIRMED_SECONDS, "confirmed")
    # It says first that it takes messages, and then stores what it had not read.
    before = 4 * MAX_UNCONFIRMED_SECONDS - 5 * PUBLISH_SECONDS
    world.loop.call_later(before, setattr, world.broker, "is_blocked", False)

    assert world.replace(UNSENT) == pytest.approx(4 * MAX_UNCONFIRMED_SECONDS)
    assert (world.broker.written, len(world.broker.published)) == (1, 1)


def test_what_comes_again_goes_on_with_its_copy(world: World) -> None:
    """A delivery whose session ends before the confirm does not have its copy published anew."""
    first, again = world.delivery(), world.delivery(redelivered=True)
    world.broker.faults = ["late"]
    world.channel.is_over = True
    with pytest.raises(BrokerError):
        world.run(world.settler.replace(first, UNSENT))
    again.replacement = first.replacement
    confirm_in(world, 3.0, "confirmed")

    assert world.seconds(world.settler.replace(again, UNSENT)) == pytest.approx(3.0)
    assert (world.broker.written, len(world.broker.published)) == (1, 1)


def test_a_copy_of_what_the_broker_delivers_again_is_given_up(world: World) -> None:
    """After the end of its channel a delivery is the broker's again, and holds up nothing."""
    world.channel.is_over = True
    world.broker.faults = ["timeout"]

    with pytest.raises(BrokerError, match=r"^the channel is gone$"):
        world.replace(UNSENT)
    assert not world.pauses.is_broker_blocked
    assert world.broker.published == []


# A copy that the broker refuses for itself

TOO_LARGE = Refusal("message size 2 is larger than configured max size 1", is_certain=True)
ENDED = Refusal("INTERNAL_ERROR", is_certain=False)
LARGE = bytes(LARGE_BODY_BYTES + 1)


@pytest.mark.parametrize("refused", [[TOO_LARGE], []], ids=["refused", "beside the refused one"])
def test_a_copy_in_flight_when_the_channel_ended(
    world: World, refused: list[Refusal | None]
) -> None:
    """It is published alone, where the broker's answer is about it, and nobody else is held up."""
    world.broker.refused_alone = list(refused)
    world.broker.faults = ["error"]

    async def replace() -> None:
        replacing = asyncio.create_task(world.settler.replace(world.delivery(), UNSENT))
        await asyncio.sleep(0)
        world.broker.refusals += 1
        await replacing

    if refused:
        with pytest.raises(CopyRefusedError, match="larger than configured"):
            world.run(replace())
    else:
        world.run(replace())

    assert len(world.broker.published) == (0 if refused else 1)
    assert not world.pauses.is_broker_blocked


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
        world.run(world.settler.replace(world.delivery(body=LARGE), UNSENT))
    except CopyRefusedError as error:
        told = str(error)

    assert bool(told) == is_refused
    assert world.value("pauses_total", reason="broker_blocked") == 0


def test_when_too_many_stay_unacked_the_others_wait(world: World) -> None:
    """The copy is tried again until it is stored, and nothing new is taken meanwhile."""
    world.fill_set_aside()
    world.broker.refused_alone = [TOO_LARGE] * 3
    world.run(world.settler.replace(world.delivery(body=LARGE), UNSENT))

    assert world.value("pauses_total", reason="broker_blocked") == 1
    assert not world.pauses.is_broker_blocked


@pytest.mark.parametrize(("refusal", "is_marked"), [(TOO_LARGE, False), (ENDED, True)])
def test_what_the_broker_may_have_stored_before_it_ended_the_connection(
    world: World, refusal: Refusal, *, is_marked: bool
) -> None:
    """It may have ended that for another message; a channel it ends for the copy alone."""
    world.fill_set_aside()
    delivery = world.delivery(body=LARGE)
    world.broker.refused_alone = [refusal]
    world.run(world.settler.replace(delivery, UNSENT))

    assert delivery.envelope.has_been_copied is is_marked


# The ack


@pytest.mark.parametrize(
    ("outcome", "name", "reason", "attempts"),
    [
        (SENT, "sent", "none", 3),
        (COUNTED, "retried", "server_error", 3),
        (SPARED, "retried", "paused", 2),
        (DEAD, "dead", "refused", 3),
        (UNSENT, "dead", "expired", 2),
        (None, "dropped", "duplicate", 2),
    ],
)
def test_a_delivery_is_acked_and_counted_once(
    world: World, ears: Ears, outcome: Outcome | None, name: str, reason: str, attempts: int
) -> None:
    """Metrics and log have its end, and how many attempts it took if it is over."""
    assert world.settler.ack(world.delivery(), outcome)
    (line,) = ears.heard("delivery")
    line.pop("seconds")
    is_over = name in {"sent", "dead"}

    assert world.channel.acked == [7]
    assert world.processed(name, reason) == 1
    assert world.value("processing_duration_seconds_count", queue="q", outcome=name) == 1
    assert world.value(
        "attempts_per_message_sum", outcome="dead" if name == "dead" else "sent"
    ) == (attempts if is_over else 0)
    facts = {
        "message_id": "m-1",
        "outcome": name,
        "reason": None if reason == "none" else reason,
        "detail": getattr(outcome, "detail", None),
        "status": getattr(outcome, "status", None),
        "code": getattr(outcome, "code", None),
        "provider_id": getattr(outcome, "provider_id", None),
        "attempts": attempts,
    }
    assert line == {fact: value for fact, value in facts.items() if value is not None}


def test_a_number_as_the_services_id_is_not_logged(world: World, ears: Ears) -> None:
    """What may be a phone number stays out of the log, also where the service calls it an id."""
    world.settler.ack(world.delivery(), SENT._replace(provider_id="to:+491713920001"))
    (line,) = ears.heard("delivery")

    assert "provider_id" not in line


def test_a_delivery_tells_what_it_has_waited_for(world: World, ears: Ears) -> None:
    """The total of each cause is in the one line and in the histogram; a moment is in neither."""
    delivery = world.delivery()
    waits: list[tuple[WaitCause, float]] = [
        *(("slot", 1.25), ("rate", 0.0009), ("slot", 0.5), ("due", 0.25)),
    ]
    for cause, seconds in waits:
        with delivery.waits(cause):
            world.passes(seconds)
    world.settler.ack(delivery, SENT)
    (line,) = ears.heard("delivery")
    counted = {
        cause: (world.waits("count", cause), world.waits("sum", cause))
        for cause in get_args(WaitCause)
    }

    assert line["waited_seconds"] == {"slot": 1.75, "due": 0.25}
    assert {cause: waited for cause, waited in counted.items() if waited != (0, 0)} == {
        "slot": (1, 1.75),
        "due": (1, 0.25),
    }


@pytest.mark.usefixtures("longest")
def test_jitter_and_the_confirm_are_waits(world: World) -> None:
    """They are told apart, and the confirm is waited for until there is one."""
    delivery = world.delivery()
    world.broker.faults = ["timeout", "nacked"]
    world.run(world.settler.replace(delivery, COUNTED))

    assert delivery.waited_seconds == pytest.approx({"jitter": 1.0, "publish": 0.5 + 1})


def test_the_ack_of_a_session_that_is_over_is_in_doubt(world: World) -> None:
    """The caller learns that the broker delivers it again, and what became of it is counted."""
    world.channel.is_over = True

    assert not world.settler.ack(world.delivery(), SENT)
    assert world.processed("sent", "none") == 1


def test_what_goes_back_to_the_queue_is_counted_and_not_acked(world: World, ears: Ears) -> None:
    """A delivery that is given back is the broker's again."""
    delivery = world.delivery(redelivered=True)
    world.passes(12.5)
    world.settler.report_released(delivery, "stopped")
    (line,) = ears.heard("delivery")

    assert world.channel.acked == []
    assert world.processed("released", "stopped") == 1
    assert (line["outcome"], line["reason"], line["redelivered"]) == ("released", "stopped", True)
    assert line["attempts"] == 2
    assert line["seconds"] == 12.5
