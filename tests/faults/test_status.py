"""What `sms-bridge status` reads of a broker that freezes, dies, comes back, or stores nothing."""

import asyncio
import contextlib
import time
from typing import Any

import aio_pika
from yarl import URL

from bridge.admin.admin_port_client import AdminPort
from bridge.admin.pausing import pause, resume
from bridge.admin.status import ANSWER_SECONDS, CONNECT_SECONDS, StatusReader
from bridge.cli.status import format_status
from tests.alarms import memory_alarm
from tests.faults.bench import Bench, eventually, make_settings


async def test_a_broker_that_comes_and_goes(bench: Bench) -> None:
    """A broker that freezes or dies is told in time, and read again as soon as it is back."""
    settings = make_settings(bench.values(rabbitmq__url=[bench.broker.url]))
    async with bench.worker():
        reader = StatusReader(settings, [])
        first = await reader.read()
        await asyncio.to_thread(bench.broker.flush)
        bench.broker.pause()
        begun_at = time.monotonic()
        frozen = await reader.read()
        seconds = time.monotonic() - begun_at
        bench.broker.resume()
        second = await reader.read()
        bench.broker.kill()  # while the event loop stands still, and sees no connection end
        dead = await reader.read()
        await asyncio.to_thread(bench.broker.start)
        third = await reader.read()
        await reader.aclose()

    assert "no answer within" in (frozen.broker.fault or "")
    assert "refused" in (dead.broker.fault or "")
    for found in (first, second, third):
        assert found.queues[0].exists
        assert (found.broker.stores, found.is_paused_by_operator) == (True, False)
    # Closing two connections that nobody answers takes the rest.
    assert seconds < CONNECT_SECONDS + ANSWER_SECONDS + 10


async def test_a_broker_that_stores_nothing(bench: Bench) -> None:
    settings = make_settings(bench.values(rabbitmq__url=[bench.broker.url]))
    async with bench.worker():
        await pause(settings, "wrong text")
        reader = StatusReader(settings, [])
        async with memory_alarm(bench.broker):
            readings = [await reader.read() for _ in range(2)]
        await resume(settings)
        await reader.aclose()

    for found in readings:
        assert (found.broker.stores, found.is_paused_by_operator) == (False, True)
        assert found.paused_by_operator is not None
        assert found.paused_by_operator.reason == "wrong text"


async def test_retries_that_a_full_queue_refuses(bench: Bench) -> None:
    full: dict[str, Any] = {
        "x-queue-type": "quorum",
        "x-max-length": 3,
        "x-overflow": "reject-publish",
    }
    await bench.amqp.channel.declare_queue(bench.queue, durable=True, arguments=full)
    changed: dict[str, Any] = {"worker__retry_delays": ["8s", "16s"]}
    bench.service.misbehave(
        {"to": None, "count": 4, "status": 503, "headers": {"Retry-After": "1"}}
    )
    async with bench.worker(**changed) as live:
        port = URL(live.admin_url).port
        settings = make_settings(
            bench.values(**changed, admin__port=port, rabbitmq__url=[bench.broker.url])
        )
        (told,) = live.logged("topology_differs")
        await bench.publish(4)
        ladder = "sms_bridge_worker_ladder_messages_total"
        await eventually(lambda: live.metric(ladder, event="stored") == 4, what="four retries")
        await pause(settings, None)
        await eventually(lambda: live.logged("not_consuming"), what="no consumer")
        await eventually(
            lambda: live.metric("sms_bridge_worker_messages_in_progress") == 0, what="nothing held"
        )
        with contextlib.suppress(aio_pika.exceptions.DeliveryError):
            while True:
                await bench.publish(1)
        retries = [f"{bench.queue}.retry.{step}" for step in ("8s", "16s")]

        async def is_over() -> bool:
            return not any([await bench.amqp.count_if_there(name) for name in retries])

        await eventually(is_over, what="the end of the first wait")
        reader = StatusReader(settings, [AdminPort("127.0.0.1", port or 0)])
        status = await reader.read()
        await reader.aclose()
        await bench.amqp.purge(bench.queue)
        assert await resume(settings)

    assert "and returning retries" in told["why"]
    assert status.ladder is not None
    assert (status.ladder.stored, status.ladder.returned, status.ladder.not_back) == (4, 0, 4)
    text = " ".join(line.text.strip() for line in format_status(status))
    assert "4 stored, 0 returned, 4 outstanding" in text
