"""A message to the stand-in SMS service: what is taken for one, and what is shown of it."""

import json
import re
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

# Lone surrogates are refused because no UTF-8 can show them.
_FORMATS: Final = {
    "to": (re.compile(r"\+[1-9][0-9]{3,14}"), "must be + and 4 to 15 digits, the first not 0"),
    "from": (
        re.compile(r"[^\x00-\x1f\x7f-\x9f\ud800-\udfff]{1,32}"),
        "must be 1 to 32 characters, none of them a control character",
    ),
    "text": (re.compile(r"[^\ud800-\udfff]+"), "must be valid Unicode and not empty"),
}


class Message(NamedTuple):
    """One message that the service took; `received_at` is in seconds of Unix time."""

    id: str
    to: str
    sender: str
    text: str
    idempotency_key: str | None
    received_at: float

    def as_json(self) -> dict[str, Any]:
        """Return the message as the sandbox shows it."""
        return {
            "id": self.id,
            "to": self.to,
            "from": self.sender,
            "text": self.text,
            "idempotency_key": self.idempotency_key,
            "received_at": _format_time(self.received_at),
        }


@dataclass(slots=True)
class Attempt:
    """One POST that reached the service; `status` stays None while nothing was answered."""

    idempotency_key: str | None
    to: str | None = None
    status: int | None = None
    received_at: float = field(default_factory=time.time)

    def as_json(self) -> dict[str, Any]:
        """Return the attempt as the sandbox shows it."""
        return {
            "to": self.to,
            "idempotency_key": self.idempotency_key,
            "status": self.status,
            "received_at": _format_time(self.received_at),
        }


def _format_time(seconds: float) -> str:
    text = datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def read_members(body: bytes) -> dict[str, Any] | None:
    """Return the members of a JSON object, or None when the body is none."""
    try:
        members = json.loads(body.decode())
    except (ValueError, RecursionError):
        return None
    return members if isinstance(members, dict) else None


def read_number(members: dict[str, Any] | None) -> str | None:
    """Return the number that a message is for, or None when it has no usable one."""
    return None if members is None or _find_fault(members, "to") else members["to"]


def find_fault(members: dict[str, Any]) -> str | None:
    """Name the first member that is wrong, and the rule, or return None when it is a message."""
    for name in _FORMATS:
        if fault := _find_fault(members, name):
            return f"{name}: {fault}"
    return None


def _find_fault(members: dict[str, Any], name: str) -> str | None:
    pattern, rule = _FORMATS[name]
    if name not in members:
        return "is missing"
    value = members[name]
    if not isinstance(value, str):
        return "must be a string"
    return None if pattern.fullmatch(value) else rule
