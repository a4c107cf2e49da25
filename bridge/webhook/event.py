"""Names a verified webhook: type, id, routing key, and the AMQP properties of an event."""

import functools
import hashlib
import zlib
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import parse_qsl

from bridge.amqp.properties import Properties
from bridge.config import EndpointSettings
from bridge.config.fields import EVENT_TYPE, MAX_EVENT_TYPE_CHARACTERS
from bridge.config.presets import Preset
from bridge.config.webhook import dotted_type
from bridge.http.messages import Request
from bridge.json_pointer import NOT_JSON, find_id, find_text, read_document
from bridge.telemetry.trace_context import TraceHeaders, read_trace
from bridge.webhook.receipts import Receipt, read_receipts
from bridge.webhook.signatures.forms import FORM, is_form_type
from bridge.webhook.signatures.verify import Verified

JSON: Final = "application/json"
EVENT_ID: Final = "sms-bridge-event-id"
BODY_SHA256: Final = "sms-bridge-body-sha256"
DELIVERY: Final = "sms-bridge-delivery"
PROVIDER_ID: Final = "sms-bridge-provider-id"
MESSAGE_ID: Final = "sms-bridge-message-id"
# Routing keys of events without a type, and of events whose type cannot be a routing key.
UNPARSED: Final = "unparsed"
OTHER: Final = "other"
# Limit of an AMQP short string (AMQP 0-9-1, 4.2.5.3).
MAX_SHORT_STRING_BYTES: Final = 255
# 16 bytes make a collision of two events practically impossible.
REPEAT_KEY_BYTES: Final = 16
# A compressed body that inflates to more is not parsed.
MAX_INFLATED_BYTES: Final = 1024 * 1024
_INFLATED: Final = frozenset(("gzip", "x-gzip", "deflate"))
# zlib's `wbits` for a gzip or zlib header, with the largest window.
_GZIP_OR_ZLIB: Final = 47
# A form with more fields is not parsed.
MAX_FORM_FIELDS: Final = 1000
_PERSISTENT: Final = 2


class Form(dict[str, str]):
    """The first value of each field of a form, by its name."""


class WebhookEvent:
    """A message to publish for a verified webhook: its whole body, or a normalized event from it.

    `type` is None if neither the body nor the endpoint names one. `sha256` is the digest of the
    webhook's body. A repeat has the same `repeat_key`, which is None if the event has no id.
    `signed_at` is in unix seconds, or None if the scheme signs no timestamp.
    """

    # Not a named tuple, for the reason given at `Request`.

    __slots__ = (
        "body",
        "content_encoding",
        "content_type",
        "event_id",
        "receipts",
        "repeat_key",
        "routing_key",
        "sha256",
        "signed_at",
        "type",
    )

    def __init__(  # noqa: PLR0913  all parts of an event
        self,
        *,
        body: bytes,
        content_type: str | None,
        content_encoding: str | None = None,
        type: str | None,  # noqa: A002  AMQP's name
        routing_key: str,
        sha256: str,
        event_id: str | None,
        repeat_key: bytes | None,
        signed_at: float | None,
        receipts: Sequence[Receipt] = (),
    ) -> None:
        self.body = body
        self.content_type = content_type
        self.content_encoding = content_encoding
        self.type = type
        self.routing_key = routing_key
        self.sha256 = sha256
        self.event_id = event_id
        self.repeat_key = repeat_key
        self.signed_at = signed_at
        self.receipts = receipts

    @property
    def receipt(self) -> Receipt | None:
        """The receipt, if the event holds exactly one."""
        return self.receipts[0] if len(self.receipts) == 1 else None


def name_event(
    body: bytes,
    content_type: str | None,
    verified: Verified,
    endpoint: EndpointSettings,
    content_encoding: str | None = None,
    *,
    reference: str | None = None,
) -> WebhookEvent:
    """Find type, id and receipts of an authentic body, which is published as it is.

    The type is the first text found by a pointer, else the endpoint's constant. The id is the
    signed id, else the first found by a pointer. `reference` is our id of the message in the
    address that was called.
    """
    plain = body if content_encoding is None else inflate(body, content_encoding)
    document = read_body(plain, content_type)
    kind = find_text(document, endpoint.event_type_pointers)
    if kind is None:
        kind = endpoint.event_type
    is_json = document is not NOT_JSON and type(document) is not Form
    sha256 = hashlib.sha256(body).hexdigest()
    event_id = verified.event_id or find_id(document, endpoint.event_id_pointers)
    return WebhookEvent(
        body=body,
        content_type=JSON if is_json else content_type,
        content_encoding=content_encoding,
        type=kind,
        routing_key=UNPARSED if kind is None else routing_key_of(kind, endpoint),
        sha256=sha256,
        event_id=event_id,
        repeat_key=repeat_key_of(endpoint.path, event_id, sha256),
        signed_at=verified.timestamp,
        receipts=read_receipts(document, kind, endpoint, reference),
    )


