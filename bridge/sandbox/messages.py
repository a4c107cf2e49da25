"""A message to the stand-in SMS service: what is taken for one, and what is shown of it."""

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, Literal, NamedTuple

from bridge.sandbox.exchanges import Exchange
from bridge.worker.segments import count_segments

# What a request says where its service wants `to`, `from`, `text` and the key.
Values = Mapping[str, object]

# Lone surrogates are refused because no UTF-8 can show them.
_FORMATS: Final = {
    "to": (re.compile(r"\+[1-9][0-9]{3,14}"), "must be + and 4 to 15 digits, the first not 0"),
    "short_codes": (
        re.compile(r"\+[1-9][0-9]{3,14}|[0-9]{3,8}"),
        "must be + and 4 to 15 digits, the first not 0, or a short code of 3 to 8 digits",
    ),
    "digits": (re.compile(r"[1-9][0-9]{3,14}"), "must be 4 to 15 digits, the first not 0, no +"),
    "from": (
        re.compile(r"[^\x00-\x1f\x7f-\x9f\ud800-\udfff]{1,32}"),
        "must be 1 to 32 characters, none of them a control character",
    ),
    "text": (re.compile(r"[^\ud800-\udfff]+"), "must be valid Unicode and not empty"),
}


class Message(NamedTuple):
    """One message that the service took; `received_at` is in seconds of Unix time.

    `sender` is None where the service is told none. `number` orders it among all that happened.
    """

    id: str
    to: str
    sender: str | None
    text: str
    idempotency_key: str | None
    received_at: float
    number: int = 0

    @property
    def repeat_key(self) -> tuple[str | None, ...]:
        """What a repeat has in common with the first: its key, without one all that it says."""
        return (self.idempotency_key,) if self.idempotency_key else self[1:4]

    def as_json(self) -> dict[str, Any]:
        """Return the message as the sandbox shows it."""
        return {
            "id": self.id,
            "to": self.to,
            "from": self.sender,
            "text": self.text,
            "idempotency_key": self.idempotency_key,
            "received_at": format_time(self.received_at),
        }

    def for_page(self) -> dict[str, Any]:
        """Return the message with what only the page shows of it."""
        encoding, segments = count_segments(self.text)
        return {
            **self.as_json(),
            "number": self.number,
            "encoding": encoding,
            "segments": segments,
        }


@dataclass(slots=True)
class Attempt:
    """One POST that reached the service; `status` stays None while nothing was answered.

    `detail` says what the sandbox found wrong with it, and `fault` how it misbehaved: a mode of
    faults. `number` orders it among all that happened. `exchange` is None once many others came.
    """

    idempotency_key: str | None
    to: str | None = None
    status: int | None = None
    detail: str | None = None
    received_at: float = field(default_factory=time.time)
    fault: str | None = None
    answered_at: float | None = None
    number: int = 0
    exchange: Exchange | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the attempt as the sandbox shows it."""
        return {
            "to": self.to,
            "idempotency_key": self.idempotency_key,
            "status": self.status,
            "detail": self.detail,
            "received_at": format_time(self.received_at),
        }

    def for_page(self) -> dict[str, Any]:
        """Return the attempt with what only the page shows of it."""
        took = None if self.answered_at is None else self.answered_at - self.received_at
        return {
            **self.as_json(),
            "number": self.number,
            "fault": self.fault,
            "seconds": None if took is None else round(took, 3),
        }


def format_time(seconds: float) -> str:
    """Write Unix time in RFC 3339, in UTC, with milliseconds."""
    text = datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def read_object(body: bytes) -> dict[str, Any] | None:
    """Return the members of a JSON object, or None when the body is none."""
    try:
        members = json.loads(body.decode())
    except (ValueError, RecursionError):
        return None
    return members if isinstance(members, dict) else None


def find_fault(
    name: Literal["to", "from", "text"],
    values: Values,
    *,
    to_form: Literal["to", "digits", "short_codes"] = "to",
) -> str | None:
    """Say what is wrong with a value, or return None.

    `to_form`: `digits` is a number without its +, `short_codes` takes those as well.
    """
    if name not in values:
        return "is missing"
    value = values[name]
    if not isinstance(value, str):
        return "must be a string"
    pattern, rule = _FORMATS[to_form if name == "to" else name]
    return None if pattern.fullmatch(value) else rule
