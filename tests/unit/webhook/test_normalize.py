"""Events of one form: what each service documents, and whatever else a webhook may hold."""

import base64
import gzip
import hashlib
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.callback import reference_in
from bridge.config import EndpointSettings
from bridge.config.presets import PRESETS, Preset, documented_webhooks
from bridge.config.webhook import NORMALIZED_TYPES
from bridge.webhook.event import WebhookEvent, properties_of
from bridge.webhook.normalize import MAX_ITEMS, EventFields, normalize
from bridge.webhook.signatures.verify import Verified
from tests.unit.webhook.documented import documented

JSON = "application/json"
FORM = "application/x-www-form-urlencoded"
SIGNED_AT = 1700000000.0
RECEIVED_AT = "2026-01-01T12:00:00.250Z"
NOW = 1767268800.25
ENDPOINTS = {
    preset: EventFields(
        EndpointSettings.model_validate({"path": f"/webhooks/{preset}", "preset": preset})
    )
    for preset in PRESETS
}


def events_of(
    preset: Preset,
    body: bytes | object,
    content_type: str | None = JSON,
    *,
    event_id: str | None = None,
    encoding: str | None = None,
    reference: str | None = None,
) -> list[WebhookEvent]:
    """Normalize a webhook; write a body that is not bytes as JSON or as a form."""
    if not isinstance(body, bytes):
        body = write(body, content_type)
    verified = Verified(0, event_id, SIGNED_AT)
    fields = ENDPOINTS[preset]
    return normalize(body, content_type, verified, fields, encoding, now=NOW, reference=reference)


def write(body: Any, content_type: str | None) -> bytes:
    return urlencode(body).encode() if content_type == FORM else json.dumps(body).encode()


def read(events: list[WebhookEvent]) -> list[dict[str, Any]]:
    """Return the events' bodies, which are the service's webhook apart from `raw`."""
    return [json.loads(event.body) for event in events]


def one(preset: Preset, body: bytes | object, content_type: str | None = JSON) -> dict[str, Any]:
    (event,) = read(events_of(preset, body, content_type))
    return event


# --- What services document -----------------------------------------------------------------------


@pytest.mark.parametrize(("preset", "webhook"), documented())
def test_documented_webhooks_become_events_of_one_form(
    preset: Preset, webhook: Mapping[str, Any]
) -> None:
    content_type = webhook.get("content_type", JSON)
    body = write(webhook["body"], content_type)
    reference = reference_in(webhook.get("callback", ""))
    events = events_of(preset, body, content_type, reference=reference)

    assert read(events) == [
        {
            **expected,
            "provider": preset,
            "received_at": RECEIVED_AT,
            "raw": {"body": body.decode(), "content_type": content_type, "encoding": "utf-8"},
        }
        for expected in webhook["normalized"]
    ]
    for event, expected in zip(events, webhook["normalized"], strict=True):
        properties = properties_of(event, message_id="m-1", trace=())
        assert (event.type, event.routing_key) == (expected["type"], expected["type"])
        assert properties.content_type == JSON
        assert properties.message_type == expected["type"]
        assert properties.headers is not None
        assert properties.headers.get("sms-bridge-event-id") == expected.get("id")
        assert properties.headers["sms-bridge-body-sha256"] == hashlib.sha256(body).hexdigest()


@pytest.mark.parametrize("preset", [preset for preset in PRESETS if preset != "generic"])
def test_each_preset_documents_every_type(preset: Preset) -> None:
    types = {event["type"] for one in documented_webhooks(preset) for event in one["normalized"]}

    assert types >= {"message.received", "receipt.delivered", "receipt.failed", "receipt.pending"}


# --- Parts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "given", "shown"),
    [
        ("vonage", "447700900001", "+447700900001"),
        pytest.param("vonage", 447700900001, "+447700900001", id="a number in JSON"),
        ("vonage", "72727", "72727"),
        ("vonage", "Acme", "Acme"),
        ("vonage", "07700900001", "07700900001"),
        ("vonage", "1" * 16, "1" * 16),
        ("twilio", "12025550101", "12025550101"),
    ],
)
def test_numbers_have_a_plus(preset: Preset, given: object, shown: str) -> None:
    """Short codes and names stay as they are, and so does what a service with a + writes."""
    names = {"vonage": ("from", "text"), "twilio": ("From", "Body")}[preset]
    event = one(preset, {names[0]: given, names[1]: "YES"}, JSON)

    assert event["data"] == {"from": shown, "text": "YES"}


