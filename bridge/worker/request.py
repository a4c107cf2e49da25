"""The format of a send request, its strict parser, and the segments of its text."""

import codecs
import json
import math
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from pydantic_core import ErrorDetails

from bridge.config import WorkerSettings
from bridge.config.fields import SenderName
from bridge.errors import InvalidMessageError

MIN_BODY_LIMIT_BYTES = 64 * 1024
# A character may be written as two escaped surrogates; the rest is for the other members.
BYTES_PER_CHARACTER = 12
OTHER_MEMBERS_BYTES = 4096

To = Annotated[str, StringConstraints(pattern=r"^\+[1-9][0-9]{3,14}$")]
ToOrShortCode = Annotated[str, StringConstraints(pattern=r"^(\+[1-9][0-9]{3,14}|[0-9]{3,8})$")]
# Of the control characters only TAB, LF and CR are allowed. A service would cut the text at others,
# or refuse it without a useful error.
Text = Annotated[
    str,
    StringConstraints(min_length=1, pattern=r"^[^\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]*$"),
]


class SendRequest(BaseModel):
    """One text to one phone number."""

    model_config = ConfigDict(
        extra="forbid", hide_input_in_errors=True, serialize_by_alias=True, defer_build=True
    )

    to: Annotated[To, Field(description="`+` and 4 to 15 digits, not starting with 0.")]
    sender: Annotated[
        SenderName,
        Field(
            alias="from",
            description="1 to 32 characters. You may leave it out if `worker.default_from` is set.",
        ),
    ] = ""
    text: Annotated[
        Text,
        Field(
            description="1 to `worker.max_text_length` characters, without control characters "
            "except tab, line feed and carriage return."
        ),
    ]


class OpenSendRequest(SendRequest):
    """A send request with additional members, which are forwarded unchanged."""

    model_config = ConfigDict(extra="allow")


class ShortCodeRequest(SendRequest):
    """One text to one phone number or short code."""

    to: Annotated[
        ToOrShortCode,
        Field(
            description="`+` and 4 to 15 digits, not starting with 0; or a short code (3 to 8 "
            "digits)."
        ),
    ]


class OpenShortCodeRequest(ShortCodeRequest):
    """A request to a phone number or short code with additional members."""

    model_config = ConfigDict(extra="allow")


class RequestReader:
    """Parses bodies strictly, and fills in the default sender.

    `short_codes`: short codes are valid recipients too (`sms_api.request.short_codes`).
    """

    def __init__(self, settings: WorkerSettings, *, short_codes: bool = False) -> None:
        # Copied, because reading a pydantic attribute takes ten times as long and happens per
        # message.
        self._longest = settings.max_text_length
        self._most_bytes = max(
            MIN_BODY_LIMIT_BYTES, self._longest * BYTES_PER_CHARACTER + OTHER_MEMBERS_BYTES
        )
        closed, open_ = (
            (ShortCodeRequest, OpenShortCodeRequest)
            if short_codes
            else (SendRequest, OpenSendRequest)
        )
        self._model = open_ if settings.extra_fields == "forward" else closed
        self._default_sender = settings.default_from

    def read(self, body: bytes | bytearray) -> SendRequest:
        """Parse a body; the text of InvalidMessageError names the field, never a value."""
        if len(body) > self._most_bytes:
            raise InvalidMessageError(f"body: larger than {self._most_bytes} bytes")
        try:
            request = self._model.model_validate_json(body)
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            raise InvalidMessageError(_describe(first, body)) from None
        if request.model_extra or not _has_texts_only(body, len(request.model_fields_set)):
            _refuse_ambiguity(body)
        if not request.sender:
            if self._default_sender is None:
                raise InvalidMessageError("from: is missing, and worker.default_from is not set")
            request.sender = self._default_sender
        if len(request.text) > self._longest:
            raise InvalidMessageError(f"text: longer than worker.max_text_length ({self._longest})")
        return request


def parse_request(
    body: bytes | bytearray, settings: WorkerSettings, *, short_codes: bool = False
) -> SendRequest:
    """Parse one body as a `RequestReader` with these settings does."""
    return RequestReader(settings, short_codes=short_codes).read(body)


def _has_texts_only(body: bytes | bytearray, members: int) -> bool:
    """Whether a valid body has exactly `members` members, all of them strings.

    Each takes four quotation marks, and a backslash could hide one. This check saves most bodies
    the second parse.
    """
    # `in` would try to interpret its operand as an integer first, and takes three times as long.
    return body.count(b'"') == 4 * members and body.find(b"\\") < 0


