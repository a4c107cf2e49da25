"""A port that serves an ASGI application: uvicorn, with its signals, limits and texts made ours."""

import asyncio
import contextlib
import errno
import socket
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import uvicorn
from starlette.responses import Response
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from bridge.errors import BridgeError
from bridge.logs import dump_json

BACKLOG = 2048


def problem(status: int, title: str, **headers: str) -> Response:
    """Make an error answer after RFC 9457 that says nothing about what was compared with what."""
    return Response(
        _problem_body(status, title),
        status_code=status,
        headers={name.replace("_", "-"): value for name, value in headers.items()},
        media_type="application/problem+json",
    )


def _problem_body(status: int, title: str) -> bytes:
    return dump_json({"title": title, "status": status}).encode()


class Listener:
    """One address that accepts connections from `start` to `stop`."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        setting: str,
        host: str,
        port: int,
        idle_timeout_seconds: float = 15,
        drain_timeout_seconds: float = 5,
    ) -> None:
        self._socket = _bind(setting, host, port)
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            app,
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=max(1, round(idle_timeout_seconds)),
            timeout_graceful_shutdown=max(1, round(drain_timeout_seconds)),
        )
        self._server = _Server(config)

    @property
    def is_accepting(self) -> bool:
        """Whether new connections are taken."""
        return self._server.started and not self._server.should_exit

    async def run(self) -> None:
        """Serve until `stop`, then finish the requests that are being answered."""
        await self._server.serve(sockets=[self._socket])

    def stop(self) -> None:
        """Close the port; `run` returns when the open requests are answered or time is up."""
        self._server.should_exit = True


def _bind(setting: str, host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        why = errno.errorcode.get(error.errno or 0, type(error).__name__)
        raise BridgeError(f"{setting}: cannot listen on {host}:{port} ({why})") from None
    # Inherited by what is accepted; without it answers wait for the client's delayed ack.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listening.setblocking(False)
    return listening


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone: uvicorn would raise them again after its own shutdown."""
        yield


class _Protocol(HttpToolsProtocol):
    """uvicorn's protocol, with a deadline for the header of each request.

    uvicorn closes a connection that idles after an answer, but never one that is silent from the
    start, or sends half a header (uvicorn issue 157).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401  uvicorn's own
        super().__init__(*args, **kwargs)
        self._header_deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock: a connection must bring a header in time."""
        super().connection_made(transport)
        self._await_header()

    def data_received(self, data: bytes) -> None:
        """Keep a clock running while no request is in progress, whatever drips in."""
        super().data_received(data)
        idle = self.cycle is None or self.cycle.response_complete
        if idle and self._header_deadline is None and self.timeout_keep_alive_task is None:
            self._await_header()

    def on_message_begin(self) -> None:
        """Start the clock for a further request on the connection."""
        super().on_message_begin()
        self._await_header()

    def on_headers_complete(self) -> None:
        """Stop the clock, and refuse a body with two lengths (RFC 9112, 6.3)."""
        self._header_came()
        names = [name for name, _ in self.headers]
        if b"transfer-encoding" in names and b"content-length" in names:
            raise ValueError("both Transfer-Encoding and Content-Length")
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._header_came()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002  uvicorn's own is no problem
        """Answer malformed HTTP, and close."""
        body = _problem_body(HTTPStatus.BAD_REQUEST, "malformed HTTP request")
        head = [
            STATUS_LINE[HTTPStatus.BAD_REQUEST],
            b"content-type: application/problem+json\r\n",
            b"content-length: %d\r\n" % len(body),
            b"connection: close\r\n\r\n",
        ]
        self.transport.write(b"".join((*head, body)))
        self.transport.close()

    def _await_header(self) -> None:
        self._header_came()
        self._header_deadline = self.loop.call_later(self.timeout_keep_alive, self.transport.close)

    def _header_came(self) -> None:
        if self._header_deadline is not None:
            self._header_deadline.cancel()
            self._header_deadline = None
