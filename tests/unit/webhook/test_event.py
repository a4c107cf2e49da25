"""What a verified webhook is called: any body has a routing key, and properties that AMQP takes."""

import gzip
import hashlib
import json
import zlib
from typing import Any
from urllib.parse import urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.config import EndpointSettings
from bridge.http.messages import Headers, Request
from bridge.json_pointer import NOT_JSON
from bridge.webhook.event import (
    MAX_FORM_FIELDS,
    Form,
    WebhookEvent,
    name_event,
    properties_of,
    read_body,
    trace_of,
)
from bridge.webhook.signatures.verify import Verified

FORM = "application/x-www-form-urlencoded"
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def name(
    body: bytes,
    *,
    event_id: str | None = None,
    content_type: str | None = "application/json",
    content_encoding: str | None = None,
    **endpoint: Any,
) -> WebhookEvent:
    """Name a webhook whose signature has this id, of an endpoint with these settings."""
    ours = EndpointSettings(path="/webhooks", **endpoint)
    verified = Verified(0, event_id, 1700000000.0)
    return name_event(body, content_type, verified, ours, content_encoding)


def request(*headers: tuple[bytes, bytes]) -> Request:
    given_headers: Headers = [*headers]
    return Request("POST", "/webhooks", b"", given_headers, b"")


@pytest.mark.parametrize(
    ("body", "routing_key", "kind"),
    [
        (b'{"type": "message.received"}', "message.received", "message.received"),
        (b'{"type": "' + b"a" * 120 + b'"}', "a" * 120, "a" * 120),
        (b'{"type": "' + b"a" * 121 + b'"}', "other", "a" * 121),
        (b'{"type": ""}', "other", ""),
        (b'{"type": ".a"}', "other", ".a"),
        (b'{"type": "a.#"}', "other", "a.#"),
        (b'{"type": 7}', "unparsed", None),
        (b'{"kind": "a"}', "unparsed", None),
        (b"no JSON", "unparsed", None),
    ],
    ids=lambda value: str(value)[:20],
)
def test_every_body_has_a_routing_key(body: bytes, routing_key: str, kind: str | None) -> None:
    """The type is the routing key if it may be one; a wildcard or an empty word never is."""
    event = name(body)

    assert (event.routing_key, event.type) == (routing_key, kind)


@pytest.mark.parametrize(
    ("kind", "preset", "routing_key"),
    [
        ("sms:received", "android-sms-gateway", "sms.received"),
        ("sms:received", "generic", "other"),
        ("message.sent", "telnyx", "message.sent"),
        ("sms:", "android-sms-gateway", "other"),
        (":#", "android-sms-gateway", "other"),
        ("a:" * 60 + "b", "android-sms-gateway", "other"),
    ],
)
def test_a_colon_is_a_dot_in_a_presets_routing_key(
    kind: str, preset: Any, routing_key: str
) -> None:
    """A service whose types have colons can be bound to by type; the type stays as it is."""
    body = json.dumps({"type": kind}).encode()
    event = name(body, preset=preset, event_type_pointers=("/type",))

    assert (event.type, event.routing_key) == (kind, routing_key)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b'{"event": "sms.in", "type": "text"}', "sms.in"),
        (b'{"data": {"event_type": "message.sent"}, "type": "text"}', "message.sent"),
        (b'{"event": 7, "data": {"event_type": "message.sent"}}', "message.sent"),
        (b'{"type": "text"}', "sms.event"),
        (b"<event/>", "sms.event"),
    ],
    ids=["first", "second", "no-text", "elsewhere", "no-json"],
)
def test_the_type_stands_where_the_endpoint_says(body: bytes, kind: str) -> None:
    """The first pointer that leads to a text has the type; where none does it is the constant."""
    pointers = ("/event", "/data/event_type")
    event = name(body, event_type_pointers=pointers, event_type="sms.event")

    assert (event.type, event.routing_key) == (kind, kind)


def test_a_form_is_read_and_stays_as_it_is() -> None:
    """Of a form the first value of each field is read; its bytes and its content type stay."""
    body = b"MessageStatus=delivered&SmsSid=SM1&SmsSid=SM2&Empty=&Body=a%20b+%C3%A9"
    told = FORM + "; charset=UTF-8"
    event = name(
        body,
        content_type=told,
        event_type_pointers=("/MessageStatus",),
        event_id_pointers=("/SmsSid",),
    )
    properties = properties_of(event, message_id="m-1", trace=())

    assert (event.type, event.event_id, event.body) == ("delivered", "SM1", body)
    assert properties.content_type == told
    assert read_body(body, told) == {
        "MessageStatus": "delivered",
        "SmsSid": "SM1",
        "Empty": "",
        "Body": "a b é",
    }


@pytest.mark.parametrize(
    "content_type", [None, "text/plain", "application/json", "multipart/form-data; boundary=a"]
)
def test_only_what_is_said_to_be_a_form_is_read_as_one(content_type: str | None) -> None:
    """Any text could be a form, so nothing is taken for one that is not said to be."""
    assert read_body(b"type=a", content_type) is NOT_JSON


