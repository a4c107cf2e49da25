"""Sets up logging: the output, and the filter for log records of libraries.

Records that libraries log through `logging` are reduced to the template of the message, without its
arguments, because aiormq and asyncio put whole messages into the arguments.

`LineWriter` writes standard output in a thread. A direct write to a full pipe, as by
`logging.StreamHandler`, would block the event loop and with it every message.
"""

import asyncio
import io
import logging
import os
import select
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, TextIO

from bridge.telemetry.logs import Level, LineOutput, Log, LogStream, describe, outputs

log = Log(__name__)

MAX_LINES: Final = 10_000
# How long the writing thread collects lines for one write.
GATHER_SECONDS: Final = 0.02
FINISH_SECONDS: Final = 1.0


def configure_logging(
    level: str,
    form: Literal["json", "console", "auto"],
    *,
    stream: LogStream,
    count: Callable[[Level], object] = lambda _level: None,
    finish: Callable[[], object] = lambda: None,
) -> None:
    """Write log records from `level` on to `stream`, which must never block.

    `count` is called with the level of each record, `finish` when the program ends. Replaces the
    effect of an earlier call.
    """
    console = form == "console" or (form == "auto" and stream.isatty())
    configured = logging.getLevelNamesMapping()[level.upper()]
    lines = LineOutput(stream, configured, count, is_console=console)
    outputs[:] = [one for one in outputs if not isinstance(one, LineOutput)] + [lines]
    logging.basicConfig(level=configured, handlers=[_LibraryHandler(lines, finish)], force=True)
    # At DEBUG, asyncio writes whole frames, bodies included, into the template itself.
    logging.getLogger("asyncio").setLevel(max(configured, logging.INFO))
    # These log errors that they also raise or return, in several lines for each connection.
    for name in ("aiormq", "aio_pika", "opentelemetry"):
        logging.getLogger(name).setLevel(
            logging.INFO if configured <= logging.DEBUG else logging.CRITICAL
        )
    for name in ("httpx", "httpcore", "uvicorn"):
        logging.getLogger(name).setLevel(max(configured, logging.WARNING))


def log_loop_faults(loop: asyncio.AbstractEventLoop) -> None:
    """Log exceptions that nothing awaited; asyncio's own handler would quote their values."""

    def handle(_loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
        error = context.get("exception")
        # After its first words, the message may contain the repr of a callback and its arguments.
        kind = " ".join(str(context.get("message")).split()[:3])
        # aiormq leaves the loss of a connection that is being opened in a future that it drops;
        # `connect` raises it, too.
        if kind == "Future exception was" and isinstance(error, ConnectionError):
            return
        log.error(
            "unhandled_error",
            what=kind,
            cause=error if isinstance(error, BaseException) else None,
        )

    loop.set_exception_handler(handle)


class _LibraryHandler(logging.Handler):
    """Logs records of libraries without their arguments."""

    def __init__(self, lines: LineOutput, finish: Callable[[], object]) -> None:
        super().__init__()
        self._lines = lines
        self._finish = finish

    def handle(self, record: logging.LogRecord) -> bool:
        """Log the template of a record, and the type and traceback locations of its exception."""
        # Some libraries pass an exception as the message; its text may quote a value.
        event = record.msg if isinstance(record.msg, str) else type(record.msg).__name__
        cause = record.exc_info[1] if record.exc_info else None
        self._lines.take(record.levelno, record.name, event, describe(cause))
        return True

    def close(self) -> None:
        """Write the waiting lines; `logging.shutdown` calls this when the program ends."""
        super().close()
        self._finish()


class LineWriter(io.TextIOBase):
    """A stream whose `write` never blocks: a thread writes the lines to a file descriptor.

    At most `MAX_LINES` wait; further lines, and lines that cannot be written, are dropped.
    `dropped` is called with their number, and a warning is logged once lines can be written again.
    Both happen in the thread that calls `write`, at its next line. Only one thread may call
    `write`.
    """

    def __init__(self, stream: TextIO, *, dropped: Callable[[int], object]) -> None:
        super().__init__()
        self._fd = stream.fileno()
        self._is_terminal = stream.isatty()
        self._on_dropped = dropped
        self._lines: deque[str] = deque()
        # Numbers of lines that the thread could not write, and whether its last write succeeded.
        self._unwritten: deque[int] = deque()
        self._is_writable = True
        # The rest of a line that was written in part, as on a full disk. It is written first once
        # there is room again; otherwise the next line would follow half of this one.
        self._torn = b""
        self._dropped = 0
        self._wanted = threading.Event()
        self._finishing = threading.Event()
        self._thread = threading.Thread(target=self._write_on, name="log", daemon=True)
        self._thread.start()

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str) -> int:
        """Queue one line, or drop it if the queue is full."""
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
        """Write the waiting lines, for at most `FINISH_SECONDS`."""
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
        """Write, and return the bytes that cannot be written."""
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
        self._on_dropped(lines)