def test_what_a_service_does_not_say_is_left_out() -> None:
    event = one("vonage", {"from": "Acme", "text": "", "to": None, "message_uuid": None})

    assert "id" not in event
    assert event["data"] == {"from": "Acme", "text": ""}


def test_all_media_are_listed() -> None:
    form = {"From": "+12025550101", "Body": "", "MediaUrl0": "https://a.example/0"}
    form |= {"MediaContentType1": "image/png", "MediaUrl1": "https://a.example/1", "MediaUrl3": "x"}

    assert one("twilio", form, FORM)["data"]["media"] == [
        {"url": "https://a.example/0"},
        {"url": "https://a.example/1", "content_type": "image/png"},
    ]


@pytest.mark.parametrize(
    ("place", "shown"),
    [
        (
            {"url": "/a/*/u", "content_type": "/b/*/t"},
            [{"url": "x", "content_type": "image/png"}, {"url": "y"}],
        ),
        ({"url": "/a/0/u", "content_type": "/none/*/t"}, [{"url": "x"}]),
        ({"url": "/a/{n}/u", "content_type": "/none/*/{n}"}, [{"url": "x"}, {"url": "y"}]),
        ({"url": "/none/*/{n}"}, None),
    ],
    ids=str,
)
def test_media_need_not_have_types(
    place: Mapping[str, str], shown: list[dict[str, str]] | None
) -> None:
    """Fewer types than media, because the settings or the webhook have no more, refuse nothing."""
    settings = {"path": "/", "preset": "vonage", "message": {"media": [place]}}
    body = b'{"from":"Acme","text":"","a":[{"u":"x"},{"u":"y"}],"b":[{"t":"image/png"}],"none":[]}'
    fields = EventFields(EndpointSettings.model_validate(settings))
    (event,) = read(normalize(body, JSON, Verified(0, None, None), fields, now=NOW))

    assert event["data"].get("media") == shown


def test_a_receipt_has_the_type_where_the_status_is_a_boolean() -> None:
    """No subscriber knows what `true` means."""
    for is_final, kind in ((True, "receipt.failed"), (False, "receipt.pending")):
        data = {"message_id": "m-1", "is_final": is_final}
        event = one("httpsms", {"type": "message.send.expired", "id": "e-1", "data": data})

        assert (event["type"], event["data"]["status"]) == (kind, "message.send.expired")


@pytest.mark.parametrize(
    ("keyword", "types"),
    [
        ("STOP", ["message.received", "opt_out"]),
        ("START", ["message.received", "opt_in"]),
        ("HELP", ["message.received"]),
        ("", ["message.received"]),
    ],
)
def test_an_opt_out_is_an_event_beside_the_message(keyword: str, types: list[str]) -> None:
    form = {"MessageSid": "SM1", "From": "+12025550101", "To": "+12025550102", "Body": "x"}
    events = events_of("twilio", form | {"OptOutType": keyword}, FORM)

    assert [event.type for event in events] == types
    assert [event.event_id for event in events] == ["SM1", f"SM1:{types[-1]}"][: len(types)]
    assert len({event.repeat_key for event in events}) == len(events)
    assert (
        read(events)[1:]
        == [
            {
                "type": types[-1],
                "id": f"SM1:{types[-1]}",
                "provider": "twilio",
                "received_at": RECEIVED_AT,
                "data": {
                    "from": "+12025550101",
                    "to": "+12025550102",
                    "keyword": keyword,
                    "provider_id": "SM1",
                },
                "raw": read(events)[0]["raw"],
            }
        ][: len(types) - 1]
    )


def test_an_id_of_the_message_is_made_one_of_the_event() -> None:
    """All receipts of a message have its id, and are no repeats of each other."""
    forms = [{"MessageSid": "SM1", "MessageStatus": word} for word in ("sent", "failed", "odd")]
    events = [event for form in forms for event in events_of("twilio", form, FORM)]

    assert [event.event_id for event in events] == [
        *("SM1:receipt.pending:sent", "SM1:receipt.failed:failed", "SM1:odd:odd")
    ]


