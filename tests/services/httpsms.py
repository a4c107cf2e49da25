"""The preset `httpsms`, whose service has no Python client.

Its clients for Go and Node.js send `POST /v1/messages/send` with the key in `x-api-key`, and JSON
with `content`, `from`, `to` and `request_id`. They accept any 2xx, whose `data` is the message.
"""

import json

import httpx

from tests.services.comparison import (
    SECRET,
    Message,
    Service,
)
from tests.services.stub import GUARD_SECONDS, Recorded, Stub, in_json


class RefusedError(Exception):
    """The service's clients only accept a 2xx."""


def send(stub: Stub, message: Message) -> str | None:
    body = {"content": message.text, "from": message.sender, "to": message.to}
    answer = httpx.post(
        f"{stub.url}/v1/messages/send",
        headers={"Content-Type": "application/json", "x-api-key": SECRET},
        content=json.dumps(body | {"request_id": message.key}),
        timeout=GUARD_SECONDS,
    )
    if answer.status_code not in {200, 201, 202, 204, 205}:
        raise RefusedError(answer.status_code)
    message_id: str = answer.json()["data"]["id"]
    return message_id


def code_of(_: Exception) -> None:
    """Return no code, because the service has none."""


def key_in(request: Recorded) -> str:
    """Find the key, which events return."""
    key: str = request.document["request_id"]
    return key


SERVICE = Service(
    "httpsms",
    send,
    code_of,
    key_characters=255,
    key_in=key_in,
    api={"account": None},
    also={
        "not well-formed": (
            in_json(400, {"status": "error", "message": "a text", "data": {"Offset": 1}}),
            "refused",
        ),
        "another phone's key": (
            in_json(401, {"status": "error", "message": "a text", "data": "a text"}),
            "setup:credentials_rejected",
        ),
        "an error behind a 200": (in_json(200, {"status": "error", "message": "x"}), "uncertain"),
        "success without a message": (in_json(200, {"status": "success", "data": None}), "sent"),
    },
    otherwise={
        "success without a message": ("sent", "the service says that it is in the phone's queue"),
    },
)
