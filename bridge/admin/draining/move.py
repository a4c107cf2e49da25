"""One message on its way to the dead letters: what its copy says, and what is noted of it."""

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from bridge.admin.rounds import Taken
from bridge.amqp.properties import Properties
from bridge.errors import InvalidMessageError
from bridge.worker.copies import copy_properties
from bridge.worker.envelope import (
    DEAD_AT,
    Envelope,
    bare_envelope,
    read_envelope,
)
from bridge.worker.outcomes import Dead
from bridge.worker.settle import count_attempt


@dataclass(frozen=True, slots=True)
class Move:
    """A message as it came, and the properties of its copy; `envelope` is from before the move."""

    message: Taken
    envelope: Envelope
    outcome: Dead
    properties: Properties

    @property
    def may_be_sent(self) -> bool:
        """Whether an attempt may have reached the phone."""
        return self.message.redelivered or self.envelope.uncertain_attempts > 0

    def as_record(self, queue: str) -> dict[str, Any]:
        """Make plain data of what was moved from a queue: no number, no text, no header."""
        return {
            "message_id": self.properties.message_id,
            "queue": queue,
            "published_at": _as_text(self.envelope.published_at),
            "not_before": _as_text(self.envelope.not_before),
            "expires_at": _as_text(self.envelope.expires_at),
            "attempts": self.envelope.attempts,
            "may_be_sent": self.may_be_sent,
            "bytes": len(self.message.body),
            "moved_at": (self.properties.headers or {})[DEAD_AT],
        }


def make_move(message: Taken, reason: str, *, max_bytes: int) -> Move:
    """Make the dead letter of a message that waits; `reason` is the operator's own.

    One that somebody had before, and has not acked, may have been sent: as after an attempt that is
    uncertain, a replay leaves it out unless that is asked for. `max_bytes` is what fits into a
    frame.
    """
    envelope = _read(message.properties)
    outcome = Dead("drained", reason, uncertain=message.redelivered)
    properties = copy_properties(
        message.properties, count_attempt(envelope, outcome), outcome, max_bytes=max_bytes
    )
    return Move(message, envelope, outcome, properties)


def _read(properties: Properties) -> Envelope:
    bare = bare_envelope(properties, now=time.time())
    try:
        return read_envelope(properties, bare)
    except InvalidMessageError:
        # Its headers stay as they are, and it is `invalid` only when a worker has it.
        return bare


def _as_text(moment: float | None) -> str | None:
    if moment is None:
        return None
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="milliseconds")