@pytest.mark.parametrize(
    ("preset", "bodies", "content_type"),
    [
        (
            "twilio",
            [
                {"MessageSid": "SM1", "MessageStatus": word}
                for word in ("in transit", "on hold", "+447700900001", "447700900002")
            ],
            FORM,
        ),
        (
            "sinch",
            [
                {"type": "recipient_delivery_report_sms", "batch_id": "b-1", "status": word}
                for word in ("Unknown", "Odd", "+447700900001", "447700900002")
            ],
            JSON,
        ),
    ],
)
def test_receipts_with_unknown_words_have_different_ids(
    preset: Preset, bodies: list[Any], content_type: str
) -> None:
    """Ids are logged, and a word that looks like a phone number does not appear in one."""
    ids = [event.event_id for body in bodies for event in events_of(preset, body, content_type)]

    assert len(set(ids)) == len(bodies)
    assert "447700" not in str(ids)


def test_the_id_of_the_signature_comes_first() -> None:
    (event,) = events_of(
        "twilio", {"MessageSid": "SM1", "MessageStatus": "sent"}, FORM, event_id="e"
    )

    assert event.event_id == "e"


# --- What is neither a message nor a receipt ------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "body", "content_type", "kind"),
    [
        ("twilio", b"", None, "unparsed"),
        ("twilio", b"a=b", "text/plain", "unparsed"),
        ("twilio", b"From=%2B12025550101", FORM, "unparsed"),
        ("twilio", b"Body=YES", FORM, "unparsed"),
        ("twilio", b"MessageSid=SM1&MessageStatus=pondering", FORM, "pondering"),
        ("vonage", b"{}", JSON, "unparsed"),
        ("vonage", b'{"from": true, "text": "YES"}', JSON, "unparsed"),
        ("vonage", b'{"from": "Acme", "text": 7}', JSON, "unparsed"),
        ("telnyx", b'{"data": {"event_type": "message.received"}}', JSON, "unparsed"),
        ("telnyx", b'{"data": {"event_type": "message.sent"}}', JSON, "unparsed"),
        ("telnyx", b'{"data": {"event_type": "call.hangup"}}', JSON, "call.hangup"),
        ("android-sms-gateway", b'{"event": "sms:data-received"}', JSON, "sms.data-received"),
        ("sinch", b'{"type": "mo_binary", "from": "1", "body": "AA"}', JSON, "mo_binary"),
        ("infobip", b'{"results": {}}', JSON, "unparsed"),
        ("infobip", b'{"results": [7]}', JSON, "unparsed"),
        ("infobip", b'{"results": [{"status": {"groupName": "NEW"}}]}', JSON, "NEW"),
    ],
    ids=str,
)
def test_other_webhooks_keep_their_type_or_are_unparsed(
    preset: Preset, body: bytes, content_type: str | None, kind: str
) -> None:
    """Nothing is refused, and nothing is taken for a message that lacks the fields of one."""
    (event,) = events_of(preset, body, content_type)
    (shown,) = read([event])

    assert (event.type, event.routing_key, shown["type"]) == (kind, kind, kind)
    assert shown["data"] == {}
    assert raw_of(shown) == body


@pytest.mark.parametrize(
    ("preset", "body"),
    [
        ("sinch", {"type": "{kind}", "id": "e-1"}),
        ("android-sms-gateway", {"event": "{kind}", "id": "e-1"}),
        ("vonage", {"status": "{kind}", "message_uuid": "m-1"}),
        ("infobip", {"results": [{"status": {"groupName": "{kind}"}}]}),
    ],
)
def test_a_service_does_not_name_a_type_of_ours(preset: Preset, body: object) -> None:
    """Events of these types have the members that subscribers rely on."""
    for word in [*NORMALIZED_TYPES, *(kind.replace(".", ":") for kind in NORMALIZED_TYPES)]:
        written = json.dumps(body).replace("{kind}", word).encode()
        event = one(preset, written)

        assert (event["type"], event["data"]) == ("unparsed", {})
        assert raw_of(event) == written


def raw_of(event: Mapping[str, Any]) -> bytes:
    text = event["raw"]["body"]
    is_text = event["raw"]["encoding"] == "utf-8"
    return text.encode() if is_text else base64.b64decode(text, validate=True)


def test_a_compressed_webhook_is_read_and_stays_as_it_is() -> None:
    body = gzip.compress(b'{"from": "Acme", "text": "YES"}')
    (event,) = events_of("vonage", body, encoding="gzip")
    (shown,) = read([event])

    assert shown["data"]["text"] == "YES"
    assert (raw_of(shown), shown["raw"]["content_encoding"]) == (body, "gzip")
    assert properties_of(event, message_id="m-1", trace=()).content_encoding is None


