"""Whether a process grows: its memory, second by second, by quarters of its run.

Pure: everything it knows is in the samples.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

# A quarter of the run may add so much to the third one's median. At 150 messages a second, 2.5 % of
# 70 MiB are 13 bytes for each message in a quarter of an hour: less than the smallest object takes.
# The first half does not count: what is remembered fills up, and that takes longer where the
# machine is too slow for the rate.
MOST_GROWTH: Final = 0.025
# What is remembered for a quarter of an hour has to be full when the second begins.
FILLED_SECONDS: Final = 900
EDGE_SAMPLES: Final = 10
# The second half is looked at in so many pieces, and the largest step from one to the next is left
# out: the table of a dict that holds a hundred thousand grows once, by 5 MiB. What leaks grows in
# the others too.
PIECES: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """The memory of a process in bytes: medians of its first and last seconds, and of quarters.

    `share`: by how much it grew in a quarter, by the steps of the second half but the largest.
    """

    start: int
    quarters: tuple[int, int, int, int]
    end: int
    peak: int
    share: float


def measure(samples: Sequence[int]) -> Growth:
    """Summarise samples that were taken at even times; there must be a dozen of them."""
    first, second, third, last = _medians(samples, 4)
    pieces = _medians(samples[len(samples) // 2 :], PIECES)
    steps = sorted(later - earlier for earlier, later in pairwise(pieces))[:-1]
    return Growth(
        start=int(statistics.median(samples[:EDGE_SAMPLES])),
        quarters=(first, second, third, last),
        end=int(statistics.median(samples[-EDGE_SAMPLES:])),
        peak=max(samples),
        share=statistics.mean(steps) * PIECES / 2 / third,
    )


def _medians(samples: Sequence[int], pieces: int) -> list[int]:
    borders = [len(samples) * number // pieces for number in range(pieces + 1)]
    return [int(statistics.median(samples[begin:end])) for begin, end in pairwise(borders)]


def is_judged(seconds: float) -> bool:
    """Say whether a run was long enough to tell growth from what fills up and stays."""
    return seconds / 4 >= FILLED_SECONDS
