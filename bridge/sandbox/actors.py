"""Who plays in the demo: the publisher, the phones, the subscriber, and who looks on."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Final, TypeVar

import httpx

from bridge.amqp.client import AbstractChannel, AbstractIncomingMessage, DeliveryMode, Message
from bridge.amqp.connecting import close_quietly
from bridge.errors import BridgeError
from bridge.sandbox.scoreboard import IN_PROGRESS
from bridge.sandbox.stage import Stage, queues_of
from bridge.sandbox.traffic import MARKER, Request, Seen, Webhook
from bridge.telemetry.scrape import Scrape
from bridge.topology.declarations import dead_queue

# Spread over some seconds, so that there is something to watch and latencies are no backlog's.
SPREAD_SECONDS: Final = 10
# In how many slices everything is sent over that time.
_SLICES: Final = 100
_MAX_WEBHOOKS_IN_FLIGHT: Final = 20
# For one request to the sandbox or an admin port.
_HTTP_TIMEOUT_SECONDS: Final = 10
# Until the first webhook gets through.
_PREPARE_SECONDS: Final = 20
_POLL_SECONDS: Final = 0.2
_FIRST_EVENT: Final = b'{"type": "demo.ready"}'

T = TypeVar("T")


class Actors:
    """Plays both directions against the stage and keeps what it saw."""

    def __init__(
        self, stage: Stage, channel: AbstractChannel, client: httpx.AsyncClient, seen: Seen
    ) -> None:
        self._stage = stage
        self._channel = channel
        self._client = client
        self._settings = stage.settings
        self.seen = seen

    async def prepare(self, faults: Sequence[dict[str, object]]) -> None:
        """Order the faults, listen to events and dead letters, and see that webhooks get through.

        The receiver is ready before its connection to the broker is, and answers 503 till then.
        """
        answer = await self._client.put(f"{self._stage.sandbox_url}/sandbox/faults", json=faults)
        answer.raise_for_status()
        deadline = time.monotonic() + _PREPARE_SECONDS
        while (answers := await self._order("/sandbox/events", _FIRST_EVENT)) != [200]:
            if time.monotonic() > deadline:
                raise BridgeError(f"webhooks are answered {answers} for {_PREPARE_SECONDS} s")
            await asyncio.sleep(_POLL_SECONDS)
        await self._subscribe()
        dead = await self._channel.get_queue(dead_queue(self._settings.worker.queue))
        # Never acked: when the channel closes, the dead letters are back in their queue.
        await dead.consume(self._on_dead_letter)

    async def publish(self, requests: Sequence[Request]) -> None:
        """Publish the send requests, persistent and confirmed."""
        async for some in _in_slices(requests):
            await asyncio.gather(*(self._publish(request) for request in some))

    async def send_webhooks(self, webhooks: Sequence[Webhook]) -> None:
        """Have the sandbox send the webhooks, and keep the bridge's answers."""
        limit = asyncio.Semaphore(_MAX_WEBHOOKS_IN_FLIGHT)
        async for some in _in_slices(webhooks):
            await asyncio.gather(*(self._send_webhook(webhook, limit) for webhook in some))

    async def look(self) -> None:
        """Read what the SMS service has accepted by now."""
        answer = await self._client.get(f"{self._stage.sandbox_url}/sandbox/messages")
        messages = answer.raise_for_status().json()["messages"]
        self.seen.accepted = [str(message["idempotency_key"]) for message in messages]
        self.seen.accepted_at = [
            datetime.fromisoformat(message["received_at"]).timestamp() for message in messages
        ]

    async def scrape(self, role: str) -> Scrape:
        """Read a role's metrics."""
        answer = await self._client.get(f"{self._stage.admin_urls[role]}/metrics")
        return Scrape(answer.raise_for_status().text)

    async def wait_until_idle(self) -> None:
        """Wait until nothing is in progress, queued or waiting for a retry."""
        while True:
            if not await self.remains():
                return
            await asyncio.sleep(_POLL_SECONDS)

    async def remains(self) -> list[str]:
        """Say in lines which queue still holds messages, and what is in progress."""
        held = int((await self.scrape("worker")).total(IN_PROGRESS))
        lines = [f"{held} messages are still in progress"] if held else []
        main, *ladder, _dead, _inbound = queues_of(self._settings)
        for name in (main, *ladder):
            queue = await self._channel.declare_queue(name, passive=True)
            if count := queue.declaration_result.message_count:
                lines.append(f"{count} messages are still in {name}")
        return lines

    async def forget_faults(self) -> None:
        """Have the sandbox behave from now on."""
        await self._client.delete(f"{self._stage.sandbox_url}/sandbox/faults")

    async def _publish(self, request: Request) -> None:
        message = Message(
            request.body,
            message_id=request.message_id,
            timestamp=time.time(),
            content_type="application/json",
            headers=request.headers,
            delivery_mode=DeliveryMode.PERSISTENT,
        )
        await self._channel.default_exchange.publish(message, self._settings.worker.queue)
        self.seen.published += 1

    async def _send_webhook(self, webhook: Webhook, limit: asyncio.Semaphore) -> None:
        answers: list[int | None] = []
        async with limit:
            for _ in range(webhook.orders):
                answers += await self._order(webhook.path, webhook.body)
        self.seen.answers[webhook.marker] = answers

    async def _order(self, path: str, body: bytes) -> list[int | None]:
        answer = await self._client.post(self._stage.sandbox_url + path, content=body)
        answers: list[int | None] = answer.raise_for_status().json()["answers"]
        return answers

    async def _subscribe(self) -> None:
        exchange = await self._channel.get_exchange(self._settings.webhook.exchange)
        queue = await self._channel.declare_queue(exclusive=True)
        await queue.bind(exchange, "#")
        await queue.consume(self._on_event, no_ack=True)

    async def _on_event(self, message: AbstractIncomingMessage) -> None:
        found = re.search(MARKER, message.body.decode(errors="replace"))
        self.seen.events.append((found[0] if found else "unknown", message.routing_key or ""))

    async def _on_dead_letter(self, message: AbstractIncomingMessage) -> None:
        reason = message.headers.get("sms-bridge-reason")
        self.seen.dead.append((message.message_id or "unknown", str(reason)))


@asynccontextmanager
async def bring_on(stage: Stage, seen: Seen) -> AsyncIterator[Actors]:
    """Lend actors that are connected to everything."""
    connection = await stage.connect("demo")
    try:
        async with (
            httpx.AsyncClient(trust_env=False, timeout=_HTTP_TIMEOUT_SECONDS) as client,
            connection.channel(on_return_raises=True) as channel,
        ):
            yield Actors(stage, channel, client, seen)
    finally:
        await close_quietly(connection)


async def _in_slices(items: Sequence[T]) -> AsyncIterator[Sequence[T]]:
    """Hand out the items evenly over the time that is meant for them."""
    start = time.monotonic()
    size = -(-len(items) // _SLICES)
    for begin in range(0, len(items), size):
        yield items[begin : begin + size]
        due = start + SPREAD_SECONDS * (begin + size) / len(items)
        await asyncio.sleep(max(0, due - time.monotonic()))
