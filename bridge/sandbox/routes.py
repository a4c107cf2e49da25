"""The stand-in SMS service: its API, its faults on demand, its signed webhooks.

It answers as the worker's contract with the real service says, keeps what it was sent, and
misbehaves when asked to. It never drops a repeated message: a duplicate has to show here.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from bridge.config.presets import Preset
from bridge.sandbox.answers import Answer
from bridge.sandbox.events import Events
from bridge.sandbox.exchanges import Exchange, mask, shorten
from bridge.sandbox.faults import FAULT, FAULTS, MAX_FAULTS, MAX_HANG_SECONDS, Fault
from bridge.sandbox.memory import Memory
from bridge.sandbox.message_query import MESSAGE_QUERY, MessageQuery
from bridge.sandbox.messages import Attempt, Message
from bridge.sandbox.page import Page
from bridge.sandbox.server import NoResponse, close_unanswered, while_connected
from bridge.sandbox.service import Refusal, Service
from bridge.sandbox.validation import validate
from bridge.sandbox.visitors import JSON, find_refusal
from bridge.sandbox.webhook_orders import WebhookOrders
from bridge.sandbox.webhooks import Sign, WebhookSender, check_url

MAX_BODY_BYTES: Final = 1024 * 1024
# So many may wait at a time for a message.
MAX_WAITING: Final = 200
# Answers with these have no body (RFC 9110, 6.4.1).
_BODILESS: Final = {204, 304}

INDEX: Final = """\
sms-bridge sandbox: a stand-in for the SMS service. Nothing is sent to anybody.

It plays the preset %s, which takes messages at
POST   %s

GET    /sandbox/messages   what was accepted, oldest first; DELETE forgets it
           ?to=NUMBER      for one number, ?after=ID after one message; with
           &wait_seconds=30 the answer comes as soon as there is one
GET    /sandbox/repeats    of these, what repeats an earlier one
GET    /sandbox/requests   every such POST and its answer; DELETE forgets it
POST   /sandbox/replies    reply from a phone: {"from", "text", "repeat": 1, "forged": false}
POST   /sandbox/receipts   what became of a message: {"id", "to", "delivery": "delivered" | "failed"
                           | "pending", "repeat": 1, "forged": false}
POST   /sandbox/events     any body, signed and sent to the bridge as it is
PUT    /sandbox/faults     misbehave: [{"to", "count", "status", "answer", "headers",
                           "latency_seconds",
                           "mode": "answer" | "hang" | "cut" | "accept_then_cut"}]
