"""The form of outcome events, which both roles publish."""

import json

from bridge.outcome_event import OutcomeEvent, outcome_properties


def test_unknown_members_are_null() -> None:
    """Every event has the same members; only code and duplicate may be missing."""
    event = OutcomeEvent("delivered", at=0.5, message_id=None, provider_id="p-1")

    assert json.loads(event.body()) == {
        "message_id": None,
        "outcome": "delivered",
        "reason": None,
        "attempts": None,
        "status": None,
        "provider_id": "p-1",
        "at": "1970-01-01T00:00:00.500+00:00",
    }


def test_a_code_and_a_duplicate_are_members() -> None:
    """Most events do not have these members."""
    event = OutcomeEvent("dead", at=0, message_id="m-1", code="E1", is_duplicate=True)

    body = json.loads(event.body())

    assert (body["code"], body["duplicate"]) == ("E1", True)


def test_each_event_is_a_message_of_its_own() -> None:
    """Each event is persistent JSON with a new id and the publisher's correlation id."""
    trace = (("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),)
    first, second = (outcome_properties(trace, "asked") for _ in range(2))

    assert first.message_id != second.message_id
    assert (first.delivery_mode, first.content_type) == (2, "application/json")
    assert (first.correlation_id, first.headers) == ("asked", dict(trace))
