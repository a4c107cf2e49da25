"""Read the properties and headers of a message.

A retry copy carries its history in `sms-bridge-attempts`, `-uncertain-attempts`, `-copies`,
`-first-delivered-at`, `-scheduled-at` and `-possible-duplicate`. `x-death` is not used, because
RabbitMQ 4 ignores it on messages that are published again. The set of headers is fixed and each
copy overwrites them, so that copies do not grow.
"""

import difflib
import hashlib
import re
import uuid
from datetime import datetime
from decimal import Decimal
from typing import Any, Final, NamedTuple, get_args
from urllib.parse import quote

from bridge.amqp.properties import Properties
from bridge.config import OnUncertain
from bridge.errors import InvalidMessageError
from bridge.telemetry.trace_context import TraceHeaders, read_trace
from bridge.worker.request import printable

PREFIX: Final = "sms-bridge-"
EXPIRES_AT: Final = "sms-bridge-expires-at"
NOT_BEFORE: Final = "sms-bridge-not-before"
ON_UNCERTAIN: Final = "sms-bridge-on-uncertain"
ORDERING_KEY: Final = "sms-bridge-ordering-key"
REASON: Final = "sms-bridge-reason"
DETAIL: Final = "sms-bridge-detail"
ATTEMPTS: Final = "sms-bridge-attempts"
UNCERTAIN_ATTEMPTS: Final = "sms-bridge-uncertain-attempts"
FIRST_DELIVERED_AT: Final = "sms-bridge-first-delivered-at"
COPIES: Final = "sms-bridge-copies"
SCHEDULED_AT: Final = "sms-bridge-scheduled-at"
STATUS: Final = "sms-bridge-status"
CODE: Final = "sms-bridge-code"
MEANING: Final = "sms-bridge-meaning"
DEAD_AT: Final = "sms-bridge-dead-at"
# Queue from which a dead letter came.
QUEUE: Final = "sms-bridge-queue"
# True on a copy that may exist twice, or whose message may have been sent. Further headers of the
# worker begin with `x-sms-bridge-`: a worker of this version refuses other names with the prefix.
POSSIBLE_DUPLICATE: Final = "sms-bridge-possible-duplicate"
# `traceparent` of the delivery that a copy replaces, if spans are exported.
EARLIER_SPAN: Final = "sms-bridge-earlier-span"
# Refused, with a text that names the queue for urgent messages.
PRIORITY: Final = "sms-bridge-priority"

# Written by the broker: how often it has delivered the message before.
DELIVERY_COUNT: Final = "x-delivery-count"
# Headers that the worker writes on copies and dead letters. A message may arrive with them, and a
# replay removes them. `copies.copy_properties` decides which ones a copy keeps.
MEMORY: Final = (
    *(REASON, DETAIL, ATTEMPTS, UNCERTAIN_ATTEMPTS),
    *(FIRST_DELIVERED_AT, STATUS, CODE, MEANING, DEAD_AT, QUEUE),
    *(SCHEDULED_AT, EARLIER_SPAN, POSSIBLE_DUPLICATE),
)
# Headers with which publishers set options of one message.
_SETTINGS: Final = (EXPIRES_AT, NOT_BEFORE, ON_UNCERTAIN, ORDERING_KEY)
# Headers of webhook events. A request may arrive with them; a copy drops them, because they do not
# describe the copy.
OF_EVENTS: Final = tuple(
    PREFIX + name for name in ("event-id", "body-sha256", "delivery", "provider-id", "message-id")
)
_KNOWN: Final = frozenset((*_SETTINGS, *MEMORY, COPIES, *OF_EVENTS))

_WAYS_ON_UNCERTAIN: Final = frozenset((None, *get_args(OnUncertain)))
_MOMENT_CHARACTERS: Final = 20
_VISIBLE_ASCII: Final = "".join(chr(c) for c in range(0x21, 0x7F) if chr(c) != "%")
_ESCAPE: Final = re.compile("%[0-9A-F]{2}")
# Servers and gateways refuse or truncate longer headers.
MAX_KEY_CHARACTERS: Final = 255
# Plausible range of a timestamp. Clocks differ by a few seconds; an older value is unset (0) or in
# other units.
MAX_AHEAD_SECONDS: Final = 5.0
MAX_CLAIMED_AGE_SECONDS: Final = 365 * 24 * 3600.0
# The last second that RFC 3339 can express.
YEAR_9999: Final = 253_402_300_799


