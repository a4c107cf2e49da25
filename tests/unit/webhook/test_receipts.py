"""What delivery receipts say: the documented ones of each service, and odd ones."""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.callback import callback_address, reference_in
from bridge.config import EndpointSettings, SmsApiSettings, WorkerSettings
from bridge.config.presets import PRESETS, documented_webhooks
from bridge.config.webhook import ReceiptSettings
from bridge.json_pointer import find_all
from bridge.webhook.receipts import Receipt, read_receipts
from bridge.worker.envelope import Envelope
from bridge.worker.request import parse_request
from bridge.worker.service.shape import shape_from
from tests.unit.webhook.documented import documented

SETTINGS = ReceiptSettings(
    status_pointers=("/status",),
    delivered=("delivered", "true", "0"),
    failed=("failed",),
    pending=("sent",),
    provider_id_pointers=("/id", "/message_id"),
    message_id_pointers=("/reference",),
)


def read(
    document: object,
    event_type: str | None = None,
    items_pointer: str | None = None,
    **changed: Any,
) -> tuple[Receipt, ...]:
    receipts = ReceiptSettings.model_validate(SETTINGS.model_dump() | changed)
    endpoint = EndpointSettings(path="/webhooks", receipts=receipts, items_pointer=items_pointer)
    found = read_receipts(document, event_type, endpoint)
    return tuple(receipt._replace(status=None) for receipt in found)


def endpoint_of(preset: Any) -> EndpointSettings:
    return EndpointSettings.model_validate({"path": "/webhooks", "preset": preset})


# --- What services document -----------------------------------------------------------------------


@pytest.mark.parametrize(("preset", "webhook"), documented())
def test_documented_webhooks_say_what_they_mean(preset: Any, webhook: Mapping[str, Any]) -> None:
    """Each example of a preset is a receipt if it is documented as one, with its ids."""
    expected = tuple(
        webhook.get(name) for name in ("delivery", "provider_id", "message_id", "code")
    )

    reference = reference_in(webhook.get("callback", ""))
    found = read_receipts(webhook["body"], webhook["type"], endpoint_of(preset), reference)

    assert [receipt[:4] for receipt in found] == ([expected] if "delivery" in webhook else [])


# --- What comes back ------------------------------------------------------------------------------

# Where each service takes a reference that it echoes.
ECHOED = {
    "vonage": "/client_ref",
    "vonage-sms": "/client-ref",
    "messagebird": "/reference",
    "sinch": "/client_reference",
    "infobip": "/messages/0/destinations/0/messageId",
    "android-sms-gateway": "/id",
    "httpsms": "/request_id",
}
# Where the others take an address for receipts.
CALLBACKS = {"twilio": "/StatusCallback", "telnyx": "/webhook_url", "plivo": "/url"}
CALLBACK_URL = "https://sms.example.com/webhooks"


def keys_sent(preset: Any, key: str) -> dict[str, str]:
    """Return what the fields of a request hold in which the key is, by their pointers."""
    needed = {"account": "an-account", "key": "a-key", "base_url": "https://api.example.com"}
    settings = SmsApiSettings.model_validate({"preset": preset, **needed})
    body = parse_request(b'{"to": "+447700900001", "from": "Acme", "text": "Hi"}', WorkerSettings())
    envelope = Envelope(key=key, message_id=key, published_at=None, first_delivered_at=0)
    content = shape_from(settings, CALLBACK_URL).encode(body, envelope).body
    document = dict(parse_qsl(content.decode())) if content[:1] != b"{" else json.loads(content)
    fields = settings.request.fields.items()
    places = [place for place, value in fields if re.search(r"\{(key|callback)", str(value))]
    return {place: find_all(document, place)[0] for place in places}


@pytest.mark.parametrize("preset", PRESETS)
def test_our_key_comes_back(preset: Any) -> None:
    """The key travels where the service echoes it, and is read from the receipt again."""
    key = "7f9c24e8-0b5c-4a5e-9d3b-1f0e6a2b8c4d"
    endpoint = endpoint_of(preset)
    echoes = {ECHOED[preset]: key} if preset in ECHOED else {}
    if preset in CALLBACKS:
        options = "#rc=5&rp=all" if preset == "twilio" else ""
        echoes = {CALLBACKS[preset]: f"{CALLBACK_URL}?sms-bridge-id={key}{options}"}

    assert keys_sent(preset, key) == echoes
    assert bool(endpoint.receipts.message_id_pointers) == (preset in ECHOED)
    for webhook in documented_webhooks(preset):
        body = json.loads(json.dumps(webhook["body"]).replace("order-1", key))
        reference = reference_in(webhook.get("callback", "").replace("order-1", key))
        for receipt in read_receipts(body, webhook["type"], endpoint, reference):
            assert receipt.message_id == (key if echoes else None)


