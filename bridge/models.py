"""What a send request is: its form, its strict reading, its length in SMS segments."""

import functools
import json
import math
import re
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from pydantic_core import ErrorDetails, from_json

from bridge.config import SenderName, WorkerSettings
from bridge.errors import InvalidMessageError

MIN_BODY_LIMIT_BYTES = 64 * 1024
# One character may be written as two escaped surrogates; the rest is for the other members.
BYTES_PER_CHARACTER = 12
OTHER_MEMBERS_BYTES = 4096

To = Annotated[str, StringConstraints(pattern=r"^\+[1-9][0-9]{3,14}$")]
Text = Annotated[str, StringConstraints(min_length=1)]


class SendRequest(BaseModel):
    """One text to one number."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True, serialize_by_alias=True)

    to: Annotated[To, Field(description="+ and 4 to 15 digits, the first not 0")]
    sender: Annotated[
        SenderName,
        Field(
            alias="from",
            description="short sender name; may be left out when worker.default_from is set",
        ),
    ] = ""
    text: Annotated[Text, Field(description="1 to worker.max_text_length characters")]


class OpenSendRequest(SendRequest):
    """A send request with members of the service's own, forwarded as they are."""

    model_config = ConfigDict(extra="allow")


def parse_request(body: bytes | bytearray, settings: WorkerSettings) -> SendRequest:
    """Read a body strictly and fill in the default sender.

    Raises InvalidMessageError, whose text names the field and never a value.
    """
    limit = max(
        MIN_BODY_LIMIT_BYTES,
        settings.max_text_length * BYTES_PER_CHARACTER + OTHER_MEMBERS_BYTES,
    )
    if len(body) > limit:
        raise InvalidMessageError(f"body: larger than {limit} bytes")
    model = OpenSendRequest if settings.extra_fields == "forward" else SendRequest
    try:
        request = model.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        raise InvalidMessageError(_describe(first)) from None
    if request.model_extra or not _has_texts_only(body, len(request.model_fields_set)):
        _refuse_ambiguity(body)
    if not request.sender:
        if settings.default_from is None:
            raise InvalidMessageError("from: is missing, and worker.default_from is not set")
        request.sender = settings.default_from
    if len(request.text) > settings.max_text_length:
        longest = settings.max_text_length
        raise InvalidMessageError(f"text: longer than worker.max_text_length ({longest})")
    return request


def _has_texts_only(body: bytes | bytearray, members: int) -> bool:
    """Whether a body that is valid has so many members, each a text, and nothing more.

    Each takes four quotation marks, and a backslash could hide one. Saves most bodies the second
    reading.
    """
    return body.count(b'"') == 4 * members and b"\\" not in body


def _refuse_ambiguity(body: bytes | bytearray) -> None:
    # pydantic takes the last of two equal members, and NaN as a number; others read otherwise.
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise InvalidMessageError(f"{printable(twice)}: is there twice")
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
    "json_invalid": "is not UTF-8 JSON, or is nested too deep",
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
}


def _describe(error: ErrorDetails) -> str:
    # pydantic's own texts may quote what they refuse.
    field = printable(str(error["loc"][0])) if error["loc"] else "body"
    faults = _PATTERN_FAULTS if error["type"] == "string_pattern_mismatch" else _FAULTS
    key = field if faults is _PATTERN_FAULTS else error["type"]
    return f"{field}: {faults.get(key, 'is not valid')}"


def printable(name: str, otherwise: str = "a member") -> str:
    """Return a name that comes from a message, unless it may be a number or a text itself."""
    plain = re.fullmatch(r"[A-Za-z_][A-Za-z_.-]{0,31}", name)
    return name if plain else otherwise


NOT_JSON: Final = object()


