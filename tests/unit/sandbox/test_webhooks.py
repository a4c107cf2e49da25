"""A played service's webhooks: the bridge reads and verifies them with the printed settings."""

import time
from dataclasses import replace

import pytest
import yaml

from bridge.callback import read_reference
from bridge.config import EndpointSettings, Settings
from bridge.config.presets import PRESETS, Preset, documented_webhooks
from bridge.errors import ConfigError, InvalidSignatureError
from bridge.sandbox.records import AcceptedMessage
from bridge.sandbox.service import PlayedService
from bridge.sandbox.webhooks import Signer, WebhookContent, write_receipt, write_reply
from bridge.webhook.endpoint import Endpoint
from bridge.webhook.event import name_event, read_body
from bridge.webhook.receipts import DeliveryState, Receipt
from bridge.webhook.signatures.verify import Verified, verify
from bridge.worker.envelope import Envelope
from bridge.worker.request import parse_request
from bridge.worker.service.shape import shape_from

NUMBER = "+15550199"
TEXT = 'Jä & "mehr" {1} 👍'
MESSAGE = AcceptedMessage("the-id-of-it", NUMBER, "Acme", "Hello", "the-key", 0)
PLAYED: list[Preset] = [preset for preset in PRESETS if preset != "generic"]
# These take our key for the message's id, which is then both.
SAME = {"android-sms-gateway", "infobip"}
# These echo no reference of ours, but call the address that came with the message.
KEYLESS = {"twilio", "plivo", "telnyx"}


def endpoint(preset: Preset) -> EndpointSettings:
    return EndpointSettings.model_validate({"path": "/x", "preset": preset})


def event_id(preset: Preset, event: WebhookContent) -> str | None:
    verified = Verified(0, None, None)
    return name_event(event.body, event.content_type, verified, endpoint(preset)).event_id


def receipts(preset: Preset, event: WebhookContent) -> tuple[Receipt, ...]:
    settings = endpoint(preset)
    named = name_event(event.body, event.content_type, Verified(0, None, None), settings)
    return tuple(receipt._replace(status=None, meaning=None) for receipt in named.receipts)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_reply_has_number_and_text(preset: Preset) -> None:
    """They stand where the example has them, and two replies are two events."""
    one, other = (write_reply(preset, NUMBER, TEXT) for _ in range(2))
    document = str(read_body(one.body, one.content_type))
    example = next(one for one in documented_webhooks(preset) if "delivery" not in one)

    assert (NUMBER if example["number"].startswith("+") else f"'{NUMBER[1:]}'") in document
    assert TEXT in document
    assert "YES" not in document
    assert event_id(preset, one) != event_id(preset, other)
    assert receipts(preset, one) == ()


@pytest.mark.parametrize("preset", PLAYED)
@pytest.mark.parametrize("delivery", ["delivered", "failed", "pending"])
def test_a_receipt_is_of_the_message(preset: Preset, delivery: DeliveryState) -> None:
    """The bridge reads what became of which message, and its key where the service echoes it."""
    message = replace(MESSAGE, id="the-key") if preset in SAME else MESSAGE
    event = write_receipt(preset, message, delivery)
    (receipt,) = receipts(preset, event)
    (keyless,) = receipts(
        preset, write_receipt(preset, replace(message, idempotency_key=None), delivery)
    )

    assert receipt.delivery == delivery
    assert receipt.provider_id == keyless.provider_id == message.id
    assert receipt.message_id == (None if preset in KEYLESS else "the-key")
    assert keyless.message_id in {None, message.id}


