"""The sizes of queues as the broker tells them: what nobody takes, and what is not there."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from bridge.amqp.client import Connection
from bridge.telemetry.metrics import Registry, new_registry
from bridge.topology.queue_sizes import QueueSizes, read_queue
from bridge.webhook.metrics import WebhookMetrics, watched
from tests.amqp_client import Amqp
from tests.integration.conftest import connected, eventually, unique

EVENTS = 3


@pytest.fixture
async def queue(amqp: Amqp) -> AsyncIterator[str]:
    name = unique("unread")
    await amqp.channel.declare_queue(name, durable=True)
    for _ in range(EVENTS):
        await amqp.publish(name, b"{}")
    yield name
    await amqp.delete([name])


def shown(registry: Registry, metric: str, queue: str) -> float | None:
    return registry.get_sample_value(f"sms_bridge_webhook_{metric}", {"queue": queue})


async def test_a_queue_that_is_not_there_is_empty(amqp_url: str) -> None:
    """A queue that somebody deleted does not show its last size for ever."""
    async with connected(amqp_url) as connection:
        sizes = await read_queue(connection, unique("gone"))

    assert sizes == QueueSizes(ready=0, consumers=0, exists=False)


async def test_events_that_nobody_takes_are_seen(amqp_url: str, queue: str) -> None:
    registry = new_registry()
    metrics = WebhookMetrics(registry, paths=["/"], event_types=[], queues=[queue])
    metrics.queue_consumers.labels(queue).set(1)
    serving = asyncio.Event()

    async def serve(_connection: Connection) -> None:
        await serving.wait()

    async def is_seen() -> bool:
        return shown(registry, "queue_messages_ready", queue) == EVENTS

    async with connected(amqp_url) as connection:
        task = asyncio.create_task(watched(serve, queue, metrics)(connection))
        await eventually(is_seen, what="the waiting events")
        serving.set()
        await task

    assert shown(registry, "queue_consumers", queue) == 0