class Envelope(NamedTuple):
    """The bridge's record of one message. Times are unix seconds.

    `try_of` distinguishes the copies of one publish from those of a later publish with the same id.
    `scheduled_at`: when the rate limit of its sender admits it, if it waits for that on a retry
    queue.
    `put_off_for` is the reason of its last stay on a retry queue. `has_been_copied`: its
    replacement may already be stored, without a confirm or by another worker.
    """

    key: str
    message_id: str | None
    published_at: float | None
    first_delivered_at: float
    expires_at: float | None = None
    not_before: float | None = None
    on_uncertain: OnUncertain | None = None
    attempts: int = 0
    uncertain_attempts: int = 0
    copies: int = 0
    try_of: str = ""
    scheduled_at: float | None = None
    put_off_for: str | None = None
    has_been_copied: bool = False
    trace: TraceHeaders = ()

    @property
    def age_starts_at(self) -> float:
        """Start of the message's age: its timestamp or its first delivery, whichever is earlier."""
        first, published = self.first_delivered_at, self.published_at
        return first if published is None else min(published, first)

    @property
    def is_ahead(self) -> bool:
        """Whether its timestamp lies after its first delivery, beyond the clock tolerance."""
        published = self.published_at
        return published is not None and published > self.first_delivered_at + MAX_AHEAD_SECONDS

    @property
    def dated_at(self) -> float | None:
        """Its timestamp, or None if it is missing or implausible."""
        published = self.published_at
        if published is None or self.is_ahead:
            return None
        oldest = self.first_delivered_at - MAX_CLAIMED_AGE_SECONDS
        return published if published >= oldest else None

    @property
    def id_of_copies(self) -> str:
        """The `message_id` of its copies: the publisher's id, else the generated key."""
        return self.message_id or self.key


def bare_envelope(properties: Properties, *, now: float) -> Envelope:
    """Read what cannot be invalid: enough to settle a message whose headers are broken."""
    message_id = properties.message_id or None
    published = properties.timestamp
    headers = properties.headers or {}
    copies, began = headers.get(COPIES), headers.get(FIRST_DELIVERED_AT)
    return Envelope(
        key=_key_of(message_id) if message_id else uuid.uuid4().hex,
        message_id=message_id,
        published_at=published.timestamp() if isinstance(published, datetime) else None,
        first_delivered_at=now,
        expires_at=read_expiration(properties, now),
        copies=copies if type(copies) is int else 0,
        try_of=began[:_MOMENT_CHARACTERS] if isinstance(began, str) else "",
    )


def read_envelope(
    properties: Properties, bare: Envelope, *, urgent_queue: str | None = None
) -> Envelope:
    """Read all headers, whether the publisher or our own last copy set them.

    Raises InvalidMessageError, whose text names the header or property and never a value.
    """
    headers = properties.headers or {}
    if not headers and not properties.expiration:
        return bare
    if not is_from_retry_queue(headers):
        _refuse_unknown(headers, urgent_queue)
    on_uncertain = _read_text(headers, ON_UNCERTAIN)
    if on_uncertain not in _WAYS_ON_UNCERTAIN:
        raise InvalidMessageError(f"{ON_UNCERTAIN}: must be retry or park")
    _read_text(headers, ORDERING_KEY)  # read by `ordering.py`, which never refuses a message
    full = bare._replace(
        expires_at=_read_expiry(properties, headers, bare),
        not_before=_read_moment(headers, NOT_BEFORE),
        on_uncertain=on_uncertain,  # type: ignore[arg-type]  # checked above
        trace=read_trace(headers.get("traceparent"), headers.get("tracestate")),
    )
    if DEAD_AT in headers:
        # A replayed dead letter starts anew, except for the count of its copies.
        return full
    return full._replace(
        first_delivered_at=_read_moment(headers, FIRST_DELIVERED_AT) or bare.first_delivered_at,
        # A message that is retried in place, without a copy, has more attempts than its headers
        # say.
        attempts=max(bare.attempts, _read_count(headers, ATTEMPTS)),
        uncertain_attempts=max(bare.uncertain_attempts, _read_count(headers, UNCERTAIN_ATTEMPTS)),
        scheduled_at=_read_moment(headers, SCHEDULED_AT),
        put_off_for=_read_word(headers, REASON),
    )


def is_from_retry_queue(headers: dict[str, Any]) -> bool:
    """Whether the worker wrote these headers on a retry copy, after checking the publisher's.

    A dead letter that was moved back starts anew, so its headers are checked again.
    """
    return ATTEMPTS in headers and DEAD_AT not in headers


