"""Accepts HTTP/1.1 connections from untrusted clients, with a limit on every time and count.

`connection` is the protocol of each connection; `occupancy` decides which connection is closed if
there are too many. This module has the socket, the check of all deadlines, and the shutdown.

Why our own: uvicorn waits without a time limit for a first request and for the rest of a header or
body, and accepts headers of any size (`tests/unit/http/test_uvicorn.py`). Its connection limit
counts idle sockets, so that strangers can lock the service out.
`tests/faults/test_webhook_strangers.py` runs such attacks against this server. uvicorn is slower,
too: in the scene `make bench SCENES=receivers` the shortest receiver on Starlette and uvicorn
serves less than half as many webhooks per CPU second (docs/benchmarks.md).

To use uvicorn, let `app` run it with the 27 lines of `tests/unit/http/asgi.py`, behind a proxy that
enforces the missing limits. Refusals and evictions are then not counted.
"""

import asyncio
import errno
import math
import select
import socket
from email.utils import formatdate
from typing import Final

from bridge.deadline import wait_at_most
from bridge.errors import BridgeError
from bridge.http.connection import ServerConnection
from bridge.http.listener_state import NO_HOOKS, Hooks, Limits, ListenerState, allow_open_files
from bridge.http.messages import Handler
from bridge.http.occupancy import Occupancy

# Connections that the kernel may queue before they are accepted; `somaxconn` may allow fewer.
BACKLOG: Final = 2048
# Interval of the check of all deadlines.
SWEEP_SECONDS: Final = 0.25
# After this many iterations of the event loop, asyncio's or uvloop's, every socket has been read.
READ_ITERATIONS: Final = 2
# How long to accept connections that the kernel has already established before the port closes.
ACCEPT_SECONDS: Final = 1.0
# For each error of binding a port: the setting at fault, the cause and the remedy.
_BIND_FAULTS: Final = {
    errno.EADDRINUSE: ("port", "it is in use; stop what listens there, or set another port"),
    errno.EACCES: ("port", "permission denied; set a port above 1023"),
}
_NO_ADDRESS: Final = ("host", "this computer has no such address; set one of its own, or 0.0.0.0")


class Listener:
    """One address that accepts connections from `run` to `stop`.

    `section` is the section of the settings with `host` and `port`, for error texts. Raises
    BridgeError if the address cannot be bound.
    """

    def __init__(
        self,
        handler: Handler,
        limits: Limits,
        *,
        section: str,
        host: str,
        port: int,
        drain_timeout_seconds: float = 5,
        hooks: Hooks = NO_HOOKS,
    ) -> None:
        self._shared = ListenerState(handler, limits, hooks)
        self.occupancy: Occupancy[ServerConnection] = Occupancy(limits)
        self._socket = bind(host, port, settings=f"{section}.")
        self.port: int = self._socket.getsockname()[1]
        self._drain_timeout_seconds = drain_timeout_seconds
        self._is_started = False
        # Whether the drain timed out before every request was answered.
        self.has_cut_off = False
        self._stopping = asyncio.Event()
        self._swept_at = math.inf

    @property
    def is_accepting(self) -> bool:
        return self._is_started and not self._stopping.is_set()

    async def run(self) -> None:
        """Serve until `stop`, then finish the requests that are being answered."""
        loop = asyncio.get_running_loop()
        self._swept_at = loop.time()
        await self._sweep(loop.time())
        server = await loop.create_server(
            lambda: ServerConnection(self._shared, self.occupancy, loop),
            sock=self._socket,
            backlog=BACKLOG,
        )
        self._is_started = True
        try:
            await self._sweep_until(self._stopping, math.inf)
            await self._drain(server)
        finally:
            self.stop()
            server.close()
            await self._cut_off()

    def stop(self) -> None:
        """Close the port; `run` returns when all requests are answered, or the drain times out.

        Afterwards, `has_cut_off` shows whether some requests were not answered.
        """
        self.occupancy.drain()
        self._stopping.set()

    async def _drain(self, server: asyncio.Server) -> None:
        """Close the port, and wait until every request is answered or the drain times out."""
        occupancy = self.occupancy
        await self._accept_queued()
        # No `await` before this: a connection made in between would be reset.
        server.close()
        await _read_all()
        for connection in list(occupancy.connections):
            connection.drain()
        occupancy.close()
        loop = asyncio.get_running_loop()
        await self._sweep_until(occupancy.is_over, loop.time() + self._drain_timeout_seconds)

    async def _cut_off(self) -> None:
        for connection in list(self.occupancy.connections):
            connection.abort()
        answers = list(self.occupancy.answers)
        self.has_cut_off = bool(answers)
        for answer in answers:
            answer.cancel()
        await asyncio.gather(*answers, return_exceptions=True)

    async def _accept_queued(self) -> None:
        """Accept the connections in the kernel's queue: closing the port would reset them."""
        loop = asyncio.get_running_loop()
        queue = select.poll()
        queue.register(self._socket, select.POLLIN)
        deadline = loop.time() + ACCEPT_SECONDS
        while queue.poll(0) and loop.time() < deadline:  # noqa: ASYNC110  the kernel's queue
            await asyncio.sleep(0)

    async def _sweep_until(self, event: asyncio.Event, deadline: float) -> None:
        loop = asyncio.get_running_loop()
        while not event.is_set() and (now := loop.time()) < deadline:
            await self._sweep(now)
            await wait_at_most(SWEEP_SECONDS, event)

    async def _sweep(self, now: float) -> None:
        """Check every deadline, which is cheaper than a timer for each connection."""
        self._shared.date_line = f"date: {formatdate(usegmt=True)}\r\n".encode()
        stalled = now - self._swept_at - SWEEP_SECONDS
        self._swept_at = now
        if stalled > SWEEP_SECONDS:
            # The process was stalled (a paused machine, no CPU time), so no client could meet its
            # deadline.
            for connection in self.occupancy.connections:
                connection.deadline += stalled
        late = [c for c in self.occupancy.connections if c.deadline <= now]
        if late:
            await _read_all()
        for connection in late:
            if connection.deadline <= now:
                connection.expire()


async def _read_all() -> None:
    """Read everything that has arrived: after a stall timers run before sockets are read."""
    for _ in range(READ_ITERATIONS):
        await asyncio.sleep(0)


def bind(host: str, port: int, *, settings: str) -> socket.socket:
    """Listen on a port; `::` listens on IPv4 too.

    Raises BridgeError with the remedy and the setting at fault: `host` or `port`, prefixed with
    `settings`.
    """
    try:
        listening = socket.create_server(
            (host, port),
            family=socket.AF_INET6 if ":" in host else socket.AF_INET,
            backlog=BACKLOG,
            dualstack_ipv6=host == "::" and socket.has_dualstack_ipv6(),
        )
    except (OSError, UnicodeError) as error:
        number = 0 if isinstance(error, UnicodeError) else error.errno or 0
        setting, why = _BIND_FAULTS.get(number, _NO_ADDRESS)
        raise BridgeError(f"{settings}{setting}: cannot listen on {host}:{port}: {why}") from None
    listening.setblocking(False)
    allow_open_files()
    return listening
