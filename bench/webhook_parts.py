"""Runs each part of a webhook's path in the receiver, so that callgrind can count it.

    valgrind --tool=callgrind --dump-before=getpriority python -m bench.webhook_parts

Like `message_parts`: the receiver's own objects run each part `MESSAGES` times. Broker, network and
output are stand-ins that do nothing. With a preset as argument, the webhooks are inbound messages
of its service, published as normalized events, or unchanged with the argument `raw`.
"""

import asyncio
import base64
import json
import sys
import time
from contextlib import suppress
from typing import Any, Final, cast
from urllib.parse import urlencode

import uvloop
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from bench.inbound import BODY
from bench.lineup import SECRET
from bench.message_parts import ALL, AT_ONCE, MESSAGES, Counted, Output
from bridge.amqp import frames
from bridge.amqp.client import Channel
from bridge.amqp.publisher import Publisher
from bridge.amqp.wire import Demultiplexer, PublishingChannel, Wire
from bridge.config.presets import Preset, documented_webhooks
from bridge.config.webhook import WebhookSettings
from bridge.errors import ConfigError
from bridge.http.connection import ServerConnection
from bridge.http.listener_state import Hooks, ListenerState
from bridge.http.messages import Request, Response, render
from bridge.http.occupancy import Occupancy
from bridge.http.parser import RequestParser
from bridge.telemetry.log_setup import configure_logging
from bridge.telemetry.metrics import BridgeMetrics, new_registry
from bridge.topology.upkeep import Upkeep
from bridge.webhook.endpoint import Endpoint
from bridge.webhook.metrics import WebhookMetrics
from bridge.webhook.receiver import Receiver, webhook_limits
from bridge.webhook.recorder import Webhook
from bridge.webhook.signatures.verify import sign

_CHANNEL: Final = 1
_FORM: Final = "application/x-www-form-urlencoded"
_JSON: Final = "application/json"
# A test key for Ed25519.
_PRIVATE_KEY: Final = bytes(range(32))
_DATE: Final = b"date: Sun, 22 Nov 2026 21:00:00 GMT\r\n"


def write_request(preset: Preset, endpoint: Endpoint) -> bytes:
    """Return the request of a webhook as its service sends it."""
    body, content_type = BODY, _JSON
    if preset != "generic":
        example = documented_webhooks(preset)[0]
        content_type = example.get("content_type", _JSON)
        document = example["body"]
        is_form = content_type == _FORM
        body = (urlencode(document) if is_form else json.dumps(document)).encode()
    key = _PRIVATE_KEY if endpoint.scheme.algorithm == "ed25519" else endpoint.keys[0]
    signed = sign(
        endpoint.scheme, key, body, now=time.time(), event_id="1", content_type=content_type
    )
    headers = "".join(f"{name}: {value}\r\n" for name, value in signed.headers)
    head = (
        "POST /webhooks HTTP/1.1\r\nHost: 127.0.0.1:8080\r\nUser-Agent: h2load nghttp2/1.52.0\r\n"
        f"Content-Length: {len(body)}\r\nContent-Type: {content_type}\r\n{headers}\r\n"
    )
    return head.encode() + body


