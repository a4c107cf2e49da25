"""Child processes that end with this process, each in its own process group."""

import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from bridge.errors import BridgeError

# The interval in which `wait_until` polls.
POLL_SECONDS = 0.05
# The deadline of a connection to a port on this computer.
CONNECT_SECONDS = 3

# Below the range for outgoing connections of every system. With a port of that range, a client that
# retries while the server is down may get the same port for its own end, connect to itself, and so
# take the server's port.
_PORTS = range(20_000, 32_000)

# Reads lines with all process groups to guard, and kills those of the last line when the pipe is
# closed, which happens when this process ends in any way.
_GUARD = 'while read -r line; do groups=$line; done; [ -z "$groups" ] || kill -s KILL -- $groups'


class Guard:
    """A shell that kills the guarded process groups when this process ends, even by SIGKILL."""

    def __init__(self) -> None:
        self._groups: set[int] = set()
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def add(self, group: int) -> None:
        self._groups.add(group)
        self._tell()

    def remove(self, group: int) -> None:
        """Stop guarding a group that has ended, before its id is used again."""
        self._groups.discard(group)
        self._tell()

    def close(self) -> None:
        """Kill the groups that are still guarded."""
        if self._shell.stdin is not None:
            self._shell.stdin.close()
        self._shell.wait()

    def _tell(self) -> None:
        line = " ".join(f"-{group}" for group in sorted(self._groups))
        if self._shell.stdin is not None:
            self._shell.stdin.write(f"{line}\n".encode())
            self._shell.stdin.flush()


@contextmanager
def guarded() -> Iterator[Guard]:
    """Provide a guard, and at exit kill the groups that it still guards."""
    guard = Guard()
    try:
        yield guard
    finally:
        guard.close()


class Child:
    """A program in its own process group, with its output in a file."""

    def __init__(
        self, command: Sequence[str], *, guard: Guard, log: Path, environ: Mapping[str, str]
    ) -> None:
        self.name = log.stem
        self.log = log
        self._guard = guard
        self._is_asked = self._is_ended = False
        self._process = self._start(command, environ)
        guard.add(self.pid)

    def _start(
        self, command: Sequence[str], environ: Mapping[str, str]
    ) -> "subprocess.Popen[bytes]":
        with self.log.open("ab") as output:
            return subprocess.Popen(
                command,
                env=environ,
                cwd=self.log.parent,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The id of the process and of its group."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code, or None while it runs."""
        return self._process.poll()

    def signal(self, number: int) -> None:
        """Send a signal to the process, if it still runs."""
        self._process.send_signal(number)

    def signal_group(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def ask_to_end(self) -> None:
        """Send SIGTERM, but only once: a second one makes a role exit at once."""
        if not self._is_asked:
            self._is_asked = True
            self.signal(signal.SIGTERM)

    def end(self, *, grace_seconds: float) -> None:
        """End the process and its children: SIGTERM, then SIGKILL after the grace period."""
        self.ask_to_end()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_seconds)
        self.kill()

    def kill(self) -> None:
        if self._is_ended:
            return  # The id may belong to another process by now.
        self.signal_group(signal.SIGKILL)
        self._process.wait()
        self._guard.remove(self.pid)
        self._is_ended = True

    def tail(self, lines: int = 15) -> str:
        text = self.log.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-lines:])


def wait_until(
    ready: Callable[[], bool], *, seconds: float, running: Callable[[], bool] = lambda: True
) -> bool:
    """Poll until `ready`; return False after a timeout, or if no longer `running`."""
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline or not running():
            return False
        time.sleep(POLL_SECONDS)
    return True


def accepts(port: int) -> bool:
    """Whether a server listens on a port of this computer."""
    try:
        with socket.create_connection(("127.0.0.1", port), CONNECT_SECONDS):
            return True
    except OSError:
        return False


def free_ports(count: int) -> list[int]:
    """Find unused ports on 127.0.0.1 that outgoing connections never get."""
    ports: list[int] = []
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            ports.append(port)
        if len(ports) == count:
            return ports
    raise BridgeError("No free port is left on 127.0.0.1.")
