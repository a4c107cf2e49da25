"""What a verified webhook is called: its type, its id, its routing key, its properties."""

import hashlib
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from bridge.amqp.properties import Properties
from bridge.http_server.request import Request
from bridge.inbound.signature import Verified
from bridge.pointers import NOT_JSON, find_id, read_document
from bridge.trace import read_trace

EVENT_ID: Final = "sms-bridge-event-id"
BODY_SHA256: Final = "sms-bridge-body-sha256"
# Routing keys of events without a type, and with a type that can be no routing key.
UNPARSED: Final = "unparsed"
OTHER: Final = "other"
# What a short string of AMQP holds (AMQP 0-9-1, 4.2.5.3).
MAX_SHORT_STRING_BYTES: Final = 255
# Enough that no two events share a key by chance.
_REPEAT_KEY_BYTES: Final = 16
_PERSISTENT: Final = 2
_ROUTING_KEY: Final = re.compile(r"(?=.{1,120}\Z)[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")


class Event(NamedTuple):
    """One verified webhook. `type` is None when the body is no object with a string `type`."""

    body: bytes
    is_json: bool
    type: str | None
    routing_key: str
    sha256: str
    event_id: str | None
    # Unix seconds; None where the scheme signs no time.
    signed_at: float | None

    @property
    def repeat_key(self) -> bytes | None:
        """What a repeat has in common with the first; None where repeats cannot be recognised.

        The id alone is not enough: several events may be about one message, and an unsigned id
        could be swapped. A digest of body and id takes a third of their memory.
        """
        if self.event_id is None:
            return None
        both = f"{self.sha256} {self.event_id}".encode()
        return hashlib.blake2b(both, digest_size=_REPEAT_KEY_BYTES).digest()


def name_event(body: bytes, verified: Verified, id_pointers: Sequence[str]) -> Event:
    """Read the type and the id of an authentic body, whatever it holds.

    The id is the signed one, or else the first that a pointer finds.
    """
    document = read_document(body)
    kind = document.get("type") if isinstance(document, dict) else None
    return Event(
        body=body,
        is_json=document is not NOT_JSON,
        type=kind if isinstance(kind, str) else None,
        routing_key=_routing_key(kind),
        sha256=hashlib.sha256(body).hexdigest(),
        event_id=verified.event_id or find_id(document, id_pointers),
        signed_at=verified.timestamp,
    )


def properties_of(event: Event, request: Request, *, message_id: str) -> Properties:
    """Make the AMQP properties of an event.

    `message_id` must be unique for each publish: a returned message is recognised by it.
    """
    headers: dict[str, Any] = {BODY_SHA256: event.sha256}
    if event.event_id is not None:
        headers[EVENT_ID] = event.event_id
    trace = read_trace(request.header(b"traceparent"), request.header(b"tracestate"))
    headers |= dict(trace)
    return Properties(
        content_type=(
            "application/json" if event.is_json else _short(request.header(b"content-type"))
        ),
        content_encoding=_short(request.header(b"content-encoding")),
        delivery_mode=_PERSISTENT,
        message_type=_short(event.type),
        timestamp=datetime.now(UTC),
        message_id=message_id,
        headers=headers,
    )


def _routing_key(kind: object) -> str:
    """Return the type when it may be a routing key, else `other` or `unparsed`."""
    if not isinstance(kind, str):
        return UNPARSED
    return kind if _ROUTING_KEY.fullmatch(kind) else OTHER


def _short(text: str | None) -> str | None:
    """Cut a text to what fits a short string of AMQP, at a whole character."""
    if text is None:
        return None
    encoded = text.encode("utf-8", "replace")[:MAX_SHORT_STRING_BYTES]
    return encoded.decode("utf-8", "ignore")
