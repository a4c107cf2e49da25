"""The stand-in's webhooks: replies of phones and other events, signed and sent to the bridge."""

import asyncio
import json
import uuid
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Annotated, Final, Self

import httpx
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from bridge.errors import ConfigError

# Makes the headers of a correctly signed webhook out of its body.
Sign = Callable[[bytes], Sequence[tuple[str, str]]]

MAX_WEBHOOKS_IN_FLIGHT: Final = 50
# Longer than any receiver takes that answers within its own deadline.
WEBHOOK_TIMEOUT_SECONDS: Final = 30


class PhoneReply(BaseModel):
    """What a phone sends back, and how its webhook is to go wrong."""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)

    sender: Annotated[str, Field(alias="from", min_length=1, max_length=32)]
    text: str
    repeat: Annotated[int, Field(ge=1, le=1000)] = 1
    forged: bool = False

    def as_event(self) -> bytes:
        """Write the event of this reply, with an id of its own."""
        data = {"id": f"reply-{uuid.uuid4().hex}", "from": self.sender, "text": self.text}
        return json.dumps({"type": "message.received", "data": data}, ensure_ascii=False).encode()


PHONE_REPLY: Final = TypeAdapter(PhoneReply)


class WebhookSender:
    """Posts signed webhooks to one URL, while it is open."""

    def __init__(self, url: str, sign: Sign) -> None:
        self._url = url
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

    async def send(self, body: bytes, *, signed: bytes, repeat: int) -> list[int | None]:
        """Post a body `repeat` times, and return the statuses; None is no answer in time.

        The signature is the one of `signed`: of another body it is a forgery.
        """
        headers = [("Content-Type", "application/json"), *self._sign(signed)]
        return await asyncio.gather(*(self._post(body, headers) for _ in range(repeat)))

    async def _post(self, body: bytes, headers: Sequence[tuple[str, str]]) -> int | None:
        async with self._in_flight:
            try:
                # httpx limits each read; this limits the whole.
                async with asyncio.timeout(WEBHOOK_TIMEOUT_SECONDS):
                    response = await self._client.post(self._url, content=body, headers=[*headers])
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
