"""Logs constant events with facts, a line each, which cannot hold personal data.

Our own modules log a constant event and named facts: `log.info("paused", reason="outage")`. What
libraries log through `logging` is reduced to the template of the message, without its arguments,
because aiormq and asyncio put whole messages into theirs. Of an exception only the type and the
traceback's places are written, never its text, which may quote a value.

Why our own: a line takes a third of the CPU time that `logging` takes with a formatter for JSON
(`make bench SCENES=log-line`, docs/benchmarks.md), and `logging.StreamHandler` waits for the reader
of standard output in the event loop, which `line_writer` does not. To swap `logging` or structlog
in, have the methods of `Log` call it with the event and the facts, and give `configure_logging` its
handler; what libraries log must still pass the handler here, or personal data gets out.
"""

import asyncio
import functools
import logging
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, Protocol

from bridge.log_lines import Facts, console_line, json_line

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
        self._log(logging.ERROR, event, facts | _describe(cause))

    def exception(self, event: str, /, **facts: object) -> None:
        """Log a bug from where its exception is caught, as `error` does."""
        self.error(event, cause=sys.exception(), **facts)

    def critical(self, event: str, /, *, cause: BaseException | None, **facts: object) -> None:
        """Log why the process ends, as `error` does."""
        self._log(logging.CRITICAL, event, facts | _describe(cause))

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


log = Log(__name__)


def configure_logging(
    level: str,
    form: Literal["json", "console", "auto"],
    *,
    stream: Stream,
    count: Callable[[Level], object] = lambda _level: None,
    finish: Callable[[], object] = lambda: None,
) -> None:
    """Write what is logged from `level` on to `stream`, which must take a line at once.

    `count` is called with the level of each, `finish` when the program ends. Takes the place of an
    earlier call.
    """
    console = form == "console" or (form == "auto" and stream.isatty())
    configured = logging.getLevelNamesMapping()[level.upper()]
    write = console_line if console else json_line
    lines = _Lines(stream, configured, write, count, finish)
    outputs[:] = [one for one in outputs if not isinstance(one, _Lines)] + [lines]
    logging.basicConfig(level=configured, handlers=[lines], force=True)
    # At DEBUG these write whole frames, bodies included, into the message itself.
    logging.getLogger("asyncio").setLevel(max(configured, logging.INFO))
    # They log what they also raise or return, several lines for each try; we log it once.
    for name in ("aiormq", "aio_pika", "opentelemetry"):
        logging.getLogger(name).setLevel(
            logging.INFO if configured <= logging.DEBUG else logging.CRITICAL
        )
    for name in ("httpx", "httpcore", "uvicorn"):
        logging.getLogger(name).setLevel(max(configured, logging.WARNING))


class _Lines(logging.Handler):
    """Counts and writes lines, ours as they come and those of libraries reduced."""

    def __init__(
        self,
        stream: Stream,
        level: int,
        form: Callable[[float, str, str, str, Facts], str],
        count: Callable[[Level], object],
        finish: Callable[[], object],
    ) -> None:
        super().__init__(level)
        self._stream = stream
        self._form = form
        self._count = count
        self._finish = finish

    def take(self, level: int, logger: str, event: str, facts: Facts) -> None:
        """Write a line; the stream never blocks, so no lock is needed."""
        if level < self.level:
            return
        name = _level_name(level)
        self._count(name)
        try:
            self._stream.write(self._form(time.time(), name, logger, event, facts))
        except Exception:  # noqa: BLE001  a line less must not be a message less
            return

    def handle(self, record: logging.LogRecord) -> bool:
        """Write of a library's record what cannot quote a value."""
        # Some log an exception itself, whose text may quote one.
        event = record.msg if isinstance(record.msg, str) else type(record.msg).__name__
        cause = record.exc_info[1] if record.exc_info else None
        self.take(record.levelno, record.name, event, _describe(cause))
        return True

    def close(self) -> None:
        """Write what is left; `logging.shutdown` calls this when the program ends."""
        super().close()
        self._finish()


def log_loop_faults(loop: asyncio.AbstractEventLoop) -> None:
    """Log errors that nobody awaited; asyncio's own handler would quote the exception's values."""

    def handle(_loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
        error = context.get("exception")
        log.error(
            "unhandled_error",
            # After the first words comes the repr of a callback, with its arguments.
            what=" ".join(str(context.get("message")).split()[:3]),
            cause=error if isinstance(error, BaseException) else None,
        )

    loop.set_exception_handler(handle)


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


def _describe(cause: BaseException | None) -> Facts:
    if cause is None:
        return {}
    places = [
        f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}"
        for frame in traceback.extract_tb(cause.__traceback__)[-12:]
    ]
    return {"error": type(cause).__name__, "at": places}
