"""One JSON line for each fact, on standard output, that can hold no personal data.

Our own modules log a constant event and named facts: `log.info("paused", reason="outage")`.
What libraries log with it is reduced to the template of the message, never its arguments, because
aiormq and asyncio put whole messages into theirs. Of an exception the type and the places are
written, never its text, which may quote a value.

`LineWriter` keeps a reader of standard output that has stopped, such as a full pipe, from
stopping the event loop.

Why our own: a line takes a third of the CPU time that `logging` takes with a formatter for JSON
(`make bench SCENES=log-line`, docs/benchmarks.md), and `logging.StreamHandler` waits for the reader
in the event loop, as `tests/test_logs.py::test_line_writer_does_not_wait_for_a_reader` shows of
ours that it does not. To swap `logging` or structlog in, have the methods of `Log` call it with the
event and the facts, and give `configure_logging` its handler; what libraries log must still pass
the handler here, or personal data gets out.
"""

import asyncio
import functools
import io
import json
import logging
import os
import select
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, Protocol, TextIO

from pydantic_core import PydanticSerializationError, to_json

MAX_LINES: Final = 10_000
# Lines that come so close together leave in one write.
GATHER_SECONDS: Final = 0.02
FINISH_SECONDS: Final = 1.0
# How often a line may be about the same thing, where strangers have it in their hands.
COUNT_SECONDS: Final = 1.0

