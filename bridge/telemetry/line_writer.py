"""A stream that never makes its writer wait, even when its reader has stopped.

A write to a full pipe would stop the event loop, and with it everything.
"""

import io
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from typing import Final, TextIO

from bridge.telemetry.logs import Log

log = Log(__name__)

MAX_LINES: Final = 10_000
# The thread collects lines for this long, and writes them together.
GATHER_SECONDS: Final = 0.02
FINISH_SECONDS: Final = 1.0


class LineWriter(io.TextIOBase):
    """A stream whose `write` never blocks: a thread hands the lines on to a file descriptor.

    At most `MAX_LINES` wait; lines beyond that, and lines that cannot be written, are dropped.
    `dropped` is called with their number, and a warning follows once lines can be written again;
    both happen in the thread that calls `write`, with its next line. Only one thread may write.
    """

    def __init__(self, stream: TextIO, *, dropped: Callable[[int], object]) -> None:
        super().__init__()
        self._fd = stream.fileno()
        self._is_terminal = stream.isatty()
        self._on_dropped = dropped
        self._lines: deque[str] = deque()
        # The numbers of lines that the thread could not write, and whether its last write
        # succeeded.
        self._unwritten: deque[int] = deque()
        # The rest of a line that was only partly written, as on a full disk. It is written first
        # once there is room again, or the next line would follow half of this one.
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
        """Write what waits, for at most `FINISH_SECONDS`."""
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
        self._on_dropped(lines)
