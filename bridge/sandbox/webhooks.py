"""The stand-in's webhooks: what is to be sent, and sending it, signed, to the bridge."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Annotated, Any, Final, Literal, Protocol, Self

import httpx
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from bridge.errors import ConfigError
from bridge.sandbox.events import Event
from bridge.sandbox.messages import format_time
from bridge.webhook.receipts import Delivery
from bridge.webhook.signatures.verify import Signed

MAX_WEBHOOKS_IN_FLIGHT: Final = 50
# Longer than any receiver takes that answers within its own deadline.
WEBHOOK_TIMEOUT_SECONDS: Final = 30


class Sign(Protocol):
    """Signs the body of a webhook, correctly or as a forger would; `Signer` does."""

    def __call__(self, body: bytes, *, content_type: str, forged: bool = False) -> Signed:
        """Make the headers and the query; raises InvalidSignatureError where that cannot be."""


class Order(BaseModel):
    """How often a webhook is to be sent, and whether it is to be forged."""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)

    repeat: Annotated[int, Field(ge=1, le=1000)] = 1
    forged: bool = False


class PhoneReply(Order):
    """What a phone sends back."""

    sender: Annotated[str, Field(alias="from", min_length=1, max_length=32)]
    text: str


class ReceiptOrder(Order):
    """What became of a message: the newest with this id, for this number, or of all."""

    id: str | None = None
    to: str | None = None
    delivery: Delivery = "delivered"


@dataclass(slots=True)
class SentWebhook:
    """A webhook that was ordered; `answers` is None while it is on its way.

    `phone` is the number whose conversation it belongs to, `about` the id of the message that a
    receipt is about.
    """

    kind: Literal["reply", "receipt", "event"]
    body: str
    phone: str | None = None
    text: str | None = None
    about: str | None = None
    delivery: Delivery | None = None
    repeat: int = 1
    forged: bool = False
    answers: list[int | None] | None = None
    number: int = 0
    sent_at: float = field(default_factory=time.time)

    def as_json(self) -> dict[str, Any]:
        """Return the webhook as the page shows it."""
        return asdict(self) | {"sent_at": format_time(self.sent_at)}


PHONE_REPLY: Final = TypeAdapter(PhoneReply)
RECEIPT_ORDER: Final = TypeAdapter(ReceiptOrder)


class WebhookSender:
    """Posts signed webhooks to one URL, while it is open."""

    def __init__(self, url: str, sign: Sign) -> None:
        self.url = url
        self._url = httpx.URL(url)
        self._sign = sign
        self._in_flight = asyncio.Semaphore(MAX_WEBHOOKS_IN_FLIGHT)
        self._client = httpx.AsyncClient(trust_env=False, timeout=WEBHOOK_TIMEOUT_SECONDS)

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._client.__aexit__(kind, error, trace)

    async def send(self, event: Event, order: Order) -> list[int | None]:
        """Post an event as often as ordered, and return the statuses; None is no answer in time.

        Raises InvalidSignatureError when the service's scheme cannot sign it.
        """
        kind = event.content_type
        signed = self._sign(event.body, content_type=kind, forged=order.forged)
        url = self._url.copy_with(query=signed.query or None)
        headers = [("Content-Type", kind), *signed.headers]
        posts = (self._post(url, event.body, headers) for _ in range(order.repeat))
        return await asyncio.gather(*posts)

    async def _post(
        self, url: httpx.URL, body: bytes, headers: Sequence[tuple[str, str]]
    ) -> int | None:
        async with self._in_flight:
            try:
                # httpx limits each read; this limits the whole.
                async with asyncio.timeout(WEBHOOK_TIMEOUT_SECONDS):
                    response = await self._client.post(url, content=body, headers=[*headers])
            except (httpx.HTTPError, TimeoutError):
                return None
            return response.status_code


def check_url(url: str) -> None:
    """Raise ConfigError when webhooks cannot be sent to this URL."""
    try:
        parsed = httpx.URL(url)
        is_usable = parsed.scheme in {"http", "https"} and bool(parsed.host)
    except httpx.InvalidURL:
        is_usable = False
    if not is_usable:
        raise ConfigError("--webhook-url: must look like http://127.0.0.1:8080/webhooks")
