"""The sandbox's HTTP interface: the service's endpoint, and `/sandbox/...` to control it.

It answers like the real service, records all requests, and misbehaves on demand. It accepts a
repeated message again, so that duplicates show.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from bridge.config.presets import Preset
from bridge.errors import InvalidSignatureError
from bridge.sandbox.guard import OriginGuard
from bridge.sandbox.orders import (
    MAX_FAULTS,
    MAX_HANG_SECONDS,
    Fault,
    Faults,
    MessageQuery,
    PhoneReply,
    ReceiptOrder,
    WebhookOrder,
    validate,
)
from bridge.sandbox.page_api import PageApi
from bridge.sandbox.records import (
    AcceptedMessage,
    HttpExchange,
    ReceivedRequest,
    SentWebhook,
    cut_body,
    mask_logins,
)
from bridge.sandbox.server import NoResponse, close_unanswered, while_connected
from bridge.sandbox.service import JSON, ParsedRequest, PlayedService, ServiceAnswer
from bridge.sandbox.store import SandboxStore
from bridge.sandbox.webhooks import (
    Signer,
    WebhookContent,
    WebhookSender,
    write_receipt,
    write_reply,
)

MAX_BODY_BYTES: Final = 1024 * 1024
# The maximum number of requests that wait for a message at the same time.
MAX_WAITING: Final = 200
# Answers with these statuses have no body (RFC 9110, 6.4.1).
_BODILESS: Final = {204, 304}

INDEX: Final = """\
sms-bridge sandbox: a stand-in for the SMS service. Nothing is sent to anybody.

It imitates the preset %s, which accepts messages at
POST   %s

GET    /sandbox/messages   the accepted messages, oldest first; DELETE forgets them
           ?to=NUMBER      for one number, ?after=ID after one message; with
           &wait_seconds=30 the answer waits for the first message
GET    /sandbox/repeats    those of them that repeat an earlier one
GET    /sandbox/requests   all POSTs and their answers; DELETE forgets them
POST   /sandbox/replies    reply from a phone: {"from", "text", "repeat": 1, "forged": false}
POST   /sandbox/receipts   delivery receipt: {"id", "to", "delivery": "delivered" | "failed"
                           | "pending", "repeat": 1, "forged": false}
POST   /sandbox/events     any body, signed and sent to the bridge unchanged
PUT    /sandbox/faults     misbehave: [{"to", "count", "status", "answer", "headers",
                           "latency_seconds",
                           "mode": "answer" | "hang" | "cut" | "accept_then_cut"}]
