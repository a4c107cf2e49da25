"""The program in processes that are forked from one that has imported all that it imports.

Imports are most of what a command computes, and what a role computes to start. What is
forked has a process, an environment and standard streams of its own, as what a shell starts. It
differs in what Python does before the first line of ours runs, and after the last one: what a test
says of that is said of a program that is started (`PROGRAM` of the tests' conftest.py).
"""

import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from multiprocessing import connection, forkserver
from pathlib import Path
from subprocess import CompletedProcess
from typing import NamedTuple, cast

import anyio

from bridge.sandbox.processes import Child

# The module with the `main` of what is forked.
PROGRAM = "bridge.__main__"

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        __name__,
        PROGRAM,
        "bridge.app",
        "bridge.operators.dead_letters.queue",
        "bridge.operators.doctor",
        "bridge.operators.draining.drain",
        "bridge.operators.status.look",
        "bridge.sandbox.server",
        "bridge.sandbox.routes",
        "pytest",  # the main program of us, which each process imports once more
    ]
)
# To start one process, and to ask for the exit code of one, reads what all have to say: of two
# threads that do it at once one reads nothing, which is taken for an end with 255.
_LOCK = threading.Lock()


def prepare() -> None:
    """Have the imports begin, for which whoever forks first has to wait."""
    forkserver.ensure_running()


class _Streams(NamedTuple):
    stdin: str
    stdout: str
    stderr: str


class _Forked:
    """Has of a `subprocess.Popen` what a `Child` uses."""

    def __init__(
        self,
        args: Sequence[str],
        *,
        environ: Mapping[str, str],
        streams: _Streams,
        folder: Path,
        program: str = PROGRAM,
    ) -> None:
        read_by_python = {k: v for k, v in os.environ.items() if k.startswith("PYTHON")}
        assert read_by_python == {k: v for k, v in environ.items() if k.startswith("PYTHON")}, (
            "Python reads these when it starts: start the program, do not fork it."
        )
        ours, its = _CONTEXT.Pipe(duplex=False)
        self._process = _CONTEXT.Process(
            target=_be_program, args=(program, args, dict(environ), streams, folder, its)
        )
        with _LOCK:
            self._process.start()
        its.close()
        with ours:
            ours.poll(None)  # until it leads a group, or is gone
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.sentinel = self._process.sentinel

    def poll(self) -> int | None:
        with _LOCK:
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        if not connection.wait([self.sentinel], timeout):
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0)
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class ForkedChild(Child):
    """A command of the program in a process group of its own, its output in a file."""

    program = PROGRAM

    def _start(
        self, command: Sequence[str], environ: Mapping[str, str]
    ) -> "subprocess.Popen[bytes]":
        log = str(self.log)
        streams = _Streams(os.devnull, log, log)
        forked = _Forked(
            command,
            environ=environ,
            streams=streams,
            folder=self.log.parent,
            program=self.program,
        )
        return cast("subprocess.Popen[bytes]", forked)


async def run_forked(
    args: Sequence[str], *, given: bytes, environ: Mapping[str, str]
) -> CompletedProcess[bytes]:
    """Run a command to its end; it is killed when this is cancelled."""
    with ExitStack() as stack:
        files = [stack.enter_context(tempfile.NamedTemporaryFile()) for _ in _Streams._fields]
        files[0].write(given)
        files[0].flush()
        streams = _Streams(*(file.name for file in files))
        forked = _Forked(args, environ=environ, streams=streams, folder=Path.cwd())
        try:
            await anyio.wait_readable(forked.sentinel)
        finally:
            forked.send_signal(signal.SIGKILL)
            code = forked.wait()
        return CompletedProcess(args, code, files[1].read(), files[2].read())


def _be_program(
    program: str,
    args: Sequence[str],
    environ: Mapping[str, str],
    streams: _Streams,
    folder: Path,
    parent: connection.Connection,
) -> None:
    """Become what `python -m bridge`, or another program, is once it has imported."""
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    for number, path in enumerate(streams):
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)
    parent.close()
    sys.stdin = os.fdopen(0, encoding="utf-8")  # a process of multiprocessing has none
    sys.argv = ["sms-bridge", *args]
    importlib.import_module(program).main()
