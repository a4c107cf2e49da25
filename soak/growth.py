"""Whether a process grows: its memory and its open files, second by second, by quarters of its run.

Pure: it is given the samples.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

# Of the memory of the third quarter, per quarter. At 150 messages a second, 2.5 % of 70 MiB are 13
# bytes per message: less than the smallest object. The first half of the run does not count,
# because caches fill up in it.
MOST_GROWTH: Final = 0.025
# Sockets come and go with faults and strangers.
MOST_MORE_FILES: Final = 5
# Caches hold entries for a quarter of an hour, and must be full when the second quarter begins.
FILLED_SECONDS: Final = 900
EDGE_SAMPLES: Final = 10
# The second half is divided into pieces, and the largest step between two of them does not count:
# a dict of a hundred thousand entries grows once, by 5 MiB. A leak shows in the other steps.
PIECES: Final = 6


class Sample(NamedTuple):
    """The size of a process at one moment."""

    memory_bytes: int
    open_files: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Memory in bytes: medians of the first and last seconds and of each quarter, and the peak.

    `share` is the growth per quarter, `more_files` that of the median from second to last quarter.
    """

    start: int
    quarters: tuple[int, int, int, int]
    end: int
    peak: int
    share: float
    more_files: int

    def problems(self) -> list[str]:
        """Return what grew too much."""
        found = [f"memory grows by {self.share:.1%} a quarter"] * (self.share > MOST_GROWTH)
        files = [f"{self.more_files} more open files"] * (self.more_files > MOST_MORE_FILES)
        return [*found, *files]


def measure(samples: Sequence[Sample]) -> Growth:
    """Summarise samples taken at even intervals, of which there must be a dozen."""
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
    """Say whether a run was long enough to tell growth from caches that fill up."""
    return seconds / 4 >= FILLED_SECONDS
