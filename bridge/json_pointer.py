"""Reads ids and codes from other people's JSON, at the places that pointers (RFC 6901) name."""

import functools
import itertools
import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

from pydantic_core import from_json

NOT_JSON: Final = object()


def read_document(body: bytes) -> Any:  # noqa: ANN401  JSON
    """Read JSON for its type and ids; return NOT_JSON for what is no JSON in UTF-8.

    Huge numbers and deep nesting are not refused: an integer too long for an id, and whatever lies
    deeper than `MAX_DEPTH`, is read as None.
    """
    if not body:
        return NOT_JSON
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


# As many words of a text as are read.
MAX_WORDS: Final = 100
_WORD: Final = re.compile(r'[^\s:;,|=&"]+')


def read_words(body: bytes) -> list[str]:
    """Read plain text as the list of its words, the first `MAX_WORDS` of them, whatever it holds.

    White space and `: ; , | = & "` stand between words.
    """
    text = body.decode("utf-8-sig", "replace")
    return [word.group() for word in itertools.islice(_WORD.finditer(text), MAX_WORDS)]


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
    """Take the first id that a pointer leads to.

    An id is an integer of at most `MAX_ID_DIGITS` digits or 1 to 255 visible ASCII characters;
    anything else is passed over.
    """
    for pointer in pointers:
        for value in find_all(document, pointer):
            if isinstance(value, str) and _ID.fullmatch(value):
                return value
            if isinstance(value, int) and not isinstance(value, bool) and abs(value) < _END_OF_IDS:
                return str(value)
    return None


def find_text(document: Any, pointers: Sequence[str]) -> str | None:  # noqa: ANN401  JSON
    """Take the first text that a pointer leads to, of any characters and length."""
    for pointer in pointers:
        for value in find_all(document, pointer):
            if isinstance(value, str):
                return value
    return None


# 7 digits with no letter between, or a + before one: no phone number, however it is grouped.
_LIKE_A_NUMBER: Final = re.compile(r"\+[0-9]|(?:[0-9][^0-9A-Za-z]*){7}")
CODE: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
# In a sentence any word would do.
CODE_IN_TEXT: Final = re.compile(r"(?=[A-Za-z_.-]*[0-9])[A-Za-z0-9_.-]{1,64}")
_NONE: Final[Mapping[str, Collection[str]]] = {}


def find_code(
    document: Any,  # noqa: ANN401  JSON
    pointers: Sequence[str],
    *,
    known: Collection[str] = (),
    but: Mapping[str, Collection[str]] = _NONE,
    like: re.Pattern[str] = CODE,
) -> str | None:
    """Take the first error code that a pointer leads to, of `known` or one that looks like a code.

    That is 1 to 64 letters, digits, `_`, `.` and `-`, in `CODE_IN_TEXT` one digit at least, and
    nothing like a phone number; all else is passed over. `but` has, by their pointer, values that
    are no errors there.
    """
    for pointer in pointers:
        no_errors = but.get(pointer, ())
        for found in find_all(document, pointer):
            code = as_code(found, known)
            if code is None or code in no_errors:
                continue
            if code in known or (like.fullmatch(code) and not is_like_a_number(code)):
                return code
    return None


def is_like_a_number(text: str) -> bool:
    """Whether a text may be, or hold, a phone number."""
    return _LIKE_A_NUMBER.search(text) is not None


def as_text(value: object) -> str | None:
    """Write a text, a whole number or a truth value as settings write it; None for all else."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value) if abs(value) < _END_OF_IDS else None
    return None


_WHOLE: Final = re.compile(r"(-?[0-9]{1,40})\.0+")
# Beyond it, not each whole number is one of floating point.
_END_OF_WHOLES: Final = 2.0**53


def as_code(value: object, known: Collection[str] = ()) -> str | None:
    """Write a code as settings do, as `as_text`; `21211.0`, number or text, is 21211.

    A text of `known` stays as it is.
    """
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < _END_OF_WHOLES else None
    text = as_text(value)
    if text is not None and text not in known and (whole := _WHOLE.fullmatch(text)) is not None:
        return whole[1]
    return text


EACH: Final = "*"
FRAGMENT: Final = "#"


def find_all(document: Any, pointer: str) -> Sequence[Any]:  # noqa: ANN401  JSON
    """Return what a pointer (RFC 6901) leads to.

    Beyond the RFC, one `*` in it is each member of a list, and a `#` at its end takes the fragment
    of the URL that it leads to. What is not there, in the document or in one of the members, is
    None as what is null.
    """
    steps, behind, takes_fragment = _way(pointer)
    found: Sequence[Any] = (_follow(document, steps),)
    if behind is not None:
        members = found[0] if isinstance(found[0], list) else ()
        found = [_follow(member, behind) for member in members]
    return [_fragment(value) for value in found] if takes_fragment else found


def in_member(pointer: str, number: int) -> str:
    """Return the pointer into one member of the list, where it leads into each."""
    names = (str(number) if name == EACH else name for name in pointer.split("/"))
    return "/".join(names)


# The name of a member, and its place where that is a list's.
_Step = tuple[str, int | None]


class _Way(NamedTuple):
    """Where a pointer leads: by `steps`, and behind a star by `behind` in each member there."""

    steps: tuple[_Step, ...]
    behind: tuple[_Step, ...] | None
    takes_fragment: bool


@functools.lru_cache(maxsize=256)
def _way(pointer: str) -> _Way:
    takes_fragment = pointer.endswith(FRAGMENT)
    names = split_pointer(pointer.removesuffix(FRAGMENT))
    steps = tuple((name, int(name) if _NUMBER.fullmatch(name) else None) for name in names)
    if EACH not in names:
        return _Way(steps, None, takes_fragment)
    at = names.index(EACH)
    return _Way(steps[:at], steps[at + 1 :], takes_fragment)


def split_pointer(pointer: str) -> tuple[str, ...]:
    """Return the names on a pointer's way, unescaped."""
    return tuple(part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:])


_NUMBER: Final = re.compile("0|[1-9][0-9]{0,8}")


def _follow(document: Any, steps: Sequence[_Step]) -> Any:  # noqa: ANN401  JSON
    for name, place in steps:
        if isinstance(document, dict):
            document = document.get(name)
        elif place is not None and isinstance(document, list):
            document = document[place] if place < len(document) else None
        else:
            return None
    return document


def _fragment(value: object) -> str | None:
    _, mark, fragment = value.rpartition(FRAGMENT) if isinstance(value, str) else ("", "", "")
    return fragment if mark else None