def _refuse_unknown(headers: dict[str, Any], urgent_queue: str | None) -> None:
    """Refuse a header with our prefix that nothing reads, such as a misspelt expiry."""
    for name in headers:
        if name in _KNOWN:
            continue
        if name == PRIORITY:
            instead = f"publish urgent messages to queue {urgent_queue}"
            if urgent_queue is None:
                instead = "there is no urgent queue (worker.urgent_queue is null)"
            raise InvalidMessageError(f"{PRIORITY}: is not read; {instead}")
        spelt = name.lower().replace("_", "-")
        if spelt.startswith(PREFIX):
            (nearest,) = difflib.get_close_matches(spelt, _SETTINGS, n=1, cutoff=0)
            shown = printable(name, otherwise=f"a header {PREFIX}...")
            raise InvalidMessageError(f"{shown}: is unknown; did you mean {nearest}?")


def _key_of(message_id: str) -> str:
    """Return the idempotency key of an id: visible ASCII, at most 255 characters, unique per id.

    An id that looks percent-encoded is itself percent-encoded.
    """
    is_visible = message_id.isascii() and message_id.isprintable() and " " not in message_id
    if is_visible and ("%" not in message_id or _ESCAPE.search(message_id) is None):
        return message_id
    key = quote(message_id, safe=_VISIBLE_ASCII, encoding="utf-8", errors="surrogateescape")
    if len(key) > MAX_KEY_CHARACTERS:
        return hashlib.sha256(key.encode("ascii")).hexdigest()
    return key


def read_expiration(properties: Properties, now: float) -> float | None:
    """Return when the AMQP expiration, in milliseconds from `now`, ends; never raises.

    `now` is the time of the first delivery, because the broker has counted the expiration until
    then. The timestamp property is not used: the publisher's clock may be hours off.
    """
    expiration = properties.expiration or ""
    if not (expiration.isascii() and expiration.isdigit()):
        return None
    return min(now + int(expiration) / 1000, YEAR_9999)


def _read_expiry(properties: Properties, headers: dict[str, Any], bare: Envelope) -> float | None:
    if properties.expiration and bare.expires_at is None:
        raise InvalidMessageError("expiration: must be a number of milliseconds")
    moments = (_read_moment(headers, EXPIRES_AT), bare.expires_at)
    return min((moment for moment in moments if moment is not None), default=None)


def read_moment(headers: dict[str, Any], name: str) -> float | None:
    """Read a header that holds a time, as unix seconds; None if it is missing or invalid."""
    try:
        return _read_moment(headers, name)
    except InvalidMessageError:
        return None


def _read_text(headers: dict[str, Any], name: str) -> str | None:
    value = headers.get(name)
    if isinstance(value, bytes | bytearray):
        value = bytes(value).decode("utf-8", "replace")
    if value is None or (isinstance(value, str) and value):
        return value
    raise InvalidMessageError(f"{name}: must be a text")


def _read_word(headers: dict[str, Any], name: str) -> str | None:
    value = headers.get(name)
    return value if isinstance(value, str) else None


def _read_count(headers: dict[str, Any], name: str) -> int:
    value = headers.get(name, 0)
    if type(value) is int and value >= 0:
        return value
    raise InvalidMessageError(f"{name}: must be a whole number")


def _read_moment(headers: dict[str, Any], name: str) -> float | None:
    value = headers.get(name)
    if value is None:
        return None
    seconds = to_seconds(value)
    if seconds is not None and YEAR_9999 < seconds <= YEAR_9999 * 1000:
        raise InvalidMessageError(f"{name}: must be unix seconds; it looks like milliseconds")
    if seconds is None or not 0 <= seconds <= YEAR_9999:
        raise InvalidMessageError(f"{name}: must be unix seconds or RFC 3339 with a time zone")
    return seconds


def write_moment(seconds: float) -> str:
    """Format unix seconds as text that `to_seconds` reads."""
    # pamqp encodes a float in 32 bits, which is off by up to a minute for current times.
    return f"{seconds:.3f}"


def to_seconds(value: object) -> float | None:
    """Read unix seconds, or RFC 3339 with a time zone; None if it is neither."""
    if isinstance(value, bytes | bytearray):
        value = bytes(value).decode("ascii", "replace")
    if isinstance(value, datetime):
        return value.timestamp()
    if isinstance(value, int | float | Decimal) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str):
        return _text_to_seconds(value)
    return None


def _text_to_seconds(value: str) -> float | None:
    if value.isascii() and value.replace(".", "", 1).isdigit():
        return float(value)
    try:
        moment = datetime.fromisoformat(value.upper())
    except ValueError:
        return None
    return None if moment.tzinfo is None else moment.timestamp()
