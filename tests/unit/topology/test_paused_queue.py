"""What an operator may write into the note of a pause, and what is read of it."""

import pytest

from bridge.topology.paused_queue import Note, checked_reason, read_body

SINCE = 1_900_000_000.0


@pytest.mark.parametrize(
    "reason",
    [
        "wrong text",
        "campaign of 2026-11-22, since 02:10:15 12:30",
        "falscher Rabatt: 30 % statt 3 %",
    ],
)
def test_reasons(reason: str) -> None:
    """A short line is taken, dates and times in it too, and read as it was written."""
    assert checked_reason(f" {reason} ") == reason
    assert read_body(Note(reason, SINCE).body()) == Note(reason, SINCE)


@pytest.mark.parametrize(
    "reason",
    [
        "+491713920001",
        "call 0170/123 45 67",
        "٠١٧٠١٢٣٤",
        "x" * 201,
        "two\nlines",
        "a\u200bb",
        "\x1b[31m",
        " ",
    ],
)
def test_reasons_that_are_refused(reason: str) -> None:
    """What may be a number, is no line, or is too long is refused, and read in no note."""
    with pytest.raises(ValueError, match=r"phone number|one line|characters|is empty"):
        checked_reason(reason)
    assert read_body(Note(reason, SINCE).body()) is None


@pytest.mark.parametrize(
    "body", [b"no json", b"[]", b"{}", b'{"since": 5, "reason": "a"}', b"\xff"]
)
def test_notes_of_others(body: bytes) -> None:
    """What is no note is none."""
    assert read_body(body) is None


def test_a_note_without_a_reason() -> None:
    """A reason is not needed; the time is told in UTC."""
    note = Note(None, SINCE)
    assert read_body(note.body()) == note
    assert note.since_text == "2030-03-17T17:46:40Z"


@pytest.mark.parametrize(
    ("by", "kept"),
    [
        ("anna@admin-1", True),
        ("491713920001@phone", False),
        ("anna@host\x1b[31m", False),
        ("anna", False),
        (f"{'a' * 65}@host", False),
    ],
)
def test_the_operator(by: str, *, kept: bool) -> None:
    """The user and the host are read if they are plain names, and cannot be a phone number."""
    assert read_body(Note("a", SINCE, by).body()) == Note("a", SINCE, by if kept else None)


def test_a_note_of_an_earlier_release() -> None:
    """It does not name the operator."""
    body = b'{"reason": "a", "since": "2030-03-17T17:46:40Z"}'
    assert read_body(body) == Note("a", SINCE)
