"""The preset `messagebird` and MessageBird's client."""

import messagebird
from messagebird.client import ErrorException
from messagebird.http_client import HttpClient

from tests.services.comparison import (
    NUMBER,
    SECRET,
    Message,
    Service,
    by_code,
)
from tests.services.stub import Recorded, Stub, Told, in_json


def send(stub: Stub, message: Message) -> str | None:
    http = HttpClient(stub.url, SECRET, messagebird.client.USER_AGENT)
    client = messagebird.Client(SECRET, http_client=http)
    options = {"datacoding": "plain" if message.is_gsm7 else "unicode"}
    if message.key:
        options["reference"] = message.key
    sent = client.message_create(message.sender_digits, message.to_digits, message.text, options)
    message_id: str | None = sent.id
    return message_id


def code_of(error: Exception) -> str | None:
    return str(error.errors[0].code) if isinstance(error, ErrorException) else None


def key_in(request: Recorded) -> str:
    """Find the key, which delivery reports return."""
    key: str = request.document["reference"]
    return key


def refusal(code: str, status: int = 422) -> Told:
    """Make a refusal whose text contains the number."""
    error = {"code": int(code), "description": f"{NUMBER} is wrong", "parameter": "recipient"}
    return in_json(status, {"errors": [error]})


SERVICE = Service(
    "messagebird",
    send,
    code_of,
    key_characters=60,
    code_of_another_key="2",
    key_in=key_in,
    otherwise={
        "forbidden for a new reason": ("ambiguous", "the client reads no code behind this status"),
        "documented: The message may or may not have been sent.": (
            "uncertain",
            "the client reads no code behind this status",
        ),
        "accepted, but an empty object": (
            "uncertain",
            "the client takes any 2xx that holds no errors, with or without a message in it",
        ),
    },
    also=by_code("messagebird", refusal)
    | {
        "a new code": (refusal("199"), "refused"),
        "two errors": (in_json(422, {"errors": [{"code": 9}, {"code": 25}]}), "refused"),
        "forbidden for a new reason": (refusal("199", 403), "ambiguous"),
        "201 with an error": (refusal("9", 201), "refused"),
        "201 with a new error": (refusal("199", 201), "uncertain"),
        "200 with a message": (in_json(200, {"id": "a-1"}), "sent"),
    },
)
