"""Reads ids, texts and codes from third-party JSON, by JSON pointers (RFC 6901)."""

import itertools
import json
import re
from collections.abc import Collection, Mapping
from typing import Any, Final

from pydantic_core import from_json

NOT_JSON: Final = object()


def read_document(body: bytes) -> Any:  # noqa: ANN401  JSON
    """Parse JSON; return NOT_JSON if the body is not JSON in UTF-8.

    Huge numbers and deep nesting are accepted: an integer too long for an id, and values deeper
    than `MAX_DEPTH`, are read as None.
    """
    if not body:
        return NOT_JSON
    try:
        # Takes a quarter of the time of the standard library's parser.
        return from_json(body, cache_strings="keys")
    except ValueError:
        pass
    # The fast parser rejects half of a surrogate pair, long numbers and deep nesting.
    try:
        text = body.decode()
        try:
            return _DECODER.decode(text)
        except RecursionError:
            return _DECODER.decode(_cut_depths(text))
    except ValueError:
        return NOT_JSON


# Number of words that are read from plain text.
MAX_WORDS: Final = 100
_WORD: Final = re.compile(r'[^\s:;,|=&"]+')


def read_words(body: bytes) -> list[str]:
    """Split plain text into its first `MAX_WORDS` words, at white space and `: ; , | = & "`."""
    text = body.decode("utf-8-sig", "replace")
    return [word.group() for word in itertools.islice(_WORD.finditer(text), MAX_WORDS)]


def _parse_int(digits: str) -> int | None:
    # Python refuses more than 4,300 digits, and parsing takes time quadratic in their number.
    return int(digits) if len(digits) <= len("-") + MAX_ID_DIGITS else None


MAX_ID_DIGITS: Final = 40
MAX_DEPTH: Final = 100
_DECODER: Final = json.JSONDecoder(parse_int=_parse_int)
# A bracket or a whole string. An unterminated string extends to the end of the text, so that no
# character is scanned twice.
_TOKENS: Final = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)


def _cut_depths(text: str) -> str:
    """Replace each list and object deeper than `MAX_DEPTH` by null."""
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
    # A text that ends too deep is not JSON, and the result is not JSON either.
    kept.append(text[begin:] if depth <= MAX_DEPTH else "")
    return "".join(kept)


MAX_ID_CHARACTERS: Final = 255
_END_OF_IDS: Final = 10**MAX_ID_DIGITS


def is_id(text: str) -> bool:
    """Whether a text is an id: 1 to 255 visible ASCII characters."""
    # Takes a third of the instructions of a regular expression.
    has_length = 0 < len(text) <= MAX_ID_CHARACTERS
    return has_length and text.isascii() and text.isprintable() and " " not in text


def find_id(document: Any, pointers: tuple[str, ...]) -> str | None:  # noqa: ANN401  JSON
    """Return the first valid id at any of these pointers.

    An integer of at most `MAX_ID_DIGITS` digits is an id too; other values are skipped.
    """
    for pointer in pointers:
        for value in find_all(document, pointer):
            if isinstance(value, str) and is_id(value):
                return value
            if isinstance(value, int) and not isinstance(value, bool) and abs(value) < _END_OF_IDS:
                return str(value)
    return None


def find_text(document: Any, pointers: tuple[str, ...]) -> str | None:  # noqa: ANN401  JSON
    """Return the first text at any of these pointers, with any characters and of any length."""
    for pointer in pointers:
        for value in find_all(document, pointer):
            if isinstance(value, str):
                return value
    return None


# Seven digits without a letter in between, or a + before a digit. Every phone number matches,
# however its digits are grouped.
_LIKE_A_PHONE_NUMBER: Final = re.compile(r"\+[0-9]|(?:[0-9][^0-9A-Za-z]*){7}")
CODE: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
# A code within a sentence. It must contain a digit, because every word matches `CODE`.
CODE_IN_TEXT: Final = re.compile(r"(?=[A-Za-z_.-]*[0-9])[A-Za-z0-9_.-]{1,64}")
_NONE: Final[Mapping[str, Collection[str]]] = {}


