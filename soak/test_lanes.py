"""The books of the proof of order."""

import pytest

from bridge.sandbox.messages import Attempt
from soak.lanes import Verdict, is_kept, judge


def attempts(*tried: str) -> list[Attempt]:
    """Make POSTs of `<number>.<place>`, of which one with a `!` behind it fails."""
    return [
        Attempt(idempotency_key=one.rstrip("!"), status=500 if one.endswith("!") else 202)
        for one in tried
    ]


@pytest.mark.parametrize(
    ("tried", "out_of_order", "extra", "lost"),
    [
        (["a.0", "b.0", "a.1"], 0, 0, 0),
        (["a.0!", "b.0", "a.0", "a.1"], 0, 0, 0),
        (["a.1", "a.0"], 1, 0, 0),
        (["a.0!", "a.1", "a.0"], 1, 0, 0),
        (["a.0", "a.1", "a.0", "a.1"], 0, 2, 0),
        (["a.0"], 0, 0, 1),
    ],
)
def test_what_is_wrong_is_counted(
    tried: list[str], out_of_order: int, extra: int, lost: int
) -> None:
    """A later message that is tried before an earlier one is accepted, a repeat, a loss."""
    published = len({one.rstrip("!") for one in tried}) + lost
    found = judge(attempts(*tried), published, most_extra=1)

    assert (found.out_of_order, found.extra, found.lost) == (out_of_order, extra, lost)
    assert is_kept(found) is (out_of_order == lost == 0 and extra <= 1)


def test_the_verdict_names_its_numbers() -> None:
    """All that was published, accepted and tried."""
    found = judge(attempts("a.0!", "a.0"), 1, most_extra=0)

    assert found == Verdict(
        published=1, accepted=1, lost=0, out_of_order=0, tries=2, extra=0, most_extra=0
    )
