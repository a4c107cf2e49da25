"""The service that is played, by a preset: how it is asked, and what it answers.

Where the bridge writes a request and judges an answer, this reads the one and gives the other.
"""

import base64
import binascii
import secrets
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any, Final, Literal, NamedTuple, assert_never
from urllib.parse import parse_qsl

from bridge.config import SmsApiSettings
from bridge.config.api_request import Slot, build_document, parse_text, slots_of
from bridge.config.presets import Preset
from bridge.json_pointer import split_pointer
from bridge.sandbox.answers import Answer, Answers
from bridge.sandbox.faults import Fault
from bridge.sandbox.messages import Message, Values, find_fault, read_object
from bridge.sandbox.visitors import FORM, JSON

# More members than a request can have fields.
_MAX_FORM_FIELDS: Final = 1000


class Refusal(NamedTuple):
    """The answer to a request that is not taken, and in our words what is wrong with it."""

    answer: Answer
    detail: str


class Reading(NamedTuple):
    """What a request says: number and key where they can be read, and what comes of it."""

    to: str | None
    key: str | None
    outcome: Message | Refusal


class Service:
    """One service, played by the preset's own settings."""

    def __init__(self, preset: Preset) -> None:
        self.preset = preset
        self.settings = SmsApiSettings.model_validate({"preset": preset})
        self.path = self.settings.path
        self._is_form = self.settings.request.body == "form"
        self.content_type = FORM if self._is_form else JSON
        self._answers = Answers(self.settings)
        self._is_generic = preset == "generic"
        self._digits = self.settings.request.to_format == "digits"
        short_codes: Literal["to", "short_codes"] = (
            "short_codes" if self.settings.request.short_codes else "to"
        )
        self._to_form: Literal["to", "digits", "short_codes"] = (
            "digits" if self._digits else short_codes
        )
        kind, _, place = self.settings.idempotency.partition(":")
        self._key_header = place.lower() if kind == "header" else None
        fields = self.settings.request.fields
        self._template = _prepare(build_document(fields))
        self._names = {
            slot.name: pointer[1:] for pointer, value in fields.items() for slot in slots_of(value)
        }
        # A message whose request gives it an id keeps that one.
        own, given = self.settings.message_id_pointers[0], f"/{self._names.get('key', '')}"
        self._takes_ids = split_pointer(own)[-1] == split_pointer(given)[-1]

    @property
    def login_header(self) -> str:
        """The header that holds the login, in lower case."""
        return self.settings.auth.header.lower()

    def list_answers(self) -> list[dict[str, Any]]:
        """List the service's own answers, as a fault can order them."""
        return self._answers.listed()

    def key_header(self, headers: Mapping[str, str]) -> str | None:
        """Return the idempotency key of a request whose body is not read yet."""
        return None if self._key_header is None else headers.get(self._key_header)

    def read(
        self, headers: Mapping[str, str], body: bytes, *, api_key: str | None, received_at: float
    ) -> Reading:
        """Read a request, and check its login and what it says, as the service does.

        Any login with `api_key` is known; None takes every key.
        """
        document = _read_form(body) if self._is_form else read_object(body)
        values = dict(_find(self._template, document))
        number, key = self._number(values), self.key_header(headers)
        if key is None and isinstance(given := values.get("key"), str):
            key = given
        refusal = None if self._knows(headers, api_key) else self._refuse_login()
        refusal = refusal or self._find_fault(values, is_readable=document is not None)
        if refusal is not None:
            return Reading(number, key, refusal)
        sender = values.get("from")
        message = Message(
            (key if self._takes_ids else None) or self._answers.new_id(),
            number or "",
            None if sender is None else str(sender),
            str(values["text"]),
            key,
            received_at,
        )
        return Reading(number, key, message)

    def _number(self, values: Values) -> str | None:
        """Return the number that a request is for, with its +, or None without a usable one."""
        if find_fault("to", values, to_form=self._to_form):
            return None
        return f"+{values['to']}" if self._digits else str(values["to"])

    def _find_fault(self, values: Values, *, is_readable: bool) -> Refusal | None:
        if not is_readable:
            kind = "a form" if self._is_form else "a JSON object"
            return self._refuse(f"body: must be {kind} in UTF-8", missing="to")
        for name in self._needed():
            if fault := find_fault(name, values, to_form=self._to_form):
                missing = None if name in values else name
                return self._refuse(f"{self._names[name]}: {fault}", missing=missing)
        return None

    @property
    def duplicate(self) -> Answer | None:
        """The answer to a repeat of a key that was taken; None where it is taken once more."""
        return self._answers.duplicate

    def accept(self, message: Message, *, status: int | None = None) -> Answer:
        """Answer that a message was taken, with the service's own status or another."""
        answer = self._answers.accept(message.id)
        return answer if status is None else answer._replace(status=status)

    def ordered(self, fault: Fault) -> Answer | None:
        """Return the answer that a fault orders; None where that is a message taken.

        Raises ValueError that lists the answers when there is none of its name.
        """
        if fault.answer is not None:
            found = self._answers.named(fault.answer)
        elif fault.own_status is None:
            return None
        else:
            found = self._with_status(fault.own_status)
        return None if found == self._answers.acceptance else found

    def status_of(self, fault: Fault) -> int:
        """Return the status that a fault answers with; raises ValueError as `ordered` does."""
        answer = self.ordered(fault) or self._answers.acceptance
        return fault.own_status or answer.status

    def _with_status(self, status: int) -> Answer:
        documented = None if self._is_generic else self._answers.with_status(status)
        if documented is None and status < HTTPStatus.MULTIPLE_CHOICES:
            return self._answers.acceptance
        return documented or Answer(status, {"error": "a fault of the sandbox"})

    def _needed(self) -> Iterator[Literal["to", "from", "text"]]:
        for name in ("to", "from", "text"):
            if name in self._names:
                yield name

    def _refuse(self, detail: str, *, missing: str | None = None) -> Refusal:
        if self._is_generic:
            return Refusal(Answer(400, {"error": detail}), detail)
        return Refusal(self._answers.refusal(missing=missing), detail)

    def _refuse_login(self) -> Refusal:
        auth = self.settings.auth
        scheme = {"basic": "Basic", "bearer": "Bearer"}.get(auth.scheme, auth.prefix.strip())
        login = f"{scheme} and a known key" if scheme else "a known key"
        detail = f"{auth.header}: must be {login}"
        if self._is_generic:
            headers = {"WWW-Authenticate": scheme}
            return Refusal(Answer(401, {"error": detail}, headers=headers), detail)
        return Refusal(self._answers.login_refusal(), detail)

    def _knows(self, headers: Mapping[str, str], api_key: str | None) -> bool:
        if self.settings.auth.scheme == "none":
            return True
        given = self._secret(headers.get(self.login_header, ""))
        if not given:
            return False
        return api_key is None or secrets.compare_digest(given.encode(), api_key.encode())

    def _secret(self, value: str) -> str:
        """Return the secret in the header of a login, empty where it is none."""
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