def _refuse_ambiguity(body: bytes | bytearray) -> None:
    # pydantic uses the last of two members with the same name, and accepts NaN; other parsers
    # differ.
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise InvalidMessageError(f"{printable(twice)}: appears twice")
        return members

    def refuse(_constant: str) -> None:
        raise InvalidMessageError("body: NaN and Infinity are not JSON")

    def finite(number: str) -> float:
        value = float(number)
        if not math.isfinite(value):
            raise InvalidMessageError("body: a number is too large")
        return value

    try:
        json.loads(body, object_pairs_hook=unique, parse_constant=refuse, parse_float=finite)
    except ValueError:
        raise InvalidMessageError("body: is not JSON") from None


_FAULTS = {
    "model_type": "must be a JSON object",
    "missing": "is missing",
    "extra_forbidden": "unknown member; allowed are to, from, text",
    "string_type": "must be a string",
    "string_too_short": "is empty",
    "string_too_long": "is too long",
    "string_unicode": "must be valid Unicode",
}
_PATTERN_FAULTS = {
    "to": "must be + and 4 to 15 digits, the first not 0",
    "from": "must not hold control characters",
    "text": "must hold no control characters but tab, line feed and carriage return",
}
_BYTE_ORDER_MARKS = {
    codecs.BOM_UTF8: "begins with a byte-order mark; write UTF-8 without one",
    codecs.BOM_UTF16_LE: "is UTF-16; write UTF-8",
    codecs.BOM_UTF16_BE: "is UTF-16; write UTF-8",
}


def _describe(error: ErrorDetails, body: bytes | bytearray) -> str:
    # pydantic's own texts may quote the refused value.
    if error["type"] == "json_invalid":
        return f"body: {_why_no_json(error, body)}"
    field = printable(str(error["loc"][0])) if error["loc"] else "body"
    faults = _PATTERN_FAULTS if error["type"] == "string_pattern_mismatch" else _FAULTS
    key = field if faults is _PATTERN_FAULTS else error["type"]
    return f"{field}: {faults.get(key, 'is not valid')}"


def _why_no_json(error: ErrorDetails, body: bytes | bytearray) -> str:
    if not body.strip():
        return "is empty"
    for mark, why in _BYTE_ORDER_MARKS.items():
        if body.startswith(mark):
            return why
    if str(error.get("ctx", {}).get("error", "")).startswith("recursion limit"):
        return "is nested too deep"
    return "is not UTF-8 JSON"


def printable(name: str, otherwise: str = "a member") -> str:
    """Return a name that comes from a message, unless it may itself be a number or a text."""
    plain = re.fullmatch(r"[A-Za-z_][A-Za-z_.-]{0,31}", name)
    return name if plain else otherwise


# Segments

# 3GPP TS 23.038: the basic character set, then the characters that take two places.
_GSM7_BASIC = (
    "@£$¥èéùìòÇ\nØø\rÅåΔ_ΦΓΛΩΠΨΣΘΞÆæßÉ !\"#¤%&'()*+,-./0123456789:;<=>?"
    "¡ABCDEFGHIJKLMNOPQRSTUVWXYZÄÖÑÜ§¿abcdefghijklmnopqrstuvwxyzäöñüà"
)
_GSM7_EXTENSION = "\f^{}\\[~]|€"
_ONE_PLACE_EACH = re.compile(f"[{re.escape(_GSM7_BASIC)}]*")
_GSM7 = re.compile(f"[{re.escape(_GSM7_BASIC + _GSM7_EXTENSION)}]*")


Encoding = Literal["gsm7", "ucs2"]


def count_segments(text: str) -> tuple[Encoding, int]:
    """Return the encoding of a text and the number of its segments.

    A segment of a longer text has less room, because of its header, and no character is split.
    """
    # Fast path: most texts are short and plain, and checking each character is many times slower.
    if len(text) <= 160 and _ONE_PLACE_EACH.fullmatch(text):  # noqa: PLR2004
        return "gsm7", 1
    if _GSM7.fullmatch(text):
        widths = [2 if char in _GSM7_EXTENSION else 1 for char in text]
        return "gsm7", _count_parts(widths, alone=160, part=153)
    widths = [2 if ord(char) > 0xFFFF else 1 for char in text]  # noqa: PLR2004  surrogates
    return "ucs2", _count_parts(widths, alone=70, part=67)


def _count_parts(widths: Sequence[int], *, alone: int, part: int) -> int:
    if sum(widths) <= alone:
        return 1
    parts, used = 1, 0
    for width in widths:
        if used + width > part:
            parts, used = parts + 1, 0
        used += width
    return parts
