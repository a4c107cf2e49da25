"""A played service's webhooks are read by the bridge, and tell of our messages and numbers."""

import pytest

from bridge.config import EndpointSettings
from bridge.config.presets import PRESETS, Preset, documented_webhooks
from bridge.sandbox.events import Event, Events
from bridge.sandbox.messages import Message
from bridge.webhook.event import name_event, read_body
from bridge.webhook.receipts import Delivery, Receipt, read_receipts
from bridge.webhook.signatures.verify import Verified

NUMBER = "+15550199"
TEXT = 'Jä & "mehr" {1} 👍'
MESSAGE = Message("the-id-of-it", NUMBER, "Acme", "Hello", "the-key", 0)
PLAYED: list[Preset] = [preset for preset in PRESETS if preset != "generic"]
# These take our key for the message's id, which is then both.
SAME = {"android-sms-gateway", "infobip"}
# These echo no reference of ours.
KEYLESS = {"twilio", "plivo", "telnyx"}


def endpoint(preset: Preset) -> EndpointSettings:
    """Describe the endpoint that a preset's service calls."""
    return EndpointSettings.model_validate({"path": "/x", "preset": preset})


def event_id(preset: Preset, event: Event) -> str | None:
    """Return the id that the bridge finds in an event."""
    verified = Verified(0, None, None)
    return name_event(event.body, event.content_type, verified, endpoint(preset)).event_id


def receipts(preset: Preset, event: Event) -> tuple[Receipt, ...]:
    """Return the delivery receipts that the bridge finds in an event."""
    settings = endpoint(preset)
    named = name_event(event.body, event.content_type, Verified(0, None, None), settings)
    return read_receipts(read_body(event.body, event.content_type), named.type, settings.receipts)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_reply_has_number_and_text(preset: Preset) -> None:
    """They stand where the example has them, and two replies are two events."""
    one, other = (Events(preset).reply(NUMBER, TEXT) for _ in range(2))
    document = str(read_body(one.body, one.content_type))
    example = next(one for one in documented_webhooks(preset) if "delivery" not in one)

    assert (NUMBER if example["number"].startswith("+") else f"'{NUMBER[1:]}'") in document
    assert TEXT in document
    assert "YES" not in document
    assert event_id(preset, one) != event_id(preset, other)
    assert receipts(preset, one) == ()


@pytest.mark.parametrize("preset", PLAYED)
@pytest.mark.parametrize("delivery", ["delivered", "failed", "pending"])
def test_a_receipt_is_of_the_message(preset: Preset, delivery: Delivery) -> None:
    """The bridge reads what became of which message, and its key where the service echoes it."""
    message = MESSAGE._replace(id="the-key") if preset in SAME else MESSAGE
    event = Events(preset).receipt(message, delivery)
    (receipt,) = receipts(preset, event)

    assert receipt.delivery == delivery
    assert receipt.provider_id == message.id
    assert receipt.message_id == (None if preset in KEYLESS else "the-key")


@pytest.mark.parametrize("preset", PLAYED)
def test_a_message_without_a_key_has_none_in_its_receipt(preset: Preset) -> None:
    """Nothing is made up where the request brought no reference."""
    message = MESSAGE._replace(idempotency_key=None)
    (receipt,) = receipts(preset, Events(preset).receipt(message, "delivered"))

    assert receipt.message_id in {None, message.id}
    assert receipt.provider_id == message.id


def test_a_service_sends_no_receipt_that_is_not_documented() -> None:
    """Of the generic service no delivery event is known."""
    with pytest.raises(
        ValueError, match=r"^the service has no documented receipt that says failed"
    ):
        Events("generic").receipt(MESSAGE, "failed")
