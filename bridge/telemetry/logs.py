"""Logs constant events with facts, a line each, which cannot hold personal data.

Our own modules log a constant event and named facts: `log.info("paused", reason="outage")`. What
libraries log through `logging` is reduced to the template of the message, without its arguments,
because aiormq and asyncio put whole messages into theirs. Of an exception only the type and the
traceback's places are written, never its text, which may quote a value.

Why our own: a line takes a third of the CPU time that `logging` takes with a formatter for JSON
(`make bench SCENES=log-line`, docs/benchmarks.md), and `logging.StreamHandler` waits for the reader
of standard output in the event loop, which `line_writer` does not. To swap `logging` or structlog
in, have the methods of `Log` call it with the event and the facts, and give `configure_logging` its
handler; what libraries log must still pass `log_setup`, or personal data gets out.
"""

import asyncio
import functools
import logging
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Final, Literal, Protocol

from bridge.telemetry.log_lines import Facts, console_line, json_line

# The shortest time between two lines about the same thing that strangers cause.
COUNT_SECONDS: Final = 1.0

Level = Literal["debug", "info", "warning", "error", "critical"]


class Stream(Protocol):
    """What lines are written to: standard output, or a writer in front of it."""

    def write(self, text: str, /) -> object:
        """Take one line, its end included."""

    def isatty(self) -> bool:
        """Whether somebody is looking."""


class Output(Protocol):
    """Something that takes what is logged."""

    def take(self, level: int, logger: str, event: str, facts: Facts, /) -> None:
        """Take one line; `level` is one of `logging`'s numbers, and no fact is None."""


# Where lines go: nowhere, until `configure_logging`.
outputs: Final[list[Output]] = []


class Log:
    """Logs constant events with named facts for one module; a fact that is None is left out."""

    def __init__(self, name: str) -> None:
        self._name = name

    def debug(self, event: str, /, **facts: object) -> None:
        """Log what helps to find a fault."""
        self._log(logging.DEBUG, event, facts)

    def info(self, event: str, /, **facts: object) -> None:
        """Log what happened as it should."""
        self._log(logging.INFO, event, facts)

    def tell(self, event: str, facts: Facts, /) -> None:
        """Log what happened as it should, with facts that somebody else is given as well."""
        self._log(logging.INFO, event, facts)

    def warning(self, event: str, /, **facts: object) -> None:
        """Log what somebody may have to look at."""
        self._log(logging.WARNING, event, facts)

    def error(self, event: str, /, *, cause: BaseException | None, **facts: object) -> None:
        """Log a bug, with the type of its exception and the places where it came from."""
        self._log(logging.ERROR, event, facts | describe(cause))

    def exception(self, event: str, /, **facts: object) -> None:
        """Log a bug from where its exception is caught, as `error` does."""
        self.error(event, cause=sys.exception(), **facts)

    def critical(self, event: str, /, *, cause: BaseException | None, **facts: object) -> None:
        """Log why the process ends, as `error` does."""
        self._log(logging.CRITICAL, event, facts | describe(cause))

    def _log(self, level: int, event: str, facts: Facts) -> None:
        known = {name: value for name, value in facts.items() if value is not None}
        for output in outputs:
            output.take(level, self._name, event, known)


class CountedLog:
    """Logs what strangers can cause at will: the first at once, then a count once a second.

    It counts each set of facts by itself, so facts must come from closed sets. Needs a running
    event loop.
    """

    def __init__(self, log: Log, event: str) -> None:
        self._log = log
        self._event = event
        # What has happened since the last line, and what writes the next one.
        self._pending: dict[tuple[tuple[str, object], ...], int] = {}
        self._timers: dict[tuple[tuple[str, object], ...], asyncio.TimerHandle] = {}

    def info(self, **facts: object) -> None:
        """Log, or count for the next line."""
        key = tuple(facts.items())
        if key in self._pending:
            self._pending[key] += 1
            return
        self._pending[key] = 1
        self._tell(key)

    def flush(self) -> None:
        """Log what was only counted so far."""
        for key in list(self._pending):
            self._timers[key].cancel()
            self._tell(key)

    def _tell(self, key: tuple[tuple[str, object], ...]) -> None:
        count, self._pending[key] = self._pending[key], 0
        if count == 0:
            del self._pending[key], self._timers[key]
            return
        self._log.info(self._event, **dict(key), count=count)
        loop = asyncio.get_running_loop()
        self._timers[key] = loop.call_later(COUNT_SECONDS, self._tell, key)


class Lines:
    """Counts what is logged from `level` on, and writes it to `stream` as lines.

    The stream must take a line at once. `count` is called with the level of each.
    """

    def __init__(
        self, stream: Stream, level: int, count: Callable[[Level], object], *, is_console: bool
    ) -> None:
        self._stream = stream
        self._level = level
        self._count = count
        self._is_console = is_console

    def take(self, level: int, logger: str, event: str, facts: Facts, /) -> None:
        """Write a line; the stream never blocks, so no lock is needed."""
        if level < self._level:
            return
        name = _level_name(level)
        self._count(name)
        now = time.time()
        try:
            if self._is_console:
                line = console_line(now, name, logger, event, facts)
            else:
                line = json_line(now, name, logger, event, facts)
            self._stream.write(line)
        except Exception:  # noqa: BLE001  a line less must not be a message less
            return


def describe(cause: BaseException | None) -> Facts:
    """Say of an exception its type and the places where it came from, and never its text."""
    if cause is None:
        return {}
    places = [
        f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}"
        for frame in traceback.extract_tb(cause.__traceback__)[-12:]
    ]
    return {"error": type(cause).__name__, "at": places}


@functools.lru_cache(maxsize=16)
def _level_name(level: int) -> Level:
    """Name a level; one that a library has between two of these counts as the lower."""
    names: Mapping[int, Level] = {
        logging.CRITICAL: "critical",
        logging.ERROR: "error",
        logging.WARNING: "warning",
        logging.INFO: "info",
    }
    return next((name for least, name in names.items() if level >= least), "debug")
