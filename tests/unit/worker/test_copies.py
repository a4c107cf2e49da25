"""What a request keeps when it is moved to the queue of its class."""

from datetime import UTC, datetime
from typing import Any

import pytest

from bridge.amqp.properties import Properties, write_properties
from bridge.amqp.publisher import USUAL_PROPERTIES_BYTES
from bridge.worker.copies import renewed_properties, sorted_properties
from bridge.worker.envelope import bare_envelope, read_envelope

NOW = 1_800_000_000.0
PUBLISHED = datetime.fromtimestamp(NOW - 10, UTC)
EXPIRES_AT = "sms-bridge-expires-at"


def moved(max_bytes: int = USUAL_PROPERTIES_BYTES, **properties: Any) -> Properties:
    """Sort a message, and return the properties of its copy."""
    given = Properties(**properties)
    return sorted_properties(given, bare_envelope(given, now=NOW), max_bytes=max_bytes)


def test_a_request_stays_as_it_came() -> None:
    """But for what would have the broker refuse, drop or reroute it."""
    kept: dict[str, Any] = {
        "message_id": "m-1",
        "reply_to": "answers",
        "correlation_id": "c",
        "priority": 7,
        "timestamp": PUBLISHED,
        "content_type": "application/json",
        "app_id": "shop",
    }
    headers = {"sms-bridge-priority": "urgent", "x-own": 1, "CC": ["other"], "x-death": []}
    copy = moved(**kept, user_id="guest", delivery_mode=1, headers=headers)

    assert {name: getattr(copy, name) for name in kept} == kept
    assert (copy.user_id, copy.delivery_mode) == (None, 2)
    assert set(copy.headers or {}) == {"sms-bridge-priority", "x-own"}


@pytest.mark.parametrize(
    ("expiration", "header", "expected"),
    [
        ("60000", None, NOW + 60),
        ("60000", NOW + 20, NOW + 20),
        ("60000", NOW + 80, NOW + 60),
        (None, NOW + 20, NOW + 20),
        (None, None, None),
    ],
    ids=str,
)
def test_the_sooner_expiry_counts(
    expiration: str | None, header: float | None, expected: float | None
) -> None:
    """The property counts from the first delivery, as without sorting, and stays as a header."""
    headers: dict[str, Any] = {} if header is None else {EXPIRES_AT: f"{header:.3f}"}
    given = Properties(timestamp=PUBLISHED, expiration=expiration, headers=headers)
    copy = moved(timestamp=PUBLISHED, expiration=expiration, headers=headers)
    directly = read_envelope(given, bare_envelope(given, now=NOW))

    assert copy.expiration is None
    assert read_envelope(copy, bare_envelope(copy, now=NOW + 5)).expires_at == expected
    assert directly.expires_at == expected


def test_an_expiry_that_cannot_be_read_stays() -> None:
    """The worker refuses the message for it."""
    copy = moved(expiration="60000", headers={EXPIRES_AT: "soon"})

    assert (copy.headers or {})[EXPIRES_AT] == "soon"


def test_the_memory_of_a_retry_stays() -> None:
    """Attempts, copies and the time of the first delivery are those of the copy that came back."""
    headers = {
        "sms-bridge-attempts": 2,
        "sms-bridge-copies": 2,
        "sms-bridge-first-delivered-at": "1799999000.000",
    }
    copy = moved(message_id="m-1", headers=dict(headers))
    envelope = read_envelope(copy, bare_envelope(copy, now=NOW))

    assert (envelope.attempts, envelope.copies) == (2, 2)
    assert envelope.first_delivered_at == 1_799_999_000.0


def test_what_fills_a_frame_still_fits() -> None:
    """Beside an id and an expiry that it had not, at the price of its largest header."""
    copy = moved(4096, expiration="60000", headers={"x-large": "x" * 4000, "x-own": 1})

    assert len(write_properties(copy)) <= 4096
    assert {"x-own", EXPIRES_AT} <= set(copy.headers or {})


@pytest.mark.parametrize("is_repeated", [True, False])
def test_what_is_renewed_tells_that_it_came_back(*, is_repeated: bool) -> None:
    """The broker tells of a fresh copy neither that somebody had it nor how often it came back."""
    headers = {"x-delivery-count": 4, "x-acquired-count": 9, "own": 1}
    renewed = renewed_properties(
        Properties(message_id="a", headers=headers, priority=3),
        is_repeated=is_repeated,
        max_bytes=USUAL_PROPERTIES_BYTES,
    )

    own = {"x-sms-bridge-repeated": True} if is_repeated else {}
    assert renewed.headers == {"own": 1} | own
    assert (renewed.message_id, renewed.priority) == ("a", 3)
