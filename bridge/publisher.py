"""Publish one message and know that it is stored, or raise."""

import asyncio
import sys
import time
from collections.abc import Mapping
from typing import Final

import aio_pika

from bridge.broker import open_channel, wire_of
from bridge.errors import BrokerError, PublishError
from bridge.frames import Confirm
from bridge.metrics import BridgeMetrics
from bridge.properties import Properties
from bridge.wire import PublishingChannel

MAX_UNCONFIRMED: Final = 4096
# What a time-out leaves behind is in no other limit any more, and waits for a broker that hangs.
MAX_UNWRITTEN_BYTES: Final = 64 * 1024 * 1024
_DETAILS: Final[Mapping[Confirm, str]] = {
    "returned": "no queue takes it: {}",
    "nacked": "the broker refused to store it",
    "timeout": "no confirm in time",
    "error": "the connection to the broker ended",
}


class Publisher:
    """Publishes mandatory and confirmed messages on a connection of its own.

    The connection is never shared with a consumer: an alarm of the broker blocks it, and would
    block the acks too.
    """

    def __init__(self, metrics: BridgeMetrics, *, timeout_seconds: float) -> None:
        self._metrics = metrics
        self._timeout_seconds = timeout_seconds
        self._channel: PublishingChannel | None = None
        self._open = asyncio.Event()

    async def serve(self, connection: aio_pika.Connection) -> None:
        """Publish on this connection until its channel ends; `Link.run` calls it."""
        channel = await open_channel(connection, confirms=True)
        # A broker without a limit of frames says 0, of which aiormq makes less than nothing.
        most = channel.max_content_size if channel.max_content_size > 0 else sys.maxsize
        wire = wire_of(connection)
        with wire.publishing(channel.number, max_payload_bytes=most) as publishing:
            self._channel = publishing
            self._open.set()
            try:
                await asyncio.wait({channel.closing})
                raise BrokerError("the publishing channel was closed")
            finally:
                self._open.clear()
                self._channel = None

    @property
    def unconfirmed(self) -> int:
        """How many messages the broker has not confirmed yet."""
        return 0 if self._channel is None else self._channel.unconfirmed

    async def publish(
        self,
        body: bytes,
        *,
        exchange: str,
        routing_key: str,
        properties: Properties,
        timeout_seconds: float | None = None,
    ) -> None:
        """Return when the broker has confirmed that the message is in a queue.

        Raises PublishError otherwise, at the latest after `timeout_seconds` (default:
        `rabbitmq.publish_timeout_seconds`), at once when the broker blocks or does not read, or
        too many publishes wait. After a time-out the broker may have it nevertheless.
        """
        if self._channel is not None:
            _see_room(self._channel)
        label = exchange or "default"
        started = time.perf_counter()
        seconds = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        try:
            confirm = await self._publish(body, exchange, routing_key, properties, seconds)
        except ValueError:
            self._metrics.published.labels(label, "error").inc()
            raise PublishError("error", "a name or a property does not fit AMQP") from None
        self._metrics.published.labels(label, confirm).inc()
        if confirm != "confirmed":
            raise PublishError(confirm, _DETAILS[confirm].format(routing_key))
        self._metrics.publish_duration.labels(label).observe(time.perf_counter() - started)

    async def _publish(
        self,
        body: bytes,
        exchange: str,
        routing_key: str,
        properties: Properties,
        timeout_seconds: float,
    ) -> Confirm:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_seconds
        channel = self._channel
        if channel is None or channel.awaited(properties.message_id) is not None:
            try:
                async with asyncio.timeout_at(deadline):
                    channel = await self._wait_for_turn(properties.message_id)
            except TimeoutError:
                return "timeout"
            if channel is None:
                return "error"
            _see_room(channel)
        confirm = channel.publish(
            body, exchange=exchange, routing_key=routing_key, properties=properties
        )
        # A timer of its own costs a third of `asyncio.timeout`.
        timer = loop.call_at(deadline, _expire, confirm)
        try:
            return await confirm
        finally:
            timer.cancel()

    async def _wait_for_turn(self, message_id: str | None) -> PublishingChannel | None:
        """Return a channel when there is one, and no other message with this id is in flight.

        Returns None when the channel has ended as soon as it was there.
        """
        await self._open.wait()
        while (channel := self._channel) is not None:
            if (earlier := channel.awaited(message_id)) is None:
                break
            await asyncio.wait({earlier})
            await self._open.wait()
        return channel


def _see_room(channel: PublishingChannel) -> None:
    """Raise PublishError when nothing may be written now."""
    if channel.is_blocked:
        raise PublishError("timeout", "the broker blocks publishing (memory or disk alarm)")
    if channel.unconfirmed >= MAX_UNCONFIRMED:
        raise PublishError("error", f"{MAX_UNCONFIRMED} publishes wait for their confirm")
    if channel.unwritten_bytes >= MAX_UNWRITTEN_BYTES:
        raise PublishError("timeout", "the broker does not read what it is sent")


def _expire(confirm: "asyncio.Future[Confirm]") -> None:
    if not confirm.done():
        confirm.set_result("timeout")
