"""What to do with the dead letters, and the count of what was done."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from bridge.admin.dead_letters.letter import Filter


@dataclass(slots=True)
class Tally:
    """What a replay or a discard did, or would do."""

    taken: Counter[str] = field(default_factory=Counter)
    maybe_sent: Counter[str] = field(default_factory=Counter)
    expired: int = 0
    repeats: int = 0

    @property
    def total(self) -> int:
        """How many letters are taken."""
        return self.taken.total()

    @property
    def met(self) -> int:
        """How many letters were selected, including those that were left out."""
        return self.total + self.maybe_sent.total() + self.expired + self.repeats


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What to replay or discard: `at_most` that many letters, and only when `apply` is set.

    `per_second` limits how fast a replay publishes; `step` is called after each letter looked at.
    """

    wanted: Filter
    apply: bool
    at_most: int | None = None
    per_second: float | None = None
    include_uncertain: bool = False
    include_repeats: bool = False
    step: Callable[[], None] = lambda: None