def _decode(text: str) -> str:
    try:
        return base64.b64decode(text, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""


def _read_form(body: bytes) -> dict[str, str] | None:
    try:
        text = body.decode("ascii")
        pairs = parse_qsl(
            text,
            keep_blank_values=True,
            strict_parsing=True,
            errors="strict",
            max_num_fields=_MAX_FORM_FIELDS,
        )
    except ValueError:
        return None
    return dict(reversed(pairs))


def _prepare(template: Any) -> Any:  # noqa: ANN401  JSON
    """Put, for each text that is a placeholder, that placeholder, and None for all else."""
    if isinstance(template, dict):
        return {name: _prepare(below) for name, below in template.items()}
    if isinstance(template, list):
        return [_prepare(below) for below in template]
    match parse_text(template) if isinstance(template, str) else ():
        case [Slot() as slot]:
            return slot
        case _:
            return None


def _find(template: Any, document: Any) -> Iterator[tuple[str, object]]:  # noqa: ANN401  JSON
    """Yield what stands in a document where a prepared template has placeholders."""
    if isinstance(template, Slot):
        yield template.name, document
    elif isinstance(template, dict) and isinstance(document, dict):
        for name in template.keys() & document.keys():
            yield from _find(template[name], document[name])
    elif isinstance(template, list) and isinstance(document, list):
        for below, value in zip(template, document, strict=False):
            yield from _find(below, value)
