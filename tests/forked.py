"""Runs sms-bridge in processes that are forked from one that has already imported its modules.

Imports take most of the CPU time of a command and of a role's start. A forked process has its own
environment and standard streams. It differs only in Python's own startup and shutdown: tests of
those start the program (`PROGRAM` in conftest.py).
"""

import asyncio
import importlib
import json
import logging
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import connection, forkserver
from pathlib import Path
from subprocess import CompletedProcess
from typing import NamedTuple, cast

import anyio

from bridge.sandbox.processes import Child

# Its `main` runs in the forked process.
PROGRAM = "bridge.__main__"

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        __name__,
        PROGRAM,
        "bridge.app",
        "bridge.cli.roles",
        "bridge.cli.sandbox",
        "bridge.webhook.endpoint",
        "bridge.admin.dead_letters",
        "bridge.admin.checks.run",
        "bridge.admin.drain",
        "bridge.admin.status",
        "bridge.sandbox.server",
        "bridge.sandbox.webhooks",
        "bridge.sandbox.api",
        "pytest",  # each process imports the main program of its parent again
    ]
)
# Starting a process and polling an exit code read from a shared pipe. If two threads did this at
# once, one would read nothing and report exit status 255.
_LOCK = threading.Lock()


def prepare() -> None:
    """Start the imports. The first fork waits for them."""
    forkserver.ensure_running()


class _Streams(NamedTuple):
    """Open files of this process, which stay open."""

    stdin: int
    stdout: int
    stderr: int


class _Forked:
    """The part of `subprocess.Popen` that `Child` uses."""

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
        # multiprocessing passes on a connection's file, which may be any open file.
        files = [connection.Connection(os.dup(stream)) for stream in streams]
        self._process = _CONTEXT.Process(
            target=_be_program, args=(program, args, dict(environ), files, folder, its)
        )
        with _LOCK:
            self._process.start()
        for file in (*files, its):
            file.close()
        with ours:
            ours.poll(None)  # until it leads a process group, or has ended
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
    """A command in its own process group, with its output in a file."""

    program = PROGRAM

    def _start(
        self, command: Sequence[str], environ: Mapping[str, str]
    ) -> "subprocess.Popen[bytes]":
        with Path(os.devnull).open("rb") as nothing, self.log.open("ab") as log:
            forked = _Forked(
                command,
                environ=environ,
                streams=_Streams(nothing.fileno(), log.fileno(), log.fileno()),
                folder=self.log.parent,
                program=self.program,
            )
        return cast("subprocess.Popen[bytes]", forked)


async def run_forked(
    args: Sequence[str], *, given: bytes, environ: Mapping[str, str], seconds: float | None = None
) -> CompletedProcess[bytes]:
    """Run a command to its end. Cancellation kills it.

    The timeout starts at the fork, after the imports.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in _Streams._fields]
        files[0].write(given)
        files[0].seek(0)
        streams = _Streams(*(file.fileno() for file in files))
        forked = _Forked(args, environ=environ, streams=streams, folder=Path.cwd())
        try:
            async with asyncio.timeout(seconds):
                await anyio.wait_readable(forked.sentinel)
        finally:
            forked.send_signal(signal.SIGKILL)
            code = forked.wait()
        shown = []
        for file in files[1:]:
            file.seek(0)
            shown.append(file.read())
        return CompletedProcess(args, code, *shown)


# Passes on arguments, environment, folder and streams, and ends with the command's exit status.
_CLIENT = f"""#!{sys.executable} -IS
import json, os, socket, sys
here = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
here.connect(os.path.join(os.path.dirname(sys.argv[0]), "forks"))
told = json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode()
socket.send_fds(here, [told], [0, 1, 2])
sys.exit(int(here.recv(100)))
"""
_MAX_TOLD_BYTES = 100_000


@contextmanager
def forked_commands(folder: Path) -> Iterator[Path]:
    """Make a folder for PATH with an `sms-bridge` that forks, for shell scripts.

    The forked process is killed when the process that the shell started has ended.
    """
    folder.mkdir()
    (folder / "sms-bridge").write_text(_CLIENT, encoding="utf-8")
    (folder / "sms-bridge").chmod(0o755)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(folder / "forks"))
        listener.listen()
        threading.Thread(target=_answer_all, args=(listener,), daemon=True).start()
        try:
            yield folder
        finally:
            listener.shutdown(socket.SHUT_RDWR)


def _answer_all(listener: socket.socket) -> None:
    while True:
        try:
            client, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_answer, args=(client,), daemon=True).start()


def _answer(client: socket.socket) -> None:
    with client:
        told, streams, _, _ = socket.recv_fds(client, _MAX_TOLD_BYTES, len(_Streams._fields))
        args, environ, folder = json.loads(told)
        forked = _Forked(args, environ=environ, streams=_Streams(*streams), folder=Path(folder))
        for stream in streams:
            os.close(stream)
        connection.wait([forked.sentinel, client])
        forked.send_signal(signal.SIGKILL)
        code = forked.wait()
        with suppress(BrokenPipeError):
            client.send(str(code if code >= 0 else 128 - code).encode())


def _be_program(
    program: str,
    args: Sequence[str],
    environ: Mapping[str, str],
    streams: Sequence[connection.Connection],
    folder: Path,
    parent: connection.Connection,
) -> None:
    """Run the main function of `bridge`, or of another program."""
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
        stream.close()
    parent.close()
    sys.stdin = os.fdopen(0, encoding="utf-8")  # multiprocessing closes it
    sys.argv = ["sms-bridge", *args]
    try:
        importlib.import_module(program).main()
    finally:
        # multiprocessing skips Python's exit handlers, so the log's writer thread might lose the
        # last lines.
        logging.shutdown()
