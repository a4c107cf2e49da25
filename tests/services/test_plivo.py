"""The preset `plivo` against Plivo's own client."""

from dataclasses import replace

import plivo
import pytest

from bridge.config.presets import preset_settings
from tests.services.comparison import (
    MESSAGES,
    NUMBER,
    SECRET,
    Message,
    Service,
    assert_reads_the_same,
    assert_sends_the_same,
)
from tests.services.sandbox import (
    assert_sandbox_refuses_the_client,
    assert_sandbox_takes_what_the_client_sends,
)
from tests.services.stub import GUARD_SECONDS, Stub, Told, in_json

# The client wants 20 characters that begin so.
AUTH_ID = "MA000000000000000001"


def send(stub: Stub, message: Message, **options: str) -> str | None:
    """Send with the client, whose address is a constant of its module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("plivo.rest.client.PLIVO_API_BASE_URI", f"{stub.url}/v1/Account")
        with plivo.RestClient(AUTH_ID, SECRET, timeout=GUARD_SECONDS) as client:
            client.session.verify = str(stub.certificate)
            sent = client.messages.create(
                src=message.sender, dst=message.to, text=message.text, **options
            )
    message_id: str = sent.message_uuid[0]
    return message_id


def code_of(_: Exception) -> None:
    """Take no code: the client raises the text of `error`."""


def refusal(status: int, error: str) -> Told:
    return in_json(status, {"api_id": "00000000-0000-4000-8000-000000000000", "error": error})


PLIVO = Service(
    "plivo",
    send,
    code_of,
    api={"account": AUTH_ID},
    also={
        "a text with the number": (
            refusal(400, f"'{NUMBER}' is not a valid phone number."),
            "refused",
        ),
        "a text of one word": (refusal(400, "Acme"), "refused"),
        "not found": (refusal(404, "not found"), "ambiguous"),
        "a country that is not allowed": (refusal(403, "forbidden"), "ambiguous"),
        "202 with an error": (refusal(202, "invalid_parameter"), "uncertain"),
        "200 with an id": (in_json(200, {"message_uuid": ["an-id"]}), "sent"),
        "201 with an id": (in_json(201, {"message_uuid": ["an-id"]}), "sent"),
        "a part was taken": (in_json(207, {"message_uuid": ["an-id"]}), "uncertain"),
    },
    otherwise={
        "a part was taken": ("uncertain", "the client leaves it to its user what 206 and 207 mean"),
    },
)


@pytest.mark.parametrize("name", MESSAGES)
async def test_request_is_the_clients(stub: Stub, name: str) -> None:
    await assert_sends_the_same(PLIVO, stub, MESSAGES[name])


async def test_receipts_are_asked_for_as_by_the_client(stub: Stub) -> None:
    url = "https://sms.example.com/webhooks/plivo"
    fields = preset_settings("plivo")["request"]["fields"]

    def send_asking(stub: Stub, message: Message) -> str | None:
        return send(stub, message, url=url)

    asking = {"account": AUTH_ID, "request": {"fields": {**fields, "/url": url}}}
    await assert_sends_the_same(replace(PLIVO, send=send_asking, api=asking), stub, Message())


@pytest.mark.parametrize("name", PLIVO.answers)
async def test_answer_is_read_as_by_the_client(stub: Stub, name: str) -> None:
    await assert_reads_the_same(PLIVO, stub, name)


def test_sandbox_passes_for_the_service(stub: Stub) -> None:
    assert_sandbox_takes_what_the_client_sends(PLIVO, stub.certificate)
    assert_sandbox_refuses_the_client(PLIVO, stub.certificate, None)
