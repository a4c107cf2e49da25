"""Values that pointers lead to in JSON of third parties, and which of them are codes."""

from typing import Any

import pytest

from bridge.json_pointer import as_text, find_all, find_code, find_id, in_member, read_words

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
        (["/code"], {}, "7"),
        (["/missing", "/code"], {}, "7"),
        (["/type#"], {}, "low-balance"),
        (["/code#"], {}, None),
        (["/parts/*/status"], {}, "0"),
        (["/parts/*/status"], {"/parts/*/status": ["0"]}, "9"),
        (["/parts/*/status"], {"/code": ["0"]}, "0"),
        (["/code"], {"/code": ["7"]}, None),
        (["/parts"], {}, None),
        (["/type"], {}, None),
    ],
)
def test_find_code(pointers: list[str], but: dict[str, list[str]], code: str | None) -> None:
    """The first code that means an error at its pointer counts."""
    assert find_code(DOCUMENT, pointers, but=but) == code


@pytest.mark.parametrize(
    ("pointer", "found"),
    [
        ("/ids/*/id", "b"),
        ("/ids/1/id", "b"),
        ("/ids/*", None),
        ("/page#", "c"),
        ("/ids/0/id", None),
        ("/number", "5"),
    ],
)
def test_find_id(pointer: str, found: str | None) -> None:
    """The first value that is an id counts."""
    document = {"ids": [{"id": "a b"}, {"id": "b"}], "page": "https://x.example/#c", "number": 5}

    assert find_id(document, [pointer]) == found


@pytest.mark.parametrize(
    ("value", "is_code"),
    [
        ("491713920001", False),
        ("+49-170-1234567", False),
        ("0170/1234567", False),
        ("(0170)123-4567", False),
        ("invalid:+49.170.1234567", False),
        ("+4917", False),
        ("1234567", False),
        ("123-45.67", False),
        ("123456", True),
        ("invalid_parameter", True),
        ("isv.BUSINESS-LIMIT_1", True),
        ("https://service.example/errors", False),
        ("Hi!", False),
        ("a@b", False),
        ("é", False),
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
    assert find_code({"code": value}, ["/code"]) == (value if is_code else None)


@pytest.mark.parametrize("code", ["errors/17", "a:b", "#7"])
def test_a_known_code_may_have_any_form(code: str) -> None:
    """A code listed in the settings counts in any form."""
    assert find_code({"code": code}, ["/code"], known=[code]) == code
    assert find_code({"code": code}, ["/code"]) is None


@pytest.mark.parametrize(
    ("value", "text"),
    [(1, "1"), (True, "true"), (False, "false"), ("a", "a"), (1.5, None), (None, None), ([], None)],
)
def test_as_text(value: object, text: str | None) -> None:
    """Values are formatted as in the settings."""
    assert as_text(value) == text


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"100", ["100"]),
        (b"\xef\xbb\xbf100\r\n12345\r\n", ["100", "12345"]),
        (b"OK: 12345", ["OK", "12345"]),
        (b"0|IN_PROGRESS|12345", ["0", "IN_PROGRESS", "12345"]),
        (b'"OK","a-1_2.3"', ["OK", "a-1_2.3"]),
        (b"status=100&id=12345;", ["status", "100", "id", "12345"]),
        (b"\xff\x00 \xe4", ["\ufffd\x00", "\ufffd"]),
        (b" ,; ", []),
        (b"", []),
        (b"a " * 101, ["a"] * 100),
    ],
)
def test_read_words(body: bytes, words: list[str]) -> None:
    """Words end at white space and punctuation; at most a hundred are read."""
    assert read_words(body) == words