Facts = dict[str, object]
Level = Literal["debug", "info", "warning", "error", "critical"]


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
    """Logs what strangers cause at will: the first at once, then a line a second with their number.

    Of each set of facts, that is, so these must come from closed sets. Needs a running event loop.
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
    stream: "TextIO | LineWriter",
    count: Callable[[Level], object] = lambda _level: None,
) -> None:
    """Write what is logged from `level` on to `stream`; `count` is called with the level of each.

    Takes the place of an earlier call.
    """
    console = form == "console" or (form == "auto" and stream.isatty())
    configured = logging.getLevelNamesMapping()[level.upper()]
    lines = _Lines(stream, configured, console_line if console else json_line, count)
    outputs[:] = [one for one in outputs if not isinstance(one, _Lines)] + [lines]
    logging.basicConfig(level=configured, handlers=[lines], force=True)
    # At DEBUG these write whole frames, bodies included, into the message itself.
    logging.getLogger("asyncio").setLevel(max(configured, logging.INFO))
    # They raise what they log, a line or more for each try to connect; our links say it once.
    for name in ("aiormq", "aio_pika"):
        logging.getLogger(name).setLevel(
            logging.INFO if configured <= logging.DEBUG else logging.CRITICAL
        )
    for name in ("httpx", "httpcore", "uvicorn"):
        logging.getLogger(name).setLevel(max(configured, logging.WARNING))


class _Lines(logging.Handler):
    """Counts and writes lines, ours as they come and those of libraries reduced."""

    def __init__(
        self,
        stream: "TextIO | LineWriter",
        level: int,
        form: Callable[[float, str, str, str, Facts], str],
        count: Callable[[Level], object],
    ) -> None:
        super().__init__(level)
        self._stream = stream
        self._form = form
        self._count = count

    def take(self, level: int, logger: str, event: str, facts: Facts) -> None:
        """Write a line; the stream takes it at once, so that no lock is needed."""
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
        if isinstance(self._stream, LineWriter):
            self._stream.finish()


class LineWriter(io.TextIOBase):
    """A stream whose `write` never blocks: a thread hands the lines on to a file descriptor.

    At most `MAX_LINES` wait, and what finds no room, or cannot be written, is dropped: `dropped`
    is called with the number of lines, and a warning says it once lines are written again. Both
    come with the next line, in its thread; only one thread may write.
    """

    def __init__(self, stream: TextIO, *, dropped: Callable[[int], object]) -> None:
        super().__init__()
        self._fd = stream.fileno()
        self._is_terminal = stream.isatty()
        self._tell_dropped = dropped
        self._lines: deque[str] = deque()
        # What the thread could not write, and whether it could the last time.
        self._unwritten: deque[int] = deque()
        # The end of a line whose beginning is written, as on a disk that is full: it comes first
        # when there is room again, or the next line would be glued to half of one.
        self._torn = b""
        self._is_writable = True
        self._dropped = 0
        self._wanted = threading.Event()
        self._finishing = threading.Event()
        self._thread = threading.Thread(target=self._write_on, name="log", daemon=True)
        self._thread.start()

    def isatty(self) -> bool:
        """Whether somebody is looking."""
        return self._is_terminal

    def write(self, text: str) -> int:
        """Take one line, or drop it when too many wait."""
        while self._unwritten:
            self._drop(self._unwritten.popleft())
        if len(self._lines) >= MAX_LINES:
            self._drop(1)
        else:
            self._lines.append(text)
            if not self._wanted.is_set():
                self._wanted.set()
            if self._dropped and self._is_writable and len(self._lines) < MAX_LINES:
                missing, self._dropped = self._dropped, 0
                log.warning("log_lines_dropped", lines=missing)
        return len(text)

    def finish(self) -> None:
        """Write what waits, for at most `FINISH_SECONDS`, and take no more time."""
        self._finishing.set()
        self._wanted.set()
        if self._thread is not threading.current_thread():
            self._thread.join(FINISH_SECONDS)

    def _write_on(self) -> None:
        while self._lines or not self._finishing.is_set():
            self._wanted.wait()
            self._finishing.wait(GATHER_SECONDS)
            self._wanted.clear()
            self._write_all()

    def _write_all(self) -> None:
        lines = [self._lines.popleft() for _ in range(len(self._lines))]
        data = self._torn + "".join(lines).encode("utf-8", "backslashreplace")
        rest = self._write_bytes(data)
        self._is_writable = not rest
        written = data[: len(data) - len(rest)]
        is_torn = not written.endswith(b"\n") if written else bool(self._torn)
        self._torn = b"".join(rest.partition(b"\n")[:2]) if is_torn else b""
        if lost := rest.count(b"\n") - is_torn:
            self._unwritten.append(lost)

    def _write_bytes(self, data: bytes) -> bytes:
        """Write, and return what cannot be written."""
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:
                select.select([], [self._fd], [], FINISH_SECONDS)
            except OSError:
                break
        return bytes(rest)

    def _drop(self, lines: int) -> None:
        self._dropped += lines
        self._tell_dropped(lines)


def log_loop_faults(loop: asyncio.AbstractEventLoop) -> None:
    """Log what nobody awaited; asyncio's own handler would quote the exception and its values."""

    def handle(_loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
        error = context.get("exception")
        log.error(
            "unhandled_error",
            # Behind the words stands the repr of a callback, with its arguments.
            what=" ".join(str(context.get("message")).split()[:3]),
            cause=error if isinstance(error, BaseException) else None,
        )

    loop.set_exception_handler(handle)


def json_line(now: float, level: str, logger: str, event: str, facts: Facts) -> str:
    """Make a line of JSON: time, level, logger, event, then the facts."""
    second = int(now)
    moment = f'{{"time":"{_format_second(second)}.{int((now - second) * 1000):03d}Z'
    head = _format_head(level, logger, event)
    return f"{moment}{head},{dump_json(facts)[1:]}\n" if facts else f"{moment}{head}}}\n"


def console_line(now: float, level: str, _logger: str, event: str, facts: Facts) -> str:
    """Make a line for a person: time of day, level, event, then the facts as `name=value`."""
    clock = time.strftime("%H:%M:%S", time.localtime(now))
    pairs = " ".join(f"{name}={value}" for name, value in facts.items())
    line = f"{clock} {level:<8} {event} {pairs}".rstrip()
    return "".join(char if char.isprintable() else "?" for char in line) + "\n"


def dump_json(value: object) -> str:
    """Write a value as one line of JSON."""
    try:
        # A quarter of the time of the standard library's.
        text = to_json(value, fallback=str)
    except PydanticSerializationError:  # half of a surrogate pair has no UTF-8
        pass
    else:
        if text.isascii():
            return text.decode()
    return json.dumps(value, default=str, separators=(",", ":"))


@functools.lru_cache(maxsize=4)
def _format_second(second: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))


# Of our own lines there are few; a library's may have any text.
@functools.lru_cache(maxsize=256)
def _format_head(level: str, logger: str, event: str) -> str:
    return f'","level":"{level}","logger":{dump_json(logger)},"event":{dump_json(event)}'


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
