"""Detects growth of a process's memory and open files, by comparing quarters of its run."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

# Growth per quarter, as a share of the third quarter's memory. At 150 messages per second, 2.5 % of
# 70 MiB are 13 bytes per message, less than the smallest object. The first half does not count,
# because caches fill up.
MOST_GROWTH: Final = 0.025
# Faults and strangers open and close sockets.
MOST_MORE_FILES: Final = 5
# Caches hold entries for 15 minutes, and must be full when the second quarter begins.
FILLED_SECONDS: Final = 900
EDGE_SAMPLES: Final = 10
# The second half is divided into pieces. The largest step between two pieces does not count: a dict
# of 100,000 entries grows by 5 MiB at once. A leak shows in the other steps.
PIECES: Final = 6


class Sample(NamedTuple):
    """The size of a process at a time."""

    memory_bytes: int
    open_files: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Memory in bytes: medians of the first and last seconds and of each quarter, and the peak.

    `share` is the growth per quarter. `more_files` is the growth of the median of open files from
    the second to the last quarter.
    """

    start: int
    quarters: tuple[int, int, int, int]
    end: int
    peak: int
    share: float
    more_files: int

    def problems(self) -> list[str]:
        """Describe excessive growth."""
        found = [f"memory grows by {self.share:.1%} a quarter"] * (self.share > MOST_GROWTH)
        files = [f"{self.more_files} more open files"] * (self.more_files > MOST_MORE_FILES)
        return [*found, *files]


def measure(samples: Sequence[Sample]) -> Growth:
    """Summarise at least 12 samples, taken at even intervals."""
    memory = [sample.memory_bytes for sample in samples]
    first, second, third, last = _medians(memory, 4)
    pieces = _medians(memory[len(memory) // 2 :], PIECES)
    steps = sorted(later - earlier for earlier, later in pairwise(pieces))[:-1]
    files = _medians([sample.open_files for sample in samples], 4)
    return Growth(
        start=int(statistics.median(memory[:EDGE_SAMPLES])),
        quarters=(first, second, third, last),
        end=int(statistics.median(memory[-EDGE_SAMPLES:])),
        peak=max(memory),
        share=statistics.mean(steps) * PIECES / 2 / third,
        more_files=files[3] - files[1],
    )


def _medians(values: Sequence[int], pieces: int) -> list[int]:
    borders = [len(values) * number // pieces for number in range(pieces + 1)]
    return [int(statistics.median(values[begin:end])) for begin, end in pairwise(borders)]


def is_judged(seconds: float) -> bool:
    """Return whether the run was long enough to distinguish growth from filling caches."""
    return seconds / 4 >= FILLED_SECONDS
