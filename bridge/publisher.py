"""Publish one message and know that it is stored, or raise."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import aio_pika
import aiormq

from bridge.broker import is_blocked, open_channel
from bridge.errors import BrokerError, PublishError
from bridge.metrics import BridgeMetrics
from bridge.properties import Properties

MAX_UNCONFIRMED: Final = 4096


class Publisher:
    """Publishes mandatory and confirmed messages on a connection of its own.

    The connection is never shared with a consumer: an alarm of the broker blocks it, and would
    block the acks too.
    """

    def __init__(self, metrics: BridgeMetrics, *, timeout_seconds: float) -> None:
        self._metrics = metrics
        self._timeout_seconds = timeout_seconds
        self._connection: aio_pika.Connection | None = None
        self._channel: aiormq.Channel | None = None
        self._open = asyncio.Event()
        self._in_flight: dict[str, asyncio.Future[None]] = {}

    async def serve(self, connection: aio_pika.Connection) -> None:
        """Publish on this connection until its channel ends; `Link.run` calls it."""
        channel = await open_channel(connection, confirms=True)
        self._connection, self._channel = connection, channel
        self._open.set()
        try:
            await asyncio.wait({channel.closing})
            raise BrokerError("the publishing channel was closed")
        finally:
            self._open.clear()
            self._connection = self._channel = None

    @property
    def is_blocked(self) -> bool:
        """Whether the broker takes no messages now (a memory or disk alarm)."""
        return self._connection is not None and is_blocked(self._connection)

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
        `rabbitmq.publish_timeout_seconds`), at once when the broker blocks or too many
        publishes wait. After a time-out the broker may have it nevertheless.
        """
        if self.is_blocked:
            raise PublishError("timeout", "the broker blocks publishing (memory or disk alarm)")
        if len(self._in_flight) >= MAX_UNCONFIRMED:
            raise PublishError("error", f"{MAX_UNCONFIRMED} publishes wait for their confirm")
        label = exchange or "default"
        started = time.perf_counter()
        try:
            async with asyncio.timeout(timeout_seconds or self._timeout_seconds):
                await self._publish(body, exchange, routing_key, properties)
        except TimeoutError:
            self._metrics.published.labels(label, "timeout").inc()
            raise PublishError("timeout", "no confirm in time") from None
        except PublishError as error:
            self._metrics.published.labels(label, error.fault).inc()
            raise
        self._metrics.published.labels(label, "confirmed").inc()
        self._metrics.publish_duration.labels(label).observe(time.perf_counter() - started)

    async def _publish(
        self, body: bytes, exchange: str, routing_key: str, properties: Properties
    ) -> None:
        await self._open.wait()
        message_id = properties.message_id or ""
        # aiormq matches a returned message by its id: two publishes in flight with one id would
        # get each other's answer. The second waits for the first.
        while (earlier := self._in_flight.get(message_id)) is not None:
            await asyncio.shield(earlier)
        with self._mark(message_id):
            channel = self._channel
            if channel is None:
                raise PublishError("error", "the connection to the broker ended")
            try:
                await channel.basic_publish(
                    body,
                    exchange=exchange,
                    routing_key=routing_key,
                    properties=properties,
                    mandatory=True,
                    wait=False,
                )
            except aiormq.exceptions.PublishError:
                raise PublishError("returned", f"no queue takes it: {routing_key}") from None
            except aiormq.exceptions.DeliveryError:
                raise PublishError("nacked", "the broker refused to store it") from None
            except Exception as error:  # noqa: BLE001  aiormq raises more than its own classes
                raise PublishError("error", type(error).__name__) from None
            except asyncio.CancelledError:
                # A closing channel cancels its futures; only our own cancellation goes on.
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                raise PublishError("error", "the channel was closed") from None

    @contextmanager
    def _mark(self, message_id: str) -> Iterator[None]:
        done = asyncio.get_running_loop().create_future()
        self._in_flight[message_id] = done
        self._metrics.unconfirmed.inc()
        try:
            yield
        finally:
            del self._in_flight[message_id]
            self._metrics.unconfirmed.dec()
            done.set_result(None)
