"""`Retry-After`: every form of a date, skewed clocks, and what cannot be read."""

import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.worker.service.retry_after import SenderRetryAfter, read_retry_after

# Sun, 06 Nov 1994 08:49:37 GMT, the moment of all of RFC 9110's examples.
THEN = 784111777.0
FORMS = {
    "IMF-fixdate": "Sun, 06 Nov 1994 08:49:37 GMT",
    "RFC 850": "Sunday, 06-Nov-94 08:49:37 GMT",
    "asctime": "Sun Nov  6 08:49:37 1994",
}


@pytest.fixture(params=["UTC0", "EST5"])
def zone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run where the clock on the wall shows the time of some zone."""
    monkeypatch.setenv("TZ", request.param)
    time.tzset()
    yield request.param
    monkeypatch.undo()
    time.tzset()


def wait_of(*values: str, now: float = THEN, date: str | None = None) -> float | None:
    return read_retry_after(list(values), now=now, server_date=date)


@pytest.mark.usefixtures("zone")
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_date(form: str) -> None:
    """A date has each of HTTP's three forms, all in GMT, and counts from the server's `Date`."""
    assert wait_of(form, now=THEN - 100) == 100
    assert wait_of(form, now=THEN + 3600, date="Sun, 06 Nov 1994 08:48:37 GMT") == 60


@pytest.mark.parametrize("date", ["", "junk", "Sun, 99 Nov 1994 08:49:37 GMT"])
def test_servers_clock_that_cannot_be_read(date: str) -> None:
    """Without a readable `Date` our own clock has to do."""
    assert wait_of(FORMS["IMF-fixdate"], now=THEN - 100, date=date) == 100


SECONDS: dict[str, tuple[str, float]] = {
    "whole": ("120", 120),
    "zero": ("0", 0),
    "fraction": ("1.5", 1.5),
    "longest": ("900", 900),
    "too long": ("901", 900),
    "the longest that is no date": ("999999999", 900),
    "milliseconds since 1970": ("1767225600000", 900),
    "beyond any digits": ("9" * 5000, 900),
}


@pytest.mark.parametrize(("value", "seconds"), SECONDS.values(), ids=SECONDS)
def test_seconds(value: str, seconds: float) -> None:
    """Seconds are read as they are, up to fifteen minutes."""
    assert wait_of(value) == seconds


def test_seconds_do_not_depend_on_any_clock() -> None:
    """A number of seconds counts from now, whatever the server's clock shows."""
    assert wait_of("5", now=0, date=FORMS["IMF-fixdate"]) == 5


@pytest.mark.parametrize("form", ["%d", "%d.5"])
def test_seconds_since_1970_are_a_date(form: str) -> None:
    """What looks like an epoch is one, and counts from the server's clock as any date does."""
    now = 1_767_225_600
    server = "Wed, 31 Dec 2025 23:59:00 GMT"

    assert wait_of(form % (now + 60), now=now) == pytest.approx(60, abs=0.5)
    assert wait_of(form % now, now=now + 3600, date=server) == pytest.approx(60, abs=0.5)
    assert wait_of(form % (now - 60), now=now) == 0


@pytest.mark.parametrize(("hours", "seconds"), [(24 * 365, 0), (-1, 900), (-24 * 36500, 900)])
def test_date_that_is_past_or_far(hours: int, seconds: float) -> None:
    """A date that is past means now, and one that is far away fifteen minutes from now."""
    assert wait_of(FORMS["IMF-fixdate"], now=THEN + hours * 3600) == seconds


GARBAGE = {
    "blank": " ",
    "word": "soon",
    "exponent": "1e3",
    "infinite": "inf",
    "not a number": "nan",
    "Arabic digits": "\u0663",
    "two points": "1.2.3",
    "no such day": "Sun, 99 Nov 1994 08:49:37 GMT",
    "year beyond all": "Sun, 06 Nov 99999999 08:49:37 GMT",
    "very long": "x" * 10_000,
}


@pytest.mark.parametrize("value", GARBAGE.values(), ids=GARBAGE)
def test_garbage(value: str) -> None:
    """What cannot be read is ignored, and our own back-off takes its place."""
    assert wait_of(value) is None


def test_no_header() -> None:
    """Without the header nothing was asked for."""
    assert wait_of() is None


@pytest.mark.parametrize(
    ("values", "seconds"),
    [(("5", "7"), 7), (("7", "5"), 7), (("junk", "5"), 5), ((FORMS["IMF-fixdate"], "5"), 100)],
)
def test_several_headers(values: tuple[str, ...], seconds: float) -> None:
    """Of several headers the longest wait counts, and garbage does not spoil it."""
    assert wait_of(*values, now=THEN - 100) == seconds


@given(st.lists(st.text(max_size=40), max_size=3), st.none() | st.text(max_size=40))
def test_any_header(values: list[str], date: str | None) -> None:
    """Whatever the headers hold, the wait is none or between 0 and 15 minutes."""
    wait = wait_of(*values, date=date)

    assert wait is None or 0 <= wait <= 900


DATE_PARTS = st.lists(
    st.sampled_from(
        [
            *("Sun,", "Sunday,", "Nov", "06", "6", "99", "-1", "1994", "94", "0", "99999", "Foo"),
            *("08:49:37", "25:61:61", "8:49", "GMT", "+0000", "+9999", "-0000", "EST", ",", ":"),
        ]
    ),
    max_size=7,
).map(" ".join)


def test_waits_of_senders_are_limited() -> None:
    """Of 1001 senders that have to wait, the first one is forgotten."""
    waits = SenderRetryAfter()
    for number in range(1001):
        waits.extend(str(number), 60, now=0, chance=0)

    assert [waits.seconds_left(sender, now=0) for sender in ("0", "1", "1000")] == [0, 60, 60]


@given(DATE_PARTS, DATE_PARTS)
def test_any_date(value: str, date: str) -> None:
    """Whatever looks like a date is read, or ignored, and never raises."""
    wait = wait_of(value, date=date)

    assert wait is None or 0 <= wait <= 900
