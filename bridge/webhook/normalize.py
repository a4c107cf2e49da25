"""Turns a verified webhook into events of one form, the same for every service. Does no I/O.

The settings of the endpoint say where each part stands in the webhook. A webhook that is neither a
message nor a receipt becomes an event as well, and every event carries what it was read from.
"""

import base64
import hashlib
import itertools
import json
import re
from collections.abc import Sequence
from typing import Any, Final

from pydantic_core import to_json

from bridge.config import EndpointSettings
from bridge.config.webhook import NORMALIZED_TYPES, dotted_type
from bridge.json_pointer import (
    as_text,
    find_all,
    find_id,
    find_text,
    is_id,
    is_like_a_phone_number,
    split_pointer,
)
from bridge.telemetry.log_format import utc_milliseconds
from bridge.webhook.event import (
    JSON,
    UNPARSED,
    WebhookEvent,
    inflate,
    read_body,
    repeat_key_of,
    routing_key_of,
)
from bridge.webhook.receipts import Receipt, find_provider_id, read_receipt
from bridge.webhook.signatures.verify import Verified

RECEIVED: Final = "message.received"
# A bundle of more items is published as one event.
MAX_ITEMS: Final = 1000
MAX_MEDIA: Final = 100
# Digits of an international number without its +. Short codes have fewer.
_MIN_DIGITS: Final = 8
_MAX_DIGITS: Final = 15
_HALF_CHARACTER: Final = re.compile(r"[\ud800-\udfff]")
# Numbers stay text, because Python refuses to convert integers of more than 4,300 digits.
_DECODER: Final = json.JSONDecoder(parse_int=str, parse_float=str)
_SPACE: Final = re.compile(r"[ \t\r\n]*")


class EventFields:
    """Where each part of an endpoint's events stands, taken from its settings once.

    Reading an attribute of the settings takes a hundred times as long as reading one of these.
    """

    __slots__ = (
        "endpoint",
        "from_pointers",
        "id_pointers",
        "item_id_pointers",
        "item_type_pointers",
        "items_pointer",
        "keyword_pointers",
        "media",
        "message_types",
        "path",
        "provider",
        "provider_id_pointers",
        "start",
        "stop",
        "text_pointers",
        "to_pointers",
        "type_pointers",
        "writes_digits",
    )

    def __init__(self, endpoint: EndpointSettings) -> None:
        message, opt_out = endpoint.message, endpoint.opt_out
        self.endpoint = endpoint
        self.path = endpoint.path
        self.provider = endpoint.preset
        self.items_pointer = endpoint.items_pointer
        # Pointers into the first item of a bundle are for every item.
        item = f"{endpoint.items_pointer}/0"
        self.type_pointers, self.item_type_pointers = _split(endpoint.event_type_pointers, item)
        self.id_pointers, self.item_id_pointers = _split(endpoint.event_id_pointers, item)
        self.writes_digits = endpoint.numbers == "digits"
        self.message_types = frozenset(message.type_values)
        self.from_pointers = message.from_pointers
        self.to_pointers = message.to_pointers
        self.text_pointers = message.text_pointers
        self.provider_id_pointers = message.provider_id_pointers
        self.media = tuple((place.url, place.content_type) for place in message.media)
        self.keyword_pointers = opt_out.keyword_pointers
        self.stop = frozenset(opt_out.stop)
        self.start = frozenset(opt_out.start)


def normalize(
    body: bytes,
    content_type: str | None,
    verified: Verified,
    fields: EventFields,
    content_encoding: str | None = None,
    *,
    now: float,
    reference: str | None = None,
) -> list[WebhookEvent]:
    """Return the events of an authentic webhook, at least one, in the order of its items.

    `now` is the time of receipt in unix seconds, `reference` our id of the message in the address
    that was called.
    """
    plain = body if content_encoding is None else inflate(body, content_encoding)
    document = read_body(plain, content_type)
    reader = _FieldReader(body, verified, fields, now, reference)
    whole = _Source(_write_raw(body, content_type, content_encoding))
    pointer = fields.items_pointer
    if pointer is None:
        return reader.read_whole(document, whole)
    items = find_all(document, pointer)[0]
    if not isinstance(items, list) or not items:
        return reader.read_whole(document, whole)
    if len(items) == 1:
        # From the first bracket to the last: no less than the item, and as a rule no more.
        whole.item = plain[plain.find(b"[") + 1 : plain.rfind(b"]")].strip()
        return reader.read_items(document, items, [whole])
    contents = _split_items(plain, pointer, len(items))
    if contents is None:
        return reader.read_whole(None, whole)
    sources = [_Source(_write_raw(one, content_type, None), one) for one in contents]
    return reader.read_items(document, items, sources)


