"""The stand-in SMS service: its API, its faults on demand, its signed webhooks.

It answers as the worker's contract with the real service says, keeps what it was sent, and
misbehaves when asked to. It never drops a repeated message: a duplicate has to show here.
"""

import asyncio
import secrets
import uuid
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final, TypeVar

from pydantic import TypeAdapter, ValidationError
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from bridge.sandbox.faults import FAULTS, MAX_HANG_SECONDS, Fault
from bridge.sandbox.memory import Memory
from bridge.sandbox.messages import Attempt, Message, find_fault, read_members, read_number
from bridge.sandbox.server import NoResponse, close_unanswered, while_connected
from bridge.sandbox.visitors import find_refusal
from bridge.sandbox.webhooks import PHONE_REPLY, Sign, WebhookSender, check_url

T = TypeVar("T")

MAX_BODY_BYTES: Final = 1024 * 1024

INDEX: Final = """\
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


class Sandbox:
    """The service's endpoints."""

    def __init__(self, memory: Memory, webhooks: WebhookSender | None) -> None:
        self._memory = memory
        self._webhooks = webhooks

    @asynccontextmanager
    async def lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        """Hold the sender of webhooks open while the application runs."""
        async with AsyncExitStack() as stack:
            if self._webhooks is not None:
                await stack.enter_async_context(self._webhooks)
            yield

    async def take_message(self, request: Request) -> Response:
        """Record one POST, check it, then take the message or do as a fault says."""
        attempt = Attempt(request.headers.get("idempotency-key"))
        self._memory.attempts.append(attempt)
        try:
            message = await self._read_message(request, attempt)
        except HTTPException as refusal:
            attempt.status = refusal.status_code
            raise
        fault = self._memory.take_fault(message.to) if self._memory.faults else None
        if fault is not None:
            return await self._misbehave(fault, message, attempt, request)
        self._memory.messages.append(message)
        attempt.status = 202
        return JSONResponse({"id": message.id}, 202)

    async def _read_message(self, request: Request, attempt: Attempt) -> Message:
        members = read_members(await request.body())
        attempt.to = read_number(members)
        self._check_key(request.headers.get("authorization", ""))
        if members is None:
            raise HTTPException(400, "body: must be a JSON object in UTF-8")
        if wrong := find_fault(members):
            raise HTTPException(400, wrong)
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
        key = self._memory.key
        known = key is None or secrets.compare_digest(given.encode(), key.encode())
        if scheme.lower() != "bearer" or not given or not known:
            headers = {"WWW-Authenticate": "Bearer"}
            raise HTTPException(401, "Authorization: must be Bearer and a known key", headers)

    async def _misbehave(
        self, fault: Fault, message: Message, attempt: Attempt, request: Request
    ) -> Response:
        # Kept before the wait: the client that gives up waiting was sent its message all the same.
        if fault.accepts:
            self._memory.messages.append(message)
        if not await while_connected(request, asyncio.sleep(fault.latency_seconds, result=True)):
            return await close_unanswered(request)
        if fault.mode == "answer":
            attempt.status = fault.status
            return _response_of(fault, message.id)
        if fault.mode == "hang":
            await while_connected(request, asyncio.sleep(MAX_HANG_SECONDS))
        return await close_unanswered(request)

    async def list_messages(self, _request: Request) -> Response:
        """Show the messages taken, oldest first."""
        return JSONResponse({"messages": [message.as_json() for message in self._memory.messages]})

    async def forget_messages(self, _request: Request) -> Response:
        """Forget the messages taken."""
        self._memory.messages.clear()
        return Response(status_code=204)

    async def list_attempts(self, _request: Request) -> Response:
        """Show every POST to the API, oldest first."""
        return JSONResponse({"requests": [attempt.as_json() for attempt in self._memory.attempts]})

    async def forget_attempts(self, _request: Request) -> Response:
        """Forget the POSTs to the API."""
        self._memory.attempts.clear()
        return Response(status_code=204)

    async def list_faults(self, _request: Request) -> Response:
        """Show the faults still to come, with what is left of their counts."""
        return JSONResponse({"faults": [fault.model_dump() for fault in self._memory.faults]})

    async def set_faults(self, request: Request) -> Response:
        """Put these faults in the place of all others."""
        self._memory.faults = _validate(FAULTS, await request.body())
        return await self.list_faults(request)

    async def forget_faults(self, _request: Request) -> Response:
        """Behave again."""
        self._memory.faults.clear()
        return Response(status_code=204)

    async def send_reply(self, request: Request) -> Response:
        """Send the webhook of a message from a phone, repeated or forged if so asked."""
        reply = _validate(PHONE_REPLY, await request.body())
        body = reply.as_event()
        signed = body + b"\n" if reply.forged else body
        return await self._send_webhooks(request, body, signed=signed, repeat=reply.repeat)

    async def send_event(self, request: Request) -> Response:
        """Send the very bytes of the request as a signed webhook."""
        body = await request.body()
        return await self._send_webhooks(request, body, signed=body, repeat=1)

    async def _send_webhooks(
        self, request: Request, body: bytes, *, signed: bytes, repeat: int
    ) -> Response:
        if self._webhooks is None:
            raise HTTPException(
                409, "Start the sandbox with --webhook-url and --webhook-secret to send webhooks."
            )
        posts = self._webhooks.send(body, signed=signed, repeat=repeat)
        answers = await while_connected(request, posts)
        if answers is None:
            return await close_unanswered(request)
        return JSONResponse({"answers": answers})


def _response_of(fault: Fault, message_id: str) -> Response:
    """Make the response that a fault asks for."""
    if fault.status in {204, 304}:  # these have no body
        return Response(status_code=fault.status, headers=fault.headers)
    body = {"id": message_id} if fault.accepts else {"error": "a fault of the sandbox"}
    return JSONResponse(body, fault.status, headers=fault.headers)


def _validate(adapter: TypeAdapter[T], body: bytes) -> T:
    try:
        return adapter.validate_json(body)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        path = ".".join(str(part) for part in first["loc"]) or "body"
        text = first["msg"].removeprefix("Value error, ")
        raise HTTPException(400, f"{path}: {text[:1].lower()}{text[1:]}") from None


async def _show_index(_request: Request) -> Response:
    return PlainTextResponse(INDEX)


async def _refuse(_request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):  # only for the type checker
        raise TypeError
    return JSONResponse({"error": error.detail}, error.status_code, headers=error.headers)


async def _let_go(_request: Request, _error: Exception) -> Response:
    return NoResponse()


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
    What it is sent stands in `state.memory`. Raises ConfigError when the webhook URL is none.
    """
    webhooks = None
    if webhook_url is not None:
        check_url(webhook_url)
        webhooks = None if sign is None else WebhookSender(webhook_url, sign)
    memory = Memory(max_messages, key=key)
    sandbox = Sandbox(memory, webhooks)
    app = Starlette(
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
    app.state.memory = memory
    return app