class _Peer(asyncio.Transport):
    """The other side of a connection, which discards all data."""

    def __init__(self) -> None:
        super().__init__()
        self.writes = 0

    def write(self, _data: object) -> None:
        self.writes += 1

    def is_closing(self) -> bool:
        return False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Ignore limits, because writes are not buffered."""

    def get_write_buffer_size(self) -> int:
        return 0


class _Channel:
    number = _CHANNEL
    max_content_size = 131_064


class Bench:
    """A receiver whose parts are called separately."""

    def __init__(self, preset: Preset, body: str | None = None) -> None:
        configure_logging("info", "json", stream=Output())
        settings, self.endpoint = _configure(preset, body)
        registry = new_registry()
        types = settings.known_types_of_all
        metrics = WebhookMetrics(registry, paths=[settings.path], event_types=types)
        publisher = Publisher(_bridge_metrics(settings.exchange), timeout_seconds=3)
        wire = Wire()
        wire._transport = cast("Any", _Peer())
        self._confirms = PublishingChannel(wire, cast("Channel", _Channel()))
        publisher._main.channel = self._confirms
        self._reading = Demultiplexer(
            asyncio.StreamReader(), {_CHANNEL: self._confirms}, lambda: 0.0
        )
        self._request = write_request(preset, self.endpoint)
        self.receiver = Receiver(
            settings,
            endpoints=[self.endpoint],
            publisher=publisher,
            upkeep=cast("Upkeep", None),
            metrics=metrics,
        )
        self.limits = webhook_limits(settings)
        hooks = Hooks(judge=self.receiver.judge)
        self._shared = ListenerState(self.receiver.answer, self.limits, hooks, _DATE)
        self.counted = Counted()

    async def all_of_it(self) -> None:
        """Process requests from their bytes to the bytes of their responses."""
        peers, connections = [], []
        occupancy: Occupancy[ServerConnection] = Occupancy(self.limits)
        for _ in range(AT_ONCE):
            connection = ServerConnection(self._shared, occupancy, asyncio.get_running_loop())
            peers.append(_Peer())
            connection.connection_made(peers[-1])
            connections.append(connection)
        size, written = len(self._request), 0
        for times in (1, MESSAGES // AT_ONCE):
            self.counted.end(None)
            for _ in range(times):
                for connection in connections:
                    connection.get_buffer(-1)[:size] = self._request
                    connection.buffer_updated(size)
                # The publishes are written before their confirms arrive.
                await asyncio.sleep(0)
                self.confirm()
                written += 1
                while peers[-1].writes < written:  # noqa: ASYNC110  an event would be counted too
                    await asyncio.sleep(0)
        self.counted.end(ALL)

    def confirm(self) -> None:
        """Confirm all pending publishes at once."""
        tag = frames._TAG_AND_BITS.pack(self._confirms._last_tag, 1)
        self._reading.data_received(frames._frame(frames.METHOD, _CHANNEL, frames._ACK + tag))

    async def one_by_one(self) -> None:
        """Process requests part by part."""
        receiver, counted = self.receiver, self.counted
        parser = RequestParser(self.limits, receiver.judge)
        requests: list[Request] = []
        counted.end(None)
        for _ in range(MESSAGES):
            parser.feed(memoryview(self._request))
            requests.append(parser.requests.popleft())
        counted.end("parse the request and check its header")
        webhooks = [receiver.recorder.begin(one, self.endpoint) for one in requests]
        counted.end("begin")
        verified = [receiver._verify(webhook) for webhook in webhooks]
        counted.end("verify the signature")
        for webhook, one in zip(webhooks, verified, strict=True):
            webhook.events = receiver._read(webhook, one)
        counted.end("name the event")
        self._end(webhooks)
        self._publish(webhooks)
        response = Response(200)
        for _ in range(MESSAGES):
            render(response, _DATE, keep_alive=True)
        counted.end("write the response")

    def _end(self, webhooks: list[Webhook]) -> None:
        self.counted.end(None)
        for webhook in webhooks:
            self.receiver._accepted(webhook, is_new=True)
        self.counted.end("count and log")

    def _publish(self, webhooks: list[Webhook]) -> None:
        self.counted.end(None)
        for webhook in webhooks:
            self.receiver._publish_at_once(webhook)
        self.counted.end("publish")


def _configure(preset: Preset, body: str | None) -> tuple[WebhookSettings, Endpoint]:
    """Configure the endpoint. For a service without signatures, a proxy signs."""
    given = {"preset": preset, "public_url": "https://sms.example.com/webhooks", "body": body}
    public_key = Ed25519PrivateKey.from_private_bytes(_PRIVATE_KEY).public_key()
    of_service = {"secrets": [SECRET.ljust(32, "-")]}
    of_key = {"secrets": [base64.b64encode(public_key.public_bytes_raw()).decode()]}
    of_proxy = {**of_service, "signature": {"preset": "plain"}}
    for signed in (of_service, of_key, of_proxy):
        settings = WebhookSettings.model_validate({**given, **signed})
        with suppress(ConfigError):
            return settings, Endpoint(settings.all_endpoints[0])
    raise ConfigError(f"webhook.preset: {preset} cannot be signed")


def _bridge_metrics(exchange: str) -> BridgeMetrics:
    return BridgeMetrics(
        new_registry(),
        component="webhook",
        version="",
        revision="",
        exchanges=[exchange],
        entities=[],
    )


async def main() -> None:
    """Run the whole path, then each part."""
    preset, body = (*sys.argv[1:3], None, None)[:2]
    bench = Bench(cast("Preset", preset or "generic"), body)
    await bench.all_of_it()
    await bench.one_by_one()
    bench.counted.tell()


if __name__ == "__main__":
    uvloop.run(main())
