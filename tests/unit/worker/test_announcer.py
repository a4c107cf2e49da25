"""Who is told what became of a request, and in which words; the broker fails when it is told to."""

import json
from collections.abc import Iterator
from datetime import UTC
from typing import Any, cast

import pytest

from bridge.amqp.properties import Properties
from bridge.amqp.publisher import Publisher
from bridge.worker.announcer import Announcer
from bridge.worker.envelope import Envelope
from bridge.worker.outcomes import Dead, Outcome, Retried, Sent
from bridge.worker.sent_messages import Accepted
from tests.clock import LeapingWorld
from tests.ears import Ears
from tests.unit.worker.stand_ins import Broker, Published

AT = 1_800_000_000.123
SENT = Sent(202, provider_id="sms-1")
BURNED = Retried("server_error", 5.0, "the SMS API answered 500", status=500, burned=True)
SPARED = Retried("paused", 30.0, "paused")
DEAD = Dead("refused", "the SMS API answered 400", status=400, burned=True, code="21211")
UNSENT = Dead("expired", "too late")
# Of a message that was tried twice.
ENVELOPE = Envelope(
    key="m-1",
    message_id="m-1",
    published_at=None,
    first_delivered_at=0.0,
    attempts=2,
    trace=(("traceparent", "00-t"),),
)


class World(LeapingWorld):
    """An announcer before a broker."""

    def __init__(self, outcome_exchange: str | None = None) -> None:
        super().__init__()
        self.broker = Broker(self.loop)
        publisher = cast("Publisher", self.broker)
        self.announcer = Announcer(publisher, outcome_exchange=outcome_exchange)

    def announce(
        self, outcome: Outcome, *, reply_to: str | None = None, envelope: Envelope = ENVELOPE
    ) -> list[Published]:
        """Tell of an outcome, and return what was published."""
        properties, trace = _properties(reply_to), envelope.trace
        self.run(self.announcer.announce(properties, envelope, outcome, AT, trace=trace))
        return self.broker.published

    def answer_repeat(self, first: Accepted | None, *, reply_to: str | None) -> list[Published]:
        """Answer a repeat, and return what was published."""
        properties, trace = _properties(reply_to), ENVELOPE.trace
        self.run(self.announcer.answer_repeat(properties, ENVELOPE, first, trace=trace))
        return self.broker.published


def _properties(reply_to: str | None) -> Properties:
    return Properties(reply_to=reply_to, correlation_id="c-1", message_id="m-1")


@pytest.fixture
def world() -> Iterator[World]:
    """Give a world in which outcomes are told to nobody but who asked."""
    made = World()
    yield made
    made.close()


@pytest.fixture
def telling() -> Iterator[World]:
    """Give a world in which outcomes are published."""
    made = World(outcome_exchange="outcomes")
    yield made
    made.close()


EVENT: dict[str, Any] = {
    "message_id": "m-1",
    "outcome": "sent",
    "reason": None,
    "attempts": 3,
    "status": 202,
    "provider_id": "sms-1",
    "at": "2027-01-15T08:00:00.123+00:00",
}
DIED = (
    EVENT
    | {"outcome": "dead", "reason": "refused", "status": 400}
    | {"code": "21211", "provider_id": None}
)


@pytest.mark.parametrize(("outcome", "event"), [(SENT, EVENT), (DEAD, DIED)], ids=["sent", "dead"])
def test_who_asked_is_told_the_end(world: World, outcome: Outcome, event: dict[str, Any]) -> None:
    """The queue in `reply_to` gets the outcome, with the correlation id and the trace."""
    (told,) = world.announce(outcome, reply_to="replies")

    assert (told.exchange, told.routing_key) == ("", "replies")
    assert json.loads(told.body) == event
    assert told.properties.correlation_id == "c-1"
    assert told.properties.content_type == "application/json"
    assert told.properties.delivery_mode == 2
    assert told.properties.headers == {"traceparent": "00-t"}
    assert told.properties.message_id not in {None, "m-1"}
    assert told.properties.timestamp is not None
    assert told.properties.timestamp.tzinfo is UTC


def test_an_end_without_an_attempt_counts_none(world: World) -> None:
    """What died unsent has the attempts that it had."""
    (told,) = world.announce(UNSENT, reply_to="replies")

    assert json.loads(told.body)["attempts"] == 2


def test_a_message_without_an_id_is_told_by_its_key(world: World) -> None:
    """The key that was made names it."""
    nameless = ENVELOPE._replace(key="made-up", message_id=None)
    (told,) = world.announce(SENT, reply_to="replies", envelope=nameless)

    assert json.loads(told.body)["message_id"] == "made-up"


@pytest.mark.parametrize(("outcome", "key"), [(SENT, "sent"), (DEAD, "dead")])
def test_outcomes_are_published(telling: World, outcome: Outcome, key: str) -> None:
    """With an exchange for outcomes each end goes there, whether anybody asked or not."""
    told = telling.announce(outcome)
    assert [(each.exchange, each.routing_key) for each in told] == [("outcomes", key)]

    told = telling.announce(outcome, reply_to="replies")
    assert [(each.exchange, each.routing_key) for each in told[1:]] == [
        *(("", "replies"), ("outcomes", key)),
    ]


@pytest.mark.parametrize("outcome", [BURNED, SPARED])
def test_a_retry_is_no_end(telling: World, outcome: Outcome) -> None:
    """Nobody is told of what is tried again."""
    assert telling.announce(outcome, reply_to="replies") == []


def test_nobody_is_told_who_did_not_ask(world: World) -> None:
    """Without `reply_to` and an exchange nothing is published."""
    assert world.announce(SENT) == []


def test_an_outcome_that_is_not_stored_holds_nothing_up(telling: World, ears: Ears) -> None:
    """It is news: tried once, and a fault of one target keeps nothing from the other."""
    telling.broker.faults = ["returned"]
    (told,) = telling.announce(SENT, reply_to="replies-of-+491713920010")
    (line,) = ears.heard("outcome_not_published")

    assert told.exchange == "outcomes"
    # Not the name of the queue, which may hold a number.
    assert line == {"target": "reply_to", "fault": "returned", "why": "no queue is bound for it"}


def test_a_repeat_is_answered_as_its_first_was(world: World) -> None:
    """Whoever sends an id again gets the first outcome, marked as a duplicate."""
    first = Accepted(attempts=1, status=200, provider_id="sms-9", at=AT)
    (told,) = world.answer_repeat(first, reply_to="replies")
    expected = {"attempts": 1, "status": 200, "provider_id": "sms-9", "duplicate": True}

    assert (told.exchange, told.routing_key) == ("", "replies")
    assert json.loads(told.body) == EVENT | expected
    assert told.properties.correlation_id == "c-1"


@pytest.mark.parametrize(
    ("first", "reply_to"),
    [(None, "replies"), (Accepted(attempts=1, status=200, provider_id=None, at=AT), None)],
    ids=["nothing known", "nobody asked"],
)
def test_a_repeat_may_go_unanswered(
    world: World, first: Accepted | None, reply_to: str | None
) -> None:
    """Nothing is told of what is not known, nor to nobody."""
    assert world.answer_repeat(first, reply_to=reply_to) == []
