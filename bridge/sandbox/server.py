"""The stand-in SMS service: its API, its faults on demand, its signed webhooks.

It answers as the worker's contract with the real service says, keeps what it was sent, and
misbehaves when asked to. It never drops a repeated message: a duplicate has to show here.
"""

import asyncio
import json
import re
import secrets
import socket
import sys
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import FrameType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import httpx
import uvicorn
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    TypeAdapter,
    ValidationError,
)
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from bridge.errors import ConfigError
from bridge.http_server.listener import bind
from bridge.sandbox.visitors import find_refusal

# Makes the headers of a correctly signed webhook out of its body.
Sign = Callable[[bytes], Sequence[tuple[str, str]]]
T = TypeVar("T")

MAX_BODY_BYTES = 1024 * 1024
MAX_HANG_SECONDS = 600
MAX_WEBHOOKS_IN_FLIGHT = 50
WEBHOOK_TIMEOUT_SECONDS = 30
# What still runs this long after the signal to stop is a fault at work, and is cut.
STOP_GRACE_SECONDS = 0.3
# Longer than clients keep idle connections, so that none is closed under a new request.
KEEP_ALIVE_SECONDS = 120

INDEX = """\
sms-bridge sandbox: a stand-in for the SMS service. Nothing is sent to anybody.

POST   /v1/messages        send a message: {"to", "from", "text"}
GET    /sandbox/messages   what was accepted, oldest first; DELETE forgets it
GET    /sandbox/requests   every POST to /v1/messages and its answer; DELETE forgets it
POST   /sandbox/replies    reply from a phone: {"from", "text", "repeat": 1, "forged": false}
POST   /sandbox/events     any body, signed and sent to the bridge as it is
PUT    /sandbox/faults     misbehave: [{"to", "count", "status", "headers", "latency_seconds",
                           "mode": "answer" | "hang" | "cut" | "accept_then_cut"}]
GET    /sandbox/faults     the faults still to come; DELETE ends them
"""


class Message(NamedTuple):
    """One message that the service took."""

    id: str
    to: str
    sender: str
    text: str
    idempotency_key: str | None
    received_at: float

    def as_json(self) -> dict[str, Any]:
        """Return the message as the sandbox shows it."""
        return {
            "id": self.id,
            "to": self.to,
            "from": self.sender,
            "text": self.text,
            "idempotency_key": self.idempotency_key,
            "received_at": _format_time(self.received_at),
        }


@dataclass(slots=True)
class Attempt:
    """One POST that reached the service; `status` stays None while nothing was answered."""

    idempotency_key: str | None
    to: str | None = None
    status: int | None = None
    received_at: float = field(default_factory=time.time)

    def as_json(self) -> dict[str, Any]:
        """Return the attempt as the sandbox shows it."""
        return {
            "to": self.to,
            "idempotency_key": self.idempotency_key,
            "status": self.status,
            "received_at": _format_time(self.received_at),
        }


def _format_time(seconds: float) -> str:
    text = datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def _not_framing(name: str) -> str:
    if name.lower() in {"content-length", "transfer-encoding"}:
        raise ValueError("is the server's own and cannot be set")
    return name


HeaderName = Annotated[
    str, StringConstraints(pattern=r"^[!#$%&'*+.^_`|~0-9A-Za-z-]+$"), AfterValidator(_not_framing)
]
HeaderValue = Annotated[str, StringConstraints(pattern=r"^[\t\x20-\x7e\xa0-\xff]*$")]


class _Input(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)


class Fault(_Input):
    """How to misbehave, to whom (`to`, None is all) and how often (`count`, None is always)."""

    to: str | None = None
    count: Annotated[int, Field(ge=1)] | None = None
    status: Annotated[int, Field(ge=200, le=599)] = 202
    headers: Annotated[dict[HeaderName, HeaderValue], Field(max_length=50)] = {}
    latency_seconds: Annotated[float, Field(ge=0, le=MAX_HANG_SECONDS, allow_inf_nan=False)] = 0
    mode: Literal["answer", "hang", "cut", "accept_then_cut"] = "answer"

    @property
    def accepts(self) -> bool:
        """Say whether the message is kept in spite of the fault."""
        return self.mode == "accept_then_cut" or (self.mode == "answer" and self.status < 300)  # noqa: PLR2004

    def answer(self, message_id: str) -> Response:
        """Make the answer that the fault asks for."""
        if self.status in {204, 304}:  # these have no body
            return Response(status_code=self.status, headers=self.headers)
        body = {"id": message_id} if self.accepts else {"error": "a fault of the sandbox"}
        return JSONResponse(body, self.status, headers=self.headers)


