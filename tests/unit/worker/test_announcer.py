"""Who is told what became of a request, and in which words; the broker fails when it is told to."""

import json
from contextlib import closing
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
COUNTED = Retried("server_error", 5.0, "the SMS API answered 500", status=500, counted=True)
SPARED = Retried("paused", 30.0, "paused")
DEAD = Dead("refused", "the SMS API answered 400", status=400, counted=True, code="21211")
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
        properties, trace = _properties(reply_to), envelope.trace
        self.run(self.announcer.announce(properties, envelope, outcome, AT, trace=trace))
        return self.broker.published

    def answer_repeat(self, first: Accepted | None, *, reply_to: str | None) -> list[Published]:
        properties, trace = _properties(reply_to), ENVELOPE.trace
        self.run(self.announcer.answer_repeat(properties, ENVELOPE, first, trace=trace))
        return self.broker.published


def _properties(reply_to: str | None) -> Properties:
    return Properties(reply_to=reply_to, correlation_id="c-1", message_id="m-1")


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


NAMELESS = ENVELOPE._replace(key="made-up", message_id=None)


@pytest.mark.parametrize(
    ("outcome", "envelope", "event"),
    [
        (SENT, ENVELOPE, EVENT),
        (SENT, NAMELESS, EVENT | {"message_id": "made-up"}),
        (DEAD, ENVELOPE, DIED),
        (
            UNSENT,
            ENVELOPE,
            DIED | {"reason": "expired", "attempts": 2, "status": None, "code": None},
        ),
    ],
    ids=["sent", "without an id", "dead", "not tried"],
)
def test_the_event_of_an_outcome(
    outcome: Outcome, envelope: Envelope, event: dict[str, Any]
) -> None:
    """It is published to `reply_to`, with the correlation id and the trace."""
    with closing(World()) as world:
        (told,) = world.announce(outcome, reply_to="replies", envelope=envelope)

    body = json.loads(told.body)
    assert {name: body.get(name) for name in event} == event
    assert (told.exchange, told.routing_key) == ("", "replies")
    assert told.properties.correlation_id == "c-1"
    assert told.properties.content_type == "application/json"
    assert told.properties.delivery_mode == 2
    assert told.properties.headers == {"traceparent": "00-t"}
    assert told.properties.message_id not in {None, "m-1"}
    assert told.properties.timestamp is not None
    assert told.properties.timestamp.tzinfo is UTC


@pytest.mark.parametrize(
    ("outcome", "exchange", "reply_to", "targets"),
    [
        (SENT, None, None, []),
        (SENT, "outcomes", None, [("outcomes", "sent")]),
        (DEAD, "outcomes", "replies", [("", "replies"), ("outcomes", "dead")]),
        (COUNTED, "outcomes", "replies", []),
        (SPARED, "outcomes", "replies", []),
    ],
)
def test_where_an_outcome_is_published(
    outcome: Outcome, exchange: str | None, reply_to: str | None, targets: list[tuple[str, str]]
) -> None:
    """A retry is not final, so nothing is published."""
    with closing(World(exchange)) as world:
        told = world.announce(outcome, reply_to=reply_to)

    assert [(each.exchange, each.routing_key) for each in told] == targets


def test_an_event_that_is_not_stored_keeps_nothing_from_the_other_target(ears: Ears) -> None:
    """It is published once, and its loss is logged."""
    with closing(World("outcomes")) as world:
        world.broker.faults = ["returned"]
        (told,) = world.announce(SENT, reply_to="replies-of-+491713920010")
    (line,) = ears.heard("outcome_not_published")

    assert told.exchange == "outcomes"
    # Not the name of the queue, which may contain a number.
    assert line == {"target": "reply_to", "fault": "returned", "why": "no queue is bound for it"}


ORIGINAL = Accepted(attempts=1, status=200, provider_id="sms-9", at=AT)


@pytest.mark.parametrize(
    ("original", "reply_to", "answers"),
    [(ORIGINAL, "replies", 1), (ORIGINAL, None, 0), (None, "replies", 0)],
)
def test_a_repeat_is_answered_as_its_original_was(
    original: Accepted | None, reply_to: str | None, answers: int
) -> None:
    """The reply is marked as a duplicate; a redelivery of the original is not answered again."""
    with closing(World()) as world:
        told = world.answer_repeat(original, reply_to=reply_to)
    expected = {"attempts": 1, "status": 200, "provider_id": "sms-9", "duplicate": True}

    assert [json.loads(each.body) for each in told] == [EVENT | expected] * answers
