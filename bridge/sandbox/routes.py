"""The stand-in SMS service: its API, its faults on demand, its signed webhooks.

It answers as the worker's contract with the real service says, keeps what it was sent, and
misbehaves when asked to. It never drops a repeated message: a duplicate has to show here.
"""

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping
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

from bridge.config.presets import Preset
from bridge.errors import InvalidSignatureError
from bridge.sandbox.answers import Answer
from bridge.sandbox.events import Event, Events
from bridge.sandbox.faults import FAULTS, MAX_HANG_SECONDS, Fault
from bridge.sandbox.memory import Memory
from bridge.sandbox.messages import Attempt, Message
from bridge.sandbox.server import NoResponse, close_unanswered, while_connected
from bridge.sandbox.service import Refusal, Service
from bridge.sandbox.visitors import JSON, find_refusal
from bridge.sandbox.webhooks import (
    PHONE_REPLY,
    RECEIPT_ORDER,
    Order,
    Sign,
    WebhookSender,
    check_url,
)

T = TypeVar("T")

MAX_BODY_BYTES: Final = 1024 * 1024
# Answers with these have no body (RFC 9110, 6.4.1).
_BODILESS: Final = {204, 304}

INDEX: Final = """\
sms-bridge sandbox: a stand-in for the SMS service. Nothing is sent to anybody.

It plays the preset %s, which takes messages at
POST   %s

GET    /sandbox/messages   what was accepted, oldest first; DELETE forgets it
GET    /sandbox/repeats    of these, what repeats an earlier one
GET    /sandbox/requests   every such POST and its answer; DELETE forgets it
POST   /sandbox/replies    reply from a phone: {"from", "text", "repeat": 1, "forged": false}
POST   /sandbox/receipts   what became of a message: {"id", "to", "delivery": "delivered" | "failed"
                           | "pending", "repeat": 1, "forged": false}
POST   /sandbox/events     any body, signed and sent to the bridge as it is
PUT    /sandbox/faults     misbehave: [{"to", "count", "status", "answer", "headers",
                           "latency_seconds",
                           "mode": "answer" | "hang" | "cut" | "accept_then_cut"}]
GET    /sandbox/faults     the faults still to come; DELETE ends them
"""


class Sandbox:
    """The service's endpoints."""

    def __init__(self, service: Service, memory: Memory, webhooks: WebhookSender | None) -> None:
        self._service = service
        self._events = Events(service.preset)
        self._memory = memory
        self._webhooks = webhooks

    @asynccontextmanager
    async def lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        """Hold the sender of webhooks open while the application runs."""
        async with AsyncExitStack() as stack:
            if self._webhooks is not None:
                await stack.enter_async_context(self._webhooks)
            yield

    async def show_index(self, _request: Request) -> Response:
        """Say what there is."""
        return PlainTextResponse(INDEX % (self._service.preset, self._service.path))

    async def take_message(self, request: Request) -> Response:
        """Record one POST, check it, then take the message or do as a fault says."""
        attempt = Attempt(self._service.key_header(request.headers))
        self._memory.attempts.append(attempt)
        try:
            body = await request.body()
        except HTTPException as refusal:
            attempt.status = refusal.status_code
            raise
        attempt.to, attempt.idempotency_key, outcome = self._service.read(
            request.headers, body, api_key=self._memory.key, received_at=attempt.received_at
        )
        if isinstance(outcome, Refusal):
            attempt.detail = outcome.detail
            return _respond(outcome.answer, attempt)
        fault = self._memory.take_fault(outcome.to) if self._memory.faults else None
        if fault is not None:
            return await self._misbehave(fault, outcome, attempt, request)
        return _respond(self._accept(outcome), attempt)

    def _accept(self, message: Message, status: int | None = None) -> Answer:
        duplicate = self._service.duplicate
        if duplicate is not None and self._memory.holds_key(message.idempotency_key):
            return duplicate
        self._memory.messages.append(message)
        return self._service.accept(message, status=status)

    async def _misbehave(
        self, fault: Fault, message: Message, attempt: Attempt, request: Request
    ) -> Response:
        answer = self._service.ordered(fault)
        # Kept before the wait: the client that gives up waiting was sent its message all the same.
        if fault.mode == "accept_then_cut" or (fault.mode == "answer" and answer is None):
            answer = self._accept(message, fault.own_status)
        if not await while_connected(request, asyncio.sleep(fault.latency_seconds, result=True)):
            return await close_unanswered(request)
        if fault.mode == "answer" and answer is not None:
            return _respond(answer, attempt, fault.headers)
        if fault.mode == "hang":
            await while_connected(request, asyncio.sleep(MAX_HANG_SECONDS))
        return await close_unanswered(request)

    async def list_messages(self, _request: Request) -> Response:
        """Show the messages taken, oldest first."""
        return JSONResponse({"messages": [message.as_json() for message in self._memory.messages]})

    async def list_repeats(self, _request: Request) -> Response:
        """Show the messages that repeat an earlier one, oldest first."""
        return JSONResponse({"repeats": [message.as_json() for message in self._memory.repeats()]})

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
        faults = [
            fault.model_dump() | {"status": self._service.status_of(fault)}
            for fault in self._memory.faults
        ]
        return JSONResponse({"faults": faults})

    async def set_faults(self, request: Request) -> Response:
        """Put these faults in the place of all others."""
        faults = _validate(FAULTS, await request.body())
        for number, fault in enumerate(faults):
            try:
                self._service.ordered(fault)
            except ValueError as error:
                raise HTTPException(400, f"{number}.answer: {error}") from None
        self._memory.faults = faults
        return await self.list_faults(request)

    async def forget_faults(self, _request: Request) -> Response:
        """Behave again."""
        self._memory.faults.clear()
        return Response(status_code=204)

    async def send_reply(self, request: Request) -> Response:
        """Send the webhook of a message from a phone, repeated or forged if so asked."""
        reply = _validate(PHONE_REPLY, await request.body())
        return await self._send_webhooks(
            request, self._events.reply(reply.sender, reply.text), reply
        )

    async def send_receipt(self, request: Request) -> Response:
        """Send the delivery receipt of a message that was taken."""
        order = _validate(RECEIPT_ORDER, await request.body())
        message = self._memory.newest(order.id, order.to)
        if message is None:
            raise HTTPException(404, "id, to: no such message was taken")
        try:
            event = self._events.receipt(message, order.delivery)
        except ValueError as error:
            raise HTTPException(400, f"delivery: {error}") from None
        return await self._send_webhooks(request, event, order)

    async def send_event(self, request: Request) -> Response:
        """Send the very bytes of the request as a signed webhook."""
        return await self._send_webhooks(request, Event(await request.body(), JSON), Order())

    async def _send_webhooks(self, request: Request, event: Event, order: Order) -> Response:
        if self._webhooks is None:
            raise HTTPException(
                409, "Start the sandbox with --webhook-url and --webhook-secret to send webhooks."
            )
        try:
            answers = await while_connected(request, self._webhooks.send(event, order))
        except InvalidSignatureError:
            raise HTTPException(
                400,
                "text: cannot be signed as the service does, for it could be read in two ways; "
                "take another one, or a --webhook-url without a query",
            ) from None
        if answers is None:
            return await close_unanswered(request)
        return JSONResponse({"answers": answers})


