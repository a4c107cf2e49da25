"""What stands in for the broker where outcomes are settled: a publisher and a channel."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal, NamedTuple, cast

from bridge.amqp.frames import LARGE_BODY_BYTES
from bridge.amqp.properties import Properties
from bridge.amqp.publication import LonePublication, Publication
from bridge.errors import Confirm, PublishError, PublishFault, Refusal
from bridge.telemetry.metrics import BridgeMetrics, new_registry
from bridge.worker.cluster.deduplication import RepeatedCopies
from bridge.worker.cluster.membership import Membership
from bridge.worker.deduplicator import Deduplicator, identity_of


class Published(NamedTuple):
    """One message that was confirmed."""

    body: bytes
    exchange: str
    routing_key: str
    properties: Properties

    def header(self, name: str) -> object:
        return (self.properties.headers or {}).get(name)


# What a broker says of a message that was not written at all, or that was, sooner or later.
Fault = PublishFault | Literal["late"]
PUBLISH_SECONDS = 10.0


class Broker:
    """What stands in for the publisher: fails as often as it has faults, then confirms.

    `late` writes the message and says nothing of it: its future is the last one of `pending`.
    """

    max_properties_bytes = 131_000

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._metrics = BridgeMetrics(
            new_registry(), component="worker", version="0", revision="0", exchanges=("default",)
        )
        self.faults: list[Fault] = []
        self.published: list[Published] = []
        self.written = 0
        self.pending: list[asyncio.Future[Confirm]] = []
        self.is_blocked = False
        # How the broker ends the channel of each copy that is published alone, in their order.
        self.refusals = 0
        self.refused_alone: list[Refusal | None] = []
        self.alone_from = LARGE_BODY_BYTES + 1
        self._by_id: dict[str | None, asyncio.Future[Confirm]] = {}

    def goes_alone(self, body: bytes) -> bool:
        """Publish large bodies alone, and those that are as large as another that was refused."""
        return len(body) >= self.alone_from

    def abandon(self, message_id: str) -> None:
        confirm = self._by_id.get(message_id)
        if confirm is not None and not confirm.done():
            confirm.set_result("timeout")

    @asynccontextmanager
    async def deadline_for(self, _body: bytes, *, alone: bool = False) -> AsyncIterator[float]:
        del alone
        yield self._loop.time() + PUBLISH_SECONDS

    async def write(
        self,
        body: bytes,
        *,
        exchange: str,
        routing_key: str,
        properties: Properties,
        deadline: float,
    ) -> Publication:
        """Write a message, and have its fault become known; or write nothing."""
        assert deadline > self._loop.time()
        in_flight = self._by_id.get(properties.message_id)
        if in_flight is not None and not in_flight.done():
            await asyncio.sleep(deadline - self._loop.time())
            raise PublishError("timeout", "another with its id is in flight")
        if self.faults and self.faults[0] in {"timeout", "error"}:
            fault = self.faults.pop(0)
            raise PublishError(cast("PublishFault", fault), str(fault))
        return self._written(body, exchange, routing_key, properties)

    async def write_alone(
        self, body: bytes, *, routing_key: str, properties: Properties, deadline: float
    ) -> LonePublication:
        """Write a message on a channel of its own, which the broker may end for it."""
        assert deadline > self._loop.time()
        confirm: asyncio.Future[Confirm] = self._loop.create_future()
        written = LonePublication(self._metrics, "default", routing_key, confirm, 0.0)
        written.refusal = self.refused_alone.pop(0) if self.refused_alone else None
        if written.refusal is None:
            self.published.append(Published(body, "", routing_key, properties))
        confirm.set_result("confirmed" if written.refusal is None else "error")
        return written

    def _written(
        self, body: bytes, exchange: str, routing_key: str, properties: Properties
    ) -> Publication:
        fault = cast(
            "Confirm | Literal['late'] | None", self.faults.pop(0) if self.faults else None
        )
        self.written += 1
        confirm: asyncio.Future[Confirm] = self._loop.create_future()
        self._by_id[properties.message_id] = confirm

        def note(done: asyncio.Future[Confirm]) -> None:
            if done.result() == "confirmed":
                self.published.append(Published(body, exchange, routing_key, properties))

        confirm.add_done_callback(note)
        if fault == "late":
            self.pending.append(confirm)
        else:
            confirm.set_result(fault or "confirmed")
        return Publication(self._metrics, "default", routing_key, confirm, 0.0)

    async def publish(
        self, body: bytes, *, exchange: str, routing_key: str, properties: Properties
    ) -> None:
        async with self.deadline_for(body) as deadline:
            publication = await self.write(
                body,
                exchange=exchange,
                routing_key=routing_key,
                properties=properties,
                deadline=deadline,
            )
            await publication.stored(deadline)


def nobody_told(metrics: Any) -> RepeatedCopies:
    """Make what would tell the peers of copies that are there twice, of a worker without any."""
    membership = Membership("q", is_enabled=False, metrics=metrics)
    return RepeatedCopies(membership, Deduplicator(heartbeat_seconds=10), identity_of=identity_of)


class Channel:
    """What stands in for a session and its channel."""

    is_closed = False
    is_leaving = False
    is_in_doubt = False
    in_progress = 0

    def __init__(self) -> None:
        self.acked: list[int] = []
        self.is_over = False

    @property
    def channel(self) -> "Channel":
        return self

    def ack(self, tag: int) -> bool:
        self.acked.append(tag)
        return not self.is_over
