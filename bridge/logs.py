"""One JSON line for each fact, on standard output, that can hold no personal data.

Our own modules log a constant event and named facts: `log.info("delivery", extra=facts(...))`.
What libraries log is reduced to the template of the message, never its arguments, because
aiormq and asyncio put whole messages into theirs. Of an exception the type and the places are
written, never its text, which may quote a value.

`LineWriter` keeps a reader of standard output that has stopped, such as a full pipe, from
stopping the event loop.
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
from typing import Any, Final, Literal, TextIO

from pydantic_core import PydanticSerializationError, to_json

log = logging.getLogger(__name__)

MAX_LINES: Final = 10_000
# Lines that come so close together leave in one write.
GATHER_SECONDS: Final = 0.02
FINISH_SECONDS: Final = 1.0

_OURS = "bridge"
_OURS_BELOW = f"{_OURS}."
_FACTS = "facts"
# What a formatter that is not ours may ask of a record, and what a record of ours fills in.
_BLANK: Final[dict[str, object]] = {
    **dict.fromkeys(("name", "levelno", "levelname", "msg", "args", "created", "msecs")),
    **dict.fromkeys(("exc_info", "exc_text", "stack_info", "taskName")),
    **dict.fromkeys(("pathname", "filename", "module", "funcName"), ""),
    **dict.fromkeys(("threadName", "processName"), ""),
    **dict.fromkeys(("lineno", "thread", "process", "relativeCreated"), 0),
}


def facts(**values: object) -> dict[str, object]:
    """Make the `extra` of a log call; what is None is left out of the line."""
    return {_FACTS: {name: value for name, value in values.items() if value is not None}}


def configure_logging(
    level: str,
    form: Literal["json", "console", "auto"],
    *,
    stream: "TextIO | LineWriter" = sys.stdout,
    count: Callable[[str], object] = lambda _level: None,
) -> None:
    """Send every log record to `stream`; `count` is called with the level of each."""
    # Nobody reads where a record comes from, and finding it out takes longer than all the rest of
    # a line (logging HOWTO, "Optimization").
    logging._srcfile = None  # noqa: SLF001
    logging.setLogRecordFactory(_Record)
    console = form == "console" or (form == "auto" and stream.isatty())
    handler = _Handler(stream, count)
    handler.setFormatter(ConsoleFormatter() if console else JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    configured = logging.getLevelName(level.upper())
    # At DEBUG these write whole frames, bodies included, into the message itself.
    logging.getLogger("asyncio").setLevel(max(configured, logging.INFO))
    # They raise what they log, a line or more for each try to connect; our links say it once.
    for name in ("aiormq", "aio_pika"):
        logging.getLogger(name).setLevel(
            logging.INFO if configured <= logging.DEBUG else logging.CRITICAL
        )
    for name in ("httpx", "httpcore", "uvicorn"):
        logging.getLogger(name).setLevel(max(configured, logging.WARNING))


class _Record(logging.LogRecord):
    """A record that does not find out its file, thread and process."""

    def __init__(
        self,
        name: str,
        level: int,
        _pathname: str,
        _lineno: int,
        msg: object,
        args: Any,  # noqa: ANN401  as logging has it
        exc_info: Any,  # noqa: ANN401
        *_: object,
        **_more: object,
    ) -> None:
        # Filling in a copy is the fastest way to so many attributes.
        self.__dict__ = values = _BLANK.copy()
        values["name"], values["msg"], values["args"] = name, msg, args
        values["levelno"], values["levelname"] = level, logging.getLevelName(level)
        values["created"] = now = time.time()
        values["msecs"] = now % 1 * 1000
        values["exc_info"] = exc_info


class _Handler(logging.Handler):
    """Counts and writes lines; a stream that fails is no reason to print a record's arguments."""

    def __init__(self, stream: "TextIO | LineWriter", count: Callable[[str], object]) -> None:
        super().__init__()
        self._stream = stream
        self._count = count

    def handle(self, record: logging.LogRecord) -> bool:
        """Write a record; the stream takes a line at once, so that no lock is needed."""
        self._count(record.levelname.lower())
        try:
            self._stream.write(f"{self.format(record)}\n")
            self._stream.flush()
        except Exception:  # noqa: BLE001  a line less must not be a message less
            self.handleError(record)
        return True

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  logging's own name
        """Say nothing: the default writes the arguments to standard error."""

    def close(self) -> None:
        """Write what is left; `logging.shutdown` calls this when the program ends."""
        super().close()
        if isinstance(self._stream, LineWriter):
            self._stream.finish()


