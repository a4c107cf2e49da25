"""The sandbox's records: accepted messages, received requests, sent webhooks.

Every record has a `number`, its position among all events, by which the page sorts.
"""

import time
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, Literal

from bridge.webhook.receipts import DeliveryState
from bridge.worker.request import count_segments

MAX_SHOWN_BYTES: Final = 64 * 1024
MASK: Final = "***"
# Headers with a login for any service; the preset adds its own.
_LOGIN_HEADERS: Final = frozenset({"authorization", "proxy-authorization", "cookie"})

HeaderPairs = tuple[tuple[str, str], ...]


@dataclass(slots=True)
class AcceptedMessage:
    """A message that the service accepted; `sender` is None if its requests have none."""

    id: str
    to: str
    sender: str | None
    text: str
    idempotency_key: str | None
    received_at: float
    number: int = 0
    # The address for receipts that came with the message.
    callback: str | None = None

    @property
    def repeat_key(self) -> tuple[str | None, ...]:
        """Equal for repeats: the idempotency key or, without one, number, sender and text."""
        if self.idempotency_key:
            return (self.idempotency_key,)
        return (self.to, self.sender, self.text)

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "to": self.to,
            "from": self.sender,
            "text": self.text,
            "idempotency_key": self.idempotency_key,
            "received_at": format_time(self.received_at),
        }

    def for_page(self) -> dict[str, Any]:
        encoding, segments = count_segments(self.text)
        more = {"number": self.number, "encoding": encoding, "segments": segments}
        return self.as_json() | more


@dataclass(slots=True)
class HttpExchange:
    """A request and its answer, with logins masked and bodies cut."""

    method: str
    path: str
    headers: HeaderPairs
    body: str = ""
    answer_headers: HeaderPairs = ()
    answer_body: str = ""


@dataclass(slots=True)
class ReceivedRequest:
    """A POST to the service; `status` is None without an answer.

    `detail` is the error in the request, `fault` the mode of a fault that was applied. `exchange`
    becomes None after many newer requests.
    """

    idempotency_key: str | None
    exchange: HttpExchange | None
    to: str | None = None
    status: int | None = None
    detail: str | None = None
    fault: str | None = None
    received_at: float = field(default_factory=time.time)
    ended_at: float | None = None
    number: int = 0

    def as_json(self) -> dict[str, Any]:
        took = None if self.ended_at is None else round(self.ended_at - self.received_at, 3)
        return {
            "to": self.to,
            "idempotency_key": self.idempotency_key,
            "status": self.status,
            "detail": self.detail,
            "received_at": format_time(self.received_at),
            "number": self.number,
            "fault": self.fault,
            "seconds": took,
        }


@dataclass(slots=True)
class SentWebhook:
    """A webhook; `answers` is None until it has been sent.

    `phone` is the number whose conversation shows it; `about` is the id of a receipt's message.
    """

    kind: Literal["reply", "receipt", "event"]
    body: str
    phone: str | None = None
    text: str | None = None
    about: str | None = None
    delivery: DeliveryState | None = None
    repeat: int = 1
    forged: bool = False
    answers: list[int | None] | None = None
    sent_at: float = field(default_factory=time.time)
    number: int = 0

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"sent_at": format_time(self.sent_at)}


def format_time(seconds: float) -> str:
    """Format unix seconds in RFC 3339, in UTC, with milliseconds."""
    text = datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def mask_logins(headers: Iterable[tuple[str, str]], also: Collection[str]) -> HeaderPairs:
    """Return the headers with logins masked; `also` has more login headers, in lower case."""
    logins = _LOGIN_HEADERS.union(also)
    return tuple(
        (name, _mask(value) if name.lower() in logins else value) for name, value in headers
    )


def _mask(value: str) -> str:
    """Mask a login, except for its scheme, such as Bearer."""
    scheme, space, _ = value.partition(" ")
    return f"{scheme} {MASK}" if space else MASK


def cut_body(body: bytes) -> str:
    text = body[:MAX_SHOWN_BYTES].decode(errors="replace")
    rest = len(body) - MAX_SHOWN_BYTES
    return text if rest <= 0 else f"{text}\n... and {rest} bytes"
