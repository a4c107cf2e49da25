"""Runs each part of a message's path in the worker, so that callgrind can count it.

    valgrind --tool=callgrind --dump-before=getpriority python -m bench.message_parts

The worker's own objects run each part `MESSAGES` times. Broker, network and output are stand-ins
that do nothing. A part ends with a call of `getpriority`, which nothing else calls, and at which
callgrind writes its counts. Prints the names of the parts as JSON, with None for other code.
"""

import asyncio
import json
import os
import socket
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final, cast
from unittest import mock

import uvloop

from bench.lineup import KEY
from bench.queues import OUTBOUND, TEXT, name_message
from bridge.amqp import frames
from bridge.amqp.client import Channel
from bridge.amqp.frames import CONTENT_HEADER_START, Body, Deliveries, DeliveryHandler
from bridge.amqp.properties import Properties, write_properties
from bridge.amqp.publisher import Publisher
from bridge.amqp.wire import Demultiplexer, Wire
from bridge.config import Settings, SmsApiSettings, WorkerSettings
from bridge.telemetry.log_setup import configure_logging
from bridge.telemetry.metrics import new_registry
from bridge.topology.upkeep import Upkeep
from bridge.worker.cluster.joint_pause import JointPause
from bridge.worker.cluster.membership import Membership
from bridge.worker.deduplicator import New
from bridge.worker.delivery import Delivery
from bridge.worker.dispatcher import Dispatcher
from bridge.worker.envelope import read_envelope
from bridge.worker.fates import Answer
from bridge.worker.metrics import WorkerMetrics
from bridge.worker.outcomes import Sent
from bridge.worker.pipeline import post_when_allowed
from bridge.worker.request import SendRequest
from bridge.worker.sent_messages import Accepted
from bridge.worker.service import transport as posting
from bridge.worker.service.sender import Sender, open_transport
from bridge.worker.service.shape import shape_from
from bridge.worker.service.transport import ApiConnection
from bridge.worker.session import Session
from bridge.worker.worker import Worker
from tests.breakers import Parts

MESSAGES: Final = 200
# Number of deliveries that the broker sends at once after some acks.
AT_ONCE: Final = 10
ALL: Final = "total"
ANSWER: Final = (
    b"HTTP/1.1 202 Accepted\r\nServer: nginx\r\nDate: Sun, 22 Nov 2026 21:00:00 GMT\r\n"
    b"Content-Type: application/json\r\nContent-Length: 43\r\nConnection: keep-alive\r\n\r\n"
    b'{"id": "0123456789abcdef0123456789abcdef"}\n'
)
_DELIVERED_BY: Final = b"\x05ctag1"
_CHANNEL: Final = 1


class _Wire:
    """Discards acks."""

    is_reading = True
    is_in_doubt = False

    def ack(self, channel: Channel, delivery_tag: int) -> None:
        frames.ack_frame(channel.number, delivery_tag)


class _Channel:
    number = _CHANNEL
    is_closed = False


class _Upkeep:
    is_usable = True


class Output:
    """Discards log lines."""

    def write(self, _text: str) -> None:
        """Discard a line."""

    def isatty(self) -> bool:
        """Not a terminal."""
        return False


class Counted:
    """The finished parts, in the order of callgrind's counts."""

    def __init__(self) -> None:
        self._parts: list[str | None] = []

    def end(self, part: str | None) -> None:
        """End a part. Without a name, the code does not count as a part."""
        self._parts.append(part)
        os.getpriority(os.PRIO_PROCESS, 0)

    def tell(self) -> None:
        """Print the names of the parts, as JSON."""
        sys.stdout.write(json.dumps(self._parts))


class _Api(asyncio.Transport):
    """Answers each request in the next iteration of the event loop."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        self._ours, self._theirs = socket.socketpair()
        super().__init__({"socket": self._ours})
        self._protocol = protocol

    def write(self, _data: object) -> None:
        asyncio.get_running_loop().call_soon(self._protocol.data_received, ANSWER)

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        """Do nothing. Under valgrind, connections may exceed the idle timeout."""


async def _connect(make: Callable[[], ApiConnection], *_: object, **__: object) -> tuple[None, Any]:
    connection = make()
    connection.connection_made(_Api(connection))
    return None, connection


class _Service:
    """A stand-in for the sender, to count only the code around it."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    async def send(self, _request: SendRequest, _delivery: Delivery) -> Answer:
        return self._answer


