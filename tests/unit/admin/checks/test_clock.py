"""Whether this computer's clock agrees with another one."""

import time
from email.utils import formatdate

import pytest

from bridge.admin.checks.findings import judge_clock
from bridge.admin.management import clock_skew_seconds


@pytest.mark.parametrize(
    ("skew_seconds", "told"),
    [
        (None, []),
        (5.0, [("ok", "agrees with broker's")]),
        (-5.0, [("ok", "agrees with broker's")]),
        (6.0, [("warn", "6 s behind broker's: ")]),
        (-6.0, [("warn", "6 s ahead of broker's: ")]),
    ],
)
def test_five_seconds_are_no_difference(
    skew_seconds: float | None, told: list[tuple[str, str]]
) -> None:
    found = judge_clock("broker", skew_seconds)

    assert [one.result for one in found] == [result for result, _ in told]
    assert [one.text for one in found if not one.text.startswith(tuple(t for _, t in told))] == []


def test_the_skew_is_read_off_the_date_of_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1_000_000.5)

    assert clock_skew_seconds(formatdate(1_000_090, usegmt=True)) == 90.0


@pytest.mark.parametrize("date", [None, "", "yesterday"])
def test_no_date_is_no_skew(date: str | None) -> None:
    assert clock_skew_seconds(date) is None
