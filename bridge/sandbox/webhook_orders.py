"""Orders for webhooks: a reply from a phone, the receipt of a message, any event."""

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from bridge.errors import InvalidSignatureError
from bridge.sandbox.events import Event, Events
from bridge.sandbox.exchanges import shorten
from bridge.sandbox.memory import Memory
from bridge.sandbox.server import close_unanswered, while_connected
from bridge.sandbox.validation import validate
from bridge.sandbox.visitors import JSON
from bridge.sandbox.webhooks import PHONE_REPLY, RECEIPT_ORDER, Order, SentWebhook, WebhookSender


class WebhookOrders:
    """Sends webhooks on order, and answers with what the bridge answered."""

    def __init__(self, memory: Memory, events: Events, webhooks: WebhookSender | None) -> None:
        self._memory = memory
        self._events = events
        self._webhooks = webhooks

    def routes(self) -> list[Route]:
        """Return the endpoints that take orders."""
        return [
            Route("/sandbox/replies", self.send_reply, methods=["POST"]),
            Route("/sandbox/receipts", self.send_receipt, methods=["POST"]),
            Route("/sandbox/events", self.send_event, methods=["POST"]),
        ]

    async def send_reply(self, request: Request) -> Response:
        """Send the webhook of a message from a phone, repeated or forged if so asked."""
        reply = validate(PHONE_REPLY, await request.body())
        event = self._events.reply(reply.sender, reply.text)
        sent = SentWebhook("reply", shorten(event.body), phone=reply.sender, text=reply.text)
        return await self._send_webhooks(request, event, reply, sent)

    async def send_receipt(self, request: Request) -> Response:
        """Send the delivery receipt of a message that was taken."""
        order = validate(RECEIPT_ORDER, await request.body())
        message = self._memory.newest(order.id, order.to)
        if message is None:
            raise HTTPException(404, "id, to: no such message was taken")
        try:
            event = self._events.receipt(message, order.delivery)
        except ValueError as error:
            raise HTTPException(400, f"delivery: {error}") from None
        body = shorten(event.body)
        sent = SentWebhook(
            "receipt", body, phone=message.to, about=message.id, delivery=order.delivery
        )
        return await self._send_webhooks(request, event, order, sent)

    async def send_event(self, request: Request) -> Response:
        """Send the very bytes of the request as a signed webhook."""
        body = await request.body()
        sent = SentWebhook("event", shorten(body))
        return await self._send_webhooks(request, Event(body, JSON), Order(), sent)

    async def _send_webhooks(
        self, request: Request, event: Event, order: Order, sent: SentWebhook
    ) -> Response:
        if self._webhooks is None:
            raise HTTPException(
                409, "Start the sandbox with --webhook-url and --webhook-secret to send webhooks."
            )
        sent.repeat, sent.forged = order.repeat, order.forged
        answers: list[int | None] | None = None
        self._memory.send(sent)
        try:
            answers = await while_connected(request, self._webhooks.send(event, order))
        except InvalidSignatureError:
            raise HTTPException(
                400,
                "text: cannot be signed as the service does, for it could be read in two ways; "
                "take another one, or a --webhook-url without a query",
            ) from None
        finally:
            self._memory.answered(sent, answers or [])
        if answers is None:
            return await close_unanswered(request)
        return JSONResponse({"answers": answers})
