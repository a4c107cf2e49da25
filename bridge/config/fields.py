"""Types of settings: durations, names, pointers, lists, secrets; the base class of sections."""

import difflib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    StringConstraints,
    WithJsonSchema,
    model_validator,
)

from bridge.json_pointer import EACH, FRAGMENT, split_pointer

_UNIT_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([smhd]?)")


def parse_duration(value: object) -> object:
    """Convert `90`, `10s`, `5m`, `2h` or `30d` to seconds; return anything but text unchanged.

    Raises ValueError with examples.
    """
    if not isinstance(value, str):
        return value
    match = _DURATION.fullmatch(value.strip())
    if match is None:
        raise ValueError("must be a number of seconds or like 10s, 5m, 2h, 30d")
    return float(match[1]) * _UNIT_SECONDS[match[2] or "s"]


def format_duration(seconds: float) -> str:
    """Format seconds in the largest unit that divides them: 120 is `2m`. Queue names use it."""
    for unit in "dhms":
        if seconds % _UNIT_SECONDS[unit] == 0:
            return f"{int(seconds // _UNIT_SECONDS[unit])}{unit}"
    return f"{seconds:g}s"


MAX_CONCURRENCY: Final = 5000
MAX_RETRY_DELAY_SECONDS: Final = 3650 * 86400
# AMQP allows 255 bytes, and the names of retry queues end with their delay.
MAX_NAME_BYTES: Final = 200

# RFC 6901: after a ~ comes 0 or 1.
POINTER: Final = r"^(/([^/~]|~[01])*)+$"
_SENDER: Final = r"^[^\x00-\x1f\x7f-\x9f]*$"
_FORMAT: Final = r"^(plain|kv|list|csv|jwt|prefix:[!-~]{1,32})$"
_SIGNED: Final = r"\{(body|url)\}"
_CODE: Final = r"^[!-~]{1,64}$"
_PREFIX: Final = r"^[ -~]{0,64}$"
_HEADER_VALUE: Final = re.compile(r"[!-~](?:[ -~]{0,998}[!-~])?")
# RFC 9110, 8.3.1.
CONTENT_TYPE: Final = r"^[!#$%&'*+.^_`|~0-9A-Za-z-]+/[!#$%&'*+.^_`|~0-9A-Za-z-]+(; ?[ -~]{1,60})?$"
# The path of a request is decoded before it is compared.
_PATH: Final = r"^/[^?#%{}\s]*$"
HALF_CHARACTER: Final = "holds half of a surrogate pair; write the whole character"
# RFC 9110, 5.6.2.
HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
# Event types that can be a routing key and a label.
MAX_EVENT_TYPE_CHARACTERS: Final = 120
EVENT_TYPE: Final = re.compile(
    rf"(?=.{{1,{MAX_EVENT_TYPE_CHARACTERS}}}\Z)[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*"
)
# Error texts, which replace the pattern in pydantic's text.
PATTERNS: Final = {
    POINTER: "must be a JSON pointer like /data/id, with ~1 for a / and ~0 for a ~ in a name",
    _SENDER: "must not hold line breaks or control characters",
    _FORMAT: (
        "must be plain, kv, list, csv, jwt, or prefix: followed by the text before the signature"
    ),
    _SIGNED: "must hold {body} or {url}",
    _CODE: "must be 1 to 64 visible ASCII characters",
    _PREFIX: "must be at most 64 visible ASCII characters and spaces",
    CONTENT_TYPE: "must be a media type like text/xml",
    _PATH: "must begin with / and hold no space, ?, #, %, { or }",
}