def test_half_a_character_is_replaced_beside_the_raw_body() -> None:
    body = b'{"from": "Acme", "text": "a\\ud83d"}'
    event = one("vonage", body)

    assert event["data"]["text"] == "a\ufffd"
    assert raw_of(event) == body


def test_an_id_that_no_header_holds_is_its_digest() -> None:
    long = "x" * 250
    (event,) = events_of("twilio", {"MessageSid": long, "MessageStatus": "delivered"}, FORM)

    expected = f"{long}:receipt.delivered:delivered"
    assert event.event_id == hashlib.sha256(expected.encode()).hexdigest()
    assert read([event])[0]["id"] == event.event_id


# --- Bundles --------------------------------------------------------------------------------------

RECEIPT = '{ "messageId":"m-1","to":"447700900001","price":1.00,"status":{"groupName":"DELIVERED"}}'
MESSAGE = '{"messageId":"m-2","from":"447700900001","text":"\\u00e9 ] } \\" é"}'
ODD = '{"n": 123456789012345678901234567890123456789012345678901234567890}'


def bundle(*items: str) -> bytes:
    before = '{ "results" : [1], "a": {"results": []}, "results" : [ '
    return f"{before}{' , '.join(items)} ] }}".encode()


def test_a_bundle_is_an_event_for_each_item() -> None:
    """Each has the JSON of its item alone, as it was written, and its place in the bundle."""
    body = bundle(RECEIPT, MESSAGE, ODD, "7")
    events = events_of("infobip", body)
    shown = read(events)

    assert [event["type"] for event in shown] == [
        *("receipt.delivered", "message.received", "unparsed", "unparsed")
    ]
    assert [event["raw"]["body"] for event in shown] == [RECEIPT, MESSAGE, ODD, "7"]
    assert [event["bundle"] for event in shown] == [{"index": n, "count": 4} for n in range(4)]
    assert [event.get("id") for event in shown] == [
        *("m-1:receipt.delivered:DELIVERED", "m-2", None, None)
    ]
    assert {event.sha256 for event in events} == {hashlib.sha256(body).hexdigest()}
    assert [len(event.receipts) for event in events] == [1, 0, 0, 0]


def test_an_item_is_recognised_in_another_bundle() -> None:
    """A service may repeat an item with others than before."""
    first, second = events_of("infobip", bundle(RECEIPT, MESSAGE, ODD))[:2]
    again = events_of("infobip", bundle(MESSAGE, RECEIPT))
    repeat = events_of("infobip", bundle(RECEIPT, MESSAGE, ODD))

    assert [event.repeat_key for event in again] == [second.repeat_key, first.repeat_key]
    # The ids of the others show that the whole is a repeat.
    assert repeat[2].repeat_key == events_of("infobip", bundle(RECEIPT, MESSAGE, ODD))[2].repeat_key
    assert repeat[2].repeat_key is not None


def test_an_item_is_recognised_when_it_comes_alone() -> None:
    """Members beside the items, such as a count of pending messages, may differ by then."""
    of_bundle = events_of("infobip", bundle(RECEIPT, MESSAGE))
    alone = [
        events_of("infobip", f'{{"pending": {n}, "results": [{item}]}}'.encode())[0]
        for n, item in enumerate((RECEIPT, MESSAGE))
    ]

    assert [event.repeat_key for event in alone] == [event.repeat_key for event in of_bundle]
    (other,) = events_of("infobip", bundle(MESSAGE.replace("text", "body")))
    assert other.repeat_key != alone[1].repeat_key


def test_a_type_beside_the_items_tells_events_apart() -> None:
    """The same item may be that of another event: the service reports a message again."""
    settings = {
        "path": "/webhooks/own",
        "event_type_pointers": ["/event"],
        "event_id_pointers": ["/items/0/id"],
        "items_pointer": "/items",
    }
    fields = EventFields(EndpointSettings.model_validate(settings))
    events = [
        normalize(
            f'{{"event": "{kind}", "items": [{{"id": "m-1"}}{others}]}}'.encode(),
            JSON,
            Verified(0, None, SIGNED_AT),
            fields,
            now=NOW,
        )[0]
        for kind in ("sms.delivered", "sms.read")
        for others in ("", ', {"id": "m-2"}')
    ]

    assert [event.type for event in events] == ["sms.delivered"] * 2 + ["sms.read"] * 2
    delivered, delivered_again, was_read, was_read_again = (event.repeat_key for event in events)
    assert delivered == delivered_again
    assert was_read == was_read_again
    assert delivered != was_read


