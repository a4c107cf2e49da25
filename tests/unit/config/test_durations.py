"""How a duration is written and read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.config.fields import format_duration, parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("10s", 10),
        ("5m", 300),
        ("2h", 7200),
        ("30d", 2592000),
        ("1.5s", 1.5),
        ("5 m", 300),
    ],
)
def test_duration(text: str, seconds: float) -> None:
    """A duration is a number of seconds, or has a unit."""
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "5w", "1h30m", "5M", "inf", "٣s", "5s\n5s", "PT5S"])
def test_duration_that_is_none(text: str) -> None:
    """Anything else is refused, with an example of what is meant."""
    with pytest.raises(ValueError, match="10s, 5m, 2h, 30d"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(5, "5s"), (30, "30s"), (90, "90s"), (120, "2m"), (600, "10m"), (3600, "1h"), (86400, "1d")],
)
def test_format_duration(seconds: float, text: str) -> None:
    """A duration in a queue's name has the largest unit that divides it."""
    assert format_duration(seconds) == text


@given(st.integers(min_value=1, max_value=10**8))
def test_format_duration_is_read_back(seconds: int) -> None:
    assert parse_duration(format_duration(seconds)) == seconds