def test_json_is_read_whatever_it_is_said_to_be() -> None:
    """JSON under the content type of a form, as curl sends it, is JSON."""
    event = name(b'{"type": "a"}', content_type=FORM)

    assert (event.type, event.content_type) == ("a", "application/json")


def test_a_form_of_too_many_fields_is_not_read() -> None:
    """What a form takes in memory is bounded; one with more fields is passed on unread."""
    most = urlencode([(f"f{number}", "") for number in range(MAX_FORM_FIELDS)]).encode()

    assert len(read_body(most, FORM)) == MAX_FORM_FIELDS
    assert read_body(most + b"&one=more", FORM) is NOT_JSON
    assert name(most + b"&type=a", content_type=FORM).routing_key == "unparsed"
    assert name(most + b"&type=a", content_type=FORM, event_type="b").routing_key == "b"


@given(body=st.binary(max_size=100))
def test_any_form_is_read_or_not(body: bytes) -> None:
    """Whatever a form's bytes are, reading them raises nothing."""
    document = read_body(b"&" + body, FORM)

    assert type(document) is Form


def test_the_id_of_the_signature_comes_first() -> None:
    body = b'{"id": "outer", "data": {"id": "inner"}}'

    assert name(body, event_id="signed").event_id == "signed"
    assert name(body).event_id == "outer"
    assert name(b'{"data": {"id": "inner"}}').event_id == "inner"
    assert name(b"{}").event_id is None


def test_a_repeat_has_the_id_and_the_body_of_the_first() -> None:
    """Another body under the same id is another event; without an id none can be told."""
    first = name(b'{"a": 1}', event_id="evt-1")

    assert first.repeat_key == name(b'{"a": 1}', event_id="evt-1").repeat_key
    assert first.repeat_key != name(b'{"a": 2}', event_id="evt-1").repeat_key
    assert first.repeat_key != name(b'{"a": 1}', event_id="evt-2").repeat_key
    assert name(b'{"a": 1}').repeat_key is None


def test_properties_say_what_the_body_does_not() -> None:
    """Subscribers get the kind, the id, the digest and the trace beside the untouched body."""
    body = b'{"type": "message.received", "id": "evt-1"}'
    trace = trace_of(request((b"traceparent", TRACE.encode())))
    event = name(body, content_type="text/plain")
    properties = properties_of(event, message_id="m-1", trace=trace)

    assert properties.headers == {
        "sms-bridge-body-sha256": hashlib.sha256(body).hexdigest(),
        "sms-bridge-event-id": "evt-1",
        "traceparent": TRACE,
    }
    assert (properties.message_id, properties.message_type) == ("m-1", "message.received")
    assert (properties.content_type, properties.delivery_mode) == ("application/json", 2)


def test_what_is_no_json_keeps_its_content_type() -> None:
    """Nobody is told that a body is JSON which is none."""
    event = name(b"\x1f\x8b", content_type="text/plain", content_encoding="gzip")
    properties = properties_of(event, message_id="m-1", trace=())

    assert (properties.content_type, properties.content_encoding) == ("text/plain", "gzip")


@pytest.mark.parametrize("size", range(252, 257))
@pytest.mark.parametrize("letter", ["a", "é", "✓", "😀"])
def test_a_long_type_is_cut_at_a_whole_character(size: int, letter: str) -> None:
    """A property takes 255 bytes; what is cut is a beginning of the type, and no half letter."""
    event, kind = name(b"{}"), "x" * size + 3 * letter
    event.type = kind
    told = properties_of(event, message_id="m-1", trace=()).message_type

    assert told is not None
    assert kind.startswith(told)
    assert 252 <= len(told.encode()) <= 255 or told == kind


DOCUMENT = b'{"type": "message.received", "id": "1"}'
COMPRESSED = {
    "gzip": (gzip.compress(DOCUMENT), "gzip", "message.received"),
    "deflate": (zlib.compress(DOCUMENT), "deflate", "message.received"),
    "inflated on the way": (DOCUMENT, "gzip", "message.received"),
    "cut off": (gzip.compress(DOCUMENT)[:-9], "gzip", None),
    "two of them": (gzip.compress(DOCUMENT) + gzip.compress(DOCUMENT), "gzip", None),
    "a bomb": (gzip.compress(DOCUMENT + b" " * 2**21), "gzip", None),
}


@pytest.mark.parametrize(("body", "encoding", "kind"), COMPRESSED.values(), ids=COMPRESSED.keys())
def test_a_compressed_body_is_read_whole_or_not_at_all(
    body: bytes, encoding: str, kind: str | None
) -> None:
    """A header that a proxy has left on a body that it inflated hides nothing."""
    ours = EndpointSettings(path="/webhooks")
    event = name_event(body, "application/json", Verified(0, None, None), ours, encoding)

    assert (event.type, event.event_id, event.body) == (kind, kind and "1", body)
