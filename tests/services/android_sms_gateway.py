"""The preset `android-sms-gateway` and the client of SMS Gateway for Android."""

import httpx
from android_sms_gateway import APIClient, domain
from android_sms_gateway.http import HttpxHttpClient

from tests.services.comparison import (
    NUMBER,
    SECRET,
    Message,
    Service,
)
from tests.services.stub import GUARD_SECONDS, Recorded, Stub, Told, in_json

USER = "user"


def send(stub: Stub, message: Message) -> str | None:
    text = domain.TextMessage(message.text)
    with httpx.Client(timeout=GUARD_SECONDS) as http:
        client = APIClient(
            USER, SECRET, base_url=f"{stub.url}/3rdparty/v1", http=HttpxHttpClient(http)
        )
        state = client.send(
            domain.Message(id=message.key, phone_numbers=[message.to], text_message=text)
        )
    message_id: str = state.id
    return message_id


def code_of(_: Exception) -> None:
    """Return no code, because the gateway has none."""


def key_in(request: Recorded) -> str:
    key: str = request.document["id"]
    return key


def state(status: int, state: str) -> Told:
    """Make an answer with the state of a message."""
    recipient = {"phoneNumber": NUMBER, "state": state, "error": None}
    return in_json(
        status,
        {
            "id": "an-id",
            "deviceId": "a-device",
            "state": state,
            "isHashed": False,
            "isEncrypted": False,
            "recipients": [recipient],
            "states": {state: "2026-11-22T12:00:00Z"},
        },
    )


TAKEN_BY_ITS_STATE = "the client hands on any state; only these say that the phone has it"
SERVICE = Service(
    "android-sms-gateway",
    send,
    code_of,
    key_characters=36,
    key_in=key_in,
    api={"account": None, "auth": {"username": USER}},
    also={
        "in the phone's queue": (state(202, "Pending"), "sent"),
        "pending, with another 2xx": (state(201, "Pending"), "sent"),
        "at the phone already": (state(202, "Processed"), "sent"),
        "on its way already": (state(200, "Sent"), "sent"),
        "there already": (state(202, "Delivered"), "sent"),
        "failed": (state(202, "Failed"), "uncertain"),
        "a new state": (state(202, "Lost"), "uncertain"),
        "no state": (in_json(202, {"id": "an-id", "recipients": []}), "uncertain"),
        "no such device": (in_json(400, {"message": "record not found"}), "refused"),
        "the token may not send": (in_json(403, {"message": "forbidden"}), "ambiguous"),
        "the phone has trouble": (in_json(500, {"message": f"{NUMBER} is wrong"}), "uncertain"),
        "the phone does not answer": (in_json(504, {"message": "timeout"}), "uncertain"),
    },
    otherwise={
        "documented: The message id was used before.": ("sent", "it was accepted before"),
        "409 with an empty object": ("sent", "the gateway answers 409 to nothing else"),
        "failed": ("uncertain", TAKEN_BY_ITS_STATE),
    },
)