def read_json(value: object, otherwise: str) -> object:
    """Parse text as JSON, which the environment uses for lists and maps; return others unchanged.

    Raises ValueError with the text `otherwise` if it is not JSON.
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise ValueError(otherwise) from None


def read_list(value: object) -> object:
    """Parse a list from the environment, which is JSON text; return other values unchanged."""
    return read_json(value, 'must be a list; in the environment as JSON, like ["a", "b"]')


def read_map(value: object) -> object:
    """Parse a map from the environment, which is JSON text; return other values unchanged."""
    return read_json(value, 'must be a map; in the environment as JSON, like {"a": "b"}')


def write_on_or_off(value: object) -> object:
    """Convert the booleans of YAML 1.1, and their words, to `on` or `off`; return others unchanged.

    Helm reads an unquoted `off` as a boolean, and passes `false`.
    """
    word = str(value).strip().lower() if isinstance(value, bool | str) else None
    if word in {"on", "true", "yes"}:
        return "on"
    return "off" if word in {"off", "false", "no"} else value


def write_number(value: object) -> object:
    """Convert an integer, which YAML reads from unquoted digits, to text; keep other values."""
    return str(value) if type(value) is int else value


def _check_not_blank(value: SecretStr) -> SecretStr:
    if not value.get_secret_value().strip():
        raise ValueError("is empty; give a secret or leave the key out")
    return value


def _check_concurrency(value: object) -> object:
    # Checked before pydantic checks the types, which would report a fault for each member of the
    # union.
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    is_count = type(value) is int and 1 <= value <= MAX_CONCURRENCY
    if not is_count and value != "auto":
        raise ValueError(f"must be a whole number from 1 to {MAX_CONCURRENCY}, or auto")
    return value


def _check_retry_delay(seconds: float) -> float:
    if seconds > MAX_RETRY_DELAY_SECONDS:
        most = format_duration(MAX_RETRY_DELAY_SECONDS)
        raise ValueError(f"must be at most {most}, RabbitMQ's longest x-message-ttl")
    return seconds


def _check_entity_name(name: str) -> str:
    if name.startswith("amq."):
        raise ValueError("must not begin with amq., which RabbitMQ keeps for itself")
    if len(name.encode()) > MAX_NAME_BYTES:
        raise ValueError(f"must have at most {MAX_NAME_BYTES} bytes in UTF-8")
    # pamqp cannot encode other characters in a name, so a role would try to connect for ever.
    if not re.fullmatch("[a-zA-Z0-9_.:@#,/+ -]*", name):
        raise ValueError("must be of letters and digits of ASCII, spaces and - _ . : @ # , / +")
    return name


def _check_exchange_name(name: str) -> str:
    # `amq.topic` is the topic exchange that every virtual host has.
    return name if name == "amq.topic" else _check_entity_name(name)


def check_whole_characters(value: str) -> str:
    """Return a text that can be encoded in UTF-8, or raise ValueError.

    Escapes in JSON and YAML can express half of a surrogate pair.
    """
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(HALF_CHARACTER) from None
    return value


def _check_path(path: Path) -> Path:
    # Opening such a path would raise ValueError; every other fault raises OSError.
    if "\0" in str(path):
        raise ValueError("must be the path of a file, without the character NUL")
    try:
        # Python represents bytes of a path that are not UTF-8 as half surrogates, which are
        # allowed.
        os.fsencode(path)
    except UnicodeEncodeError:
        check_whole_characters(str(path))
    return path


def _check_read_pointer(pointer: str) -> str:
    if split_pointer(pointer).count(EACH) > 1:
        raise ValueError(
            "contains * more than once, but only one is allowed; replace the others by an index"
        )
    return pointer


def check_put_pointer(pointer: str) -> str:
    """Return a pointer at which a value can be put, or raise ValueError."""
    if EACH in split_pointer(pointer) or pointer.endswith(FRAGMENT):
        raise ValueError(
            "contains * or ends in #, which are valid only for reading; write the index of a "
            "list member, or the whole name"
        )
    return pointer


def _check_header_name(value: str) -> str:
    if not HEADER_NAME.fullmatch(value):
        raise ValueError("is not an HTTP header name")
    return value


def _check_header_value(value: SecretStr) -> SecretStr:
    if not _HEADER_VALUE.fullmatch(value.get_secret_value()):
        raise ValueError(
            "must be 1 to 1,000 visible ASCII characters, with spaces between and no line breaks"
        )
    return value


def _check_event_type(value: str) -> str:
    if not EVENT_TYPE.fullmatch(value):
        raise ValueError(
            "must be a routing key like message.received: at most 120 letters, digits, - and _, "
            "with dots between"
        )
    return value


def _check_event_pointer(value: str) -> str:
    if "*" in value.split("/"):
        raise ValueError("cannot lead to each member of a list; write the first, like /results/0")
    return value


# In seconds, after parsing.
Duration = Annotated[
    float,
    BeforeValidator(parse_duration),
    Field(gt=0, allow_inf_nan=False),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "exclusiveMinimum": 0},
                {"type": "string", "title": "Duration", "examples": ["10s", "5m", "2h", "30d"]},
            ]
        }
    ),
]
RetryDelay = Annotated[Duration, AfterValidator(_check_retry_delay)]
Concurrency = Annotated[int | Literal["auto"], BeforeValidator(_check_concurrency)]
Port = Annotated[int, Field(ge=0, le=65535)]

Secret = Annotated[SecretStr, AfterValidator(_check_not_blank)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=200)]
QueueName = Annotated[Name, AfterValidator(_check_entity_name)]
ExchangeName = Annotated[Name, AfterValidator(_check_exchange_name)]
HeaderName = Annotated[str, AfterValidator(_check_header_name)]
# It may be a secret, and is never shown.
HeaderValue = Annotated[
    SecretStr, BeforeValidator(write_number), AfterValidator(_check_header_value)
]
# A pointer for reading. One * stands for each member of a list; a # at the end selects the fragment
# of a URL.
Pointer = Annotated[str, StringConstraints(pattern=POINTER), AfterValidator(_check_read_pointer)]
# A pointer for writing, to exactly one place.
PutPointer = Annotated[str, StringConstraints(pattern=POINTER), AfterValidator(check_put_pointer)]
EventPointer = Annotated[Pointer, AfterValidator(_check_event_pointer)]
EventType = Annotated[str, AfterValidator(_check_event_type)]
# A service's own error code; many are numbers.
ErrorCode = Annotated[str, StringConstraints(pattern=_CODE), BeforeValidator(write_number)]
Prefix = Annotated[str, StringConstraints(pattern=_PREFIX)]
SenderName = Annotated[str, StringConstraints(min_length=1, max_length=32, pattern=_SENDER)]
FilePath = Annotated[Path, AfterValidator(_check_path)]
RequestPath = Annotated[str, StringConstraints(pattern=_PATH)]
SignatureFormat = Annotated[str, StringConstraints(pattern=_FORMAT)]
SignedContent = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=_SIGNED)]
# Marks a list, which the environment can contain as JSON.
List = BeforeValidator(read_list)
# The same for a map whose keys are not settings.
Map = BeforeValidator(read_map)


# Minimum similarity, from 0 to 1, of an unknown name to a known one to count as a misspelling.
_LIKENESS: Final = 0.6


def did_you_mean(name: str, names: Iterable[str], prefix: str = "") -> str:
    """Return the end of an error text with the nearest of `names`; empty if none is similar."""
    found = nearest(name, names)
    return "" if found is None else f"; did you mean {prefix}{found}?"


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the most similar of `names` (lower case), or None if none is similar."""
    wanted = name[:MAX_NAME_BYTES].lower()
    found = difflib.get_close_matches(wanted, list(names), n=1, cutoff=_LIKENESS)
    return found[0] if found else None


def read_section(value: object) -> object:
    """Convert an empty section to an empty map, and JSON text from the environment to a map."""
    if value is None:
        return {}
    return read_json(value, "must hold keys; in the environment it is JSON")


class Section(BaseModel):
    """Base class of sections: keys with types and defaults; an unknown key is a fault."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
        allow_inf_nan=False,
        # Sections are validated only as parts of `Settings`.
        defer_build=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _read_map(cls, value: object) -> object:
        return read_section(value)


def allow_null(schema: dict[str, Any], keys: Iterable[str]) -> None:
    """Allow null for these keys in the JSON Schema of a section."""
    for name in keys:
        schema["properties"][name] = {"anyOf": [schema["properties"][name], {"type": "null"}]}


class ServiceSection(Section):
    """Base class of sections that a preset sets as a whole; null keeps its value of a key."""

    model_config = ConfigDict(
        json_schema_extra=lambda schema: allow_null(schema, schema["properties"])
    )