class Reply(_Input):
    """What a phone sends back, and how its webhook is to go wrong."""

    sender: Annotated[str, Field(alias="from", min_length=1, max_length=32)]
    text: str
    repeat: Annotated[int, Field(ge=1, le=1000)] = 1
    forged: bool = False


_FAULTS: TypeAdapter[list[Fault]] = TypeAdapter(Annotated[list[Fault], Field(max_length=1000)])
_REPLY = TypeAdapter(Reply)

# Lone surrogates are refused because no UTF-8 can show them.
_FORMATS = {
    "to": (re.compile(r"\+[1-9][0-9]{3,14}"), "must be + and 4 to 15 digits, the first not 0"),
    "from": (
        re.compile(r"[^\x00-\x1f\x7f-\x9f\ud800-\udfff]{1,32}"),
        "must be 1 to 32 characters, none of them a control character",
    ),
    "text": (re.compile(r"[^\ud800-\udfff]+"), "must be valid Unicode and not empty"),
}


class Sandbox:
    """The service's memory and its endpoints."""

    def __init__(
        self, *, sign: Sign | None, webhook_url: str | None, key: str | None, max_messages: int
    ) -> None:
        self.messages: deque[Message] = deque(maxlen=max_messages)
        self.attempts: deque[Attempt] = deque(maxlen=max_messages)
        self.faults: list[Fault] = []
        self._key = key
        self._sign = sign
        self._webhook_url = webhook_url
        self._webhooks = asyncio.Semaphore(MAX_WEBHOOKS_IN_FLIGHT)
        self._client = httpx.AsyncClient(trust_env=False, timeout=WEBHOOK_TIMEOUT_SECONDS)

    @asynccontextmanager
    async def lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        """Hold the webhook client open while the application runs."""
        async with self._client:
            yield

    async def take_message(self, request: Request) -> Response:
        """Record one POST, check it, then take the message or do as a fault says."""
        attempt = Attempt(request.headers.get("idempotency-key"))
        self.attempts.append(attempt)
        try:
            message = await self._read_message(request, attempt)
        except HTTPException as refusal:
            attempt.status = refusal.status_code
            raise
        fault = self._take_fault(message.to) if self.faults else None
        if fault is not None:
            return await self._misbehave(fault, message, attempt, request)
        self.messages.append(message)
        attempt.status = 202
        return JSONResponse({"id": message.id}, 202)

    async def _read_message(self, request: Request, attempt: Attempt) -> Message:
        members = _parse_object(await request.body())
        attempt.to = None if members is None or _find_fault(members, "to") else members["to"]
        self._check_key(request.headers.get("authorization", ""))
        if members is None:
            raise HTTPException(400, "body: must be a JSON object in UTF-8")
        for name in _FORMATS:
            if fault := _find_fault(members, name):
                raise HTTPException(400, f"{name}: {fault}")
        return Message(
            f"sandbox-{uuid.uuid4().hex}",
            members["to"],
            members["from"],
            members["text"],
            attempt.idempotency_key,
            attempt.received_at,
        )

    def _check_key(self, authorization: str) -> None:
        scheme, _, given = authorization.partition(" ")
        known = self._key is None or secrets.compare_digest(given.encode(), self._key.encode())
        if scheme.lower() != "bearer" or not given or not known:
            headers = {"WWW-Authenticate": "Bearer"}
            raise HTTPException(401, "Authorization: must be Bearer and a known key", headers)

    def _take_fault(self, to: str) -> Fault | None:
        for fault in self.faults:
            if fault.to in {None, to}:
                self._count_down(fault)
                return fault
        return None

    def _count_down(self, fault: Fault) -> None:
        if fault.count is not None:
            fault.count -= 1
            if fault.count == 0:
                self.faults.remove(fault)

    async def _misbehave(
        self, fault: Fault, message: Message, attempt: Attempt, request: Request
    ) -> Response:
        # Kept before the wait: the client that gives up waiting was sent its message all the same.
        if fault.accepts:
            self.messages.append(message)
        if not await _while_connected(request, asyncio.sleep(fault.latency_seconds, result=True)):
            return await _close_unanswered(request)
        if fault.mode == "answer":
            attempt.status = fault.status
            return fault.answer(message.id)
        if fault.mode == "hang":
            await _while_connected(request, asyncio.sleep(MAX_HANG_SECONDS))
        return await _close_unanswered(request)

    async def list_messages(self, _request: Request) -> Response:
        """Show the messages taken, oldest first."""
        return JSONResponse({"messages": [message.as_json() for message in self.messages]})

    async def forget_messages(self, _request: Request) -> Response:
        """Forget the messages taken."""
        self.messages.clear()
        return Response(status_code=204)

    async def list_attempts(self, _request: Request) -> Response:
        """Show every POST to the API, oldest first."""
        return JSONResponse({"requests": [attempt.as_json() for attempt in self.attempts]})

    async def forget_attempts(self, _request: Request) -> Response:
        """Forget the POSTs to the API."""
        self.attempts.clear()
        return Response(status_code=204)

    async def list_faults(self, _request: Request) -> Response:
        """Show the faults still to come, with what is left of their counts."""
        return JSONResponse({"faults": [fault.model_dump() for fault in self.faults]})

    async def set_faults(self, request: Request) -> Response:
        """Put these faults in the place of all others."""
        self.faults = _validate(_FAULTS, await request.body())
        return await self.list_faults(request)

    async def forget_faults(self, _request: Request) -> Response:
        """Behave again."""
        self.faults.clear()
        return Response(status_code=204)

    async def send_reply(self, request: Request) -> Response:
        """Send the webhook of a message from a phone, repeated or forged if so asked."""
        reply = _validate(_REPLY, await request.body())
        data = {"id": f"reply-{uuid.uuid4().hex}", "from": reply.sender, "text": reply.text}
        event = {"type": "message.received", "data": data}
        body = json.dumps(event, ensure_ascii=False).encode()
        return await self._send_webhooks(
            request, body, signed=body + b"\n" if reply.forged else body, repeat=reply.repeat
        )

    async def send_event(self, request: Request) -> Response:
        """Send the very bytes of the request as a signed webhook."""
        body = await request.body()
        return await self._send_webhooks(request, body, signed=body, repeat=1)

    async def _send_webhooks(
        self, request: Request, body: bytes, *, signed: bytes, repeat: int
    ) -> Response:
        if self._webhook_url is None or self._sign is None:
            raise HTTPException(
                409, "Start the sandbox with --webhook-url and --webhook-secret to send webhooks."
            )
        headers = [("Content-Type", "application/json"), *self._sign(signed)]
        url = self._webhook_url
        posts = asyncio.gather(*(self._post(url, body, headers) for _ in range(repeat)))
        answers = await _while_connected(request, posts)
        if answers is None:
            return await _close_unanswered(request)
        return JSONResponse({"answers": answers})

    async def _post(self, url: str, body: bytes, headers: Sequence[tuple[str, str]]) -> int | None:
        async with self._webhooks:
            try:
                # httpx limits each read; this limits the whole.
                async with asyncio.timeout(WEBHOOK_TIMEOUT_SECONDS):
                    answer = await self._client.post(url, content=body, headers=[*headers])
            except (httpx.HTTPError, TimeoutError):
                return None
            return answer.status_code


