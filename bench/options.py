"""How much a scene measures, what it returns, and what is kept of it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
# By scene: on what it ran, how much, and its rows.
Results = dict[str, dict[str, Any]]
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Options:
    """How much to measure; `minutes` of pauses, in each role."""

    messages: int
    rounds: int
    million: bool
    minutes: float
