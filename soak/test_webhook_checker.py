"""The webhook checker finds every fault of a receiver."""

from collections import Counter
from typing import Any

import pytest

from soak.webhook_checker import Event, Evidence, Verdict, check


def _event(*answers: int | None, again: int = 0) -> Event:
    return Event(Counter(answers), again)


def _check(*answers: int | None, copies: int = 1, again: int = 0, **changes: Any) -> Verdict:
    facts: dict[str, Any] = {"events": {"a": _event(*answers, again=again)}}
    facts["stored"] = {"a": copies} if copies else {}
    return check(Evidence(**(facts | changes)))


def test_finds_nothing_wrong_when_all_is_well() -> None:
    """An event that is answered 200 and stored once, a forged one that is refused."""
    verdict = _check(200, forged={401: 3}, stored={"a": 1, "probe-b": 1})

    assert verdict.problems == []
    assert (verdict.accepted, verdict.stored, verdict.copies, verdict.forged) == (1, 1, 0, 3)


def test_a_repeat_that_was_not_answered_200_may_be_stored_twice() -> None:
    """A 503 or no answer at all may have been stored: one more copy for each is no fault."""
    verdict = _check(503, None, 200, copies=3)

    assert verdict.problems == []
    assert (verdict.copies, verdict.answers) == (2, {"200": 1, "503": 1, "None": 1})


PROBLEMS: dict[str, tuple[dict[str, Any], list[int | None], str]] = {
    "missing": ({"copies": 0}, [200], "1 events were answered 200, but are not stored"),
    "missing after a repeat": ({"copies": 0}, [503, 200], "answered 200, but are not stored"),
    "refused": ({}, [401, 200], "signed events were refused 1 times"),
    "never accepted": ({}, [503], "1 events were never answered 200"),
    "copies": ({"copies": 2}, [200], "have more copies than unanswered attempts"),
    "copies of a repeat": ({"copies": 2, "again": 1}, [200, 200], "more copies than"),
    "more copies than tries": ({"copies": 3}, [503, 200], "more copies than"),
    "unexpected": ({"stored": {"a": 1, "b": 1}}, [200], "1 stored events were never sent"),
    "forged": ({"forged": {200: 1, 401: 1}}, [200], "1 forged events were not answered 401"),
    "forged, no answer": ({"forged": {None: 1}}, [200], "1 forged events were not answered 401"),
    "nothing": ({"events": {}, "copies": 0}, [], "no event was sent"),
}


@pytest.mark.parametrize(("facts", "answers", "problem"), PROBLEMS.values(), ids=PROBLEMS.keys())
def test_finds_what_is_wrong(
    facts: dict[str, Any], answers: list[int | None], problem: str
) -> None:
    """Each broken promise is one line that says how often."""
    found = _check(*answers, **facts).problems

    assert len(found) == 1
    assert problem in found[0]
