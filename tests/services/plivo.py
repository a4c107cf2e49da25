"""The preset `plivo` and Plivo's client."""

import plivo
import pytest

from tests.services.comparison import (
    NUMBER,
    SECRET,
    Message,
    Service,
)
from tests.services.stub import GUARD_SECONDS, Stub, Told, in_json

# The client requires 20 characters with this prefix.
AUTH_ID = "MA000000000000000001"


def send(stub: Stub, message: Message, **options: str) -> str | None:
    """Send with the client, whose address is a constant in its module."""
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
    """Return no code, because the client only raises the text of `error`."""


def refusal(status: int, error: str) -> Told:
    return in_json(status, {"api_id": "00000000-0000-4000-8000-000000000000", "error": error})


SERVICE = Service(
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
