"""Serve the sandbox with a uvicorn that can leave requests unanswered and stops quickly."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import Final, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from bridge.http.listener import bind

T = TypeVar("T")

# A request that is still open this long after the signal to stop hangs, and is cut.
STOP_GRACE_SECONDS: Final = 0.3
# Longer than clients keep idle connections, so that none is closed while a request arrives.
KEEP_ALIVE_SECONDS: Final = 120


async def serve(
    app: Starlette, *, host: str = "127.0.0.1", port: int, announce: Callable[[str], object]
) -> None:
    """Serve until SIGTERM, SIGINT or cancellation; call `announce` with the URL when it listens.

    Raises BridgeError if the address cannot be used.
    """
    with bind(host, port, settings="--") as listening:
        # Inherited by connections; asyncio sets it only on sockets that it has created. Without it,
        # an answer in two writes waits 40 ms for the client's delayed ACK.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        server = _SandboxServer(app, lambda: announce(_format_url(host, listening)))
        running = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            await asyncio.shield(running)
        finally:
            server.should_exit = True
            await running


def _format_url(host: str, listening: socket.socket) -> str:
    # Not every browser opens 0.0.0.0.
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
    shown = f"[{shown}]" if ":" in shown else shown
    return f"http://{shown}:{listening.getsockname()[1]}"


class _CuttableProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with connections that the application can close unanswered."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"]["close_connection"] = self.transport.close


class _SandboxServer(uvicorn.Server):
    """uvicorn's server without logging, which stops quickly in spite of hanging requests."""

    def __init__(self, app: Starlette, on_started: Callable[[], object]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=_CuttableProtocol,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=1,
            )
        )
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        cut = asyncio.get_running_loop().call_later(STOP_GRACE_SECONDS, self._cut_all)
        try:
            await super().shutdown(sockets)
        finally:
            cut.cancel()

    def _cut_all(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.close()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        # uvicorn would raise the signal again after a clean stop.
        self.force_exit = self.should_exit
        self.should_exit = True


async def while_connected(request: Request, work: Awaitable[T]) -> T | None:
    """Return the result of `work`, or cancel it and return None if the client disconnects."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_until_gone(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def close_unanswered(request: Request) -> Response:
    request.state.close_connection()
    # uvicorn logs a missing answer as an error unless it knows that the connection has ended.
    await _until_gone(request)
    return NoResponse()


class NoResponse(Response):
    """The response of an endpoint that sends nothing."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send nothing."""
