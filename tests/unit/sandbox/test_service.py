"""A played service reads what the bridge writes for it, and the bridge reads its answers."""

import base64
import json
import re
from typing import Any

import pytest

from bridge.config import SmsApiSettings
from bridge.config.presets import PRESETS, Preset
from bridge.sandbox.service import ParsedRequest, PlayedService, Rejection, ServiceAnswer, like
from bridge.worker.envelope import Envelope
from bridge.worker.fates import Fate
from bridge.worker.request import SendRequest
from bridge.worker.service.shape import Shape, shape_from
from bridge.worker.service.transport import Reply

KEY = "an-api-key"
TO = "+15550100"
TEXT = 'Wörter & "mehr" + 1 = {2}\n👋'
SENDERLESS = {"android-sms-gateway"}
# The services that are told our key, of whatever use it is to them.
KEYLESS = {"twilio", "plivo"}


def shape(preset: Preset) -> Shape:
    given = {
        "base_url": "http://127.0.0.1:1",
        "account": "an-account",
        "auth": {"username": "a-user"},
        "key": KEY,
    }
    return shape_from(SmsApiSettings.model_validate({"preset": preset} | given))


def written(preset: Preset, *, key: str = "a-message-id") -> tuple[dict[str, str], bytes]:
    request = SendRequest.model_validate({"to": TO, "from": "Acme", "text": TEXT})
    envelope = Envelope(key=key, message_id=key, published_at=None, first_delivered_at=0)
    asked = shape(preset).encode(request, envelope)
    headers = (*asked.common, *asked.headers)
    return {name.decode().lower(): value.decode() for name, value in headers}, asked.body


def ask(
    preset: Preset, headers: dict[str, str], body: bytes, *, key: str | None = KEY
) -> ParsedRequest:
    return PlayedService(preset, key).read(headers, body)


def rejection(preset: Preset, headers: dict[str, str], body: bytes) -> Rejection:
    found = ask(preset, headers, body).rejection
    assert found is not None
    return found


def judge(preset: Preset, answer: ServiceAnswer) -> Any:
    content = b"" if answer.body is None else json.dumps(answer.body).encode()
    return shape(preset).judge(Reply(answer.status, (), content))


@pytest.mark.parametrize("preset", PRESETS)
def test_the_service_reads_what_the_bridge_writes(preset: Preset) -> None:
    """Number, sender, text and key arrive as they were, wherever the preset puts them."""
    headers, body = written(preset)
    parsed = ask(preset, headers, body)
    message = PlayedService(preset).accept(parsed)

    assert parsed.rejection is ask(preset, headers, body, key=None).rejection is None
    assert (message.to, message.text) == (TO, TEXT)
    assert message.sender == (None if preset in SENDERLESS else "Acme")
    assert message.idempotency_key == (None if preset in KEYLESS else "a-message-id")


@pytest.mark.parametrize("preset", PRESETS)
def test_the_bridge_reads_what_the_service_answers(preset: Preset) -> None:
    """The yes of the service is a yes to the bridge, with the id of the message in it."""
    service = PlayedService(preset)
    one, other = (service.accept(ask(preset, *written(preset, key=key))) for key in ("a", "b"))
    judged = judge(preset, service.acceptance_of(one))

    assert one.id != other.id
    assert (judged.fate, judged.provider_id) == (Fate.SENT, one.id)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("login", ["wrong", "missing"])
def test_a_wrong_login_is_told_as_the_service_does(preset: Preset, login: str) -> None:
    """A key that is not known, or none, pauses the bridge for its credentials."""
    headers, body = written(preset)
    if login == "missing":
        del headers[PlayedService(preset).login_header]
    parsed = ask(preset, headers, body, key="another-key" if login == "wrong" else None)
    assert parsed.rejection is not None
    judged = judge(preset, parsed.rejection.answer)

    assert (judged.fate, judged.pause) == (Fate.SETUP, "credentials_rejected")
    assert parsed.rejection.detail.endswith("a known key")
    assert parsed.to == TO


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", ["to", "from", "text"])
def test_what_is_missing_is_refused(preset: Preset, name: str) -> None:
    """A request without number, sender or text gets the service's own no, and we say what lacks."""
    headers, body = written(preset)
    fields = PlayedService(preset).settings.request.fields
    field = next((at for at, value in fields.items() if value == f"{{{name}}}"), None)
    if field is None:
        assert name == "from"
        assert preset in SENDERLESS
        return
    parts = field[1:].split("/")
    if PlayedService(preset).settings.request.body == "form":
        pairs = [pair for pair in body.split(b"&") if not pair.startswith(f"{parts[0]}=".encode())]
        body = b"&".join(pairs)
    else:
        document = node = json.loads(body)
        for part in parts[:-1]:
            node = node[int(part) if part.isdecimal() else part]
        del node[int(parts[-1]) if parts[-1].isdecimal() else parts[-1]]
        body = json.dumps(document).encode()
    refused = rejection(preset, headers, body)

    assert refused.detail == f"{field[1:]}: is missing"
    assert judge(preset, refused.answer).fate is Fate.REFUSED


