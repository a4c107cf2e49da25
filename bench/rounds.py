"""Rounds of runs: who is run when, and what is made of the figures.

Runs are interleaved: each round has every contestant once, beginning with another one, so that
what disturbs the machine for a while disturbs all.
"""

from collections.abc import Callable, Sequence
from statistics import median

from bench.lineup import Contestant
from bench.options import Row, Tell

Runs = dict[str, list[Row]]


def interleave(
    contestants: Sequence[Contestant], rounds: int, run: Callable[[Contestant], Row], tell: Tell
) -> Runs:
    """Run all of them, round after round; return the figures of each."""
    runs: Runs = {one.name: [] for one in contestants}
    for number in range(rounds):
        for one in rotated(contestants, number):
            figures = run(one)
            runs[one.name].append(figures)
            tell_run(tell, f"{number + 1}/{rounds} {one.name}", figures)
    return runs


def rotated(contestants: Sequence[Contestant], number: int) -> Sequence[Contestant]:
    """Begin with another one in each round."""
    first = number % len(contestants)
    return (*contestants[first:], *contestants[:first])


def tell_run(tell: Tell, name: str, figures: Row) -> None:
    """Say what one run showed."""
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
    """Add to the medians how many times the yardstick's rate each has, with the extremes."""
    rows = []
    for name, row in medians(runs).items():
        ratios = rate_ratios(runs, name, yardstick)
        extremes = {"ratio_min": min(ratios), "ratio_max": max(ratios)}
        rows.append(row | {"ratio": median(ratios)} | extremes)
    return rows


def rate_ratios(runs: Runs, name: str, yardstick: str) -> list[float]:
    """Compare within each round: what is slow in one is slow for both."""
    pairs = zip(runs[name], runs[yardstick], strict=True)
    return [ours["cpu_rate"] / theirs["cpu_rate"] for ours, theirs in pairs]