def _respond(
    answer: Answer, attempt: Attempt, headers: Mapping[str, str] | None = None
) -> Response:
    """Give an answer, with more headers if so ordered, and record it."""
    attempt.status = answer.status
    headers = {**answer.headers, **(headers or {})}
    if answer.body is None or answer.status in _BODILESS:
        return Response(status_code=answer.status, headers=headers)
    return JSONResponse(answer.body, answer.status, headers=headers)


def _validate(adapter: TypeAdapter[T], body: bytes) -> T:
    try:
        return adapter.validate_json(body)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        path = ".".join(str(part) for part in first["loc"]) or "body"
        text = first["msg"].removeprefix("Value error, ")
        raise HTTPException(400, f"{path}: {text[:1].lower()}{text[1:]}") from None


async def _refuse(_request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):  # only for the type checker
        raise TypeError
    return JSONResponse({"error": error.detail}, error.status_code, headers=error.headers)


async def _let_go(_request: Request, _error: Exception) -> Response:
    return NoResponse()


class _Visitors:
    """ASGI middleware: refuses what a page of another site has a browser send."""

    def __init__(self, app: ASGIApp, hosts: Collection[str], service: Service) -> None:
        self._app = app
        self._hosts = hosts
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app: ASGIApp = self._app
        if scope["type"] == "http":
            # What is no order is for the service.
            is_order = scope["path"].startswith("/sandbox/")
            kind = JSON if is_order else self._service.content_type
            body_type = kind if scope["method"] in {"POST", "PUT"} else None
            refusal = find_refusal(Headers(scope=scope), hosts=self._hosts, body_type=body_type)
            if refusal is not None:
                status, text = refusal
                app = JSONResponse({"error": text}, status)
        await app(scope, receive, send)


def create_app(
    *,
    sign: Sign | None,
    webhook_url: str | None,
    key: str | None = None,
    preset: Preset = "generic",
    max_messages: int = 100_000,
    hosts: Collection[str] = (),
) -> Starlette:
    """Make the sandbox; start it with `serve`, which lends it the means to cut connections.

    `key` is the only API key that it takes; without it, it takes any. `hosts` are names by which
    it is asked for, besides addresses and names without a dot. What it is sent stands in
    `state.memory`. Raises ConfigError when the webhook URL is none.
    """
    webhooks = None
    if webhook_url is not None:
        check_url(webhook_url)
        webhooks = None if sign is None else WebhookSender(webhook_url, sign)
    memory = Memory(max_messages, key=key)
    service = Service(preset)
    sandbox = Sandbox(service, memory, webhooks)
    app = Starlette(
        routes=[
            Route(service.path, sandbox.take_message, methods=["POST"]),
            Route("/", sandbox.show_index),
            Route("/sandbox/messages", sandbox.list_messages),
            Route("/sandbox/messages", sandbox.forget_messages, methods=["DELETE"]),
            Route("/sandbox/repeats", sandbox.list_repeats),
            Route("/sandbox/requests", sandbox.list_attempts),
            Route("/sandbox/requests", sandbox.forget_attempts, methods=["DELETE"]),
            Route("/sandbox/faults", sandbox.list_faults),
            Route("/sandbox/faults", sandbox.set_faults, methods=["PUT"]),
            Route("/sandbox/faults", sandbox.forget_faults, methods=["DELETE"]),
            Route("/sandbox/replies", sandbox.send_reply, methods=["POST"]),
            Route("/sandbox/receipts", sandbox.send_receipt, methods=["POST"]),
            Route("/sandbox/events", sandbox.send_event, methods=["POST"]),
        ],
        exception_handlers={HTTPException: _refuse, ClientDisconnect: _let_go},
        middleware=[Middleware(_Visitors, hosts=frozenset(hosts), service=service)],
        lifespan=sandbox.lifespan,
        max_body_size=MAX_BODY_BYTES,
    )
    app.state.memory = memory
    return app
