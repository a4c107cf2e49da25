"""The logger of the bridge: constant event names with named facts, without personal data.

The bridge's own modules log a constant event and named facts, as in `log.info("paused",
reason="outage")`. Of an exception, only the type and the traceback locations are logged, never the
text, which may quote a value. `log_setup` chooses the output and reduces the records of libraries.

Why not `logging`: a line takes a third of the CPU time that `logging` takes with a JSON formatter
(`make bench SCENES=log-line`, docs/evidence/benchmarks.md). To return to `logging` or structlog,
let the methods of `Log` call it with the event and the facts. Records of libraries must still pass
through `log_setup`, which keeps personal data out.
"""

import asyncio
import functools
import logging
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Final, Literal, Protocol

from bridge.telemetry.log_format import Facts, console_line, json_line

# Minimum interval between two lines about an event that strangers can cause.
COUNT_SECONDS: Final = 1.0

Level = Literal["debug", "info", "warning", "error", "critical"]


class LogStream(Protocol):
    """The text stream that receives log lines: standard output, or a writer in front of it."""

    def write(self, text: str, /) -> object:
        """Accept one line, including its line break."""

    def isatty(self) -> bool:
        """Whether the stream is a terminal."""


class LogOutput(Protocol):
    """A receiver of log records."""

    def take(self, level: int, logger: str, event: str, facts: Facts, /) -> None:
        """Accept one record; `level` is a number of `logging`, and no fact is None."""


# All receivers of log records; empty until `configure_logging` is called.
outputs: Final[list[LogOutput]] = []


class Log:
    """The logger of one module: logs constant events with named facts, and leaves out None."""

    def __init__(self, name: str) -> None:
        self._name = name

    def debug(self, event: str, /, **facts: object) -> None:
        self._log(logging.DEBUG, event, facts)

    def info(self, event: str, /, **facts: object) -> None:
        self._log(logging.INFO, event, facts)

    def info_facts(self, event: str, facts: Facts, /) -> None:
        """Log normal operation, with facts that are already in a dictionary."""
        self._log(logging.INFO, event, facts)

    def warning(self, event: str, /, **facts: object) -> None:
        """Log a problem that an operator may have to solve."""
        self._log(logging.WARNING, event, facts)

    def error(self, event: str, /, *, cause: BaseException | None, **facts: object) -> None:
        """Log a bug, with the type of its exception and the traceback locations."""
        self._log(logging.ERROR, event, facts | describe(cause))

    def exception(self, event: str, /, **facts: object) -> None:
        """Log the exception that is being handled, as `error` does."""
        self.error(event, cause=sys.exception(), **facts)

    def critical(self, event: str, /, *, cause: BaseException | None, **facts: object) -> None:
        """Log the reason why the process ends, as `error` does."""
        self._log(logging.CRITICAL, event, facts | describe(cause))

    def _log(self, level: int, event: str, facts: Facts) -> None:
        known = {name: value for name, value in facts.items() if value is not None}
        for output in outputs:
            output.take(level, self._name, event, known)


class CountedLog:
    """Logs an event that strangers can cause at will: at once, then as a count per second.

    Each set of facts is counted separately, so facts must come from closed sets. Needs a running
    event loop.
    """

    def __init__(self, log: Log, event: str) -> None:
        self._log = log
        self._event = event
        # The events since the last line, and the timer of the next line.
        self._pending: dict[tuple[tuple[str, object], ...], int] = {}
        self._timers: dict[tuple[tuple[str, object], ...], asyncio.TimerHandle] = {}

    def info(self, **facts: object) -> None:
        """Log the event, or count it for the next line."""
        key = tuple(facts.items())
        if key in self._pending:
            self._pending[key] += 1
            return
        self._pending[key] = 1
        self._write(key)

    def flush(self) -> None:
        """Log the events that were only counted so far."""
        for key in list(self._pending):
            self._timers[key].cancel()
            self._write(key)

    def _write(self, key: tuple[tuple[str, object], ...]) -> None:
        count, self._pending[key] = self._pending[key], 0
        if count == 0:
            del self._pending[key], self._timers[key]
            return
        self._log.info(self._event, **dict(key), count=count)
        loop = asyncio.get_running_loop()
        self._timers[key] = loop.call_later(COUNT_SECONDS, self._write, key)


class LineOutput:
    """Writes records from `level` on to `stream`, one line each.

    The stream must never block. `count` is called with the level of each record.
    """

    def __init__(
        self, stream: LogStream, level: int, count: Callable[[Level], object], *, is_console: bool
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
        except Exception:  # noqa: BLE001  a lost line must not become a lost message
            return


def describe(cause: BaseException | None) -> Facts:
    """Return the type of an exception and its traceback locations, but never its text."""
    if cause is None:
        return {}
    places = [
        f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}"
        for frame in traceback.extract_tb(cause.__traceback__)[-12:]
    ]
    return {"error": type(cause).__name__, "at": places}


@functools.lru_cache(maxsize=16)
def _level_name(level: int) -> Level:
    """Return the name of a level; a level between two names counts as the lower one."""
    names: Mapping[int, Level] = {
        logging.CRITICAL: "critical",
        logging.ERROR: "error",
        logging.WARNING: "warning",
        logging.INFO: "info",
    }
    return next((name for least, name in names.items() if level >= least), "debug")
