"""Outcome events: JSON messages that both roles publish about the outcome of a message."""

import json
import uuid
from datetime import UTC, datetime
from typing import Final, Literal, NamedTuple

from bridge.amqp.properties import Properties
from bridge.telemetry.trace_context import TraceHeaders

# The outcome of a message according to its delivery receipt.
ReceiptOutcome = Literal["delivered", "undelivered"]

_PERSISTENT: Final = 2


class OutcomeEvent(NamedTuple):
    """The outcome of one message, without its text and phone number.

    None stands for unknown or not applicable. `at` is the time of the outcome in unix seconds.
    Only the worker knows `attempts` and `status`, the last HTTP status. `code` is the API's error
    code, and `meaning` explains it in words of the bridge.
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
        """Write the event as JSON; without `code`, `meaning` and `duplicate` if empty."""
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
    """Build the AMQP properties of an outcome event, with a new message id."""
    return Properties(
        content_type="application/json",
        delivery_mode=_PERSISTENT,
        message_id=uuid.uuid4().hex,
        correlation_id=correlation_id,
        timestamp=datetime.now(UTC),
        headers=dict(trace),
    )
