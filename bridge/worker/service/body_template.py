"""Request bodies in the configured format: a template prepared once and filled per message."""

import functools
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, assert_never
from urllib.parse import quote_plus

from pydantic_core import to_json

from bridge.callback import callback_address
from bridge.config import RequestSettings
from bridge.config.api_request import Slot, build_document, parse_text
from bridge.errors import InvalidMessageError
from bridge.json_pointer import as_text, split_pointer
from bridge.worker.envelope import Envelope
from bridge.worker.request import SendRequest, count_segments, printable
from bridge.worker.service.api_login import ApiLogin

WriteBody = Callable[[SendRequest, Envelope], bytes]
# Reads the value of a placeholder from a message.
_Read = Callable[[SendRequest, Envelope], str]
_ReaderOf = Callable[[Slot], _Read]

_NUMBER: Final = re.compile(r"\+[0-9]+")
_FORM_CHARACTERS: Final = str.maketrans({chr(n): quote_plus(chr(n)) for n in range(128)})


def write_json(value: object) -> bytes:
    """Write ASCII JSON, which a service reads correctly whatever charset it assumes."""
    written = to_json(value)
    # Escaping takes more than half as long again, and most texts do not need it.
    return written if written.isascii() else to_json(value, ensure_ascii=True)


def prepare_body(
    settings: RequestSettings,
    fields: Mapping[str, Any],
    login: ApiLogin,
    callback_url: str | None = None,
) -> WriteBody:
    """Prepare a body with these fields; the returned function raises InvalidMessageError.

    It does so if the message has a member besides `to`, `from` and `text` for which there is no
    place.
    """
    digits = settings.to_format == "digits"
    read = functools.partial(_reader, login=login, digits=digits, callback_url=callback_url)
    match settings.body:
        case "json":
            return _JsonBody(build_document(fields), read)
        case "form":
            return _FormBody(fields, read)
        case _:
            assert_never(settings.body)


class _JsonBody:
    def __init__(self, document: Any, read: _ReaderOf) -> None:  # noqa: ANN401  JSON
        self._parts = _joined(_json_parts(document, read))
        self._names = set(document) if isinstance(document, dict) else None

    def __call__(self, request: SendRequest, envelope: Envelope) -> bytes:
        body = b"".join(
            [
                part if isinstance(part, bytes) else write_json(part(request, envelope))[1:-1]
                for part in self._parts
            ]
        )
        extra = request.model_extra
        if not extra:
            return body
        for name in extra:
            if self._names is None or name in self._names:
                raise _no_place(name)
        return b"%s,%s" % (body[:-1], write_json(extra)[1:])


def _json_parts(value: Any, read: _ReaderOf) -> list[bytes | _Read]:  # noqa: ANN401  JSON
    """Split a document at its placeholders; their values are written between quotes."""
    if isinstance(value, str):
        parts: list[bytes | _Read] = [b'"']
        for part in parse_text(value):
            if isinstance(part, Slot):
                parts.append(read(part))
            else:
                parts.append(write_json(part)[1:-1])
        return [*parts, b'"']
    if isinstance(value, list):
        members = [_json_parts(member, read) for member in value]
        return [b"[", *_with_commas(members), b"]"]
    if isinstance(value, dict):
        members = [
            [write_json(name), b":", *_json_parts(member, read)] for name, member in value.items()
        ]
        return [b"{", *_with_commas(members), b"}"]
    return [write_json(value)]


def _with_commas(members: Sequence[list[bytes | _Read]]) -> list[bytes | _Read]:
    parts: list[bytes | _Read] = []
    for number, member in enumerate(members):
        parts += [b",", *member] if number else member
    return parts


class _FormBody:
    def __init__(self, fields: Mapping[str, Any], read: _ReaderOf) -> None:
        parts: list[bytes | _Read] = []
        self._names = set()
        for pointer, value in fields.items():
            (name,) = split_pointer(pointer)
            self._names.add(name)
            for one in value if isinstance(value, list) else [value]:
                begin = f"{'&' if parts else ''}{quote_plus(name)}="
                parts += [begin.encode(), *_form_parts(one, read)]
        self._parts = _joined(parts)

    def __call__(self, request: SendRequest, envelope: Envelope) -> bytes:
        body = b"".join(
            [
                part if isinstance(part, bytes) else _quoted(part(request, envelope)).encode()
                for part in self._parts
            ]
        )
        extra = request.model_extra
        if not extra:
            return body
        for name, value in extra.items():
            text = as_text(value)
            if name in self._names or text is None:
                raise _no_place(name)
            body += f"&{quote_plus(name)}={quote_plus(text)}".encode()
        return body


def _quoted(text: str) -> str:
    """Encode a form value like `quote_plus`, but twice as fast for ASCII, the usual case."""
    return text.translate(_FORM_CHARACTERS) if text.isascii() else quote_plus(text)


def _form_parts(value: object, read: _ReaderOf) -> list[bytes | _Read]:
    if not isinstance(value, str):
        constant = as_text(value)
        return [quote_plus(str(value) if constant is None else constant).encode()]
    return [
        read(part) if isinstance(part, Slot) else quote_plus(part).encode()
        for part in parse_text(value)
    ]


def _joined(parts: Sequence[bytes | _Read]) -> list[bytes | _Read]:
    joined: list[bytes | _Read] = []
    for part in parts:
        if joined and isinstance(part, bytes) and isinstance(joined[-1], bytes):
            joined[-1] += part
        else:
            joined.append(part)
    return joined


def _no_place(name: str) -> InvalidMessageError:
    return InvalidMessageError(
        f"{printable(name)}: the SMS API's request has no field for it; remove it"
    )


def _reader(slot: Slot, *, login: ApiLogin, digits: bool, callback_url: str | None) -> _Read:
    """Return the function that reads a placeholder's value from a message."""
    match slot.name:
        case "to":
            return (lambda request, _: request.to[1:]) if digits else lambda request, _: request.to
        case "from":
            return _sender_in_digits if digits else lambda request, _: request.sender
        case "text":
            return lambda request, _: request.text
        case "key":
            return _key_of(int(slot.detail or 0))
        case "encoding":
            gsm7, _, ucs2 = (slot.detail or "gsm7|ucs2").partition("|")
            words = {"gsm7": gsm7, "ucs2": ucs2}
            return lambda request, _: words[count_segments(request.text)[0]]
        case "account":
            return lambda _, __: login.account
        case "secret":
            # Read for each message, because the file may change.
            return lambda _, __: login.key.current
        case "callback":
            url = callback_url or ""
            return lambda request, envelope: callback_address(url, envelope.key, request.to)
        case _:
            assert_never(slot.name)


def _sender_in_digits(request: SendRequest, _: Envelope) -> str:
    # A numeric sender is formatted like a recipient; a name stays unchanged.
    return request.sender[1:] if _NUMBER.fullmatch(request.sender) else request.sender


def _key_of(most_characters: int) -> _Read:
    if not most_characters:
        return lambda _, envelope: envelope.key

    def read(_: SendRequest, envelope: Envelope) -> str:
        key = envelope.key
        if len(key) <= most_characters:
            return key
        # Identical for all attempts of a message, and different for every other message.
        return hashlib.sha256(key.encode()).hexdigest()[:most_characters]

    return read
