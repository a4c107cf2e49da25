"""What a verified webhook is called: any body has a routing key, and properties that AMQP takes."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.http_server.request import Headers, Request
from bridge.inbound.event import Event, name_event, properties_of
from bridge.inbound.signature import Verified

POINTERS = ("/id", "/data/id")
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def name(body: bytes, *, event_id: str | None = None) -> Event:
    """Name a webhook whose signature has this id."""
    return name_event(body, Verified(0, event_id, 1700000000.0), POINTERS)


def request(*headers: tuple[bytes, bytes]) -> Request:
    """Make the request of a webhook."""
    given_headers: Headers = [*headers]
    return Request("POST", "/webhooks", b"", given_headers, b"")


@pytest.mark.parametrize(
    ("body", "routing_key", "kind"),
    [
        (b'{"type": "message.received"}', "message.received", "message.received"),
        (b'{"type": "a-b_c.D9"}', "a-b_c.D9", "a-b_c.D9"),
        (b'{"type": "' + b"a" * 120 + b'"}', "a" * 120, "a" * 120),
        (b'{"type": "' + b"a" * 121 + b'"}', "other", "a" * 121),
        (b'{"type": ""}', "other", ""),
        (b'{"type": "a..b"}', "other", "a..b"),
        (b'{"type": ".a"}', "other", ".a"),
        (b'{"type": "a.#"}', "other", "a.#"),
        (b'{"type": "a\\n"}', "other", "a\n"),
        (b'{"type": 7}', "unparsed", None),
        (b'{"kind": "a"}', "unparsed", None),
        (b'["type"]', "unparsed", None),
        (b"no JSON", "unparsed", None),
        (b"", "unparsed", None),
    ],
    ids=lambda value: str(value)[:20],
)
def test_every_body_has_a_routing_key(body: bytes, routing_key: str, kind: str | None) -> None:
    """The type is the routing key if it may be one; a wildcard or an empty word never is."""
    event = name(body)

    assert (event.routing_key, event.type) == (routing_key, kind)


def test_the_id_of_the_signature_comes_first() -> None:
    """An id beside the signature counts before one in the body, and the first pointer first."""
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
    headers = request((b"traceparent", TRACE.encode()), (b"content-type", b"text/plain"))
    properties = properties_of(name(body), headers, message_id="m-1")

    assert properties.headers == {
        "sms-bridge-body-sha256": hashlib.sha256(body).hexdigest(),
        "sms-bridge-event-id": "evt-1",
        "traceparent": TRACE,
    }
    assert (properties.message_id, properties.message_type) == ("m-1", "message.received")
    assert (properties.content_type, properties.delivery_mode) == ("application/json", 2)


def test_what_is_no_json_keeps_its_content_type() -> None:
    """Nobody is told that a body is JSON which is none."""
    plain = request((b"content-type", b"text/plain"), (b"content-encoding", b"gzip"))
    properties = properties_of(name(b"\x1f\x8b"), plain, message_id="m-1")

    assert (properties.content_type, properties.content_encoding) == ("text/plain", "gzip")


@given(kind=st.text(alphabet=st.characters(codec="utf-8"), min_size=200, max_size=300))
def test_a_long_type_is_cut_at_a_whole_character(kind: str) -> None:
    """A property takes 255 bytes; what is cut is a beginning of the type, and no half letter."""
    event = name(b"{}")._replace(type=kind)
    told = properties_of(event, request(), message_id="m-1").message_type

    assert told is not None
    assert kind.startswith(told)
    assert 252 <= len(told.encode()) <= 255 or told == kind
