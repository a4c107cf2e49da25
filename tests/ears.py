"""What hears every line that the bridge logs in this process."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from bridge.logs import Facts, outputs


class Line(NamedTuple):
    """One line."""

    level: int
    logger: str
    event: str
    facts: dict[str, Any]


class Ears:
    """Keeps lines of every level."""

    def __init__(self) -> None:
        self.lines: list[Line] = []

    def take(self, level: int, logger: str, event: str, facts: Facts) -> None:
        """Keep a line."""
        self.lines.append(Line(level, logger, event, facts))

    def heard(self, event: str) -> list[dict[str, Any]]:
        """Return the facts of every line of an event."""
        return [line.facts for line in self.lines if line.event == event]


@contextmanager
def listening() -> Iterator[Ears]:
    """Hear what is logged within."""
    ears = Ears()
    outputs.append(ears)
    try:
        yield ears
    finally:
        outputs.remove(ears)
