"""Which dead letters a filter means, and what of a letter is masked."""

import pytest

from bridge.admin.dead_letters import DeadLetter, LetterFilter, mask_record
from bridge.admin.move import TakenMessage
from bridge.amqp.properties import Properties


@pytest.mark.parametrize(
    ("wanted", "taken"),
    [
        (LetterFilter(), {"a", "b", "c"}),
        (LetterFilter(reasons=["refused"]), {"a", "c"}),
        (LetterFilter(ids=["b", "c"]), {"b", "c"}),
        (LetterFilter(older_than_seconds=100), {"a"}),
        (LetterFilter(newer_than_seconds=100), {"b"}),
        (LetterFilter(reasons=["refused"], newer_than_seconds=100), set()),
    ],
    ids=["all", "reason", "id", "older", "newer", "both"],
)
def test_a_filter_says_which_letters_are_meant(wanted: LetterFilter, taken: set[str]) -> None:
    letters = {
        "a": _letter("a", "refused", dead_at=800),
        "b": _letter("b", "expired", dead_at=990),
        "c": _letter("c", "refused", dead_at=None),
    }

    assert {name for name, one in letters.items() if wanted.selects(one, now=1000)} == taken


def _letter(message_id: str, reason: str, *, dead_at: float | None) -> DeadLetter:
    headers: dict[str, object] = {"sms-bridge-reason": reason}
    if dead_at is not None:
        headers["sms-bridge-dead-at"] = dead_at
    properties = Properties(message_id=message_id, headers=headers)
    return DeadLetter(TakenMessage(1, False, properties, b"{}"))


def test_a_header_with_the_name_of_a_property_is_masked() -> None:
    """The names are the publisher's, and so are the values."""
    names = ("message_id", "app_id", "message_type", "timestamp", "priority", "content_type")
    record = {"properties": {}, "headers": dict.fromkeys(names, "+447700900123"), "body": ""}
    assert "447700900123" not in str(mask_record(record))
