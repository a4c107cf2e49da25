"""Values that pointers lead to in JSON of third parties, and which of them are codes."""

from typing import Any

import pytest

from bridge import json_pointer
from bridge.json_pointer import (
    NOT_JSON,
    as_text,
    find_all,
    find_code,
    find_id,
    in_member,
    read_document,
    read_words,
)

DOCUMENT: dict[str, Any] = {
    "code": 7,
    "type": "https://service.example/errors#low-balance",
    "parts": [{"status": "0"}, {"status": None}, {"status": "9"}, {}],
    "pages": ["https://service.example/#1", "https://service.example/", 5, "#"],
    "a/b": {"~": "x"},
    "nothing": None,
}


@pytest.mark.parametrize(
    ("pointer", "into_one"),
    [("/a/*/b", "/a/2/b"), ("/a/*", "/a/2"), ("/a*/b", "/a*/b"), ("/a/*/b#", "/a/2/b#")],
)
def test_in_member(pointer: str, into_one: str) -> None:
    """The star is replaced by the index of the member."""
    assert in_member(pointer, 2) == into_one


@pytest.mark.parametrize(
    ("pointer", "found"),
    [
        ("/code", [7]),
        ("/parts/0/status", ["0"]),
        ("/parts/*/status", ["0", None, "9", None]),
        ("/parts/*", [{"status": "0"}, {"status": None}, {"status": "9"}, {}]),
        ("/code/*", []),
        ("/nothing", [None]),
        ("/a~1b/~0", ["x"]),
        ("/parts/9/status", [None]),
        ("/type#", ["low-balance"]),
        ("/pages/*#", ["1", None, None, ""]),
    ],
)
def test_find_all(pointer: str, found: list[Any]) -> None:
    """A star stands for each member of a list, a # for the fragment; a missing value is None."""
    assert list(find_all(DOCUMENT, pointer)) == found


@pytest.mark.parametrize(
    ("pointers", "but", "code"),
    [
        (("/code",), {}, "7"),
        (("/missing", "/code"), {}, "7"),
        (("/type#",), {}, "low-balance"),
        (("/code#",), {}, None),
        (("/parts/*/status",), {}, "0"),
        (("/parts/*/status",), {"/parts/*/status": ["0"]}, "9"),
        (("/code",), {"/code": ["7"]}, None),
        (("/parts",), {}, None),
    ],
)
def test_find_code(pointers: tuple[str, ...], but: dict[str, list[str]], code: str | None) -> None:
    """The first code that means an error at its pointer counts."""
    assert find_code(DOCUMENT, pointers, but=but) == code


@pytest.mark.parametrize(
    ("pointer", "found"),
    [
        ("/ids/*/id", "b"),
        ("/ids/*", None),
        ("/page#", "c"),
        ("/number", "5"),
    ],
)
def test_find_id(pointer: str, found: str | None) -> None:
    """The first value that is an id counts."""
    document = {"ids": [{"id": "a b"}, {"id": "b"}], "page": "https://x.example/#c", "number": 5}

    assert find_id(document, (pointer,)) == found


@pytest.mark.parametrize(
    ("value", "is_code"),
    [
        ("491713920001", False),
        ("+49-170-1234567", False),
        ("(0170)123-4567", False),
        ("invalid:+49.170.1234567", False),
        ("+4917", False),
        ("123456", True),
        ("invalid_parameter", True),
        ("isv.BUSINESS-LIMIT_1", True),
        ("https://service.example/errors", False),
        ("a@b", False),
        ("E-1234-5678x", False),
        ("E1234A5678", True),
        ("a b", False),
        ("x\n", False),
        ("x" * 64, True),
        ("x" * 65, False),
    ],
)
def test_code_form(value: str, is_code: bool) -> None:  # noqa: FBT001
    """A word may be a code, but not a phone number, however its digits are grouped."""
    assert find_code({"code": value}, ("/code",)) == (value if is_code else None)


@pytest.mark.parametrize("code", ["errors/17", "a:b", "#7"])
def test_a_known_code_may_have_any_form(code: str) -> None:
    """A code listed in the settings counts in any form."""
    assert find_code({"code": code}, ("/code",), known=[code]) == code
    assert find_code({"code": code}, ("/code",)) is None


@pytest.mark.parametrize(
    ("value", "text"),
    [(1, "1"), (True, "true"), ("a", "a"), (None, None), ([], None)],
)
def test_as_text(value: object, text: str | None) -> None:
    """Values are formatted as in the settings."""
    assert as_text(value) == text


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"\xef\xbb\xbf100\r\n12345\r\n", ["100", "12345"]),
        (b"OK: 12345", ["OK", "12345"]),
        (b"0|IN_PROGRESS|12345", ["0", "IN_PROGRESS", "12345"]),
        (b'"OK","a-1_2.3"', ["OK", "a-1_2.3"]),
        (b"status=100&id=12345;", ["status", "100", "id", "12345"]),
        (b"\xff\x00 \xe4", ["\ufffd\x00", "\ufffd"]),
        (b" ,; ", []),
        (b"a " * 101, ["a"] * 100),
    ],
)
def test_read_words(body: bytes, words: list[str]) -> None:
    """Words end at white space and punctuation; at most a hundred are read."""
    assert read_words(body) == words


