"""Erlang's name service, by which nodes and `rabbitmqctl` find each other."""

import os
import shutil
from pathlib import Path

from bridge.errors import BrokerError
from bridge.sandbox.processes import Child, Guard, accepts, free_ports, wait_until

# How long starting may take before it counts as failed.
START_SECONDS = 30


class Epmd:
    """Erlang's name service for the nodes that share `folder` as home, and so a cookie.

    A node would start one that outlives it, so we start one that we can end.
    """

    def __init__(self, folder: Path, *, guard: Guard) -> None:
        self.folder = folder
        self.port = free_ports(1)[0]
        self._guard = guard
        self._child: Child | None = None

    def start(self) -> None:
        """Start, unless it runs, and return when it takes connections."""
        if self._child is not None:
            return
        self._child = child = Child(
            [_find_epmd(), "-port", str(self.port), "-address", "127.0.0.1"],
            guard=self._guard,
            log=self.folder / "epmd.log",
            environ=os.environ,
        )
        if not wait_until(
            lambda: accepts(self.port),
            seconds=START_SECONDS,
            running=lambda: child.exit_code is None,
        ):
            raise BrokerError(f"epmd did not start; the end of its log:\n{child.tail()}")

    def close(self) -> None:
        """End it at once."""
        if self._child is not None:
            self._child.kill()


def _find_epmd() -> str:
    erlang = shutil.which("erl")
    beside = str(Path(erlang).resolve().parent) if erlang else ""
    found = shutil.which("epmd") or shutil.which("epmd", path=beside)
    if found is None:
        raise BrokerError("Erlang's `epmd` is not on PATH; install Erlang in full.")
    return found