class _Source:
    """The raw body of an event; for an item of a bundle also its JSON, and its place."""

    __slots__ = ("item", "place", "raw")

    def __init__(self, raw: dict[str, str], item: bytes | None = None) -> None:
        self.raw = raw
        self.item = item
        self.place: dict[str, int] | None = None


class _FieldReader:
    """Reads the events of one webhook."""

    __slots__ = ("_fields", "_received_at", "_reference", "_sha256", "_verified")

    def __init__(
        self,
        body: bytes,
        verified: Verified,
        fields: EventFields,
        now: float,
        reference: str | None,
    ) -> None:
        self._fields = fields
        self._verified = verified
        self._reference = reference
        self._sha256 = hashlib.sha256(body).hexdigest()
        self._received_at = utc_milliseconds(now)

    def read_whole(self, document: Any, source: _Source) -> list[WebhookEvent]:  # noqa: ANN401  JSON
        """Return the events of a webhook that is no bundle."""
        fields = self._fields
        kind = find_text(document, fields.type_pointers)
        event_id = self._verified.event_id or find_id(document, fields.id_pointers)
        return self.read(document, kind, event_id, source)

    def read_items(
        self,
        document: Any,  # noqa: ANN401  JSON
        items: Sequence[Any],
        sources: Sequence[_Source],
    ) -> list[WebhookEvent]:
        """Return the events of the items of a bundle."""
        fields, count = self._fields, len(items)
        kind = find_text(document, fields.type_pointers)
        event_id = self._verified.event_id or find_id(document, fields.id_pointers)
        events: list[WebhookEvent] = []
        for index, item in enumerate(items):
            item_kind = find_text(item, fields.item_type_pointers) or kind
            item_id = find_id(item, fields.item_id_pointers)
            if item_id is None and event_id is not None:
                item_id = event_id if count == 1 else f"{event_id}:{index}"
            source = sources[index]
            if count > 1:
                source.place = {"index": index, "count": count}
            events += self.read(item, item_kind, item_id, source)
        without_id = [number for number, event in enumerate(events) if event.repeat_key is None]
        if len(without_id) < len(events):
            # The ids of the others show whether the bundle is a repeat.
            for number in without_id:
                key = repeat_key_of(fields.path, str(number), self._sha256)
                events[number].repeat_key = key
        return events

    def read(
        self,
        document: Any,  # noqa: ANN401  JSON
        kind: str | None,
        event_id: str | None,
        source: _Source,
    ) -> list[WebhookEvent]:
        """Return the events of one item, or of a webhook that is no bundle.

        `kind` is the service's own type. `event_id` is the service's id of the event, or its id of
        the message that the event is about.
        """
        fields = self._fields
        endpoint = fields.endpoint
        receipt = read_receipt(document, kind, endpoint, self._reference)
        if receipt is not None and receipt.delivery is not None:
            return [self._receipt_event(document, receipt, event_id, source)]
        is_message = kind in fields.message_types if fields.message_types else kind is None
        if receipt is None and is_message:
            data = _read_message(document, fields)
            if data is not None:
                if event_id is None:
                    event_id = data.get("provider_id")
                event = self._event(RECEIVED, data, event_id, source)
                opt_out = self._opt_out_event(document, data, event_id, source)
                return [event] if opt_out is None else [event, opt_out]
        lacks_fields = is_message or (receipt is None and kind in endpoint.receipts.type_values)
        if not kind or lacks_fields:
            return [self._event(UNPARSED, {}, event_id, source, receipt)]
        kind = dotted_type(kind, fields.provider)
        if receipt is not None and event_id is not None and event_id == receipt.provider_id:
            event_id = f"{event_id}:{_word(f'{kind}:{receipt.status}')}"
        if kind in NORMALIZED_TYPES:
            # Subscribers rely on the members that events of these types have.
            kind = UNPARSED
        return [self._event(kind, {}, event_id, source, receipt)]

    def _receipt_event(
        self,
        document: Any,  # noqa: ANN401  JSON
        receipt: Receipt,
        event_id: str | None,
        source: _Source,
    ) -> WebhookEvent:
        fields, kind = self._fields, f"receipt.{receipt.delivery}"
        to_pointers = fields.endpoint.receipts.to_pointers
        provider_id = receipt.provider_id
        if provider_id is not None and event_id in {None, provider_id}:
            # An id of the message alone would be the same for each of its receipts.
            event_id = f"{provider_id}:{kind}:{receipt.status}"
        data = {
            "message_id": receipt.message_id,
            "provider_id": provider_id,
            "to": _find_number(document, to_pointers, fields),
            "status": receipt.status,
            "code": receipt.code,
            "meaning": receipt.meaning,
        }
        return self._event(kind, _known(data), event_id, source, receipt)

    def _opt_out_event(
        self,
        document: Any,  # noqa: ANN401  JSON
        message: dict[str, Any],
        event_id: str | None,
        source: _Source,
    ) -> WebhookEvent | None:
        fields = self._fields
        if not fields.keyword_pointers:
            return None
        keyword = find_text(document, fields.keyword_pointers)
        if keyword in fields.stop:
            kind = "opt_out"
        elif keyword in fields.start:
            kind = "opt_in"
        else:
            return None
        data = {
            "from": message["from"],
            "to": message.get("to"),
            "keyword": keyword,
            "provider_id": message.get("provider_id"),
        }
        event_id = None if event_id is None else f"{event_id}:{kind}"
        return self._event(kind, _known(data), event_id, source)

    def _event(
        self,
        kind: str,
        data: dict[str, Any],
        event_id: str | None,
        source: _Source,
        receipt: Receipt | None = None,
    ) -> WebhookEvent:
        endpoint = self._fields.endpoint
        if event_id is not None and not is_id(event_id):
            event_id = hashlib.sha256(event_id.encode("utf-8", "replace")).hexdigest()
        event: dict[str, Any] = {"type": kind}
        if event_id is not None:
            event["id"] = event_id
        event["provider"] = self._fields.provider
        event["received_at"] = self._received_at
        event["data"] = data
        event["raw"] = source.raw
        if source.place is not None:
            event["bundle"] = source.place
        content = self._sha256
        if source.item is not None:
            # Recognises a repeat in any bundle. The type may stand beside the items. The key also
            # has the id, so a hash of 64 bits suffices: a digest takes ten times the instructions.
            content = f"{kind} {hash(source.item)}"
        return WebhookEvent(
            body=_write(event),
            content_type=JSON,
            type=kind,
            routing_key=routing_key_of(kind, endpoint),
            sha256=self._sha256,
            event_id=event_id,
            repeat_key=repeat_key_of(self._fields.path, event_id, content),
            signed_at=self._verified.timestamp,
            receipts=() if receipt is None else (receipt,),
        )