class Bench:
    """A worker whose parts are called separately."""

    def __init__(self) -> None:
        configure_logging("info", "json", stream=Output())
        api = SmsApiSettings.model_validate({"base_url": "http://127.0.0.1:1", "key": KEY})
        settings = Settings(sms_api=api)
        metrics = WorkerMetrics(new_registry(), queue=OUTBOUND, retry_queues=[], dead="dead")
        parts = Parts(settings.worker, metrics)
        self.shape = shape_from(api)
        mock.patch.object(posting, "create_connection", _connect).start()
        self.transport = open_transport(api, max_connections=AT_ONCE)
        self.worker = Worker(
            settings,
            account=parts.account(Sender(self.shape, transport=self.transport, metrics=metrics)),
            pauses=parts.pauses,
            spans=None,
            publisher=cast("Publisher", None),
            upkeep=cast("Upkeep", _Upkeep()),
            joint_pause=JointPause(
                Membership(OUTBOUND, is_enabled=False, metrics=metrics),
                setup=lambda: "0" * 16,
                turn_seconds=5,
            ),
            metrics=metrics,
        )
        self.session = Session(cast("Channel", _Channel()), cast("Wire", _Wire()))
        self.metrics = metrics
        self.counted = Counted()
        self.end = self.counted.end
        self._made = 0

    def deliveries(self) -> list[bytes]:
        """Write deliveries in batches, as RabbitMQ does."""
        made = [self._delivery() for _ in range(MESSAGES)]
        return [b"".join(made[at : at + AT_ONCE]) for at in range(0, MESSAGES, AT_ONCE)]

    def _delivery(self) -> bytes:
        self._made += 1
        body = json.dumps({"to": f"+9997{self._made:09d}", "from": "Acme", "text": TEXT}).encode()
        properties = Properties(
            content_type="application/json",
            delivery_mode=2,
            message_id=name_message(self._made),
            timestamp=datetime.now(UTC),
        )
        tag = frames._TAG_AND_BITS.pack(self._made, 0)
        name = bytes((len(OUTBOUND),)) + OUTBOUND.encode()
        method = frames._DELIVER + _DELIVERED_BY + tag + b"\0" + name
        header = CONTENT_HEADER_START.pack(60, 0, len(body)) + write_properties(properties)
        written = enumerate((method, header, body), 1)
        return b"".join(frames._frame(kind, _CHANNEL, payload) for kind, payload in written)

    def read(self, chunks: list[bytes], take: DeliveryHandler) -> None:
        """Let the wire read the broker's data."""
        protocol = Demultiplexer(asyncio.StreamReader(), {_CHANNEL: Deliveries(take)}, lambda: 0.0)
        for chunk in chunks:
            protocol.data_received(chunk)

    def take(self, tag: int, redelivered: bool, properties: Properties, body: Body) -> None:  # noqa: FBT001
        """Receive a delivery as the consumer does."""
        self.worker._dispatcher.start(self.make(tag, redelivered, properties, body))

    def make(self, tag: int, redelivered: bool, properties: Properties, body: Body) -> Delivery:  # noqa: FBT001
        """Make a delivery from the main queue."""
        dispatcher = self.worker._dispatcher
        return dispatcher.make(self.session, OUTBOUND, tag, redelivered, properties, body)

    async def all_of_it(self) -> None:
        """Process deliveries from their bytes to their ack."""
        for chunk in self.deliveries():
            self.read([chunk], self.take)
            await self.worker._dispatcher.all_done()
        self.end(None)
        chunks = self.deliveries()
        self.end(None)
        for chunk in chunks:
            self.read([chunk], self.take)
            while self.worker._dispatcher.count:  # noqa: ASYNC110  an event would be counted too
                await asyncio.sleep(0)
        self.end(ALL)

    async def one_by_one(self) -> None:
        """Process deliveries part by part."""
        taken: list[tuple[int, bool, Properties, Body]] = []
        chunks = self.deliveries()
        self.end(None)
        self.read(chunks, lambda *delivered: taken.append(delivered))
        self.end("read frames and properties")
        deliveries = [self.make(*one) for one in taken]
        self.end("build the delivery")
        await self._begin_tasks(deliveries)
        await self._settle(deliveries, await self._dispatch(deliveries))

    async def _begin_tasks(self, deliveries: list[Delivery]) -> None:
        async def process(_: Delivery) -> None:
            pass

        settings = WorkerSettings(queue=OUTBOUND)
        dispatcher = Dispatcher(
            settings, process=process, changed=asyncio.Event(), metrics=self.metrics
        )
        self.end(None)
        for at in range(0, MESSAGES, AT_ONCE):
            for delivery in deliveries[at : at + AT_ONCE]:
                dispatcher.start(delivery)
            while dispatcher.count:  # noqa: ASYNC110  an event would be counted too
                await asyncio.sleep(0)
        self.end("count the delivery and start its task")

    async def _dispatch(self, deliveries: list[Delivery]) -> Sent:
        pipeline, account = self.worker._pipeline, self.worker._account
        reader = pipeline._reader
        self.end(None)
        requests = []
        for delivery in deliveries:
            delivery.envelope = read_envelope(delivery.properties, delivery.envelope)
            requests.append(reader.read(delivery.body))
        self.end("read the request")
        pairs = [*zip(requests, deliveries, strict=True)]
        self.end(None)
        encoded = [self.shape.encode(request, delivery.envelope) for request, delivery in pairs]
        self.end("write the POST")
        replies = [
            await self.transport.post(one.url, one.headers, one.body, one.common) for one in encoded
        ]
        self.end("send the POST and parse the answer, without the socket")
        answers = [self.shape.judge(reply) for reply in replies]
        self.end("judge the answer")
        account._sender = cast("Sender", _Service(answers[0]))
        self.end(None)
        for request, delivery in pairs:
            await post_when_allowed(account, pipeline._pauses, delivery, request)
            delivery.free_slot()
        self.end("rate limits and circuit breaker")
        return Sent(202, answers[0].provider_id)

    async def _settle(self, deliveries: list[Delivery], sent: Sent) -> None:
        identification, settler = self.worker._identification, self.worker._settler
        self.end(None)
        for delivery in deliveries:
            verdict = await identification.claim(delivery)
            accepted = Accepted(1, sent.status, sent.provider_id, 0.0)
            identification.settle(cast("New", verdict).in_flight, accepted, acked=True)
        self.end("identify and settle")
        for delivery in deliveries:
            settler.ack(delivery, sent)
        self.end("count, log and ack")


async def main() -> None:
    """Run the whole path, then each part."""
    bench = Bench()
    await bench.all_of_it()
    await bench.one_by_one()
    bench.counted.tell()


if __name__ == "__main__":
    uvloop.run(main())