def find_code(
    document: Any,  # noqa: ANN401  JSON
    pointers: tuple[str, ...],
    *,
    known: Collection[str] = (),
    but: Mapping[str, Collection[str]] = _NONE,
    like: re.Pattern[str] = CODE,
) -> str | None:
    """Return the first error code at any of these pointers: a known one, or text in code form.

    Code form is `like`, by default 1 to 64 letters, digits, `_`, `.` and `-`, and not like a phone
    number; other values are skipped. `but` lists, by pointer, values that mean "no error" there.
    """
    for pointer in pointers:
        no_errors = but.get(pointer, ())
        for found in find_all(document, pointer):
            code = as_code(found, known)
            if code is None or code in no_errors:
                continue
            if code in known or (like.fullmatch(code) and not is_like_a_phone_number(code)):
                return code
    return None


def is_like_a_phone_number(text: str) -> bool:
    """Whether a text may be or contain a phone number."""
    return _LIKE_A_PHONE_NUMBER.search(text) is not None


def as_text(value: object) -> str | None:
    """Format a text, integer or boolean as in the settings; return None for other values."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value) if abs(value) < _END_OF_IDS else None
    return None


_WHOLE: Final = re.compile(r"(-?[0-9]{1,40})\.0+")
# From here on, floats cannot represent every integer.
_END_OF_WHOLES: Final = 2.0**53


def as_code(value: object, known: Collection[str] = ()) -> str | None:
    """Format an error code as in the settings: like `as_text`, and `21211.0` becomes `21211`.

    A text in `known` stays as it is.
    """
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < _END_OF_WHOLES else None
    text = as_text(value)
    if text is not None and text not in known and (whole := _WHOLE.fullmatch(text)) is not None:
        return whole[1]
    return text


EACH: Final = "*"
FRAGMENT: Final = "#"


def find_all(document: Any, pointer: str) -> list[Any]:  # noqa: ANN401  JSON
    """Return the values at a pointer (RFC 6901).

    Two extensions of the RFC: one `*` stands for each member of a list, and a `#` at the end
    selects the fragment of a URL. A missing value is None, like null.
    """
    path = _PATHS.get(pointer)
    if path is None:
        if len(_PATHS) >= MAX_PATHS:
            _PATHS.clear()
        path = _PATHS[pointer] = _parse(pointer)
    value = _follow(document, path.steps)
    if path.behind is None:
        return [_fragment(value) if path.takes_fragment else value]
    members = value if isinstance(value, list) else []
    found = [_follow(member, path.behind) for member in members]
    return [_fragment(value) for value in found] if path.takes_fragment else found


def in_member(pointer: str, number: int) -> str:
    """Return the pointer with its `*` replaced by the index of one member."""
    names = (str(number) if name == EACH else name for name in pointer.split("/"))
    return "/".join(names)


# The name of a member, and its index if the name is one.
_Step = tuple[str, int | None]


class _Path:
    """A parsed pointer: `steps` up to the `*`, `behind` after it, followed in each member."""

    __slots__ = ("behind", "steps", "takes_fragment")

    def __init__(
        self, steps: tuple[_Step, ...], behind: tuple[_Step, ...] | None, *, takes_fragment: bool
    ) -> None:
        self.steps = steps
        self.behind = behind
        self.takes_fragment = takes_fragment


# The pointers of the settings are few; `in_member` makes others from them.
MAX_PATHS: Final = 1000
_PATHS: Final[dict[str, _Path]] = {}


def _parse(pointer: str) -> _Path:
    takes_fragment = pointer.endswith(FRAGMENT)
    names = split_pointer(pointer.removesuffix(FRAGMENT))
    steps = tuple((name, int(name) if _NUMBER.fullmatch(name) else None) for name in names)
    if EACH not in names:
        return _Path(steps, None, takes_fragment=takes_fragment)
    at = names.index(EACH)
    return _Path(steps[:at], steps[at + 1 :], takes_fragment=takes_fragment)


def split_pointer(pointer: str) -> tuple[str, ...]:
    """Return the names in a pointer, unescaped."""
    return tuple(part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:])


_NUMBER: Final = re.compile("0|[1-9][0-9]{0,8}")


def _follow(document: Any, steps: tuple[_Step, ...]) -> Any:  # noqa: ANN401  JSON
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