def _word(text: str) -> str:
    """Return an unknown word of the service for an event id, which may be logged."""
    if not is_like_a_phone_number(text):
        return text
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()


def _read_message(document: Any, fields: EventFields) -> dict[str, Any] | None:  # noqa: ANN401
    """Return the parts of a person's message; None without a sender, or without text and media."""
    sender = _find_number(document, fields.from_pointers, fields)
    if sender is None:
        return None
    text = find_text(document, fields.text_pointers)
    media = _find_media(document, fields.media) if fields.media else []
    if text is None and not media:
        return None
    data: dict[str, Any] = {"from": sender}
    recipient = _find_number(document, fields.to_pointers, fields)
    if recipient is not None:
        data["to"] = recipient
    if text is not None:
        data["text"] = text
    provider_id = find_provider_id(document, fields.provider_id_pointers)
    if provider_id is not None:
        data["provider_id"] = provider_id
    if media:
        data["media"] = media
    return data


def _find_number(
    document: Any,  # noqa: ANN401  JSON
    pointers: tuple[str, ...],
    fields: EventFields,
) -> str | None:
    """Return the first phone number, short code or name; an international number with its +."""
    for pointer in pointers:
        for value in find_all(document, pointer):
            text = None if isinstance(value, bool) else as_text(value)
            if text:
                return f"+{text}" if fields.writes_digits and _is_international(text) else text
    return None


def _is_international(text: str) -> bool:
    """Whether a text is an international number without its +."""
    # Takes half of the instructions of a regular expression.
    has_length = _MIN_DIGITS <= len(text) <= _MAX_DIGITS
    return has_length and text.isascii() and text.isdecimal() and text[0] != "0"


