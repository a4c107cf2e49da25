"""The busiest and the quietest time in a series of moments."""

import bisect
from collections.abc import Sequence


def most_in(moments: Sequence[float], seconds: float) -> int:
    """Return how many there are in the fullest window of so many seconds."""
    return max(bisect.bisect_left(moments, at + seconds) - i for i, at in enumerate(moments))


def fewest_in(moments: Sequence[float], seconds: float) -> int:
    """Return how many there are in the emptiest window between the first and the last."""
    starts = [at for at in moments if at + seconds <= moments[-1]]
    return min(
        bisect.bisect_right(moments, at + seconds) - bisect.bisect_right(moments, at)
        for at in starts
    )