class LineWriter(io.TextIOBase):
    """A stream whose `write` never blocks: a thread hands the lines on to a file descriptor.

    At most `MAX_LINES` wait, and what finds no room, or cannot be written, is dropped: `dropped`
    is called with the number of lines, and a warning tells it when the stream takes lines again.
    """

    def __init__(self, stream: TextIO, *, dropped: Callable[[int], object]) -> None:
        super().__init__()
        self._fd = stream.fileno()
        self._is_terminal = stream.isatty()
        self._tell_dropped = dropped
        self._lines: deque[str] = deque()
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
        if len(self._lines) >= MAX_LINES:
            self._drop(1)
        else:
            self._lines.append(text)
            if not self._wanted.is_set():
                self._wanted.set()
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
        try:
            self._write_bytes("".join(lines).encode("utf-8", "backslashreplace"))
        except OSError:
            self._drop(len(lines))
            return
        if self._dropped:
            log.warning("log_lines_dropped", extra=facts(lines=self._dropped))
            self._dropped = 0

    def _write_bytes(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:
                select.select([], [self._fd], [], FINISH_SECONDS)

    def _drop(self, lines: int) -> None:
        self._dropped += lines
        self._tell_dropped(lines)


def log_loop_faults(loop: asyncio.AbstractEventLoop) -> None:
    """Log what nobody awaited; asyncio's own handler would quote the exception and its values."""
    log = logging.getLogger(f"{_OURS}.loop")

    def handle(_loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
        error = context.get("exception")
        log.error(
            "unhandled_error",
            # Behind the words stands the repr of a callback, with its arguments.
            extra=facts(what=" ".join(str(context.get("message")).split()[:3])),
            exc_info=error if isinstance(error, BaseException) else None,
        )

    loop.set_exception_handler(handle)


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


class JsonFormatter(logging.Formatter):
    """Write a record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line: time, level, logger, event, then the facts."""
        head = (
            f'{{"time":"{_format_second(int(record.created))}.{int(record.msecs):03d}Z",'
            f'"level":"{record.levelname.lower()}","logger":{_quote(record.name)},'
            f'"event":{_quote(_event(record))}'
        )
        values = _facts(record)
        return f"{head},{dump_json(values)[1:]}" if values else f"{head}}}"


# Names of loggers and constant texts: few.
_quote = functools.lru_cache(maxsize=256)(dump_json)


class ConsoleFormatter(logging.Formatter):
    """Write a record as one line for a person."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line: time of day, level, event, then the facts as `name=value`."""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        pairs = " ".join(f"{name}={value}" for name, value in _facts(record).items())
        line = f"{clock} {record.levelname.lower():<8} {_event(record)} {pairs}".rstrip()
        return "".join(char if char.isprintable() else "?" for char in line)


def _event(record: logging.LogRecord) -> str:
    if record.name.startswith(_OURS_BELOW) or record.name == _OURS:
        return record.getMessage()
    # Some libraries log an exception itself, whose text may quote a value.
    return record.msg if isinstance(record.msg, str) else type(record.msg).__name__


def _facts(record: logging.LogRecord) -> dict[str, object]:
    values: dict[str, object] = getattr(record, _FACTS, {})
    if not record.exc_info or record.exc_info[1] is None:
        return values
    error = record.exc_info[1]
    places = [
        f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}"
        for frame in traceback.extract_tb(error.__traceback__)[-12:]
    ]
    return {**values, "error": type(error).__name__, "at": places}