POINTERS = ("/id", "/message_id", "/messages/0/id")
FOUND: dict[str, tuple[object, str | None]] = {
    "second": ({"message_id": "b"}, "b"),
    "in a list": ({"messages": [{"id": "c"}, {"id": "d"}]}, "c"),
    "integer": ({"id": 17}, "17"),
    "40 digits": ({"id": 10**40 - 1}, "9" * 40),
    "40 digits, negative": ({"id": 1 - 10**40}, "-" + "9" * 40),
    "41 digits": ({"id": 10**40}, None),
    "41 digits, negative": ({"id": -(10**40)}, None),
    "more digits than Python writes": ({"id": 10**5000, "message_id": "b"}, "b"),
    "255 characters": ({"id": "x" * 255}, "x" * 255),
    "256 characters": ({"id": "x" * 256}, None),
    "too long, then another": ({"id": "x" * 256, "message_id": "b"}, "b"),
    "empty": ({"id": ""}, None),
    "blank": ({"id": "a b"}, None),
    "newline": ({"id": "a\n"}, None),
    "not ASCII": ({"id": "é"}, None),
    "truth": ({"id": True}, None),
    "fraction": ({"id": 1.5}, None),
    "object": ({"id": {"id": "a"}}, None),
    "nothing": (None, None),
}


@pytest.mark.parametrize(("document", "found"), FOUND.values(), ids=FOUND)
def test_the_form_of_an_id(document: object, found: str | None) -> None:
    """An id has 1 to 255 visible ASCII characters, or is an integer of at most 40 digits."""
    assert find_id(document, POINTERS) == found


@pytest.mark.parametrize(
    ("pointer", "found"),
    [
        ("/a~1b", "slash"),
        ("/m~0n", "tilde"),
        ("/", "empty"),
        ("/l/1", "second"),
        ("/l/9", None),
        ("/l/01", None),
        ("/0", "zero"),
    ],
)
def test_pointer(pointer: str, found: str | None) -> None:
    """A pointer is read as RFC 6901 has it."""
    document = {
        "a/b": "slash",
        "m~n": "tilde",
        "~1": "both",
        "": "empty",
        "0": "zero",
        "l": ["first", "second"],
    }

    assert find_id(document, (pointer,)) == found


def _nested(levels: int, inside: str = "") -> str:
    return "[" * levels + inside + "]" * levels


def _typed(deep: str, rest: str = "") -> str:
    return '{"x": ' + deep + ', "type": "t", "id": 7' + rest + "}"


TYPED: dict[str, object] = {"type": "t", "id": 7}
# What some readers of JSON refuse, and what is read of it.
ODD: dict[str, tuple[str, dict[str, object]]] = {
    "5,000 digits": (f'{{"type": "t", "id": {"7" * 5000}}}', {"type": "t", "id": None}),
    "half a surrogate pair": (r'{"type": "\ud800"}', {"type": "\ud800"}),
    "201 levels": (_typed(_nested(201)), TYPED),
    "100,000 levels": (_typed(_nested(100_000)), TYPED),
    "deep objects": (_typed('{"a": [' * 50_000 + "1" + "]}" * 50_000), TYPED),
    "deep twice": (_typed(_nested(5000), f', "y": {_nested(5000)}'), TYPED),
    "brackets in a deep text": (_typed(_nested(5000, '"]\\"]"')), TYPED),
    "brackets in a text": (_typed(_nested(5000), r', "z": "[[\"["'), TYPED | {"z": '[["['}),
}


@pytest.mark.parametrize(("body", "expected"), ODD.values(), ids=ODD)
def test_odd_document(body: str, expected: dict[str, object]) -> None:
    """What is valid is read, whatever its numbers and depth; what lies very deep is passed over."""
    document = read_document(body.encode())

    assert isinstance(document, dict)
    assert {name: document[name] for name in expected} == expected


BROKEN: dict[str, bytes] = {
    "nothing": b"",
    "no JSON": b"no json",
    "no UTF-8": b'{"type": "\xff"}',
    "deep without an end": b"[" * 100_000,
    "deep, closed too often": b"[" * 5000 + b"]" * 5001,
    "deep, then nonsense": b'{"x": ' + b"[" * 5000 + b"]" * 5000 + b", nonsense}",
    "a string without an end": b'{"x": ' + b"[" * 5000 + b'"' + b'\\"' * 100_000,
    "a backslash at the end": b'{"x": ' + b"[" * 5000 + b'"\\',
}


@pytest.mark.parametrize("body", BROKEN.values(), ids=BROKEN)
def test_broken_document(body: bytes) -> None:
    """What is no JSON is said to be none, without a long look."""
    assert read_document(body) is NOT_JSON


def test_memory_of_parsed_pointers_is_bounded() -> None:
    """A pointer to the member that an answer names may have any index."""
    document = {"parts": [{"status": "0"}]}
    for number in range(3 * json_pointer.MAX_PATHS):
        find_all(document, in_member("/parts/*/status", number))

    assert len(json_pointer._PATHS) <= json_pointer.MAX_PATHS
    assert find_all(document, "/parts/0/status") == ["0"]
