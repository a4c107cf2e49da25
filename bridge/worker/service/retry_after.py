"""`Retry-After`: for how long the SMS API wants no requests (RFC 9110, 10.2.3).

Reads the header, and keeps the resulting wait, for all messages or for one sender.
"""

from collections import OrderedDict
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Final, NamedTuple

from bridge.worker.delivery import MAX_HOLD_SECONDS

MAX_RETRY_AFTER_SECONDS: Final = 900.0
# A value in this range, from 2001 to 5138, is a date in unix seconds: no service asks for a wait of
# thirty years.
_LIKE_AN_EPOCH: Final = (1e9, 1e11)
# Without `Retry-After` the first wait is one second, and doubles with each 429 up to a minute.
FIRST_WAIT_SECONDS: Final = 1.0
MAX_DOUBLINGS: Final = 6
# The jitter only adds to a wait, because a request that is too early is refused again.
MAX_JITTER: Final = 1.1
# The longest wait accepted from another worker.
MAX_RECEIVED_SECONDS: Final = MAX_RETRY_AFTER_SECONDS * MAX_JITTER
MAX_SENDERS: Final = 1000
# From the second wait in a row on, or in a wait longer than this, messages may move to retry
# queues, so that messages of other senders reach the front of the queue.
LONG_WAIT_SECONDS: Final = 6.0
# How many may move in each wait: a limit for all senders must not copy the whole queue.
MAX_LEAVING: Final = 1000


def read_retry_after(
    values: list[str], *, now: float, server_date: str | None = None
) -> float | None:
    """Read `Retry-After` as seconds from now, clamped to 0..900.

    A date, also in unix seconds, is compared with the answer's own `Date` header, so that a wrong
    clock on either side does no harm. Of several headers the longest wait counts; an unreadable
    value is ignored.
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


class RetryAfter(NamedTuple):
    """The wait after a 429. Times are of the monotonic clock; `chance` is a number from 0 to 1.

    `slow_downs` counts the waits in a row. Until `asked_until` the service itself has asked this
    worker to wait; `ends_at` includes waits published by other workers. `may_leave` is the number
    of messages that may still move to retry queues during this wait.
    """

    slow_downs: int = 0
    asked_until: float = 0.0
    ends_at: float = 0.0
    may_leave: int = 0

    def seconds_left(self, now: float) -> float:
        """Return the rest of the wait; zero or less if it is over."""
        return self.ends_at - now

    def after_429(
        self, seconds: float | None, *, now: float, chance: float
    ) -> tuple["RetryAfter", float]:
        """Return the wait after one more 429, and its seconds without jitter.

        `seconds` is the answer's `Retry-After`; without it, the back-off decides.
        """
        # Of many 429s at once, only the first increases the back-off.
        is_new = self.ends_at <= now
        slow_downs = self.slow_downs + is_new
        own = FIRST_WAIT_SECONDS * 2.0 ** min(slow_downs - 1, MAX_DOUBLINGS)
        wait = seconds or min(own, MAX_HOLD_SECONDS)
        end = now + wait * (1.0 + (MAX_JITTER - 1.0) * chance)
        retry_after = RetryAfter(
            slow_downs,
            asked_until=max(self.asked_until, end),
            ends_at=max(self.ends_at, end),
            may_leave=MAX_LEAVING if is_new else self.may_leave,
        )
        return retry_after, wait

    def after_peer(self, seconds: float, *, now: float) -> "RetryAfter":
        """Return the wait after another worker has published one.

        A published wait longer than the maximum comes from a faulty worker, and is cut to the
        maximum.
        """
        seconds = min(seconds, MAX_RECEIVED_SECONDS)
        is_new = self.ends_at <= now < now + seconds
        return RetryAfter(
            self.slow_downs + is_new,
            asked_until=self.asked_until,
            ends_at=max(self.ends_at, now + seconds),
            may_leave=MAX_LEAVING if is_new else self.may_leave,
        )

    def lets_leave(self, now: float) -> bool:
        """Whether a message may move to a retry queue instead of waiting here."""
        left = self.seconds_left(now)
        return left > 0 and (self.slow_downs > 1 or left > LONG_WAIT_SECONDS) and self.may_leave > 0

    def after_leaving(self) -> "RetryAfter":
        """Return the same wait after a message has moved to a retry queue."""
        return self._replace(may_leave=self.may_leave - 1)

    def after_acceptance(self) -> "RetryAfter":
        """Return the same wait, with the back-off reset."""
        return self._replace(slow_downs=0) if self.slow_downs else self


class SenderRetryAfter:
    """The waits of single senders; limited in number, the oldest are dropped first.

    A sender's entry lasts from its first wait until the service accepts one of its messages.
    """

    def __init__(self) -> None:
        self._waits: OrderedDict[str, RetryAfter] = OrderedDict()
        # An attribute, because it is read for each message.
        self.is_empty = True

    def seconds_left(self, sender: str, *, now: float) -> float:
        """Return how long a sender has to wait; zero or less if its messages may be sent."""
        wait = self._waits.get(sender)
        return 0.0 if wait is None else wait.seconds_left(now)

    def extend(self, sender: str, seconds: float | None, *, now: float, chance: float) -> float:
        """Start or extend the wait of a sender; return its seconds."""
        former = self._waits.get(sender, RetryAfter())
        wait, _ = former.after_429(seconds, now=now, chance=chance)
        self._waits[sender] = wait
        if len(self._waits) > MAX_SENDERS:
            self._waits.popitem(last=False)
        self.is_empty = False
        return wait.seconds_left(now)

    def accept(self, sender: str) -> None:
        """End the wait of a sender: the service has accepted one of its messages."""
        if not self.is_empty and self._waits.pop(sender, None) is not None:
            self.is_empty = not self._waits

    def clear(self) -> None:
        """End all waits: the API key has changed."""
        self._waits.clear()
        self.is_empty = True
