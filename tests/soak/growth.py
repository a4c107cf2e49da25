"""Whether a process grows: its memory, second by second, by quarters of its run.

Pure: everything it knows is in the samples.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

# Of the third quarter's median the last may be so much more. At 150 messages a second, 2.5 % of 70
# MiB are 13 bytes for each message in the quarter of an hour between: less than the smallest object
# takes. The first half does not count: what is remembered fills up, and that takes longer where the
# machine is too slow for the rate.
MOST_GROWTH: Final = 0.025
# What is remembered for a quarter of an hour has to be full when the second begins.
FILLED_SECONDS: Final = 900
EDGE_SAMPLES: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """The memory of a process in bytes: medians of its first and last seconds, and of quarters."""

    start: int
    quarters: tuple[int, int, int, int]
    end: int
    peak: int

    @property
    def share(self) -> float:
        """By how much the last quarter exceeds the one before it."""
        return self.quarters[3] / self.quarters[2] - 1


def measure(samples: Sequence[int]) -> Growth:
    """Summarise samples that were taken at even times; there must be four of them."""
    borders = [len(samples) * number // 4 for number in range(5)]
    first, second, third, last = (
        int(statistics.median(samples[begin:end])) for begin, end in pairwise(borders)
    )
    return Growth(
        start=int(statistics.median(samples[:EDGE_SAMPLES])),
        quarters=(first, second, third, last),
        end=int(statistics.median(samples[-EDGE_SAMPLES:])),
        peak=max(samples),
    )


def is_judged(seconds: float) -> bool:
    """Say whether a run was long enough to tell growth from what fills up and stays."""
    return seconds / 4 >= FILLED_SECONDS
