"""Compares the requests and the reading of answers of a service's official client and the preset.

Both post the same message to the stub. The preset uses the worker's request shape and transport.
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
# Characters of a key that need no percent-encoding.
VISIBLE = string.punctuation.replace("%", "")
# Numbers reserved for fiction.
NUMBER = "+447700900123"
LONG = "Your code is 123456. Do not tell it to anybody, whoever asks you for it. " * 12


class Message(NamedTuple):
    """A text to a number. Without a key, the worker generates one.

    `is_gsm7`: every character is in the tables of GSM 03.38, which some requests state.
    """

    text: str = "Your code is 123456."
    sender: str = "Acme"
    key: str | None = "order-7:code"
    to: str = NUMBER
    is_gsm7: bool = True

    @property
    def to_digits(self) -> str:
        """The number without a plus."""
        return self.to.removeprefix("+")

    @property
    def sender_digits(self) -> str:
        """The sender, without a plus if it is a number."""
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
    "another number": Message(to="+12025550123"),
    "no key": Message(key=None),
    "a key with signs": Message(key="a b/ü&=%+"),
    # The maximum length of an AMQP message_id.
    "a long key": Message(key="order-7:" + "x" * 247),
}

# Headers that may differ, with the reason.
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
    # JSON is always UTF-8 (RFC 8259, 8.1), and a form ASCII, whatever charset is stated.
    headers["content-type"] = request.media_type
    return {
        "method": request.method,
        "path": request.path,
        "query": request.query,
        "headers": headers,
        "body": request.document,
    }


class Verdict(NamedTuple):
    """The reading of an answer: whether the message was accepted, its id, the error code."""

    is_sent: bool
    provider_id: str | None = None
    code: str | None = None


@dataclass(frozen=True)
class Service:
    """A service, and its official client.

    `send` posts a message with the client and returns the message's id. It raises the client's
    exceptions, from which `code_of` takes the service's code. `own_headers` are prefixes of headers
    that only the client sends. `otherwise` are answers that the preset reads differently: fate and
    reason. `key_in` finds the key in the preset's request, so that the client sends the same.
    `also` are further answers with their fates.
    """

    preset: Preset
    send: Callable[[Stub, Message], str | None]
    code_of: Callable[[Exception], str | None]
    own_headers: Mapping[str, str] = field(default_factory=dict)
    otherwise: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    api: Mapping[str, Any] = field(default_factory=dict)
    key_in: Callable[[Recorded], str] | None = None
    # Maximum length of the service's key.
    key_characters: int = 0
    also: Mapping[str, tuple[Told, str]] = field(default_factory=dict)
    # The client's exception for a wrong API key.
    code_of_another_key: str | None = None

    @property
    def answers(self) -> dict[str, Told]:
        """Answers of the service, by meaning."""
        return answers(self.preset) | {name: told for name, (told, _) in self.also.items()}

    def settings(self, stub: Stub) -> SmsApiSettings:
        """Make the preset's settings for the stub."""
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
    """Return a refusal for each fate of the preset's codes."""
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
        "204": Told(204),
        "400 in HTML": Told(400, HTML, "text/html"),
        "400, cut off": Told(400, b'{"code": 21'),
        "403 and empty": Told(403),
        "404 in HTML": Told(404, HTML, "text/html"),
        "409 with an empty object": Told(409, b"{}"),
        "500 and empty": Told(500),
        "503 to try again": Told(503, headers={"Retry-After": "1"}),
    }