@pytest.mark.parametrize("preset", sorted(KEYLESS))
def test_a_receipt_goes_to_the_address_that_came_with_the_message(preset: Preset) -> None:
    """The bridge that the printed settings make finds its own id in what is sent and signed."""
    signer = Signer(preset, URL, None)
    bridge = printed(signer)
    request = parse_request(b'{"to": "+15550199", "from": "Acme", "text": "Hi"}', bridge.worker)
    envelope = Envelope(key="order-1", message_id=None, published_at=None, first_delivered_at=0)
    posted = shape_from(bridge.sms_api, bridge.callback_url).encode(request, envelope)
    service = PlayedService(preset)
    headers = {name.decode().lower(): value.decode() for name, value in posted.common}
    message = service.accept(service.read(headers, posted.body))
    event = write_receipt(preset, message, "delivered")
    signed = signer.sign(event)
    reference = read_reference(signed.query)
    (settings,) = bridge.webhook.all_endpoints
    verified = check(endpoint_of(signer), signer, event)
    named = name_event(event.body, event.content_type, verified, settings)
    (receipt,) = named.receipts

    assert reference == "order-1"
    assert receipt.message_id == ("order-1" if preset == "telnyx" else None)
    with pytest.raises(InvalidSignatureError, match="mismatch"):
        check(endpoint_of(signer), signer, event, forged=True)


def test_a_service_sends_no_receipt_that_is_not_documented() -> None:
    """Of the generic service no delivery event is known."""
    with pytest.raises(ValueError, match=r"^the service documents no receipt for failed"):
        write_receipt("generic", MESSAGE, "failed")


URL = "http://127.0.0.1:8080/webhooks/it"


SANDBOX_URL = "http://127.0.0.1:8025"


def printed(signer: Signer) -> Settings:
    text = signer.settings_to_copy(SANDBOX_URL, has_key=False)
    return Settings.model_validate(yaml.safe_load(text))


def endpoint_of(signer: Signer) -> Endpoint:
    (settings,) = printed(signer).webhook.all_endpoints
    return Endpoint(settings)


def check(
    endpoint: Endpoint, signer: Signer, event: WebhookContent, *, forged: bool = False
) -> Verified:
    """Verify, as the bridge does, what the sandbox sends of an event."""
    signed = signer.sign(event, forged=forged)
    headers = [(name.lower().encode(), value.encode()) for name, value in signed.headers]
    headers.append((b"content-type", event.content_type.encode()))
    now = time.time()
    return verify(endpoint.scheme, endpoint.keys, headers, event.body, now=now, query=signed.query)


@pytest.mark.parametrize("preset", PRESETS)
def test_what_is_printed_verifies_what_is_sent(preset: Preset) -> None:
    """The endpoint that the sandbox prints takes its webhooks, and no forged one."""
    # Plivo's scheme cannot tell a query from a form.
    query = "" if preset == "plivo" else "?a=1"
    signer = Signer(preset, URL + query, None)
    endpoint, event = endpoint_of(signer), write_reply(preset, NUMBER, "Ja!")

    assert check(endpoint, signer, event).key_index == 0
    assert query[1:].encode() in signer.sign(event).query
    with pytest.raises(InvalidSignatureError, match="mismatch"):
        check(endpoint, signer, event, forged=True)


@pytest.mark.parametrize("preset", [preset for preset in PRESETS if preset != "telnyx"])
def test_the_users_secret_is_used_and_not_shown(preset: Preset) -> None:
    """A secret that is given signs, and the configuration says whose it is in its place."""
    secret = "the-secret-that-the-user-has-given"
    signer, event = Signer(preset, URL, secret), write_reply(preset, NUMBER, "Ja!")
    endpoint = endpoint_of(signer)
    shown = [one.current for one in endpoint.secrets]
    endpoint.keys = [secret.encode()]

    assert shown == ["the value of --webhook-secret"]
    assert secret not in signer.settings_to_copy(SANDBOX_URL, has_key=True)
    assert "the value of --key" in signer.settings_to_copy(SANDBOX_URL, has_key=True)
    assert check(endpoint, signer, event).key_index == 0


def test_a_public_key_cannot_be_signed_with() -> None:
    """Telnyx has the private key alone, so that the sandbox makes a pair of its own."""
    with pytest.raises(ConfigError, match=r"^--webhook-secret: telnyx signs with a key pair"):
        Signer("telnyx", URL, "a-secret")


@pytest.mark.parametrize("preset", PRESETS)
def test_the_printed_settings_are_all_that_the_worker_needs(preset: Preset) -> None:
    """Copied as they are, they are complete, and lead to the sandbox."""
    settings = printed(Signer(preset, URL, None)).sms_api

    assert (settings.missing, settings.preset) == ([], preset)
    assert shape_from(settings).login.key.current == "any-key"
    assert settings.base_url == SANDBOX_URL
