"""Settings of the SMS service's API: its address, its requests, the meaning of its answers.

The defaults of the keys that describe the API are those of the preset `generic`; `presets` has the
others.
"""

from typing import Annotated, Any, Final

from pydantic import ConfigDict, ValidationInfo, field_validator, model_validator

from bridge.config.api_answers import NO_WORD, ResponseSettings
from bridge.config.api_request import (
    DEFAULT_IDEMPOTENCY_HEADER,
    ApiHeader,
    ApiPath,
    AuthSettings,
    Idempotency,
    RequestSettings,
    Slot,
    check_fields,
    may_be_named,
    shown,
    slots_of,
)
from bridge.config.fields import (
    Duration,
    FilePath,
    List,
    Name,
    Pointer,
    Secret,
    Section,
    allow_null,
    read_section,
)
from bridge.config.presets import (
    PRESETS,
    KnownPreset,
    lay_over,
    needed_settings,
    preset_settings,
)
from bridge.config.urls import BaseUrl, ProxyUrl

# Used if the preset has no name of the service's own for a setting.
_REMEDIES: Final = {
    "base_url": "the worker needs it",
    "account": "it is what {account} stands for",
    "auth.username": "set it, or sms_api.account, whose default it is",
    "key": "set sms_api.key or sms_api.key_file",
}


class SmsApiSettings(Section):
    """The SMS service's REST API; a preset describes it, and a single key overrides the preset."""

    model_config = ConfigDict(
        json_schema_extra=lambda schema: allow_null(schema, preset_settings("generic"))
    )

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
        below = preset_settings(preset)
        laid = _with_one_idempotency(given, lay_over(below, given))
        return _with_field_of_key(laid, below["request"]["fields"])

    @field_validator("request")
    @classmethod
    def _leaves_out_the_login(
        cls, request: RequestSettings, info: ValidationInfo
    ) -> RequestSettings:
        auth = info.data.get("auth")
        if not isinstance(auth, AuthSettings) or auth.scheme == "none":
            return request
        if request.has_header(auth.header):
            raise ValueError(
                "headers has the header of sms_api.auth; leave it out, or set auth.scheme to none"
            )
        return request

    @field_validator("idempotency")
    @classmethod
    def _has_its_own_header(cls, idempotency: str, info: ValidationInfo) -> str:
        kind, _, header = idempotency.partition(":")
        auth, request = info.data.get("auth"), info.data.get("request")
        if kind == "header" and isinstance(request, RequestSettings) and request.has_header(header):
            raise ValueError(
                "names a header of sms_api.request.headers; leave it out of one of them"
            )
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
        if kind != "field" or not isinstance(request, RequestSettings):
            return idempotency
        if pointer not in request.fields:
            fields = {**request.fields, pointer: "{key}"}
            check_fields(fields, is_form=request.body == "form")
            return idempotency
        keys = _key_slots(request.fields[pointer])
        if not keys:
            raise ValueError(f"request.fields has {shown(pointer)} without {{key}}; add it")
        of_preset = preset_settings(info.data.get("preset", "generic"))["request"]["fields"]
        for bound in _key_slots(of_preset.get(pointer)):
            if any(_may_be_longer(key, bound) for key in keys):
                raise ValueError(
                    f"request.fields has {shown(pointer)} with a longer key than the service "
                    f"takes; write {{key:{bound.detail}}}"
                )
        return idempotency

    @field_validator("message_id_pointers", "error_code_pointers")
    @classmethod
    def _can_be_followed(cls, pointers: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        response = info.data.get("response")
        default = cls.model_fields[str(info.field_name)].default
        if not isinstance(response, ResponseSettings) or pointers == default:
            return pointers
        for number, pointer in enumerate(pointers):
            if not response.can_follow(pointer):
                raise ValueError(f"{number}: {NO_WORD}")
        return pointers

    @property
    def knows_repeats(self) -> bool:
        """Whether the service recognises a repeated request by its idempotency key."""
        return self.idempotency != "none"

    @property
    def needs_key(self) -> bool:
        """Whether requests contain `key`, for authentication or in the body."""
        return self.auth.scheme != "none" or "secret" in self.request.placeholders

    @property
    def missing(self) -> list[str]:
        """An error text for each setting that the worker needs and that is missing."""
        auth, words = self.auth, needed_settings(self.preset)
        has_username = auth.username or auth.username_file or self.account
        names_account = "{account}" in self.path or "account" in self.request.placeholders
        is_missing = {
            "base_url": self.base_url is None,
            "account": self.account is None and names_account,
            "auth.username": auth.scheme == "basic" and not has_username,
            "key": self.needs_key and self.key is None and self.key_file is None,
        }
        if is_missing["auth.username"] and "account" in words:
            # The account is the default user name, and the preset has the service's name for it.
            is_missing |= {"account": True, "auth.username": False}
        told = _REMEDIES | {key: f"it is {words[key]}" for key in words if key != "key"}
        if "key" in words:
            told["key"] = f"it is {words['key']}; {_REMEDIES['key']}"
        return [f"sms_api.{key}: is missing; {told[key]}" for key in told if is_missing[key]]


def _with_one_idempotency(given: dict[str, Any], laid: dict[str, Any]) -> dict[str, Any]:
    """Merge the older key `idempotency_header` into `idempotency`, and show the header in use.

    Null sends no header. The default value, even if it is written out, does not override the header
    of a preset.
    """
    name = given.get("idempotency_header", DEFAULT_IDEMPOTENCY_HEADER)
    if name is not None and not may_be_named(name):
        return laid
    idempotency = str(laid["idempotency"])
    merged = idempotency
    if name is None and idempotency.startswith("header:"):
        merged = "none"
    elif name is not None and name != DEFAULT_IDEMPOTENCY_HEADER:
        merged = f"header:{name}"
    if merged != idempotency and given.get("idempotency") is not None:
        raise ValueError("idempotency_header conflicts with idempotency; remove idempotency_header")
    header = merged.removeprefix("header:") if merged.startswith("header:") else None
    # An invalid name is reported as a fault of `idempotency`.
    shown_name = header if may_be_named(header) else None
    if merged == idempotency:
        return laid | {"idempotency_header": shown_name}
    return laid | {"idempotency": merged, "idempotency_header": shown_name}


def _key_slots(value: object) -> list[Slot]:
    return [slot for slot in slots_of(value) if slot.name == "key"]


def _may_be_longer(key: Slot, bound: Slot) -> bool:
    return bool(bound.detail) and (not key.detail or int(key.detail) > int(bound.detail))


def _with_field_of_key(laid: dict[str, Any], of_preset: dict[str, Any]) -> dict[str, Any]:
    """Keep the preset's field of the idempotency key, which limits the length of the key.

    Otherwise the user's `request.fields` would replace it together with the other fields.
    """
    kind, _, pointer = str(laid["idempotency"]).partition(":")
    request = laid["request"]
    fields = request.get("fields") if isinstance(request, dict) else None
    if kind != "field" or pointer not in of_preset or not isinstance(fields, dict):
        return laid
    return laid | {"request": request | {"fields": {pointer: of_preset[pointer]} | fields}}