def read_document(body: bytes) -> Any:  # noqa: ANN401  JSON
    """Read JSON for its type and ids; return NOT_JSON for what is no JSON in UTF-8.

    No size of a number and no depth is refused: an integer too long for an id, and what lies
    deeper than `MAX_DEPTH`, are read as None.
    """
    try:
        # A quarter of the time of the standard library's.
        return from_json(body, cache_strings="keys")
    except ValueError:
        pass
    # That refuses half of a surrogate pair, long numbers and deep nesting.
    try:
        text = body.decode()
        try:
            return _DECODER.decode(text)
        except RecursionError:
            return _DECODER.decode(_cut_depths(text))
    except ValueError:
        return NOT_JSON


def _parse_int(digits: str) -> int | None:
    # Python refuses more than 4,300, and to read them takes the square of their count.
    return int(digits) if len(digits) <= len("-") + MAX_ID_DIGITS else None


MAX_ID_DIGITS: Final = 40
MAX_DEPTH: Final = 100
_DECODER: Final = json.JSONDecoder(parse_int=_parse_int)
# A string to its end, or to that of the text, so that none is looked at twice; or a bracket.
_TOKENS: Final = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)


def _cut_depths(text: str) -> str:
    """Put null for each list and object that lies deeper than `MAX_DEPTH`."""
    kept: list[str] = []
    begin = depth = 0
    for token in _TOKENS.finditer(text):
        mark = text[token.start()]
        if mark in "[{":
            depth += 1
            if depth == MAX_DEPTH + 1:
                kept += text[begin : token.start()], "null"
        elif mark in "]}":
            depth -= 1
            if depth == MAX_DEPTH:
                begin = token.end()
    # Without its end it is no JSON, and is left so.
    kept.append(text[begin:] if depth <= MAX_DEPTH else "")
    return "".join(kept)


_ID = re.compile(r"[!-~]{1,255}")
_END_OF_IDS: Final = 10**MAX_ID_DIGITS


def find_id(document: Any, pointers: Sequence[str]) -> str | None:  # noqa: ANN401  JSON
    """Take the first id that a JSON pointer (RFC 6901) leads to.

    An id is an integer of at most `MAX_ID_DIGITS` digits or 1 to 255 visible ASCII characters;
    anything else is passed over.
    """
    for pointer in pointers:
        value = _follow(document, _names_of(pointer))
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) < _END_OF_IDS:
            return str(value)
        if isinstance(value, str) and _ID.fullmatch(value):
            return value
    return None


@functools.lru_cache(maxsize=64)
def _names_of(pointer: str) -> tuple[str, ...]:
    return tuple(part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:])


def _follow(document: Any, names: Sequence[str]) -> Any:  # noqa: ANN401  JSON
    for name in names:
        if isinstance(document, dict):
            document = document.get(name)
        elif isinstance(document, list) and re.fullmatch("0|[1-9][0-9]{0,8}", name):
            document = document[int(name)] if int(name) < len(document) else None
        else:
            return None
    return document


# 3GPP TS 23.038: the basic character set, then the characters that take two places.
_GSM7_BASIC = (
    "@£$¥èéùìòÇ\nØø\rÅåΔ_ΦΓΛΩΠΨΣΘΞÆæßÉ !\"#¤%&'()*+,-./0123456789:;<=>?"
    "¡ABCDEFGHIJKLMNOPQRSTUVWXYZÄÖÑÜ§¿abcdefghijklmnopqrstuvwxyzäöñüà"
)
_GSM7_EXTENSION = "\f^{}\\[~]|€"
_ONE_PLACE_EACH = re.compile(f"[{re.escape(_GSM7_BASIC)}]*")
_GSM7 = re.compile(f"[{re.escape(_GSM7_BASIC + _GSM7_EXTENSION)}]*")


def count_segments(text: str) -> tuple[Literal["gsm7", "ucs2"], int]:
    """Say how a text is encoded and how many SMS it takes.

    A part of a long text has less room, for its header, and no character is split over two.
    """
    # Most texts are short and plain, and to look at each character costs many times as much.
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
