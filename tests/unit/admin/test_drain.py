"""What the dead letter of a drained message says, and what the file says of it."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from bridge.admin.drain import DrainedMessage, drain_message
from bridge.admin.move import TakenMessage
from bridge.amqp.properties import Properties

BODY = b'{"to": "+491713920010", "from": "Acme", "text": "Zikadensommer"}'
MAX_BYTES = 131_000


def drained(
    headers: dict[str, Any] | None = None,
    *,
    redelivered: bool = False,
    max_bytes: int = MAX_BYTES,
    **properties: Any,
) -> DrainedMessage:
    given = Properties(**({"message_id": "m-1", "headers": headers} | properties))
    return drain_message(
        TakenMessage(7, redelivered, given, BODY), "wrong text", queue="q", max_bytes=max_bytes
    )


def headers_of(message: DrainedMessage) -> dict[str, Any]:
    return dict(message.properties.headers or {})


def test_a_message_that_nobody_had_has_no_attempts() -> None:
    headers = headers_of(drained())

    assert headers["sms-bridge-reason"] == "drained"
    assert headers["sms-bridge-detail"] == "wrong text"
    assert (headers["sms-bridge-attempts"], headers["sms-bridge-uncertain-attempts"]) == (0, 0)
    assert "sms-bridge-status" not in headers


def test_what_waited_for_a_retry_keeps_its_past() -> None:
    past = {
        "sms-bridge-reason": "uncertain",
        "sms-bridge-detail": "the SMS API answered 500",
        "sms-bridge-attempts": 2,
        "sms-bridge-uncertain-attempts": 1,
        "sms-bridge-first-delivered-at": "1800000000.000",
        "sms-bridge-copies": 2,
        "sms-bridge-status": 500,
        "sms-bridge-code": "30008",
    }
    message = drained(past)
    headers = headers_of(message)
    changed = {"sms-bridge-reason": "drained", "sms-bridge-detail": "wrong text"}
    headers.pop("sms-bridge-dead-at")

    assert headers == past | changed | {"sms-bridge-copies": 3, "sms-bridge-queue": "q"}
    assert message.may_have_been_sent


@pytest.mark.parametrize("attempts", [0, 1])
def test_what_somebody_had_counts_as_uncertain(attempts: int) -> None:
    own = {"sms-bridge-attempts": attempts, "sms-bridge-uncertain-attempts": attempts}
    message = drained(own if attempts else None, redelivered=True)
    headers = headers_of(message)

    assert message.may_have_been_sent
    assert headers["sms-bridge-uncertain-attempts"] == attempts + 1
    assert headers["sms-bridge-attempts"] == attempts


def test_headers_that_nobody_can_read_stay() -> None:
    headers = headers_of(drained({"sms-bridge-not-before": "soon", "sms-bridge-expiry": 7}))

    assert (headers["sms-bridge-not-before"], headers["sms-bridge-expiry"]) == ("soon", 7)
    assert headers["sms-bridge-reason"] == "drained"


def test_headers_that_fit_no_frame_go() -> None:
    headers = headers_of(drained({"large": "x" * 5000}, max_bytes=4096))

    assert "large" not in headers
    assert headers["sms-bridge-reason"] == "drained"


def test_the_record_has_nothing_personal() -> None:
    published = datetime(2026, 11, 22, 15, tzinfo=UTC)
    own = {
        "sms-bridge-not-before": 1_800_000_000,
        "sms-bridge-ordering-key": "+491713920010",
        "customer": "+491713920010",
    }
    message = drained(own, timestamp=published, expiration="60000", reply_to="of-+491713920010")
    record = message.record("q")
    moved_at = datetime.fromisoformat(record.pop("moved_at"))
    # The move is the first delivery, from which an `expiration` counts.
    lasts = datetime.fromisoformat(record.pop("expires_at")) - moved_at

    assert moved_at.tzinfo is not None
    assert lasts == pytest.approx(timedelta(seconds=60), abs=timedelta(seconds=30))
    assert record == {
        "message_id": "m-1",
        "queue": "q",
        "published_at": "2026-11-22T15:00:00.000+00:00",
        "not_before": "2027-01-15T08:00:00.000+00:00",
        "attempts": 0,
        "may_be_sent": False,
        "bytes": len(BODY),
    }
    assert "1713920010" not in json.dumps(record)
