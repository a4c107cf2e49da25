"""Records the log lines of the bridge in this process, and restores logging afterwards."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from bridge.telemetry.log_format import Facts
from bridge.telemetry.logs import outputs


class Line(NamedTuple):
    """One log line."""

    event: str
    facts: dict[str, Any]
    level: int = logging.INFO


class Ears:
    """Recorded lines of every level."""

    def __init__(self) -> None:
        self.lines: list[Line] = []

    def take(self, level: int, _logger: str, event: str, facts: Facts) -> None:
        """Record a line."""
        self.lines.append(Line(event, facts, level))

    def heard(self, event: str) -> list[dict[str, Any]]:
        return [line.facts for line in self.lines if line.event == event]


@contextmanager
def listening() -> Iterator[Ears]:
    """Record log lines inside the block."""
    ears = Ears()
    outputs.append(ears)
    try:
        yield ears
    finally:
        outputs.remove(ears)


@contextmanager
def logging_kept() -> Iterator[None]:
    """Restore the process's logging at the end of the block."""
    written = outputs[:]
    root = logging.getLogger()
    handlers = root.handlers[:]
    level = root.level
    levels = {name: logging.getLogger(name).level for name in list(root.manager.loggerDict)}
    yield
    outputs[:] = written
    root.handlers[:] = handlers
    root.setLevel(level)
    for name in list(root.manager.loggerDict):
        logging.getLogger(name).setLevel(levels.get(name, logging.NOTSET))
