"""The busiest and the quietest window in a series of times."""

import bisect
from collections.abc import Sequence


def most_in(moments: Sequence[float], seconds: float) -> int:
    """Return the count in the fullest window of this many seconds."""
    return max(bisect.bisect_left(moments, at + seconds) - i for i, at in enumerate(moments))


def fewest_in(moments: Sequence[float], seconds: float) -> int:
    """Return the count in the emptiest window between the first and the last time."""
    starts = [at for at in moments if at + seconds <= moments[-1]]
    return min(
        bisect.bisect_right(moments, at + seconds) - bisect.bisect_right(moments, at)
        for at in starts
    )
