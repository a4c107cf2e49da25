"""Outcome events: what became of a message, in the one form in which both roles tell it."""

import json
import uuid
from datetime import UTC, datetime
from typing import Final, Literal, NamedTuple

from bridge.amqp.properties import Properties
from bridge.telemetry.trace_context import TraceHeaders

# What a message has become by its delivery receipt.
ReceiptOutcome = Literal["delivered", "undelivered"]

_PERSISTENT: Final = 2


class OutcomeEvent(NamedTuple):
    """What became of one message: never its text or its number.

    What is not known, or does not apply, is None. `at` is when it came about, in unix seconds;
    `attempts` and `status`, the last one of HTTP, only the worker knows. `code` is the API's own
    for an error, `meaning` what it says, in our words.
    """

    outcome: str
    at: float
    message_id: str | None
    provider_id: str | None = None
    reason: str | None = None
    attempts: int | None = None
    status: int | None = None
    code: str | None = None
    meaning: str | None = None
    is_duplicate: bool = False

    def body(self) -> bytes:
        """Write it as JSON, without `code`, `meaning` and `duplicate` where they say nothing."""
        event: dict[str, object] = {
            "message_id": self.message_id,
            "outcome": self.outcome,
            "reason": self.reason,
            "attempts": self.attempts,
            "status": self.status,
            "provider_id": self.provider_id,
            "at": datetime.fromtimestamp(self.at, UTC).isoformat(timespec="milliseconds"),
        }
        if self.code is not None:
            event["code"] = self.code
        if self.meaning is not None:
            event["meaning"] = self.meaning
        if self.is_duplicate:
            event["duplicate"] = True
        return json.dumps(event).encode()


def outcome_properties(trace: TraceHeaders, correlation_id: str | None = None) -> Properties:
    """Make the AMQP properties of an outcome event, with an id of its own."""
    return Properties(
        content_type="application/json",
        delivery_mode=_PERSISTENT,
        message_id=uuid.uuid4().hex,
        correlation_id=correlation_id,
        timestamp=datetime.now(UTC),
        headers=dict(trace),
    )
