"""The imitated SMS service: it reads requests and writes answers as its preset says.

It is the counterpart of `bridge.worker.service`, which writes requests and judges answers.
"""

import base64
import binascii
import copy
import json
import re
import secrets
import string
import time
import uuid
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any, Final, Literal, NamedTuple, assert_never
from urllib.parse import parse_qsl

from pydantic import SecretStr

from bridge.config import SmsApiSettings
from bridge.config.api_request import Slot, parse_text
from bridge.config.fields import did_you_mean
from bridge.config.presets import Preset, documented_answers
from bridge.json_pointer import find_all, split_pointer
from bridge.sandbox.records import AcceptedMessage
from bridge.worker.service.shape import shape_from
from bridge.worker.service.transport import Reply

JSON: Final = "application/json"
FORM: Final = "application/x-www-form-urlencoded"
# Above the number of fields in a request of any preset.
_MAX_FORM_FIELDS: Final = 1000

# Lone surrogates are refused because UTF-8 cannot encode them.
_FORMATS: Final = {
    "to": (re.compile(r"\+[1-9][0-9]{3,14}"), "must be + and 4 to 15 digits, the first not 0"),
    "short_codes": (
        re.compile(r"\+[1-9][0-9]{3,14}|[0-9]{3,8}"),
        "must be + and 4 to 15 digits, the first not 0, or a short code of 3 to 8 digits",
    ),
    "digits": (re.compile(r"[1-9][0-9]{3,14}"), "must be 4 to 15 digits, the first not 0, no +"),
    "from": (
        re.compile(r"[^\x00-\x1f\x7f-\x9f\ud800-\udfff]{1,32}"),
        "must be 1 to 32 characters, none of them a control character",
    ),
    "text": (re.compile(r"[^\ud800-\udfff]+"), "must be valid Unicode and not empty"),
}
_UUID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
# Shorter runs of digits, such as a date, may be the same in all ids of the service.
_DIGITS: Final = re.compile(r"[0-9a-f]{8,}|[0-9A-F]{8,}")

Format = Literal["to", "short_codes", "digits", "from", "text"]


def find_problem(kind: Format, value: object) -> str | None:
    """Return the error in a number, a sender or a text, or None."""
    if value is None:
        return "is missing"
    if not isinstance(value, str):
        return "must be a string"
    pattern, rule = _FORMATS[kind]
    return None if pattern.fullmatch(value) else rule


class ServiceAnswer(NamedTuple):
    """An answer of the service, without a body if `body` is None.

    A documented answer has `means`, `fate` and `code` from the preset; `missing` names the members
    (`to`, `from`, `text`) whose absence leads to it.
    """

    status: int
    body: Any = None
    means: str | None = None
    fate: str | None = None
    code: str | None = None
    missing: tuple[str, ...] = ()
    headers: Mapping[str, str] = {}


class Rejection(NamedTuple):
    """The answer to a request that is not accepted, and the sandbox's own reason."""

    answer: ServiceAnswer
    detail: str


class ParsedRequest(NamedTuple):
    """The content of a request; `rejection` is None if it can be accepted."""

    to: str | None
    idempotency_key: str | None
    sender: str | None
    text: str
    rejection: Rejection | None
    callback: str | None = None