def test_the_signed_body_is_enough_where_it_has_the_address() -> None:
    payload: dict[str, Any] = {"id": "m-1", "to": [{"status": "delivered"}]}
    given = {"webhook_url": callback_address(CALLBACK_URL, "order-1", "+447700900001")}
    others: tuple[dict[str, Any], ...] = (
        {},
        {"webhook_url": None},
        {"webhook_url": CALLBACK_URL},
        {"webhook_url": [1]},
    )

    def message_id(members: dict[str, Any]) -> str | None:
        document = {"data": {"payload": payload | members}}
        (receipt,) = read_receipts(document, "message.finalized", endpoint_of("telnyx"))
        return receipt.message_id

    assert message_id(given) == "order-1"
    assert [message_id(other) for other in others] == [None] * len(others)


@pytest.mark.parametrize("preset", ECHOED)
def test_a_key_that_is_too_long_can_be_found_by_its_digest(preset: Any) -> None:
    """What the field cannot hold travels as the first characters of its SHA-256."""
    key = "x" * 300
    ((_, sent),) = keys_sent(preset, key).items()

    assert hashlib.sha256(key.encode()).hexdigest().startswith(sent)
    assert len(sent) >= 36


# --- Which events are receipts --------------------------------------------------------------------


def test_an_event_without_a_status_is_no_receipt() -> None:
    """What people write has no status, or one that is neither text nor number."""
    for document in ({"id": "m-1"}, {"status": {}}, {"status": None}, [], "text", None, object()):
        assert read(document) == ()


def test_only_the_types_that_are_listed_are_receipts() -> None:
    """A service may use one member in events of several types."""
    settings: dict[str, Any] = {"type_values": ["message.status"]}

    assert read({"status": "sent"}, "message.status", **settings) == (Receipt("pending"),)
    assert read({"status": "sent"}, "message.received", **settings) == ()
    assert read({"status": "sent"}, None, **settings) == ()


def test_numbers_and_truth_values_are_words_too() -> None:
    """A status may be a number or a truth value in JSON."""
    assert read({"status": True}) == (Receipt("delivered"),)
    assert read({"status": 0}) == (Receipt("delivered"),)


def test_one_call_may_hold_many_receipts() -> None:
    """Each member of the list is read by itself, and what is no receipt is passed over."""
    members = [{"status": "delivered", "id": "m-1"}, {}, 7, {"status": "failed", "id": "m-2"}]

    found = read({"results": members}, items_pointer="/results")

    assert found == (Receipt("delivered", "m-1"), Receipt("failed", "m-2"))
    assert read({"results": {}}, items_pointer="/results") == ()


# --- Ids ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reference", "found"),
    [
        ("order-1", "order-1"),
        ("00000000-0000-4000-8000-000000000001", "00000000-0000-4000-8000-000000000001"),
        ("e8077d803532c0b5937c639b60216938", "e8077d803532c0b5937c639b60216938"),
        (26, "26"),
        ("447700900001", None),
        pytest.param(447700900001, None, id="a number in JSON"),
        ("00123456789012345", None),
        ("770090", "770090"),
        ("(7700)900-001", None),
        ("two words", None),
        ("é", None),
        ("", None),
        pytest.param("x" * 256, None, id="too long"),
        (None, None),
        (1.5, None),
        ({"id": "order-1"}, None),
    ],
)
def test_a_reference_is_an_id_and_no_phone_number(reference: object, found: str | None) -> None:
    assert read({"status": "sent", "reference": reference}) == (
        Receipt("pending", message_id=found),
    )


def test_a_numbered_message_keeps_its_provider_id() -> None:
    """Services number their messages; only what is certainly a phone number is left out."""
    assert read({"status": "sent", "id": 12345678}) == (Receipt("pending", "12345678"),)
    assert read({"status": "sent", "id": "+447700900001"}) == (Receipt("pending"),)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["status", "id", "reference", "results"]), inner)
        ),
    )
)
def test_no_document_breaks_the_reading(document: Any) -> None:
    """Whatever an authentic event holds, ids are short, visible and no phone number with a plus."""
    for receipt in (*read(document), *read(document, items_pointer="/results")):
        for text in (receipt.provider_id, receipt.message_id):
            assert text is None or (1 <= len(text) <= 255 and text.isascii() and text.isprintable())
