"""What a send request is: its form, and how strictly it is read."""

import json
import math
import re
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from pydantic_core import ErrorDetails

from bridge.config import WorkerSettings
from bridge.config.fields import SenderName
from bridge.errors import InvalidMessageError

MIN_BODY_LIMIT_BYTES = 64 * 1024
# One character may be written as two escaped surrogates; the rest is for the other members.
BYTES_PER_CHARACTER = 12
OTHER_MEMBERS_BYTES = 4096

To = Annotated[str, StringConstraints(pattern=r"^\+[1-9][0-9]{3,14}$")]
Text = Annotated[str, StringConstraints(min_length=1)]


class SendRequest(BaseModel):
    """One text to one number."""

    model_config = ConfigDict(
        extra="forbid", hide_input_in_errors=True, serialize_by_alias=True, defer_build=True
    )

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


class RequestReader:
    """Reads bodies strictly and fills in the default sender."""

    def __init__(self, settings: WorkerSettings) -> None:
        # Read for each message; an attribute of a model takes ten times as long as one of ours.
        self._longest = settings.max_text_length
        self._most_bytes = max(
            MIN_BODY_LIMIT_BYTES, self._longest * BYTES_PER_CHARACTER + OTHER_MEMBERS_BYTES
        )
        self._model = OpenSendRequest if settings.extra_fields == "forward" else SendRequest
        self._default_sender = settings.default_from

    def read(self, body: bytes | bytearray) -> SendRequest:
        """Read a body; raises InvalidMessageError, whose text names the field and never a value."""
        if len(body) > self._most_bytes:
            raise InvalidMessageError(f"body: larger than {self._most_bytes} bytes")
        try:
            request = self._model.model_validate_json(body)
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            raise InvalidMessageError(_describe(first)) from None
        if request.model_extra or not _has_texts_only(body, len(request.model_fields_set)):
            _refuse_ambiguity(body)
        if not request.sender:
            if self._default_sender is None:
                raise InvalidMessageError("from: is missing, and worker.default_from is not set")
            request.sender = self._default_sender
        if len(request.text) > self._longest:
            raise InvalidMessageError(f"text: longer than worker.max_text_length ({self._longest})")
        return request


def parse_request(body: bytes | bytearray, settings: WorkerSettings) -> SendRequest:
    """Read one body as a `RequestReader` of these settings does."""
    return RequestReader(settings).read(body)


def _has_texts_only(body: bytes | bytearray, members: int) -> bool:
    """Whether a body that is valid has so many members, each a text, and nothing more.

    Each takes four quotation marks, and a backslash could hide one. Saves most bodies the second
    reading.
    """
    # `in` would first try to take what it looks for as a number, which costs thrice the search.
    return body.count(b'"') == 4 * members and body.find(b"\\") < 0


def _refuse_ambiguity(body: bytes | bytearray) -> None:
    # pydantic takes the last of two equal members, and NaN as a number; other parsers differ.
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
