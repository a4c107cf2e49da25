"""Rounds of runs: size, order and statistics.

Runs are interleaved: each round runs every contestant once, starting with a different one. So a
disturbance of the machine affects all of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol, TypeVar

Row = dict[str, Any]
Runs = dict[str, list[Row]]
# By scene: environment, options and rows.
Results = dict[str, dict[str, Any]]
Tell = Callable[[str], None]


class BenchError(Exception):
    """A measurement failed, or a contestant misbehaved."""


@dataclass(frozen=True, slots=True)
class Options:
    """Size of the measurement. `minutes` is the duration of the scene `pauses`, per role."""

    messages: int
    rounds: int
    million: bool
    minutes: float


class Named(Protocol):
    """A contestant of a round."""

    @property
    def name(self) -> str:
        """Name of the row."""


T = TypeVar("T", bound=Named)


def interleave(contestants: Sequence[T], rounds: int, run: Callable[[T], Row], tell: Tell) -> Runs:
    """Run all contestants in each round, and return the figures of each."""
    runs: Runs = {one.name: [] for one in contestants}
    for number in range(rounds):
        for one in rotated(contestants, number):
            figures = run(one)
            runs[one.name].append(figures)
            tell_run(tell, f"{number + 1}/{rounds} {one.name}", figures)
    return runs


def rotated(contestants: Sequence[T], number: int) -> Sequence[T]:
    """Start each round with a different contestant."""
    first = number % len(contestants)
    return (*contestants[first:], *contestants[:first])


def tell_run(tell: Tell, name: str, figures: Row) -> None:
    """Print the figures of a run."""
    shown = ", ".join(f"{key} {value:,.4g}" for key, value in figures.items())
    tell(f"{name}: {shown}")


def medians(runs: Runs) -> dict[str, Row]:
    """Return the median of each figure, by name."""
    return {
        name: {"name": name, "runs": len(ours)}
        | {key: median(one[key] for one in ours) for key in ours[0]}
        for name, ours in runs.items()
    }


def compared(runs: Runs, yardstick: str) -> list[Row]:
    """Add the ratio to the yardstick's rate to the medians, with its extremes."""
    rows = []
    for name, row in medians(runs).items():
        ratios = rate_ratios(runs, name, yardstick)
        extremes = {"ratio_min": min(ratios), "ratio_max": max(ratios)}
        rows.append(row | {"ratio": median(ratios)} | extremes)
    return rows


def rate_ratios(runs: Runs, name: str, yardstick: str) -> list[float]:
    """Compare within each round, because a slow round affects both."""
    pairs = zip(runs[name], runs[yardstick], strict=True)
    return [ours["cpu_rate"] / theirs["cpu_rate"] for ours, theirs in pairs]
