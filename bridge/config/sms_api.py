"""The SMS service's API: where it is, how it is asked, what its answers mean.

The defaults of what describes its shape are those of the preset `generic`; `presets` has the
others.
"""

import re
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    JsonValue,
    ValidationInfo,
    field_validator,
    model_validator,
)

from bridge.config.fields import (
    HEADER_NAME,
    POINTER,
    Duration,
    ErrorCode,
    FilePath,
    HeaderName,
    List,
    Map,
    Name,
    Pointer,
    Prefix,
    PutPointer,
    Secret,
    check_put_pointer,
    write_number,
)
from bridge.config.presets import (
    PRESETS,
    KnownPreset,
    lay_over,
    needed_settings,
    preset_settings,
)
from bridge.config.request_fields import check_fields, shown, slots_of
from bridge.config.section import Section, read_section
from bridge.config.urls import BaseUrl, ProxyUrl
from bridge.pointers import is_like_a_number

AuthScheme = Literal["bearer", "basic", "header", "none"]
# What a code of the service's own means for the message; behind `setup:` the reason of the pause.
ErrorFate = Literal[
    "refused",
    "retry",
    "slow_down",
    "setup:credentials_rejected",
    "setup:insufficient_funds",
    "setup:misconfigured",
]
MAX_CODES: Final = 200
DEFAULT_IDEMPOTENCY_HEADER: Final = "Idempotency-Key"

_FIELDS: Final[dict[str, JsonValue]] = {"/to": "{to}", "/from": "{from}", "/text": "{text}"}
_ERRORS: Final[dict[str, ErrorFate]] = {}
# Where no preset knows what the service calls a setting.
_REMEDIES: Final = {
    "base_url": "the worker needs it",
    "account": "it is the {account} in sms_api.path",
    "auth.username": "set it, or sms_api.account, whose default it is",
    "key": "set sms_api.key or sms_api.key_file",
}
_PATH: Final = re.compile(r"/(?:[!\"$-z|~]|\{account\})*")
# Those that the bridge writes itself, and those of one connection (RFC 9110, 7.6.1): twice, or with
# a secret as their value, they would break the request or show the secret to a proxy.
_TAKEN_HEADERS: Final = frozenset(
    (
        *("accept-encoding", "content-encoding", "content-length", "content-type", "expect"),
        *("host", "user-agent", "traceparent", "tracestate"),
        *("connection", "keep-alive", "proxy-authorization", "proxy-connection", "te"),
        *("trailer", "transfer-encoding", "upgrade"),
    )
)
_YES: Final = re.compile("2(?:[0-9][0-9]|xx)")
# Without a code beside it, such a status may say a hundred things, or has its meaning already.
_SAYS_NO_REPEAT: Final = frozenset((401, 402, 403, 404, 405, 407, 408, 410, 421, 425, 426, 429))


def _check_path(value: str) -> str:
    if not _PATH.fullmatch(value):
        raise ValueError("must begin with / and hold no space, # or { } but {account}")
    return value


def _check_free(header: str) -> str:
    if header.lower() in _TAKEN_HEADERS:
        raise ValueError(f"{header} is not free to use; name a header that the service reads")
    return header


def _check_idempotency(value: str) -> str:
    kind, _, rest = value.partition(":")
    if value == "none":
        return value
    if kind == "header" and HEADER_NAME.fullmatch(rest):
        _check_free(rest)
        return value
    if kind == "field" and re.fullmatch(POINTER, rest):
        check_put_pointer(rest)
        return value
    raise ValueError("must be none, header: and its name, or field: and a JSON pointer")


def _check_code(value: str) -> str:
    if is_like_a_number(value):
        raise ValueError("is like a phone number, which is never read as a code; leave it out")
    return value


def _check_yes(status: str) -> str:
    if not _YES.fullmatch(status):
        raise ValueError(
            "must be a status like 202, or 2xx for all of them; what else is answered to a key "
            "that was accepted before belongs in response.duplicate"
        )
    return status