class PlayedService:
    """The service of a preset; `api_key` is the only accepted key, None accepts any."""

    def __init__(self, preset: Preset, api_key: str | None = None) -> None:
        self.preset = preset
        self.api_key = api_key
        self.settings = settings = SmsApiSettings.model_validate({"preset": preset})
        self.path = settings.path
        self.login_header = settings.auth.header.lower()
        self._is_generic = preset == "generic"
        request = settings.request
        self._is_form = request.body == "form"
        self.content_type = FORM if self._is_form else JSON
        self._has_digits = request.to_format == "digits"
        self._number_format: Format = "short_codes" if request.short_codes else "to"
        if self._has_digits:
            self._number_format = "digits"
        kind, _, name = settings.idempotency.partition(":")
        self._key_header = name.lower() if kind == "header" else None
        # The pointer to each member in the body of a request.
        self._pointers = {
            slot: place
            for pointer, value in request.fields.items()
            for slot, place in _places(pointer, value)
        }
        id_pointer = settings.message_id_pointers[0]
        key_pointer = self._pointers.get("key", "/")
        # If id and key have the same name, the key of a message is its id.
        self._key_is_id = split_pointer(id_pointer)[-1] == split_pointer(key_pointer)[-1]
        self._id_pointer = id_pointer
        self._answers = [*_documented(settings)]
        accepted = [answer for answer in self._answers if answer.fate == "sent"]
        self.acceptance = accepted[0]
        # A second accepting answer is for repeated keys. Without one, repeats are accepted again.
        self.duplicate = accepted[1] if len(accepted) > 1 else None

    def key_header(self, headers: Mapping[str, str]) -> str | None:
        """Return the idempotency key from the headers, if the service has it there."""
        return None if self._key_header is None else headers.get(self._key_header)

    def read(self, headers: Mapping[str, str], body: bytes) -> ParsedRequest:
        """Parse a request, and check its login and its members like the service."""
        document = _read_form(body) if self._is_form else _read_json(body)
        values = {name: find_all(document, place)[0] for name, place in self._pointers.items()}
        number, key, sender = values.get("to"), values.get("key"), values.get("from")
        if find_problem(self._number_format, number):
            number = None
        elif self._has_digits:
            number = f"+{number}"
        return ParsedRequest(
            number,
            self.key_header(headers) or (key if isinstance(key, str) else None),
            None if sender is None else str(sender),
            str(values.get("text")),
            self._check_login(headers) or self._check_values(values, document),
            callback if isinstance(callback := values.get("callback"), str) else None,
        )

    def _check_login(self, headers: Mapping[str, str]) -> Rejection | None:
        auth = self.settings.auth
        if auth.scheme == "none":
            return None
        given, known = self._secret(headers.get(self.login_header, "")), self.api_key
        if given and (known is None or secrets.compare_digest(given.encode(), known.encode())):
            return None
        scheme = {"basic": "Basic", "bearer": "Bearer"}.get(auth.scheme, auth.prefix.strip())
        login = f"{scheme} and a known key" if scheme else "a known key"
        detail = f"{auth.header}: must be {login}"
        if self._is_generic:
            answer = ServiceAnswer(401, {"error": detail}, headers={"WWW-Authenticate": scheme})
        else:
            fate = "setup:credentials_rejected"
            answer = next(answer for answer in self._answers if answer.fate == fate)
        return Rejection(answer, detail)

    def _secret(self, value: str) -> str:
        """Return the key in a login header, or an empty string if there is none."""
        auth = self.settings.auth
        scheme, _, rest = value.partition(" ")
        match auth.scheme:
            case "bearer":
                return rest if scheme.lower() == "bearer" else ""
            case "basic":
                username, _, password = _decode(rest).partition(":")
                return password if scheme.lower() == "basic" and username else ""
            case "header":
                return value.removeprefix(auth.prefix) if value.startswith(auth.prefix) else ""
            case "none":
                return ""
            case _:
                assert_never(auth.scheme)

    def _check_values(self, values: Mapping[str, object], document: object) -> Rejection | None:
        if document is None:
            kind = "a form" if self._is_form else "a JSON object"
            return self._reject(f"body: must be {kind} in UTF-8", missing="to")
        formats: dict[str, Format] = {"to": self._number_format, "from": "from", "text": "text"}
        for name, kind in formats.items():
            if name in self._pointers and (problem := find_problem(kind, values[name])):
                missing = name if values[name] is None else None
                return self._reject(f"{self._pointers[name][1:]}: {problem}", missing=missing)
        return None

    def _reject(self, detail: str, *, missing: str | None) -> Rejection:
        """Return the documented refusal, for a missing member its own if there is one."""
        if self._is_generic:
            return Rejection(ServiceAnswer(400, {"error": detail}), detail)
        refusals = [answer for answer in self._answers if answer.fate == "refused"]
        wrong = next(answer for answer in refusals if not answer.missing)
        answer = next((answer for answer in refusals if missing in answer.missing), wrong)
        return Rejection(answer, detail)

    def accept(self, request: ParsedRequest) -> AcceptedMessage:
        key = request.idempotency_key
        message_id = (key if self._key_is_id else None) or self._new_id()
        return AcceptedMessage(
            message_id,
            request.to or "",
            request.sender,
            request.text,
            key,
            time.time(),
            callback=request.callback,
        )

    def _new_id(self) -> str:
        return like(str(find_all(self.acceptance.body, self._id_pointer)[0]))

    def acceptance_of(self, message: AcceptedMessage) -> ServiceAnswer:
        body = copy.deepcopy(self.acceptance.body)
        *way, last = split_pointer(self._id_pointer)
        node = body
        for name in way:
            node = node[int(name) if isinstance(node, list) else name]
        node[int(last) if isinstance(node, list) else last] = message.id
        return self.acceptance._replace(body=body)

    def fault_answer(self, name: str | None, status: int | None) -> ServiceAnswer | None:
        """Return the answer of a fault by name or by status; None accepts the message.

        Raises ValueError, which lists the answers, if the name is unknown.
        """
        if name is not None:
            found = self._named(name)
            return None if found is self.acceptance else found
        if status is None:
            return None
        if not self._is_generic:
            for answer in self._answers:
                if answer.status == status:
                    return None if answer is self.acceptance else answer
        if status < HTTPStatus.MULTIPLE_CHOICES:
            return None
        return ServiceAnswer(status, {"error": "a fault of the sandbox"})

    def _named(self, name: str) -> ServiceAnswer:
        for attribute in ("means", "code", "fate"):
            for answer in self._answers:
                if getattr(answer, attribute) == name:
                    return answer
        known = [text for answer in self._answers for text in (answer.means, answer.code) if text]
        listed = "; ".join(
            f"{one.means} ({', '.join(filter(None, (one.code, one.fate)))})"
            for one in self._answers
        )
        raise ValueError(f"is unknown{did_you_mean(name, known) or ';'} there are: {listed}")

    def list_answers(self) -> list[dict[str, Any]]:
        """List the documented answers, each with its name for faults."""
        return [
            {
                "name": one.means or one.code,
                "status": one.status,
                "code": one.code,
                "fate": one.fate,
            }
            for one in self._answers
        ]


