"""Which dead letters a filter means."""

import pytest

from bridge.admin.dead_letters.letter import DeadLetter, Filter
from bridge.admin.rounds import Taken
from bridge.amqp.properties import Properties


@pytest.mark.parametrize(
    ("wanted", "taken"),
    [
        (Filter(), {"a", "b", "c"}),
        (Filter(reasons=["refused"]), {"a", "c"}),
        (Filter(ids=["b", "c"]), {"b", "c"}),
        (Filter(older_than_seconds=100), {"a"}),
        (Filter(newer_than_seconds=100), {"b"}),
        (Filter(reasons=["refused"], newer_than_seconds=100), set()),
    ],
    ids=["all", "reason", "id", "older", "newer", "both"],
)
def test_a_filter_says_which_letters_are_meant(wanted: Filter, taken: set[str]) -> None:
    """Reason, id and age choose; a letter without a moment of death has no age to go by."""
    letters = {
        "a": _letter("a", "refused", dead_at=800),
        "b": _letter("b", "expired", dead_at=990),
        "c": _letter("c", "refused", dead_at=None),
    }

    assert {name for name, one in letters.items() if wanted.takes(one, now=1000)} == taken


def _letter(message_id: str, reason: str, *, dead_at: float | None) -> DeadLetter:
    return DeadLetter(
        taken=Taken(1, False, Properties(), b"{}"),
        message_id=message_id,
        reason=reason,
        detail=None,
        attempts=None,
        uncertain_attempts=0,
        status=None,
        code=None,
        meaning=None,
        dead_at=dead_at,
        expires_at=None,
    )