def test_items_that_json_cannot_express_are_told_apart() -> None:
    """Half of a surrogate pair has no UTF-8, and the bridge cannot write 700 nested lists."""
    deep = f'{{"messageId":"m-3","deep":{"[" * 700}{"]" * 700}}}'
    halves = [MESSAGE.replace("u00e9", half) for half in ("ud83d", "ud83e")]
    events, repeat = (events_of("infobip", bundle(*halves, deep)) for _ in range(2))

    keys = [event.repeat_key for event in events]
    assert None not in keys
    assert len(set(keys)) == len(keys) == 3
    assert [event.repeat_key for event in repeat] == keys


@pytest.mark.parametrize("ids", [("",), (', "id": "a"',), (', "id": "a"', ', "id": "b"')])
def test_the_type_of_an_item_may_have_half_a_character(ids: tuple[str, ...]) -> None:
    endpoint = EndpointSettings(
        path="/webhooks",
        items_pointer="/items",
        event_type_pointers=("/items/0/type",),
        event_id_pointers=("/items/0/id",),
    )
    items = ", ".join(f'{{"type": "a\\ud83d"{one}}}' for one in ids)
    body = f'{{"items": [{items}]}}'.encode()
    fields, verified = EventFields(endpoint), Verified(0, None, SIGNED_AT)
    events = normalize(body, JSON, verified, fields, now=NOW)
    assert [event.routing_key for event in events] == ["other"] * len(ids)
    for event in events:
        properties_of(event, message_id="1", trace=())


def test_items_without_any_id_are_no_repeats() -> None:
    assert [event.repeat_key for event in events_of("infobip", bundle("7", "8"))] == [None, None]


def test_the_signed_id_of_a_bundle_tells_its_items_apart() -> None:
    events = events_of("infobip", bundle("7", "8"), event_id="e-1")

    assert [event.event_id for event in events] == ["e-1:0", "e-1:1"]


@pytest.mark.parametrize(
    "body",
    [
        bundle(*["{}"] * (MAX_ITEMS + 1)),
        b'{"results": [%s, {}]}' % (b"[" * 100_000 + b"]" * 100_000),
    ],
    ids=["many", "deep"],
)
def test_a_bundle_that_cannot_be_split_is_one_event(body: bytes) -> None:
    (event,) = read(events_of("infobip", body))

    assert event["type"] == "unparsed"
    assert raw_of(event) == body


# --- Anything -------------------------------------------------------------------------------------

NAMES = sorted(
    {
        name
        for preset in PRESETS
        for webhook in documented_webhooks(preset)
        for name in [*webhook["body"], *webhook["body"].get("data", {})]
    }
)
VALUES = st.none() | st.booleans() | st.integers() | st.text() | st.sampled_from(["sent", "STOP"])
DOCUMENTS = st.recursive(
    VALUES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*NAMES, "status"]), inner)
    ),
    max_leaves=20,
)
BODIES = (
    st.binary(max_size=200)
    | DOCUMENTS.map(json.dumps).map(str.encode)
    | st.lists(DOCUMENTS, max_size=4).map(lambda items: json.dumps({"results": items}).encode())
    | st.dictionaries(st.sampled_from(NAMES), st.text(max_size=20)).map(
        lambda form: urlencode(form, errors="replace").encode()
    )
)


@given(
    preset=st.sampled_from(PRESETS),
    body=BODIES,
    content_type=st.sampled_from([JSON, FORM, "text/plain", None]),
    encoding=st.sampled_from([None, None, "gzip"]),
)
def test_any_webhook_becomes_events(
    preset: Preset, body: bytes, content_type: str | None, encoding: str | None
) -> None:
    """At least one, without null, with a routing key, and with every byte that came."""
    events = events_of(preset, body, content_type, encoding=encoding)
    shown = read(events)

    assert events
    if "bundle" not in shown[0]:
        assert all(raw_of(event) == body for event in shown)
    for event, content in zip(events, shown, strict=True):
        members = [*content.values(), *content["data"].values(), *content["raw"].values()]
        assert None not in members
        assert content["type"] == event.type
        assert event.routing_key in {event.type, "other"}
        assert set(content["raw"]) <= {"body", "content_type", "encoding", "content_encoding"}
        assert content.get("id") == event.event_id
        properties_of(event, message_id="m-1", trace=())
