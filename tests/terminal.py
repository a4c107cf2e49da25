"""Runs a program in a pseudo-terminal, and types like a user."""

import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

SECONDS = 30.0
AGAIN_SECONDS = 5.0
# `getpass` needs a controlling terminal, which the program must acquire.
_TAKE = (
    "import fcntl, os, sys, termios;"
    "fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)


class Typist:
    """Reads the screen of a program, and types."""

    def __init__(self, process: "subprocess.Popen[bytes]", handle: int) -> None:
        self._process = process
        self._handle = handle
        self.shown = ""
        # Raw output, including control sequences.
        self.raw = ""
        self._read_until = 0

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + SECONDS
        while text not in self.shown[self._read_until :]:
            assert time.monotonic() < deadline, f"never shown: {text!r} in {self.shown!r}"
            assert self._read(deadline), f"ended without {text!r}: {self.shown!r}"
        self._read_until = self.shown.index(text, self._read_until) + len(text)

    def type(self, prompt: str, keys: str) -> None:
        self.wait_for(prompt)
        self.press(keys)

    def press(self, keys: str) -> None:
        """Type without waiting for output."""
        os.write(self._handle, keys.encode())

    def signal(self, number: int) -> None:
        """Send the program a signal."""
        self._process.send_signal(number)

    def insist(self, act: Callable[[], None]) -> int:
        """Do this until the program ends, and return its exit code.

        A signal that comes just before Python waits for input is seen only with the next.
        """
        for _ in range(int(SECONDS / AGAIN_SECONDS)):
            act()
            deadline = time.monotonic() + AGAIN_SECONDS
            while self._is_ready(deadline):
                if not self._read(deadline):
                    return self._process.wait(SECONDS)
        raise AssertionError(f"does not end: {self.shown!r}")

    def exit_code(self) -> int:
        """Wait for the program's end, and return its exit code."""
        deadline = time.monotonic() + SECONDS
        while self._read(deadline):
            pass
        return self._process.wait(SECONDS)

    def _read(self, deadline: float) -> bool:
        """Read available output. Return False at the program's end."""
        assert self._is_ready(deadline), f"silent for {SECONDS:g} s: {self.shown!r}"
        try:
            data = os.read(self._handle, 65536)
        except OSError:
            # Linux reports a closed other side with this error.
            return False
        self.raw += data.decode(errors="replace")
        text = re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", data.decode(errors="replace"))
        self.shown += text.replace("\r", "")
        return bool(data)

    def _is_ready(self, deadline: float) -> bool:
        """Wait for output until the deadline."""
        ready, _, _ = select.select([self._handle], [], [], max(0, deadline - time.monotonic()))
        return bool(ready)


@contextmanager
def typing(program: Sequence[str], *, folder: Path, environ: Mapping[str, str]) -> Iterator[Typist]:
    """Start a program in a terminal. Kill it if it is still running at the end of the block."""
    ours, its = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", _TAKE, *program],
        stdin=its,
        stdout=its,
        stderr=its,
        cwd=folder,
        env=dict(environ),
        start_new_session=True,
    )
    os.close(its)
    try:
        yield Typist(process, ours)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
