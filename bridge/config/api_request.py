"""How the SMS service is asked: the login, the body, and where the idempotency key goes."""

import re
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field, JsonValue, SecretStr, ValidationInfo, field_validator

from bridge.config.fields import (
    HEADER_NAME,
    POINTER,
    FilePath,
    HeaderName,
    HeaderValue,
    Map,
    Name,
    Prefix,
    PutPointer,
    check_put_pointer,
)
from bridge.config.request_fields import Placeholder, check_fields, slots_of
from bridge.config.section import Section

AuthScheme = Literal["bearer", "basic", "header", "none"]
DEFAULT_IDEMPOTENCY_HEADER: Final = "Idempotency-Key"

_FIELDS: Final[dict[str, JsonValue]] = {"/to": "{to}", "/from": "{from}", "/text": "{text}"}
_NO_HEADERS: Final[dict[str, SecretStr]] = {}
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


ApiHeader = Annotated[HeaderName, AfterValidator(_check_free)]
ApiPath = Annotated[str, AfterValidator(_check_path)]
Idempotency = Annotated[str, AfterValidator(_check_idempotency)]


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
    short_codes: bool = False
    fields: Annotated[dict[PutPointer, JsonValue], Map, Field(min_length=1, max_length=100)] = (
        _FIELDS
    )
    headers: Annotated[dict[ApiHeader, HeaderValue], Map, Field(max_length=50)] = _NO_HEADERS

    @property
    def placeholders(self) -> frozenset[Placeholder]:
        """What the service is told of a message, and of us."""
        return frozenset(slot.name for value in self.fields.values() for slot in slots_of(value))

    @field_validator("fields")
    @classmethod
    def _work(cls, fields: dict[str, JsonValue], info: ValidationInfo) -> dict[str, JsonValue]:
        check_fields(fields, is_form=info.data.get("body") == "form")
        return fields

    @field_validator("headers")
    @classmethod
    def _are_there_once(cls, headers: dict[str, SecretStr]) -> dict[str, SecretStr]:
        if len({name.lower() for name in headers}) < len(headers):
            raise ValueError("has a header twice; upper and lower case are the same")
        return headers

    def has_header(self, name: str) -> bool:
        """Whether a constant header has this name, in upper or lower case."""
        return name.lower() in {header.lower() for header in self.headers}


def may_be_named(header: object) -> bool:
    """Whether a setting can name this header."""
    return (
        isinstance(header, str)
        and HEADER_NAME.fullmatch(header) is not None
        and header.lower() not in _TAKEN_HEADERS
    )
