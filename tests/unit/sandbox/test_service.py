"""A service that is played reads what the bridge writes for it, and is understood by it."""

import base64
import json
from typing import Any

import pytest

from bridge.config import SmsApiSettings
from bridge.config.presets import PRESETS, Preset
from bridge.sandbox.answers import Answer
from bridge.sandbox.faults import Fault
from bridge.sandbox.messages import Message
from bridge.sandbox.service import Reading, Refusal, Service
from bridge.worker.envelope import Envelope
from bridge.worker.fates import Fate
from bridge.worker.request import SendRequest
from bridge.worker.service.connection import Reply
from bridge.worker.service.shape import Shape, shape_from

KEY = "an-api-key"
TO = "+15550100"
TEXT = 'Wörter & "mehr" + 1 = {2}\n👋'
SENDERLESS = {"android-sms-gateway"}
# The services that are told our key, of whatever use it is to them.
KEYLESS = {"twilio", "plivo"}


def shape(preset: Preset) -> Shape:
    """Prepare the bridge for a preset."""
    given = {
        "base_url": "http://127.0.0.1:1",
        "account": "an-account",
        "auth": {"username": "a-user"},
        "key": KEY,
    }
    return shape_from(SmsApiSettings.model_validate({"preset": preset} | given))


def written(preset: Preset, *, key: str = "a-message-id") -> tuple[dict[str, str], bytes]:
    """Write a request as the worker does."""
    request = SendRequest.model_validate({"to": TO, "from": "Acme", "text": TEXT})
    envelope = Envelope(key=key, message_id=key, published_at=None, first_delivered_at=0)
    asked = shape(preset).encode(request, envelope)
    headers = (*asked.common, *asked.headers)
    return {name.decode().lower(): value.decode() for name, value in headers}, asked.body


def ask(preset: Preset, headers: dict[str, str], body: bytes, *, key: str | None = KEY) -> Reading:
    """Have the service read a request."""
    return Service(preset).read(headers, body, api_key=key, received_at=1.5)


def judge(preset: Preset, answer: Answer) -> Any:
    """Have the bridge judge an answer."""
    content = b"" if answer.body is None else json.dumps(answer.body).encode()
    return shape(preset).judge(Reply(answer.status, (), content))


@pytest.mark.parametrize("preset", PRESETS)
def test_the_service_reads_what_the_bridge_writes(preset: Preset) -> None:
    """Number, sender, text and key arrive as they were, wherever the preset puts them."""
    headers, body = written(preset)
    message = ask(preset, headers, body).outcome

    assert isinstance(message, Message)
    assert (message.to, message.text, message.received_at) == (TO, TEXT, 1.5)
    assert message.sender == (None if preset in SENDERLESS else "Acme")
    assert message.idempotency_key == (None if preset in KEYLESS else "a-message-id")


@pytest.mark.parametrize("preset", PRESETS)
def test_the_bridge_reads_what_the_service_answers(preset: Preset) -> None:
    """The yes of the service is a yes to the bridge, with the id of the message in it."""
    message = ask(preset, *written(preset)).outcome
    assert isinstance(message, Message)
    judged = judge(preset, Service(preset).accept(message))

    assert (judged.fate, judged.provider_id) == (Fate.SENT, message.id)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("login", ["wrong", "missing"])
def test_a_wrong_login_is_told_as_the_service_does(preset: Preset, login: str) -> None:
    """A key that is not known, or none, pauses the bridge for its credentials."""
    headers, body = written(preset)
    if login == "missing":
        del headers[Service(preset).settings.auth.header.lower()]
    reading = ask(preset, headers, body, key="another-key" if login == "wrong" else None)
    assert isinstance(reading.outcome, Refusal)
    judged = judge(preset, reading.outcome.answer)

    assert (judged.fate, judged.pause) == (Fate.SETUP, "credentials_rejected")
    assert reading.outcome.detail.endswith("a known key")
    assert reading.to == TO


@pytest.mark.parametrize("preset", PRESETS)
def test_any_key_will_do_unless_one_is_named(preset: Preset) -> None:
    """Without a key of its own, the service takes each."""
    assert isinstance(ask(preset, *written(preset), key=None).outcome, Message)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", ["to", "from", "text"])