def _find_media(
    document: Any,  # noqa: ANN401  JSON
    places: tuple[tuple[str, str | None], ...],
) -> list[dict[str, str]]:
    media: list[dict[str, str]] = []
    for place, of_type in places:
        if "{n}" not in place:
            urls = find_all(document, place)
            # Most messages have no media.
            if any(urls):
                types = [] if of_type is None else find_all(document, of_type)
                pairs = itertools.zip_longest(urls[:MAX_MEDIA], types[:MAX_MEDIA])
                media += (_medium(url, named) for url, named in pairs if url)
            continue
        for n in range(MAX_MEDIA):
            url = _find_first(document, place.replace("{n}", str(n)))
            if not url:
                break
            named = None if of_type is None else of_type.replace("{n}", str(n))
            media.append(_medium(url, None if named is None else _find_first(document, named)))
    return [medium for medium in media if medium]


def _find_first(document: Any, pointer: str) -> object:  # noqa: ANN401  JSON
    return next(iter(find_all(document, pointer)), None)


def _medium(url: object, content_type: object) -> dict[str, str]:
    if not isinstance(url, str):
        return {}
    medium = {"url": url}
    if isinstance(content_type, str):
        medium["content_type"] = content_type
    return medium


def _known(members: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in members.items() if value is not None}


def _write_raw(
    body: bytes, content_type: str | None, content_encoding: str | None
) -> dict[str, str]:
    raw = {}
    try:
        raw["body"], encoding = body.decode(), "utf-8"
    except UnicodeDecodeError:
        raw["body"], encoding = base64.b64encode(body).decode(), "base64"
    if content_type is not None:
        raw["content_type"] = content_type
    raw["encoding"] = encoding
    if content_encoding is not None:
        raw["content_encoding"] = content_encoding
    return raw


def _write(event: dict[str, Any]) -> bytes:
    try:
        # Takes a quarter of the time of the standard library's writer.
        return to_json(event)
    except ValueError:
        # A JSON escape can be half of a surrogate pair, which UTF-8 cannot express.
        return json.dumps(_with_whole_characters(event)).encode()


def _with_whole_characters(value: Any) -> Any:  # noqa: ANN401  JSON
    if isinstance(value, dict):
        return {name: _with_whole_characters(below) for name, below in value.items()}
    if isinstance(value, list):
        return [_with_whole_characters(below) for below in value]
    return _HALF_CHARACTER.sub("\ufffd", value) if isinstance(value, str) else value


# --- Bundles --------------------------------------------------------------------------------------


def _split(pointers: tuple[str, ...], item: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the pointers that do not lead into this item, and the rest of each that does."""
    below = f"{item}/"
    beside = tuple(one for one in pointers if not one.startswith(below))
    return beside, tuple(one.removeprefix(item) for one in pointers if one.startswith(below))


def _split_items(plain: bytes, pointer: str, count: int) -> list[bytes] | None:
    """Return the JSON of each item as it was written; None if the list cannot be split."""
    if count > MAX_ITEMS:
        return None
    text = plain.decode()
    try:
        at = _skip(text, 0)
        for name in split_pointer(pointer):
            at = _find_member(text, at, name)
        items = []
        at = _skip(text, at + 1)
        while text[at] != "]":
            end = _DECODER.raw_decode(text, at)[1]
            items.append(text[at:end].encode())
            at = _skip(text, end)
            if text[at] == ",":
                at = _skip(text, at + 1)
    except (ValueError, IndexError, RecursionError):
        return None
    return items if len(items) == count else None


def _find_member(text: str, at: int, name: str) -> int:
    """Return where the value of a member of the JSON object at this position begins.

    If there are several, the last one counts, as it does for parsers. Raises ValueError if there is
    none.
    """
    found = -1
    at = _skip(text, at + 1)
    while text[at] != "}":
        key, at = json.decoder.scanstring(text, at + 1)  # type: ignore[attr-defined]
        at = _skip(text, _skip(text, at) + 1)
        if key == name:
            found = at
        at = _skip(text, _DECODER.raw_decode(text, at)[1])
        if text[at] == ",":
            at = _skip(text, at + 1)
    if found < 0:
        raise ValueError("there is no such member")
    return found


def _skip(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    return at if space is None else space.end()