POST   /sandbox/faults     one fault more; GET lists those still to come, DELETE ends them
"""


class Sandbox:
    """The service's endpoints."""

    def __init__(self, service: Service, memory: Memory, webhooks: WebhookSender | None) -> None:
        self._service = service
        self._memory = memory
        self._webhooks = webhooks
        self.orders = WebhookOrders(memory, Events(service.preset), webhooks)
        url = None if webhooks is None else webhooks.url
        self.page = Page(service, memory, webhook_url=url)
        self._waiting = 0

    @asynccontextmanager
    async def lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        """Hold the sender of webhooks open while the application runs."""
        async with AsyncExitStack() as stack:
            if self._webhooks is not None:
                await stack.enter_async_context(self._webhooks)
            yield

    async def show_index(self, request: Request) -> Response:
        """Show browsers the page, and tell programs what there is."""
        if "text/html" in request.headers.get("accept", ""):
            return self.page.show()
        return PlainTextResponse(INDEX % (self._service.preset, self._service.path))

    async def take_message(self, request: Request) -> Response:
        """Record one POST, check it, then take the message or do as a fault says."""
        attempt = Attempt(self._service.key_header(request.headers))
        attempt.exchange = _exchange(request, self._service.login_header)
        self._memory.record(attempt)
        try:
            body = await request.body()
            attempt.exchange.body = shorten(body)
            return await self._answer(attempt, body, request)
        except HTTPException as refusal:
            attempt.status = refusal.status_code
            raise
        finally:
            attempt.answered_at = time.time()
            self._memory.tell_of(attempt)

    async def _answer(self, attempt: Attempt, body: bytes, request: Request) -> Response:
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
        self._memory.keep(message)
        return self._service.accept(message, status=status)

    async def _misbehave(
        self, fault: Fault, message: Message, attempt: Attempt, request: Request
    ) -> Response:
        answer = self._service.ordered(fault)
        attempt.fault = fault.mode
        # Kept before the wait: the client that gives up waiting was sent its message all the same.
        if fault.mode == "accept_then_cut" or (fault.mode == "answer" and answer is None):
            answer = self._accept(message, fault.own_status)
        # What waits is shown while it does.
        self._memory.tell_of(attempt)
        if not await while_connected(request, asyncio.sleep(fault.latency_seconds, result=True)):
            return await close_unanswered(request)
        if fault.mode == "answer" and answer is not None:
            return _respond(answer, attempt, fault.headers)
        if fault.mode == "hang":
            await while_connected(request, asyncio.sleep(MAX_HANG_SECONDS))
        return await close_unanswered(request)

    async def list_messages(self, request: Request) -> Response:
        """Show the messages taken, oldest first; wait for the first of them if so asked."""
        query = validate(MESSAGE_QUERY, dict(request.query_params))
        number = -1
        if query.after is not None:
            after = self._memory.newest(query.after, None)
            if after is None:
                raise HTTPException(404, "after: no message that is kept has this id")
            number = after.number
        found = self._memory.since(number, query.to)
        if not found and query.wait_seconds:
            found = await self._wait(request, query, number)
        return JSONResponse({"messages": [message.as_json() for message in found]})

    async def _wait(self, request: Request, query: MessageQuery, number: int) -> list[Message]:
        if self._waiting >= MAX_WAITING:
            raise HTTPException(503, f"{MAX_WAITING} requests wait already", {"Retry-After": "1"})
        self._waiting += 1
        try:
            waiting = self._memory.wait(number, query.to, query.wait_seconds)
            return await while_connected(request, waiting) or []
        finally:
            self._waiting -= 1

    async def list_repeats(self, _request: Request) -> Response:
        """Show the messages that repeat an earlier one, oldest first."""
        return JSONResponse({"repeats": [message.as_json() for message in self._memory.repeats()]})

    async def forget_messages(self, _request: Request) -> Response:
        """Forget the messages taken."""
        self._memory.forget_messages()
        return Response(status_code=204)

    async def list_attempts(self, _request: Request) -> Response:
        """Show every POST to the API, oldest first."""
        return JSONResponse({"requests": [attempt.as_json() for attempt in self._memory.attempts]})

    async def forget_attempts(self, _request: Request) -> Response:
        """Forget the POSTs to the API."""
        self._memory.forget_attempts()
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
        self._memory.order(self._check(validate(FAULTS, await request.body())))
        return await self.list_faults(request)

    async def add_fault(self, request: Request) -> Response:
        """Put one more fault behind all others."""
        if len(self._memory.faults) >= MAX_FAULTS:
            raise HTTPException(409, f"There are {MAX_FAULTS} faults; end them first.")
        added = self._check([validate(FAULT, await request.body())])
        self._memory.order([*self._memory.faults, *added])
        return await self.list_faults(request)

    def _check(self, faults: list[Fault]) -> list[Fault]:
        for number, fault in enumerate(faults):
            try:
                self._service.ordered(fault)
            except ValueError as error:
                raise HTTPException(400, f"{number}.answer: {error}") from None
        return faults

    async def forget_faults(self, _request: Request) -> Response:
        """Behave again."""
        self._memory.order([])
        return Response(status_code=204)


def _respond(
    answer: Answer, attempt: Attempt, headers: Mapping[str, str] | None = None
) -> Response:
    """Give an answer, with more headers if so ordered, and record it."""
    attempt.status = answer.status
    headers = {**answer.headers, **(headers or {})}
    if answer.body is None or answer.status in _BODILESS:
        response = Response(status_code=answer.status, headers=headers)
    else:
        response = JSONResponse(answer.body, answer.status, headers=headers)
    if attempt.exchange is not None:
        attempt.exchange.answer_headers = (*response.headers.items(),)
        attempt.exchange.answer_body = shorten(bytes(response.body))
    return response


def _exchange(request: Request, login_header: str) -> Exchange:
    path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    headers = mask(request.headers.items(), logins={login_header})
    return Exchange(request.method, path, headers, body="")


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
            *sandbox.page.routes(),
            Route("/sandbox/messages", sandbox.list_messages),
            Route("/sandbox/messages", sandbox.forget_messages, methods=["DELETE"]),
            Route("/sandbox/repeats", sandbox.list_repeats),
            Route("/sandbox/requests", sandbox.list_attempts),
            Route("/sandbox/requests", sandbox.forget_attempts, methods=["DELETE"]),
            Route("/sandbox/faults", sandbox.list_faults),
            Route("/sandbox/faults", sandbox.set_faults, methods=["PUT"]),
            Route("/sandbox/faults", sandbox.add_fault, methods=["POST"]),
            Route("/sandbox/faults", sandbox.forget_faults, methods=["DELETE"]),
            *sandbox.orders.routes(),
        ],
        exception_handlers={HTTPException: _refuse, ClientDisconnect: _let_go},
        middleware=[Middleware(_Visitors, hosts=frozenset(hosts), service=service)],
        lifespan=sandbox.lifespan,
        max_body_size=MAX_BODY_BYTES,
    )
    app.state.memory = memory
    return app
