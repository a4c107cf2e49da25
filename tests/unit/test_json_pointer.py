"""What pointers lead to in other people's JSON, and what of it may be a code."""

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
    """A star becomes the number of the one member; all else stays."""
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
    """A star is each member of a list, a # the fragment there; what is not there is None."""
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
    """The first code counts, of those that mean something where they stand."""
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
    """An id is found by the same pointers as all else: the first that is one."""
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
def test_what_looks_like_a_code(value: str, is_code: bool) -> None:  # noqa: FBT001
    """A word may be a code, but nothing like a phone number, however its digits are grouped."""
    assert find_code({"code": value}, ["/code"]) == (value if is_code else None)


@pytest.mark.parametrize("code", ["errors/17", "a:b", "#7"])
def test_code_that_is_known_may_look_otherwise(code: str) -> None:
    """What the settings list is a code, whatever it looks like."""
    assert find_code({"code": code}, ["/code"], known=[code]) == code
    assert find_code({"code": code}, ["/code"]) is None


@pytest.mark.parametrize(
    ("value", "text"),
    [(1, "1"), (True, "true"), (False, "false"), ("a", "a"), (1.5, None), (None, None), ([], None)],
)
def test_as_text(value: object, text: str | None) -> None:
    """Values are compared as they are written in settings."""
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
    """Words are what stands between white space and punctuation, a hundred of them at most."""
    assert read_words(body) == words
