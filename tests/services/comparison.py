"""What a service's official client and our preset are compared by: what they send, what they read.

Both post the same message to the stub. Ours goes the worker's way: the shape that the preset
describes, and the transport to the SMS API.
"""

import json
import string
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bridge.amqp.properties import Properties
from bridge.config import SmsApiSettings, WorkerSettings
from bridge.config.presets import Preset, documented_answers, preset_settings
from bridge.worker.envelope import bare_envelope
from bridge.worker.fates import Answer
from bridge.worker.request import parse_request
from bridge.worker.service.sender import open_transport
from bridge.worker.service.shape import shape_from
from tests.services.stub import Recorded, Stub, Told, in_json

ACCOUNT = "AC00000000000000000000000000000001"
SECRET = "a-secret/with+odd=characters"
# What of a key needs no percent.
VISIBLE = string.punctuation.replace("%", "")
# From the ranges that are kept for fiction.
NUMBER = "+447700900123"
LONG = "Your code is 123456. Do not tell it to anybody, whoever asks you for it. " * 12


class Message(NamedTuple):
    """One text to one number; without a key, the worker makes one up.

    `is_gsm7`, for the services that want to be told: every character is in GSM 03.38's tables.
    """

    text: str = "Your code is 123456."
    sender: str = "Acme"
    key: str | None = "order-7:code"
    to: str = NUMBER
    is_gsm7: bool = True

    @property
    def to_digits(self) -> str:
        """The number, for services that want no plus."""
        return self.to.removeprefix("+")

    @property
    def sender_digits(self) -> str:
        """The sender, for services that want no plus before one that is a number."""
        return self.sender.removeprefix("+")


MESSAGES: Mapping[str, Message] = {
    "gsm-7": Message(),
    "gsm-7 by its table of extensions": Message(text="10 € [a] {b} ~ ^ | \\"),
    "not gsm-7": Message(text="Żółć: 123456", is_gsm7=False),
    "emoji": Message(text="Party 🎉 at 👩‍👩‍👧", is_gsm7=False),
    "long": Message(text=LONG),
    "long and not gsm-7": Message(text="Ваш код 123456. " * 30, is_gsm7=False),
    "signs of a form": Message(text="a+b & c=d; 100% of /x?y#z\nnext line \"quotes\" 'too' %2B"),
    "spaces at its ends": Message(text="  x "),
    "a number as sender": Message(sender="+447700900999"),
    "a sender with a space": Message(sender="Acme & Co"),
    "another number": Message(to="+12025550123"),
    "no key": Message(key=None),
    "a key with signs": Message(key="a b/ü&=%+"),
    # As long as AMQP lets a message_id be.
    "a long key": Message(key="order-7:" + "x" * 247),
}

# Headers that may differ, each with the reason.
OWN_HEADERS: Mapping[str, str] = {
    "accept": "without it these APIs answer in JSON, or as Infobip in the form of the request",
    "accept-encoding": "the transport decompresses nothing, and says so",
    "connection": "both keep connections",
    "content-length": "JSON can be written with and without spaces",
    "user-agent": "each says who it is",
}


def said(request: Recorded, but: Mapping[str, str]) -> dict[str, Any]:
    headers = {
        name: value
        for name, value in request.headers.items()
        if name not in OWN_HEADERS and not name.startswith(tuple(but))
    }
    # JSON is UTF-8 (RFC 8259, 8.1), a form ASCII, whatever is said beside it.
    headers["content-type"] = request.media_type
    return {
        "method": request.method,
        "path": request.path,
        "query": request.query,
        "headers": headers,
        "body": request.document,
    }


class Verdict(NamedTuple):
    """What one side says of an answer: whether the message was taken, its id, the error's code."""

    is_sent: bool
    provider_id: str | None = None
    code: str | None = None


@dataclass(frozen=True)
class Service:
    """A service, and its official client.

    `send` has the client post a message to the stub, returns the message's id, and raises what the
    client raises, from which `code_of` takes the service's code. `own_headers` are those that the
    client alone sends, by how they begin, and `otherwise` the answers of which we say something
    else than the client: our fate, and why. `key_in` finds the key in our request, where the
    service is told one that the client is to send as well; `also` are further answers, and what
    each is to become.
    """

    preset: Preset
    send: Callable[[Stub, Message], str | None]
    code_of: Callable[[Exception], str | None]
    own_headers: Mapping[str, str] = field(default_factory=dict)
    otherwise: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    api: Mapping[str, Any] = field(default_factory=dict)
    key_in: Callable[[Recorded], str] | None = None
    # The longest key that the service takes.
    key_characters: int = 0
    also: Mapping[str, tuple[Told, str]] = field(default_factory=dict)
    # What the client makes of the answer to a wrong API key.
    code_of_another_key: str | None = None

    @property
    def answers(self) -> dict[str, Told]:
        """What the service may answer, by what it means."""
        return answers(self.preset) | {name: told for name, (told, _) in self.also.items()}

    def settings(self, stub: Stub) -> SmsApiSettings:
        """Make the settings with which the preset posts to the stub."""
        mine = {
            "preset": self.preset,
            "base_url": stub.url,
            "ca_file": str(stub.certificate),
            "account": ACCOUNT,
            "key": SECRET,
        }
        return SmsApiSettings.model_validate({**mine, **self.api})


async def send_ours(service: Service, stub: Stub, message: Message) -> Answer:
    settings = service.settings(stub)
    body = {"to": message.to, "from": message.sender, "text": message.text}
    request = parse_request(json.dumps(body).encode(), WorkerSettings())
    envelope = bare_envelope(Properties(message_id=message.key), now=time.time())
    shape = shape_from(settings)
    transport = open_transport(settings, max_connections=1)
    try:
        asked = shape.encode(request, envelope)
        reply = await transport.post(asked.url, asked.headers, asked.body, asked.common)
        return shape.judge(reply)
    finally:
        await transport.aclose()


def by_code(preset: Preset, refusal: Callable[[str], Told]) -> dict[str, tuple[Told, str]]:
    """Return a refusal with a code of each fate that a preset names, and that fate."""
    fates: dict[str, str] = preset_settings(preset)["response"]["errors"]
    codes = {fate: code for code, fate in fates.items()}
    return {f"code {code}": (refusal(code), fate) for fate, code in codes.items()}


HTML = b"<!DOCTYPE html><title>Sign in to the network</title>"


def answers(preset: Preset) -> dict[str, Told]:
    documented = {
        f"documented: {one['means']}": in_json(one["status"], one["body"])
        if "body" in one
        else Told(one["status"])
        for one in documented_answers(preset)
    }
    accepted = next(one for one in documented_answers(preset) if one["fate"] == "sent")
    status, whole = accepted["status"], json.dumps(accepted["body"]).encode()
    return documented | {
        "accepted, but empty": Told(status),
        "accepted, but HTML": Told(status, HTML, "text/html"),
        "accepted, but cut off": Told(status, whole[:-4]),
        "accepted, but an empty object": Told(status, b"{}"),
        "accepted, but a list": Told(status, b"[]"),
        "accepted, but null": Told(status, b"null"),
        "204": Told(204),
        "400 in HTML": Told(400, HTML, "text/html"),
        "400, cut off": Told(400, b'{"code": 21'),
        "403 and empty": Told(403),
        "404 in HTML": Told(404, HTML, "text/html"),
        "409 with an empty object": Told(409, b"{}"),
        "422 with a list": Told(422, b"[1]"),
        "500 and empty": Told(500),
        "502 in HTML": Told(502, HTML, "text/html"),
        "503 to try again": Told(503, headers={"Retry-After": "1"}),
    }