def _places(pointer: str, value: object) -> Iterator[tuple[str, str]]:
    """Yield each placeholder that is a complete value, with its pointer.

    Options of the service may follow the address for receipts.
    """
    if isinstance(value, list):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        for name, below in value.items():
            yield from _places(f"{pointer}/{name}", below)
    elif isinstance(value, str):
        parts = parse_text(value)
        first = parts[0] if parts else ""
        if isinstance(first, Slot) and (len(parts) == 1 or first.name == "callback"):
            yield first.name, pointer


def _documented(settings: SmsApiSettings) -> Iterator[ServiceAnswer]:
    """Yield the preset's documented answers, each with the error code that the worker reads."""
    placeholders = {"base_url": "http://sandbox", "account": "any", "key": SecretStr("any")}
    shape = shape_from(settings.model_copy(update=placeholders))
    for given in documented_answers(settings.preset):
        content = json.dumps(given["body"]).encode() if "body" in given else b""
        yield ServiceAnswer(
            given["status"],
            given.get("body"),
            given["means"],
            given["fate"],
            shape.judge(Reply(given["status"], (), content)).code,
            tuple(given.get("missing", ())),
        )


def like(example: str) -> str:
    """Generate an id in the form of an example, or in our own if that form is unknown."""
    if _UUID.fullmatch(example):
        return str(uuid.uuid4())
    if not _DIGITS.search(example):
        return f"sandbox-{uuid.uuid4().hex}"
    return _DIGITS.sub(_random_digits, example)


def _random_digits(run: re.Match[str]) -> str:
    if run[0].isdecimal():
        return "".join(secrets.choice(string.digits) for _ in run[0])
    digits = secrets.token_hex(len(run[0]))[: len(run[0])]
    return digits.upper() if run[0].isupper() else digits


def _decode(text: str) -> str:
    try:
        return base64.b64decode(text, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""


def _read_json(body: bytes) -> dict[str, Any] | None:
    try:
        members = json.loads(body.decode())
    except (ValueError, RecursionError):
        return None
    return members if isinstance(members, dict) else None


def _read_form(body: bytes) -> dict[str, str] | None:
    try:
        pairs = parse_qsl(
            body.decode("ascii"),
            keep_blank_values=True,
            strict_parsing=True,
            errors="strict",
            max_num_fields=_MAX_FORM_FIELDS,
        )
    except ValueError:
        return None
    return dict(reversed(pairs))
