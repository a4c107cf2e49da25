"""Settings for requests to the SMS service: authentication, body, fields, placeholders."""

import json
import re
import string
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal, NamedTuple, get_args

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
    ServiceSection,
    check_put_pointer,
    check_whole_characters,
    did_you_mean,
)
from bridge.json_pointer import split_pointer

Placeholder = Literal["to", "from", "text", "key", "encoding", "account", "secret", "callback"]
PLACEHOLDERS: Final[tuple[Placeholder, ...]] = get_args(Placeholder)
# Shorter idempotency keys could collide.
MIN_KEY_CHARACTERS: Final = 20


class Slot(NamedTuple):
    """A placeholder; `detail` is the text after its colon."""

    name: Placeholder
    detail: str = ""


def parse_text(text: str) -> list[str | Slot]:
    """Split a text with placeholders into its constant texts and slots, in order.

    Raises ValueError that describes the fault, and quotes only names of known placeholders.
    """
    parts: list[str | Slot] = []
    try:
        parsed = list(string.Formatter().parse(text))
    except ValueError:
        raise ValueError("holds a { or } that belongs to no placeholder; write {{ or }}") from None
    for constant, name, detail, conversion in parsed:
        if constant:
            parts.append(constant)
        if name is not None:
            parts.append(_slot(name, detail or "", conversion))
    return parts


def _slot(name: str, detail: str, conversion: str | None) -> Slot:
    known = next((one for one in PLACEHOLDERS if one == name), None)
    if known is None or conversion:
        names = " ".join(f"{{{one}}}" for one in PLACEHOLDERS)
        meant = did_you_mean(name, PLACEHOLDERS)
        raise ValueError(f"holds an unknown placeholder{meant or f'; there are {names}'}")
    if detail and known == "key":
        if not (re.fullmatch("[0-9]{2,3}", detail) and int(detail) >= MIN_KEY_CHARACTERS):
            least = MIN_KEY_CHARACTERS
            raise ValueError(f"{{key:N}} needs a length N from {least} to 999")
    elif detail and known == "encoding":
        if detail.count("|") != 1:
            raise ValueError(
                "holds {encoding:...} without two words, as in {encoding:text|unicode}"
            )
    elif detail:
        raise ValueError(f"holds {{{known}:...}}; it takes no argument")
    return Slot(known, detail)


class _Branch(dict[str, Any]):
    """A level of the body that pointers lead through, as opposed to a constant map."""


def build_document(fields: Mapping[str, Any]) -> Any:  # noqa: ANN401  JSON
    """Put each value where its pointer leads; a level whose names are 0, 1, ... is a list.

    Raises ValueError if two fields have the same place, or if a level mixes numbers and names.
    """
    root = _Branch()
    for pointer, value in fields.items():
        *way, last = split_pointer(pointer)
        node = root
        for name in way:
            below = node.setdefault(name, _Branch())
            if not isinstance(below, _Branch):
                raise ValueError(_at_one_place(pointer))  # noqa: TRY004  a fault of the setting
            node = below
        if last in node:
            raise ValueError(_at_one_place(pointer))
        node[last] = value
    return _as_json(root)


def _at_one_place(pointer: str) -> str:
    return f"{shown(pointer)}: conflicts with the place of another field; remove one of the two"


def _as_json(value: Any) -> Any:  # noqa: ANN401  JSON
    if not isinstance(value, _Branch):
        return value
    members = {name: _as_json(below) for name, below in value.items()}
    if not any(name.isdecimal() for name in members):
        return members
    if sorted(members) != sorted(str(number) for number in range(len(members))):
        raise ValueError("the members of a list must be numbered 0, 1, ... and stand by themselves")
    return [members[str(number)] for number in range(len(members))]


def check_fields(fields: Mapping[str, Any], *, is_form: bool) -> None:
    """Raise ValueError with a remedy if a field is invalid, or a required placeholder missing."""
    slots = set()
    for pointer, value in fields.items():
        if is_form:
            _check_form_field(pointer, value)
        try:
            check_whole_characters(json.dumps({pointer: value}, ensure_ascii=False))
            slots |= {slot.name for slot in slots_of(value)}
        except ValueError as error:
            raise ValueError(f"{shown(pointer)}: {error}") from None
    if not is_form:
        build_document(fields)
    for needed in ("to", "text"):
        if needed not in slots:
            raise ValueError(f"no field holds {{{needed}}}; say where the service wants it")


def _check_form_field(pointer: str, value: object) -> None:
    if len(split_pointer(pointer)) != 1:
        raise ValueError(
            f"{shown(pointer)}: is nested, but form fields are flat; "
            "write it like /To, or set request.body to json"
        )
    for one in value if isinstance(value, list) else [value]:
        if one is None or isinstance(one, dict | list):
            raise ValueError(f"{shown(pointer)}: must be text or a number, or a list of them")


def slots_of(value: object) -> Iterator[Slot]:
    """Yield the placeholders of a value, at any depth."""
    if isinstance(value, str):
        yield from (part for part in parse_text(value) if isinstance(part, Slot))
    elif isinstance(value, list):
        for member in value:
            yield from slots_of(member)
    elif isinstance(value, dict):
        for member in value.values():
            yield from slots_of(member)


def shown(pointer: str) -> str:
    """Return a pointer for an error text, or `a field` if it does not look like a pointer."""
    return pointer if re.fullmatch(r"(?:/[A-Za-z0-9_.-]{1,32}){1,8}", pointer) else "a field"


AuthScheme = Literal["bearer", "basic", "header", "none"]
DEFAULT_IDEMPOTENCY_HEADER: Final = "Idempotency-Key"

_FIELDS: Final[dict[str, JsonValue]] = {"/to": "{to}", "/from": "{from}", "/text": "{text}"}
_NO_HEADERS: Final[dict[str, SecretStr]] = {}
_PATH: Final = re.compile(r"/(?:[!\"$-z|~]|\{account\})*")
# Headers that the bridge itself writes, and headers of one connection (RFC 9110, 7.6.1). A second
# one would break the request; a secret as its value would be shown to a proxy.
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
        raise ValueError(
            "must start with / and contain no spaces, # or braces other than {account}"
        )
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


class AuthSettings(ServiceSection):
    """Authentication: by `sms_api.key` and, for `basic`, by a user name with it."""

    scheme: AuthScheme = "bearer"
    header: ApiHeader = "Authorization"
    prefix: Prefix = ""
    username: Name | None = None
    username_file: FilePath | None = None


class RequestSettings(ServiceSection):
    """The body and the constant headers of a request."""

    body: Literal["json", "form"] = "json"
    to_format: Literal["e164", "digits"] = "e164"
    short_codes: bool = False
    fields: Annotated[dict[PutPointer, JsonValue], Map, Field(min_length=1, max_length=100)] = (
        _FIELDS
    )
    headers: Annotated[dict[ApiHeader, HeaderValue], Map, Field(max_length=50)] = _NO_HEADERS

    @property
    def placeholders(self) -> frozenset[Placeholder]:
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
    return (
        isinstance(header, str)
        and HEADER_NAME.fullmatch(header) is not None
        and header.lower() not in _TAKEN_HEADERS
    )
