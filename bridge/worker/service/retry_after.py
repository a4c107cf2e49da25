"""`Retry-After`: how long the SMS API wants to be left alone (RFC 9110, 10.2.3)."""

from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Final

MAX_RETRY_AFTER_SECONDS: Final = 900.0
# From 2001 to 5138: nobody asks for a wait of thirty years.
_LIKE_AN_EPOCH: Final = (1e9, 1e11)


def read_retry_after(
    values: list[str], *, now: float, server_date: str | None = None
) -> float | None:
    """Read `Retry-After` as seconds from now, clamped to 0..900.

    A date, or the seconds since 1970 of one, counts from the server's own `Date`, so that a skewed
    clock on either side does no harm. Of several headers the longest wait counts; what cannot be
    read is ignored.
    """
    start = _read_date(server_date) if server_date else None
    waits = [_read_wait(value.strip(), now if start is None else start) for value in values]
    known = [wait for wait in waits if wait is not None]
    return min(max(*known, 0.0), MAX_RETRY_AFTER_SECONDS) if known else None


def _read_wait(value: str, start: float) -> float | None:
    if value[:1].isdigit() and value.replace(".", "", 1).isdigit() and value.isascii():
        seconds = float(value)
        first, end = _LIKE_AN_EPOCH
        return seconds - start if first <= seconds < end else seconds
    date = _read_date(value)
    return None if date is None else date - start


def _read_date(value: str) -> float | None:
    try:
        date = parsedate_to_datetime(value)
        # The obsolete asctime form names no zone and means UTC (RFC 9110, 5.6.7).
        return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
    except (ValueError, TypeError, IndexError, OverflowError, OSError):
        return None