ReadCode = Annotated[ErrorCode, AfterValidator(_check_code)]
ApiHeader = Annotated[HeaderName, AfterValidator(_check_free)]
ApiPath = Annotated[str, AfterValidator(_check_path)]
Idempotency = Annotated[str, AfterValidator(_check_idempotency)]
YesStatus = Annotated[str, BeforeValidator(write_number), AfterValidator(_check_yes)]


class AuthSettings(Section):
    """How the service knows us: by `sms_api.key`, and for `basic` by a user name beside it."""

    scheme: AuthScheme = "bearer"
    header: ApiHeader = "Authorization"
    prefix: Prefix = ""
    username: Name | None = None
    username_file: FilePath | None = None


class RequestSettings(Section):
    """What is posted."""

    body: Literal["json", "form"] = "json"
    to_format: Literal["e164", "digits"] = "e164"
    fields: Annotated[dict[PutPointer, JsonValue], Map, Field(min_length=1, max_length=100)] = (
        _FIELDS
    )

    @property
    def sends_sender(self) -> bool:
        """Whether the service is told a sender."""
        return any(
            slot.name == "from" for value in self.fields.values() for slot in slots_of(value)
        )

    @field_validator("fields")
    @classmethod
    def _work(cls, fields: dict[str, JsonValue], info: ValidationInfo) -> dict[str, JsonValue]:
        check_fields(fields, is_form=info.data.get("body") == "form")
        return fields


class AcceptedSettings(Section):
    """Which answers say yes: their statuses and, where the body decides, the values in it.

    A pointer without values wants nothing but that something stands there, such as an id.
    """

    statuses: Annotated[tuple[YesStatus, ...], List, Field(min_length=1, max_length=20)] = ("2xx",)
    pointer: Pointer | None = None
    values: Annotated[tuple[ErrorCode, ...], List, Field(max_length=100)] = ()

    @model_validator(mode="after")
    def _says_what_means_yes(self) -> "AcceptedSettings":
        if self.values and self.pointer is None:
            raise ValueError("values need a pointer that says where they stand")
        return self


class DuplicateSettings(Section):
    """The answer to a repeat of a key that was accepted before; without either, there is none."""

    status: Annotated[int, Field(ge=200, le=599)] | None = None
    code: ReadCode | None = None

    @model_validator(mode="after")
    def _says_nothing_else(self) -> "DuplicateSettings":
        if self.status is None or self.code is not None:
            return self
        if self.status not in range(400, 500) or self.status in _SAYS_NO_REPEAT:
            raise ValueError(
                f"status {self.status} alone may mean something else, and would lose messages; "
                "give the code beside it"
            )
        return self


class ResponseSettings(Section):
    """What answers mean, as far as that is not the status alone."""

    accepted: AcceptedSettings = AcceptedSettings()
    errors: Annotated[dict[ReadCode, ErrorFate], Map, Field(max_length=MAX_CODES)] = _ERRORS
    duplicate: DuplicateSettings = DuplicateSettings()

    @model_validator(mode="after")
    def _says_one_thing(self) -> "ResponseSettings":
        if self.duplicate.status is None and self.duplicate.code in self.errors:
            raise ValueError("duplicate.code is in errors too; leave it out of one of them")
        return self