def repeat_key_of(path: str, event_id: str | None, content: str) -> bytes | None:
    """Return the key that an event shares with its repeats only; None if it has no id.

    The id alone does not suffice: several events may concern one message, an unsigned id can be
    replaced, and two services may use the same id.
    """
    if event_id is None:
        return None
    # A type may have half of a surrogate pair.
    parts = f"{path}\n{event_id}\n{content}".encode("utf-8", "surrogatepass")
    # A digest takes a third of their memory.
    return hashlib.blake2b(parts, digest_size=REPEAT_KEY_BYTES).digest()


def inflate(body: bytes, content_encoding: str) -> bytes:
    """Undo gzip or deflate; return b"" if the result exceeds `MAX_INFLATED_BYTES`.

    A body that is not compressed is returned unchanged, because a proxy may have inflated it and
    left the header. Several concatenated streams count as unreadable (b"").
    """
    if content_encoding.strip().lower() not in _INFLATED:
        return body
    inflating = zlib.decompressobj(_GZIP_OR_ZLIB)
    try:
        plain = inflating.decompress(body, MAX_INFLATED_BYTES)
    except zlib.error:
        return body
    return plain if inflating.eof and not inflating.unused_data else b""


def read_body(body: bytes, content_type: str | None) -> Any:  # noqa: ANN401  JSON
    """Parse a body as JSON with any content type, or as a `Form` with the content type of a form.

    Returns NOT_JSON for anything else, and for a form of more than `MAX_FORM_FIELDS` fields.
    """
    document = read_document(body)
    if document is not NOT_JSON or content_type is None or not is_form_type(content_type):
        return document
    try:
        fields = parse_qsl(
            body.decode("utf-8", "replace"), keep_blank_values=True, max_num_fields=MAX_FORM_FIELDS
        )
    except ValueError:
        return NOT_JSON
    # Reversed, so that the first value of a repeated name wins.
    return Form(reversed(fields))


def as_form(request: Request) -> Request:
    """Return a GET as the POST of a form whose body is the query string, byte for byte."""
    of_body = {b"content-type", b"content-encoding"}
    others = [header for header in request.headers if header[0] not in of_body]
    headers = [(b"content-type", FORM.encode()), *others]
    return Request(
        request.method,
        request.path,
        request.query,
        headers,
        request.query,
        request.keep_alive,
        request.size_bytes,
    )


def properties_of(event: WebhookEvent, *, message_id: str, trace: TraceHeaders) -> Properties:
    """Build the AMQP properties of an event, trace headers included.

    `message_id` must be unique for each publish, because a returned message is recognised by it.
    """
    headers: dict[str, Any] = {BODY_SHA256: event.sha256}
    if event.event_id is not None:
        headers[EVENT_ID] = event.event_id
    if event.receipts:
        headers |= _receipt_headers(event.receipt)
    for name, value in trace:
        headers[name] = value
    return Properties(
        content_type=_short(event.content_type),
        content_encoding=_short(event.content_encoding),
        delivery_mode=_PERSISTENT,
        message_type=_short(event.type),
        timestamp=datetime.now(UTC),
        message_id=message_id,
        headers=headers,
    )


def trace_of(request: Request) -> TraceHeaders:
    parent = request.header(b"traceparent")
    return () if parent is None else read_trace(parent, request.header(b"tracestate"))


def _receipt_headers(receipt: Receipt | None) -> dict[str, str]:
    if receipt is None:
        return {}
    named = {
        DELIVERY: receipt.delivery,
        PROVIDER_ID: receipt.provider_id,
        MESSAGE_ID: receipt.message_id,
    }
    return {name: value for name, value in named.items() if value is not None}


def routing_key_of(kind: str, endpoint: EndpointSettings) -> str:
    """Return the routing key for an event type: its dotted form, or `other` if not valid."""
    return OTHER if len(kind) > MAX_EVENT_TYPE_CHARACTERS else _routing_key(kind, endpoint.preset)


# A service has few event types, so the cache rarely misses.
@functools.lru_cache(maxsize=256)
def _routing_key(kind: str, preset: Preset) -> str:
    key = dotted_type(kind, preset)
    return OTHER if EVENT_TYPE.fullmatch(key) is None else key


def _short(text: str | None) -> str | None:
    """Truncate a text to the limit of an AMQP short string, at a whole character."""
    if text is None or (text.isascii() and len(text) <= MAX_SHORT_STRING_BYTES):
        return text
    encoded = text.encode("utf-8", "replace")[:MAX_SHORT_STRING_BYTES]
    return encoded.decode("utf-8", "ignore")