POST   /sandbox/faults     add one fault; GET lists the remaining ones, DELETE ends them
"""


class SandboxApi:
    """The endpoints for programs; `PageApi` has those for the web page."""

    def __init__(
        self, service: PlayedService, store: SandboxStore, webhooks: WebhookSender | None
    ) -> None:
        self._service = service
        self._store = store
        self._webhooks = webhooks
        self._page = PageApi(service, store, webhook_url=webhooks.url if webhooks else None)
        self._waiting = 0

    def routes(self) -> list[Route]:
        return [
            Route(self._service.path, self.receive_message, methods=["POST"]),
            Route("/", self.show_index),
            Route("/sandbox/messages", self.list_messages),
            Route("/sandbox/messages", self.forget_messages, methods=["DELETE"]),
            Route("/sandbox/repeats", self.list_repeats),
            Route("/sandbox/requests", self.list_requests),
            Route("/sandbox/requests", self.forget_requests, methods=["DELETE"]),
            Route("/sandbox/requests/{number:int}", self.show_request),
            Route("/sandbox/faults", self.list_faults),
            Route("/sandbox/faults", self.set_faults, methods=["PUT"]),
            Route("/sandbox/faults", self.add_fault, methods=["POST"]),
            Route("/sandbox/faults", self.forget_faults, methods=["DELETE"]),
            Route("/sandbox/replies", self.send_reply, methods=["POST"]),
            Route("/sandbox/receipts", self.send_receipt, methods=["POST"]),
            Route("/sandbox/events", self.send_event, methods=["POST"]),
            *self._page.routes(),
        ]

    @asynccontextmanager
    async def lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        yield
        if self._webhooks is not None:
            await self._webhooks.close()

    async def show_index(self, request: Request) -> Response:
        """Show browsers the page, and programs a list of the endpoints."""
        if "text/html" in request.headers.get("accept", ""):
            return self._page.show()
        return PlainTextResponse(INDEX % (self._service.preset, self._service.path))

    async def receive_message(self, request: Request) -> Response:
        """Record a POST to the service and check it, then accept it or apply a fault."""
        received = ReceivedRequest(
            self._service.key_header(request.headers),
            HttpExchange(
                request.method,
                request.url.path + (f"?{request.url.query}" if request.url.query else ""),
                mask_logins(request.headers.items(), {self._service.login_header}),
            ),
        )
        self._store.add_request(received)
        try:
            return await self._answer(received, await request.body(), request)
        except HTTPException as error:
            received.status = error.status_code
            raise
        finally:
            received.ended_at = time.time()
            self._store.request_changed(received)

    async def _answer(self, received: ReceivedRequest, body: bytes, request: Request) -> Response:
        if received.exchange is not None:
            received.exchange.body = cut_body(body)
        parsed = self._service.read(request.headers, body)
        received.to, received.idempotency_key = parsed.to, parsed.idempotency_key
        if parsed.rejection is not None:
            received.detail = parsed.rejection.detail
            return _respond(parsed.rejection.answer, received)
        fault = self._store.take_fault(parsed.to or "")
        if fault is not None:
            return await self._misbehave(fault, parsed, received, request)
        return _respond(self._accept(parsed), received)

    def _accept(self, parsed: ParsedRequest, status: int | None = None) -> ServiceAnswer:
        duplicate = self._service.duplicate
        if duplicate is not None and self._store.holds_key(parsed.idempotency_key):
            return duplicate
        message = self._service.accept(parsed)
        self._store.add_message(message)
        answer = self._service.acceptance_of(message)
        return answer if status is None else answer._replace(status=status)

    async def _misbehave(
        self, fault: Fault, parsed: ParsedRequest, received: ReceivedRequest, request: Request
    ) -> Response:
        answer = self._service.fault_answer(fault.answer, fault.given_status)
        received.fault = fault.mode
        # Accepted before the delay: the message is sent even if the client gives up.
        if fault.mode == "accept_then_cut" or (fault.mode == "answer" and answer is None):
            answer = self._accept(parsed, fault.given_status)
        # Pages show the request during the delay.
        self._store.request_changed(received)
        delay = MAX_HANG_SECONDS if fault.mode == "hang" else fault.latency_seconds
        is_connected = await while_connected(request, asyncio.sleep(delay, result=True))
        if is_connected and fault.mode == "answer" and answer is not None:
            return _respond(answer, received, fault.headers)
        return await close_unanswered(request)

    async def list_messages(self, request: Request) -> Response:
        """Show the accepted messages, oldest first; wait for the first one if requested."""
        query = validate(MessageQuery, dict(request.query_params))
        number = -1
        if query.after is not None:
            after = self._store.newest(query.after, None)
            if after is None:
                raise HTTPException(404, "after: no message with this id is kept")
            number = after.number
        found = self._store.messages_after(number, query.to)
        if not found and query.wait_seconds:
            found = await self._wait(request, number, query.to, query.wait_seconds)
        return JSONResponse({"messages": [message.as_json() for message in found]})

    async def _wait(
        self, request: Request, number: int, to: str | None, seconds: float
    ) -> list[AcceptedMessage]:
        if self._waiting >= MAX_WAITING:
            raise HTTPException(
                503, f"{MAX_WAITING} requests are waiting already", {"Retry-After": "1"}
            )
        self._waiting += 1
        try:
            messages = self._store.wait_for_messages(number, to, seconds)
            return await while_connected(request, messages) or []
        finally:
            self._waiting -= 1

    async def forget_messages(self, _request: Request) -> Response:
        self._store.forget_messages()
        return Response(status_code=204)

    async def list_repeats(self, _request: Request) -> Response:
        return JSONResponse({"repeats": [message.as_json() for message in self._store.repeats()]})

    async def list_requests(self, _request: Request) -> Response:
        return JSONResponse({"requests": [one.as_json() for one in self._store.requests]})

    async def forget_requests(self, _request: Request) -> Response:
        self._store.forget_requests()
        return Response(status_code=204)

    async def show_request(self, request: Request) -> Response:
        received = self._store.find_request(request.path_params["number"])
        if received is None or received.exchange is None:
            raise HTTPException(404, "number: this request is not kept")
        return JSONResponse(received.as_json() | asdict(received.exchange))

    async def list_faults(self, _request: Request) -> Response:
        return JSONResponse({"faults": [self._describe(fault) for fault in self._store.faults]})

    def _describe(self, fault: Fault) -> dict[str, object]:
        answer = self._service.fault_answer(fault.answer, fault.given_status)
        status = fault.given_status or (answer or self._service.acceptance).status
        return fault.model_dump() | {"status": status}

    async def set_faults(self, request: Request) -> Response:
        self._store.set_faults(self._check(validate(Faults, await request.body()).root))
        return await self.list_faults(request)

    async def add_fault(self, request: Request) -> Response:
        if len(self._store.faults) >= MAX_FAULTS:
            raise HTTPException(409, f"There are {MAX_FAULTS} faults; end them first.")
        added = self._check([validate(Fault, await request.body())])
        self._store.set_faults([*self._store.faults, *added])
        return await self.list_faults(request)

    def _check(self, faults: list[Fault]) -> list[Fault]:
        for number, fault in enumerate(faults):
            try:
                self._service.fault_answer(fault.answer, fault.given_status)
            except ValueError as error:
                raise HTTPException(400, f"{number}.answer: {error}") from None
        return faults

    async def forget_faults(self, _request: Request) -> Response:
        self._store.set_faults([])
        return Response(status_code=204)

    async def send_reply(self, request: Request) -> Response:
        reply = validate(PhoneReply, await request.body())
        content = write_reply(self._service.preset, reply.sender, reply.text)
        webhook = SentWebhook("reply", cut_body(content.body), reply.sender, reply.text)
        return await self._send_webhook(request, content, reply, webhook)

    async def send_receipt(self, request: Request) -> Response:
        order = validate(ReceiptOrder, await request.body())
        message = self._store.newest(order.id, order.to)
        if message is None:
            raise HTTPException(404, "id, to: there is no such message")
        try:
            content = write_receipt(self._service.preset, message, order.delivery)
        except ValueError as error:
            raise HTTPException(400, f"delivery: {error}") from None
        webhook = SentWebhook(
            "receipt",
            cut_body(content.body),
            phone=message.to,
            about=message.id,
            delivery=order.delivery,
        )
        return await self._send_webhook(request, content, order, webhook)

    async def send_event(self, request: Request) -> Response:
        """Sign the body of the request and send it unchanged."""
        content = WebhookContent(await request.body(), JSON)
        webhook = SentWebhook("event", cut_body(content.body))
        return await self._send_webhook(request, content, WebhookOrder(), webhook)

    async def _send_webhook(
        self, request: Request, content: WebhookContent, order: WebhookOrder, webhook: SentWebhook
    ) -> Response:
        if self._webhooks is None:
            raise HTTPException(
                409, "Start the sandbox with --webhook-url and --webhook-secret to send webhooks."
            )
        webhook.repeat, webhook.forged = order.repeat, order.forged
        self._store.add_webhook(webhook)
        answers: list[int | None] | None = None
        try:
            sending = self._webhooks.send(content, repeat=order.repeat, forged=order.forged)
            answers = await while_connected(request, sending)
        except InvalidSignatureError:
            raise HTTPException(
                400,
                "text: the service's scheme cannot sign it unambiguously; use another text, or a "
                "--webhook-url without a query",
            ) from None
        finally:
            webhook.answers = answers or []
            self._store.webhook_changed(webhook)
        if answers is None:
            return await close_unanswered(request)
        return JSONResponse({"answers": answers})


def _respond(
    answer: ServiceAnswer, received: ReceivedRequest, headers: Mapping[str, str] | None = None
) -> Response:
    """Build the response, with the headers of a fault if given, and record it."""
    received.status = answer.status
    headers = {**answer.headers, **(headers or {})}
    if answer.body is None or answer.status in _BODILESS:
        response = Response(status_code=answer.status, headers=headers)
    else:
        response = JSONResponse(answer.body, answer.status, headers=headers)
    if received.exchange is not None:
        received.exchange.answer_headers = (*response.headers.items(),)
        received.exchange.answer_body = cut_body(bytes(response.body))
    return response


async def _error_response(_request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):  # for the type checker
        raise TypeError
    return JSONResponse({"error": error.detail}, error.status_code, headers=error.headers)


async def _no_response(_request: Request, _error: Exception) -> Response:
    return NoResponse()


def create_app(
    *,
    preset: Preset = "generic",
    key: str | None = None,
    signer: Signer | None = None,
    max_messages: int = 100_000,
    hosts: Collection[str] = (),
) -> Starlette:
    """Build the sandbox's application for `serve`, which can cut connections.

    `key` is the only accepted API key, None accepts any. Without a `signer` it sends no webhooks.
    `hosts` are its names besides addresses and names without a dot. `state` has the service and
    the store for tests.
    """
    store, service = SandboxStore(max_messages), PlayedService(preset, key)
    sandbox = SandboxApi(service, store, None if signer is None else WebhookSender(signer))
    guard = Middleware(OriginGuard, hosts=frozenset(hosts), service_type=service.content_type)
    app = Starlette(
        routes=sandbox.routes(),
        exception_handlers={HTTPException: _error_response, ClientDisconnect: _no_response},
        middleware=[guard],
        lifespan=sandbox.lifespan,
        max_body_size=MAX_BODY_BYTES,
    )
    app.state.service, app.state.store = service, store
    return app
