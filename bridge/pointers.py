"""Reads ids and codes from other people's JSON, at the places that pointers (RFC 6901) name."""

import functools
import json
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final

from pydantic_core import from_json

NOT_JSON: Final = object()


def read_document(body: bytes) -> Any:  # noqa: ANN401  JSON
    """Read JSON for its type and ids; return NOT_JSON for what is no JSON in UTF-8.

    Huge numbers and deep nesting are not refused: an integer too long for an id, and whatever lies
    deeper than `MAX_DEPTH`, is read as None.
    """
    try:
        # A quarter of the time of the standard library's.
        return from_json(body, cache_strings="keys")
    except ValueError:
        pass
    # The fast parser refuses half of a surrogate pair, long numbers and deep nesting.
    try:
        text = body.decode()
        try:
            return _DECODER.decode(text)
        except RecursionError:
            return _DECODER.decode(_cut_depths(text))
    except ValueError:
        return NOT_JSON


def _parse_int(digits: str) -> int | None:
    # Python refuses more than 4,300 digits, and the time to read them grows with their square.
    return int(digits) if len(digits) <= len("-") + MAX_ID_DIGITS else None


MAX_ID_DIGITS: Final = 40
MAX_DEPTH: Final = 100
_DECODER: Final = json.JSONDecoder(parse_int=_parse_int)
# A whole string, or to the end of the text if it never ends, so that nothing is scanned twice; or a
# bracket.
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
    # A text that ends too deep is not JSON, and stays so.
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
        value = _follow(document, split_pointer(pointer))
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) < _END_OF_IDS:
            return str(value)
        if isinstance(value, str) and _ID.fullmatch(value):
            return value
    return None


def find_text(document: Any, pointers: Sequence[str]) -> str | None:  # noqa: ANN401  JSON
    """Take the first text that a JSON pointer leads to, of any characters and length."""
    for pointer in pointers:
        value = _follow(document, split_pointer(pointer))
        if isinstance(value, str):
            return value
    return None


# No phone number, however its digits are grouped: 8 of them with no letter between, or a + before.
_CODE: Final = re.compile(r"(?=[!-~]{1,64}\Z)(?!.*(?:\+[0-9]|(?:[0-9][^0-9A-Za-z]*){8})).*")


def find_code(
    document: Any,  # noqa: ANN401  JSON
    pointers: Sequence[str],
    *,
    but: Collection[str] = (),
) -> str | None:
    """Take the first error code that a pointer leads to, of those that are not in `but`.

    A code is a number or 1 to 64 visible ASCII characters. What may be a phone number is passed
    over, and so is anything else: 8 digits with no letter between them, or one behind a `+`. A
    pointer that ends in `#` means the fragment of the URL that it leads to.
    """
    for pointer in pointers:
        for found in find_all(document, pointer.removesuffix("#")):
            code = as_text(found)
            if code is not None and pointer.endswith("#"):
                code = code.rpartition("#")[2]
            if code is not None and code not in but and is_code(code):
                return code
    return None


def is_code(text: str) -> bool:
    """Whether a text may be an error code, by the rule of `find_code`."""
    return _CODE.fullmatch(text) is not None


def as_text(value: object) -> str | None:
    """Write a text, a whole number or a truth value as settings write it; None for all else."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value) if abs(value) < _END_OF_IDS else None
    return value if isinstance(value, str) else None


def find_all(document: Any, pointer: str) -> Iterator[Any]:  # noqa: ANN401  JSON
    """Yield what a pointer leads to; `*` in it is each member of a list.

    What is not there, in the document or in one of the members, is None as what is null.
    """
    found = [document]
    names = split_pointer(pointer)
    if "*" in names:
        at = names.index("*")
        members = _follow(document, names[:at])
        found = members if isinstance(members, list) else []
        names = names[at + 1 :]
    for one in found:
        yield _follow(one, names)


@functools.lru_cache(maxsize=256)
def split_pointer(pointer: str) -> tuple[str, ...]:
    """Return the names on a pointer's way, unescaped."""
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