@pytest.mark.parametrize("preset", PRESETS)
def test_what_cannot_be_read_is_refused(preset: Preset) -> None:
    """A body of another kind is a no as well, whatever is in it."""
    headers, _ = written(preset)
    for body in (b"", b"\xff", b"[]", b"x=%zz&&"):
        assert judge(preset, rejection(preset, headers, body).answer).fate is Fate.REFUSED


def test_a_number_wants_the_form_that_the_service_wants() -> None:
    """Where a service takes digits, a + is wrong, and the other way round."""
    headers, body = written("vonage")
    digits = rejection("vonage", headers, body.replace(b'"15550100"', b'"+15550100"'))
    headers, body = written("twilio")
    number = rejection("twilio", headers, body.replace(b"%2B15550100", b"15550100"))

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
    refused = rejection("twilio", headers | {"authorization": value}, body)

    assert refused.detail == "Authorization: must be Basic and a known key"


def test_a_message_keeps_the_id_that_its_request_gives_it() -> None:
    """Two services take our key for the id of the message, and recognise a repeat of it."""
    duplicates = {preset: PlayedService(preset).duplicate for preset in PRESETS}
    found = {preset: answer for preset, answer in duplicates.items() if answer is not None}

    assert {preset: answer.status for preset, answer in found.items()} == {
        "android-sms-gateway": 409,
        "infobip": 200,
    }
    for preset, answer in found.items():
        message = PlayedService(preset).accept(ask(preset, *written(preset, key="our-own-id")))
        assert message.id == "our-own-id"
        assert judge(preset, answer).fate is Fate.SENT


@pytest.mark.parametrize(
    ("preset", "name", "status", "answered", "fate"),
    [
        ("twilio", "21610", None, 400, Fate.REFUSED),
        ("twilio", "setup:credentials_rejected", None, 401, Fate.SETUP),
        ("twilio", None, 429, 429, Fate.SLOW_DOWN),
        ("vonage-sms", "slow_down", None, 200, Fate.SLOW_DOWN),
        ("generic", None, 422, 422, Fate.REFUSED),
    ],
)
def test_a_fault_is_answered_in_the_services_words(
    preset: Preset, name: str | None, status: int | None, answered: int, fate: Fate
) -> None:
    """By meaning, code or fate, or by a status that is documented; else in the sandbox's words."""
    answer = PlayedService(preset).fault_answer(name, status)
    assert answer is not None

    assert answer.status == answered
    assert (answer.means is None) == (answered in {418, 422})
    assert judge(preset, answer).fate is fate


@pytest.mark.parametrize(
    ("preset", "name", "status"),
    [
        ("twilio", "Queued.", None),
        ("generic", None, 204),
    ],
)
def test_a_fault_that_says_yes_accepts_the_message(
    preset: Preset, name: str | None, status: int | None
) -> None:
    """If a fault orders the service's own yes, there is no other answer in its place."""
    assert PlayedService(preset).fault_answer(name, status) is None


def test_an_unknown_answer_lists_the_answers() -> None:
    """The error lists the answers, and suggests the nearest name."""
    meant = r"^is unknown; did you mean The recipient replied STOP.\? there are: Queued. \(sent\); "
    with pytest.raises(ValueError, match=meant) as caught:
        PlayedService("twilio").fault_answer("The recipent replid STOP.", None)

    assert "The recipient replied STOP. (21610, refused); " in str(caught.value)


@pytest.mark.parametrize(
    ("example", "pattern"),
    [
        ("SM00000000000000000000000000000001", r"SM[0-9]{32}"),
        (
            "00000000-0000-4000-8000-000000000001",
            r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}",
        ),
        ("e8077d803532c0b5937c639b60216938", r"[0-9a-f]{32}"),
        ("01FC66621XXXXX119Z8PMV1QPQ", r"[0-9A-F]{9}XXXXX119Z8PMV1QPQ"),
        ("a-message-id", r"sandbox-[0-9a-f]{32}"),
    ],
)
def test_an_id_has_the_form_of_its_example(example: str, pattern: str) -> None:
    """What differs from message to message is made up, and the form stays."""
    made = {like(example) for _ in range(20)}

    assert len(made) == 20
    assert all(re.fullmatch(pattern, one) for one in made)