class SmsApiSettings(Section):
    """The SMS service's REST API; a preset sets all of its shape, and a single key overrides it."""

    preset: KnownPreset = "generic"
    base_url: BaseUrl | None = None
    path: ApiPath = "/v1/messages"
    account: Name | None = None
    key: Secret | None = None
    key_file: FilePath | None = None
    auth: AuthSettings = AuthSettings()
    request: RequestSettings = RequestSettings()
    idempotency: Idempotency = f"header:{DEFAULT_IDEMPOTENCY_HEADER}"
    idempotency_header: ApiHeader | None = DEFAULT_IDEMPOTENCY_HEADER
    response: ResponseSettings = ResponseSettings()
    message_id_pointers: Annotated[tuple[Pointer, ...], List] = (
        "/id",
        "/message_id",
        "/messages/0/id",
    )
    error_code_pointers: Annotated[tuple[Pointer, ...], List] = (
        "/code",
        "/error/code",
        "/error_code",
        "/errors/0/code",
    )
    timeout_seconds: Duration = 20
    connect_timeout_seconds: Duration = 5
    proxy: ProxyUrl | None = None
    ca_file: FilePath | None = None

    @model_validator(mode="before")
    @classmethod
    def _lay_over_preset(cls, value: object) -> object:
        given = read_section(value)
        if not isinstance(given, dict):
            return given
        preset = given.get("preset", "generic")
        if preset not in PRESETS:
            return given
        return _with_one_idempotency(given, lay_over(preset_settings(preset), given))

    @field_validator("idempotency")
    @classmethod
    def _has_its_own_header(cls, idempotency: str, info: ValidationInfo) -> str:
        kind, _, header = idempotency.partition(":")
        auth = info.data.get("auth")
        if not isinstance(auth, AuthSettings) or auth.scheme == "none":
            return idempotency
        if kind == "header" and header.lower() == auth.header.lower():
            raise ValueError("names the header of sms_api.auth; name another one, or none")
        return idempotency

    @field_validator("idempotency")
    @classmethod
    def _has_a_place(cls, idempotency: str, info: ValidationInfo) -> str:
        kind, _, pointer = idempotency.partition(":")
        request = info.data.get("request")
        if kind == "field" and isinstance(request, RequestSettings):
            given = request.fields.get(pointer)
            if pointer not in request.fields:
                fields = {**request.fields, pointer: "{key}"}
                check_fields(fields, is_form=request.body == "form")
            elif not any(slot.name == "key" for slot in slots_of(given)):
                raise ValueError(f"request.fields has {shown(pointer)} without {{key}}; put it in")
        return idempotency

    @property
    def knows_repeats(self) -> bool:
        """Whether the service can tell a repeat of a request from another one."""
        return self.idempotency != "none"

    @property
    def missing(self) -> list[str]:
        """A fault for each setting that the worker needs and nobody has given."""
        auth, words = self.auth, needed_settings(self.preset)
        has_username = auth.username or auth.username_file or self.account
        is_missing = {
            "base_url": self.base_url is None,
            "account": "{account}" in self.path and self.account is None,
            "auth.username": auth.scheme == "basic" and not has_username,
            "key": auth.scheme != "none" and self.key is None and self.key_file is None,
        }
        if is_missing["auth.username"] and "account" in words:
            # Which is its default, and what this service calls it by.
            is_missing |= {"account": True, "auth.username": False}
        told = _REMEDIES | {key: f"it is {words[key]}" for key in words if key != "key"}
        if "key" in words:
            told["key"] = f"it is {words['key']}; {_REMEDIES['key']}"
        return [f"sms_api.{key}: is missing; {told[key]}" for key in told if is_missing[key]]


def _with_one_idempotency(given: dict[str, Any], laid: dict[str, Any]) -> dict[str, Any]:
    """Let `idempotency_header`, which is older, override a preset's header, and show the one used.

    Null sends none. Its own default says nothing: whoever writes it out may mean another preset's.
    """
    name = given.get("idempotency_header", DEFAULT_IDEMPOTENCY_HEADER)
    if name is not None and not _may_be_named(name):
        return laid
    idempotency = str(laid["idempotency"])
    older = idempotency
    if name is None and idempotency.startswith("header:"):
        older = "none"
    elif name is not None and name != DEFAULT_IDEMPOTENCY_HEADER:
        older = f"header:{name}"
    if older != idempotency and given.get("idempotency") is not None:
        raise ValueError("idempotency_header is given beside idempotency; leave it out")
    header = older.removeprefix("header:") if older.startswith("header:") else None
    # What cannot be one is told as a fault of `idempotency`.
    shown_name = header if _may_be_named(header) else None
    if older == idempotency:
        return laid | {"idempotency_header": shown_name}
    return laid | {"idempotency": older, "idempotency_header": shown_name}


def _may_be_named(header: object) -> bool:
    return (
        isinstance(header, str)
        and HEADER_NAME.fullmatch(header) is not None
        and header.lower() not in _TAKEN_HEADERS
    )
