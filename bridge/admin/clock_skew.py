"""By how much another computer's clock differs from ours, as far as its answers tell."""

import time
from email.utils import parsedate_to_datetime


def clock_skew_seconds(date: str | None) -> float | None:
    """Return by how many seconds a clock is ahead of ours, from the Date header of its answer.

    None when there is no such header, or no date in it. To be called when the answer has come.
    """
    try:
        theirs = parsedate_to_datetime(date or "").timestamp()
    except ValueError:
        return None
    # The header has whole seconds, cut off.
    return theirs + 0.5 - time.time()
