"""A webhook receiver on Granian, a server in Rust, and aiormq: verify, publish, confirm, 200.

It lacks deduplication, several secrets, and reconnects (the process ends, and is restarted).
"""

import asyncio
import hashlib
import hmac
import os
from typing import Any, Final

import aiormq
from granian import Granian
from granian.constants import HTTPModes, Interfaces, Loops
from granian.rsgi import HTTPProtocol, Scope
from pamqp.commands import Basic
from pydantic import BaseModel, ValidationError

SECRET = os.environ["BENCH_SECRET"].encode()
EXCHANGE = os.environ["BENCH_EXCHANGE"]
CONFIRM_SECONDS: Final = 10.0
PERSISTENT: Final = 2


class Event(BaseModel):
    """The fields of a webhook's body that the program needs."""

    type: str


class Receiver:
    """Publishes on one channel with confirms."""

    _channel: aiormq.Channel

    def __rsgi_init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Connect before the first request."""
        loop.run_until_complete(self._connect())

    async def _connect(self) -> None:
        connection = await aiormq.connect(os.environ["BENCH_AMQP_URL"])
        channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
        assert isinstance(channel, aiormq.Channel)
        self._channel = channel
        self._channel.closing.add_done_callback(lambda _: os._exit(1))

    async def __rsgi__(self, scope: Scope, protocol: HTTPProtocol) -> None:
        """Handle a request."""
        protocol.response_empty(await self._receive(scope, await protocol()), [])

    async def _receive(self, scope: Any, body: bytes) -> int:
        if (scope.method, scope.path) != ("POST", "/webhooks"):
            return 404
        expected = hmac.new(SECRET, body, hashlib.sha256).hexdigest()
        given = scope.headers.get("x-service-signature") or ""
        if not hmac.compare_digest(expected.encode(), given.encode()):
            return 401
        try:
            event = Event.model_validate_json(body)
        except ValidationError:
            return 400
        try:
            await self._channel.basic_publish(
                body,
                exchange=EXCHANGE,
                routing_key=event.type,
                properties=Basic.Properties(
                    content_type="application/json", delivery_mode=PERSISTENT
                ),
                mandatory=True,
                timeout=CONFIRM_SECONDS,
                wait=False,
            )
        except (aiormq.AMQPError, TimeoutError):
            return 503
        return 200


receiver = Receiver()

if __name__ == "__main__":
    Granian(
        "granian_webhook:receiver",
        port=int(os.environ["BENCH_PORT"]),
        interface=Interfaces.RSGI,
        loop=Loops.uvloop,
        http=HTTPModes.http1,
        websockets=False,
        metrics_enabled=True,
        metrics_scrape_interval=1,
        metrics_port=int(os.environ["BENCH_METRICS_PORT"]),
    ).serve()
