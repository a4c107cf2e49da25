"""What pointers lead to in other people's JSON, and what of it may be a code."""

from typing import Any

import pytest

from bridge.pointers import as_text, find_all, find_code

DOCUMENT: dict[str, Any] = {
    "code": 7,
    "type": "https://service.example/errors#low-balance",
    "parts": [{"status": "0"}, {"status": None}, {"status": "9"}, {}],
    "a/b": {"~": "x"},
    "nothing": None,
}


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
    ],
)
def test_find_all(pointer: str, found: list[Any]) -> None:
    """A star stands for each member of a list; a member that lacks the value is told as None."""
    assert list(find_all(DOCUMENT, pointer)) == found


@pytest.mark.parametrize(
    ("pointers", "but", "code"),
    [
        (["/code"], (), "7"),
        (["/missing", "/code"], (), "7"),
        (["/type#"], (), "low-balance"),
        (["/parts/*/status"], (), "0"),
        (["/parts/*/status"], ("0",), "9"),
        (["/code"], ("7",), None),
        (["/parts"], (), None),
        (["/type"], (), "https://service.example/errors#low-balance"),
    ],
)
def test_find_code(pointers: list[str], but: tuple[str, ...], code: str | None) -> None:
    """The first code counts, of those that mean something."""
    assert find_code(DOCUMENT, pointers, but=but) == code


@pytest.mark.parametrize(
    ("value", "is_code"),
    [
        ("4917012345678", False),
        ("+49-170-1234567", False),
        ("0170/1234567", False),
        ("(0170)123-4567", False),
        ("invalid:+49.170.1234567", False),
        ("+4917", False),
        ("1234567", True),
        ("E-1234-5678x", False),
        ("E1234A5678", True),
        ("a b", False),
        ("x\n", False),
        ("x" * 64, True),
        ("x" * 65, False),
    ],
)
def test_no_number_is_a_code(value: str, is_code: bool) -> None:  # noqa: FBT001
    """What may be a phone number is no code, however its digits are grouped."""
    assert find_code({"code": value}, ["/code"]) == (value if is_code else None)


@pytest.mark.parametrize(
    ("value", "text"),
    [(1, "1"), (True, "true"), (False, "false"), ("a", "a"), (1.5, None), (None, None), ([], None)],
)
def test_as_text(value: object, text: str | None) -> None:
    """Values are compared as they are written in settings."""
    assert as_text(value) == text