def _parse_object(body: bytes) -> dict[str, Any] | None:
    try:
        members = json.loads(body.decode())
    except (ValueError, RecursionError):
        return None
    return members if isinstance(members, dict) else None


def _find_fault(members: dict[str, Any], name: str) -> str | None:
    pattern, rule = _FORMATS[name]
    if name not in members:
        return "is missing"
    value = members[name]
    if not isinstance(value, str):
        return "must be a string"
    return None if pattern.fullmatch(value) else rule


def _validate(adapter: TypeAdapter[T], body: bytes) -> T:
    try:
        return adapter.validate_json(body)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        path = ".".join(str(part) for part in first["loc"]) or "body"
        text = first["msg"].removeprefix("Value error, ")
        raise HTTPException(400, f"{path}: {text[:1].lower()}{text[1:]}") from None


async def _while_connected(request: Request, work: Awaitable[T]) -> T | None:
    """Await `work`, but give it up when the client is gone or cut off; then return None."""
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


async def _close_unanswered(request: Request) -> Response:
    request.state.close_connection()
    # uvicorn takes a missing answer for a bug of ours unless it has seen the connection end.
    await _until_gone(request)
    return _NoAnswer()


class _NoAnswer(Response):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send nothing at all."""


async def _show_index(_request: Request) -> Response:
    return PlainTextResponse(INDEX)


async def _refuse(_request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):  # only for the type checker
        raise TypeError
    return JSONResponse({"error": error.detail}, error.status_code, headers=error.headers)


async def _let_go(_request: Request, _error: Exception) -> Response:
    return _NoAnswer()


class _Visitors:
    """ASGI middleware: refuses what a page of another site has a browser send."""

    def __init__(self, app: ASGIApp, hosts: Collection[str]) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app: ASGIApp = self._app
        if scope["type"] == "http":
            has_body = scope["method"] in {"POST", "PUT"}
            refusal = find_refusal(Headers(scope=scope), hosts=self._hosts, has_body=has_body)
            if refusal is not None:
                status, text = refusal
                app = JSONResponse({"error": text}, status)
        await app(scope, receive, send)


def create_app(
    *,
    sign: Sign | None,
    webhook_url: str | None,
    key: str | None = None,
    max_messages: int = 100_000,
    hosts: Collection[str] = (),
) -> Starlette:
    """Make the sandbox; start it with `serve`, which lends it the means to cut connections.

    `hosts` are names by which it is asked for, besides addresses and names without a dot.
    Raises ConfigError when the webhook URL is none.
    """
    _check_url(webhook_url)
    sandbox = Sandbox(sign=sign, webhook_url=webhook_url, key=key, max_messages=max_messages)
    return Starlette(
        routes=[
            Route("/v1/messages", sandbox.take_message, methods=["POST"]),
            Route("/", _show_index),
            Route("/sandbox/messages", sandbox.list_messages),
            Route("/sandbox/messages", sandbox.forget_messages, methods=["DELETE"]),
            Route("/sandbox/requests", sandbox.list_attempts),
            Route("/sandbox/requests", sandbox.forget_attempts, methods=["DELETE"]),
            Route("/sandbox/faults", sandbox.list_faults),
            Route("/sandbox/faults", sandbox.set_faults, methods=["PUT"]),
            Route("/sandbox/faults", sandbox.forget_faults, methods=["DELETE"]),
            Route("/sandbox/replies", sandbox.send_reply, methods=["POST"]),
            Route("/sandbox/events", sandbox.send_event, methods=["POST"]),
        ],
        exception_handlers={HTTPException: _refuse, ClientDisconnect: _let_go},
        middleware=[Middleware(_Visitors, hosts=frozenset(hosts))],
        lifespan=sandbox.lifespan,
        max_body_size=MAX_BODY_BYTES,
    )


def _check_url(url: str | None) -> None:
    try:
        usable = url is None or (
            httpx.URL(url).scheme in {"http", "https"} and bool(httpx.URL(url).host)
        )
    except httpx.InvalidURL:
        usable = False
    if not usable:
        raise ConfigError("--webhook-url: must look like http://127.0.0.1:8080/webhooks")


def _announce(url: str) -> None:
    sys.stdout.write(f"sandbox: {url}\n")
    sys.stdout.flush()


async def serve(
    app: Starlette,
    *,
    host: str = "127.0.0.1",
    port: int = 8025,
    announce: Callable[[str], object] = _announce,
) -> None:
    """Serve until SIGTERM, SIGINT or cancellation; `announce` gets the URL once it accepts.

    It runs on the caller's event loop, so start that as uvloop. Raises BridgeError when the
    address cannot be used.
    """
    with bind(host, port, settings="--") as listener:
        # Connections inherit it. asyncio sets it only on sockets it made, and an answer in two
        # writes then waits 40 ms for the client's delayed ACK.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        server = _Server(app, lambda: announce(_format_url(host, listener)))
        running = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            await asyncio.shield(running)
        finally:
            server.should_exit = True
            await running


def _format_url(host: str, listener: socket.socket) -> str:
    # Nobody can open 0.0.0.0 in a browser everywhere.
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
    shown = f"[{shown}]" if ":" in shown else shown
    return f"http://{shown}:{listener.getsockname()[1]}"


class _Protocol(HttpToolsProtocol):
    """uvicorn's protocol, but the application may close the connection without an answer."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"]["close_connection"] = self.transport.close


class _Server(uvicorn.Server):
    """uvicorn's server, but it stops soon whatever hangs, and leaves logging alone."""

    def __init__(self, app: Starlette, on_started: Callable[[], object]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=_Protocol,
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
        # uvicorn's own also remembers the signal and raises it again after a clean stop.
        self.force_exit = self.should_exit
        self.should_exit = True