def test_what_is_missing_is_refused(preset: Preset, name: str) -> None:
    """A request without number, sender or text gets the service's own no, and we say what lacks."""
    headers, body = written(preset)
    fields = Service(preset).settings.request.fields
    field = next((at for at, value in fields.items() if value == f"{{{name}}}"), None)
    if field is None:
        assert name == "from"
        assert preset in SENDERLESS
        return
    parts = field[1:].split("/")
    if Service(preset).settings.request.body == "form":
        pairs = [pair for pair in body.split(b"&") if not pair.startswith(f"{parts[0]}=".encode())]
        body = b"&".join(pairs)
    else:
        document = node = json.loads(body)
        for part in parts[:-1]:
            node = node[int(part) if part.isdecimal() else part]
        del node[int(parts[-1]) if parts[-1].isdecimal() else parts[-1]]
        body = json.dumps(document).encode()
    refused = ask(preset, headers, body).outcome
    assert isinstance(refused, Refusal)

    assert refused.detail == f"{field[1:]}: is missing"
    assert judge(preset, refused.answer).fate is Fate.REFUSED


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("body", [b"", b"\xff", b"[]", b"x=%zz&&"])
def test_what_cannot_be_read_is_refused(preset: Preset, body: bytes) -> None:
    """A body of another kind is a no as well, whatever is in it."""
    headers, _ = written(preset)
    refused = ask(preset, headers, body).outcome
    assert isinstance(refused, Refusal)

    assert judge(preset, refused.answer).fate is Fate.REFUSED


def test_a_number_wants_the_form_that_the_service_wants() -> None:
    """Where a service takes digits, a + is wrong, and the other way round."""
    headers, body = written("vonage")
    digits = ask("vonage", headers, body.replace(b'"15550100"', b'"+15550100"')).outcome
    headers, body = written("twilio")
    number = ask("twilio", headers, body.replace(b"%2B15550100", b"15550100")).outcome

    assert isinstance(digits, Refusal)
    assert isinstance(number, Refusal)
    assert digits.detail == "to: must be 4 to 15 digits, the first not 0, no +"
    assert number.detail == "To: must be + and 4 to 15 digits, the first not 0"


@pytest.mark.parametrize(
    "value",
    [
        "Basic " + base64.b64encode(b"an-account").decode(),
        "Basic " + base64.b64encode(b":an-api-key").decode(),
        "Basic an-api-key",
        "Bearer an-api-key",
        "an-api-key",
    ],
)
def test_a_login_wants_the_form_of_the_service(value: str) -> None:
    """A key that stands elsewhere than the service looks for it is none."""
    headers, body = written("twilio")
    refused = ask("twilio", headers | {"authorization": value}, body).outcome

    assert isinstance(refused, Refusal)


@pytest.mark.parametrize("preset", ["android-sms-gateway", "infobip"])
def test_a_message_keeps_the_id_that_its_request_gives_it(preset: Preset) -> None:
    """Where a request names the message's id, the answer has that one, and a repeat is told so."""
    message = ask(preset, *written(preset, key="our-own-id")).outcome
    duplicate = Service(preset).duplicate
    assert isinstance(message, Message)
    assert duplicate is not None

    assert message.id == "our-own-id"
    assert judge(preset, duplicate).fate is Fate.SENT


@pytest.mark.parametrize(
    ("preset", "fault", "status", "fate"),
    [
        ("twilio", {"answer": "21610"}, 400, Fate.REFUSED),
        ("twilio", {"status": 429}, 429, Fate.SLOW_DOWN),
        ("twilio", {"status": 418}, 418, Fate.REFUSED),
        ("vonage-sms", {"answer": "slow_down"}, 200, Fate.SLOW_DOWN),
        ("generic", {"status": 422}, 422, Fate.REFUSED),
    ],
)
def test_a_fault_is_answered_in_the_services_words(
    preset: Preset, fault: dict[str, Any], status: int, fate: Fate
) -> None:
    """By name, or by a status of which the service has an example; else in the sandbox's words."""
    service = Service(preset)
    ordered = service.ordered(Fault(**fault))
    assert ordered is not None

    assert service.status_of(Fault(**fault)) == ordered.status == status
    assert (ordered.means is None) == (status in {418, 422})
    assert judge(preset, ordered).fate is fate


@pytest.mark.parametrize(
    ("preset", "fault", "status"),
    [
        ("twilio", {"latency_seconds": 1}, 201),
        ("twilio", {"answer": "queued"}, 201),
        ("vonage-sms", {"status": 200}, 200),
        ("generic", {"status": 204}, 204),
        ("generic", {}, 202),
    ],
)
def test_a_fault_that_says_yes_takes_the_message(
    preset: Preset, fault: dict[str, Any], status: int
) -> None:
    """The service's own yes is no answer to give in its place, whatever else is ordered."""
    service = Service(preset)

    assert service.ordered(Fault(**fault)) is None
    assert service.status_of(Fault(**fault)) == status
